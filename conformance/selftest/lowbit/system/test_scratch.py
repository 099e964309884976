"""Workplaces: a new one is the caller's own, whatever other processes sweep in the same folder."""

import os
from pathlib import Path
from typing import Any

import pytest

from lowbit.system.scratch import sweep, workplace


@pytest.mark.parametrize("when", ["before it is opened", "before it is locked"])
def test_a_workplace_that_is_swept_away_is_made_again(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new workplace looks abandoned until it is locked; whoever makes it notices and makes another."""
    swept = list[str]()
    really = os.open

    def opened(path: Any, *rest: Any, **folder: Any) -> int:
        if swept or Path(path).parent != tmp_path:
            return really(path, *rest, **folder)
        swept.append(str(path))
        descriptor = really(path, *rest) if when == "before it is locked" else -1
        sweep(tmp_path)
        assert not Path(path).exists()
        return really(path, *rest) if descriptor < 0 else descriptor

    monkeypatch.setattr(os, "open", opened)
    with workplace(tmp_path) as place:
        assert place.is_dir() and str(place) not in swept
        sweep(tmp_path)
        assert place.is_dir(), "one that is locked is left alone"
    assert len(swept) == 1 and not list(tmp_path.iterdir())
