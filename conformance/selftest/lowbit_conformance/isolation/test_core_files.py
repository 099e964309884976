"""Processes that may crash leave no core file, whatever limit the user has set (``ulimit -c``)."""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker

from lowbit_conformance.isolation.arena import Arena
from lowbit_conformance.isolation.process import HostEndedError, HostProcess


@pytest.fixture
def hard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The hard limit, which is also the limit in force during the test; the current folder is empty."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    monkeypatch.chdir(tmp_path)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("method", ["landlock", "namespaces", "none"])
def test_a_host_that_crashes_leaves_no_core_file(method: str, hard: int, tmp_path: Path) -> None:
    """Its limit is 0, and the hard limit is the user's, so that a backend can ask for a core file of its own."""
    with closing(Arena()) as arena:
        host = HostProcess(arena, [method, "none"])
        assert resource.prlimit(host._inside, resource.RLIMIT_CORE) == (0, hard)
        os.kill(host._inside, signal.SIGSEGV)
        with pytest.raises(HostEndedError, match=r"CRASHED\(SIGSEGV\)"):
            host.ask({"do": "nothing"}, 10.0)
    assert os.listdir(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_CORE) == (hard, hard)


def test_a_worker_of_the_comparison_leaves_no_core_file(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another project may end it by a signal."""
    seen = list[tuple[int, int]]()

    def reader(threads: int) -> Any:
        seen.append(resource.getrlimit(resource.RLIMIT_CORE))
        return SimpleNamespace(ceilings=lambda: {})

    monkeypatch.setattr(worker, "MemoryReader", reader)
    monkeypatch.setattr(worker, "Watch", lambda reader: None)
    monkeypatch.setattr(worker, "sayer", lambda: lambda event, **fields: None)
    monkeypatch.setattr(sys, "argv", ["worker.py", json.dumps({"threads": 1, "contests": []})])
    worker.main()
    assert seen == [(0, hard)]
