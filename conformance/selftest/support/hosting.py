"""What tests of the isolation share: a backend in a host process, and a run of the suite on it."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from misbehaving import Mine
from paths import SUPPORT

from lowbit.quantization.affine import quantize
from lowbit_conformance.isolation import methods as isolation
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError

PATIENCE = 60.0
"""Seconds that only a hang takes, on a busy machine too."""


def has_ended(process: int) -> bool:
    """Whether a process has ended, or ends within `PATIENCE`; it need not be a child of this one."""
    try:
        ending = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([ending], [], [], PATIENCE)[0])
    finally:
        os.close(ending)


@contextmanager
def hosted(name: str) -> Iterator[Remote]:
    """A backend in a host process."""
    with closing(Remote("name", name, PATIENCE)) as remote:
        remote.load()
        yield remote


def verdict_on(kind: type[Mine], deadline: float = PATIENCE) -> str:
    """What becomes of a product with the backend of this class; a test of what hangs gives a short deadline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        remote = Remote("name", f"{kind.__module__}:{kind.__name__}", deadline)
        try:
            remote.load()
        except BrokenPromiseError as error:
            remote.close()
            remote.arena.close()
            return f"not loaded: {error}"
    try:
        matrix = quantize(np.eye(4, 5, dtype=np.float32), bits=8, group_size=4)
        prepared = remote.prepare(matrix)
        prepared.guarded(np.ones((1, 4), np.float32), 0)
    except BrokenPromiseError as error:
        return str(error)
    finally:
        remote.close()
        remote.arena.close()
    return "passed"


def conformance(kind: type[Mine], method: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``lowbit conformance`` on a backend of this class; exit status, report and standard error."""
    name = f"{kind.__module__}:{kind.__name__}"
    command = [sys.executable, "-m", "lowbit", "conformance", name, "--json", "--seeds", "0"]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT), isolation.VARIABLE: method}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def failures_of(kind: type[Mine], method: str, *arguments: str) -> list[dict[str, Any]]:
    """The failures of a run of a few cases, which must fail without forging a pass."""
    status, report, error = conformance(kind, method, "--op", "linear.qgemv/C1", "--quick", *arguments)
    assert (status, report["verdict"]) == (1, "failed"), error
    assert "Traceback" not in error
    assert report["isolation"]["method"] == method or method == ""
    assert not [case for case in report["passed"] if "forged" in case["id"]]
    return list(report["failures"])
