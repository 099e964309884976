"""Files of the cache of quantised weights that another user could change."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from quantized_copies import PLAN
from tiny_checkpoint import write

from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.system.storage import CACHE_VARIABLE


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "user"))
    return open_checkpoint(write(tmp_path / "tiny"))


def test_what_others_can_change_is_made_again(source: Checkpoint, tmp_path: Path) -> None:
    """A sound file by a link, with a second name, that others can write to, or of another user: it would be mapped, and
    its owner could exchange the weights under the model."""
    made = quantized(source, PLAN, tmp_path / "cache")
    path, aside = made.folder / "layer-00001.safetensors", tmp_path / "aside"
    sound = path.read_bytes()

    def linked() -> None:
        path.rename(aside)
        path.symlink_to(aside)

    harms: list[Callable[[], object]] = [
        linked,
        lambda: aside.hardlink_to(path),
        lambda: path.chmod(0o664),
        lambda: path.chmod(0o646),
    ]
    if os.geteuid() == 0:  # nobody else can give a file away
        harms.append(lambda: os.chown(path, 12345, -1))
    for use in (lambda: made.layer(1), lambda: made.keep("layer-00001")):
        for number, harm in enumerate(harms):
            aside.unlink(missing_ok=True)
            harm()
            use()
            found = path.lstat()
            assert stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1, number
            assert not found.st_mode & 0o022 and path.read_bytes() == sound, number


def test_a_generous_umask_does_not_spoil_what_is_kept(source: Checkpoint, tmp_path: Path) -> None:
    """Files are made so that no other user can write to them, and are found again."""
    before = os.umask(0)
    try:
        made = quantized(source, PLAN, tmp_path / "cache")
        inodes = {path.name: path.stat().st_ino for path in made.folder.iterdir()}
        quantized(source, PLAN, tmp_path / "cache").layer(0)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_ino for path in made.folder.iterdir()} == inodes
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.folder.iterdir()} == {0o644}
