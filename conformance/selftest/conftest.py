"""What holds for every test here.

No test sees what `lowbit tune` may have found on this machine. The environment is set when pytest reads this file, so
programs that tests start have it too. The same holds for the limit of core files: some of these programs crash on
purpose.

Tests are marked here: ``slow`` from ``slow.txt``, which lists what they cost; ``whole``, by the same list, where the
cases of a function cost much; and ``toolchain`` where they run a compiler.

Property tests do not depend on the machine: no time limits an example or the drawing of it, examples are the same in
every run, and nothing is kept of earlier runs. ``pytest --hypothesis-profile=search`` draws other examples each time. A
failure prints the decorator that repeats it.
"""

import gc
import os
import resource
from collections.abc import Iterator
from importlib.util import find_spec
from math import ceil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from lowbit_cppyy.runtime import hardware
from lowbit_cppyy.tuning import outcomes

HERE = Path(__file__).parent
collect_ignore = [  # kernels for libraries that only `nox -s functions` installs
    f"support/field/{path.name}"
    for library in ("numba", "torch", "triton")
    for path in (HERE / "support/field").glob(f"{library}_*.py")
    if find_spec(library) is None
]
collect_ignore += ["support/interop.py", "support/interop_tools.py"]  # programs for what `nox -s interop` installs
collect_ignore += ["support/import_contracts.py"]  # of import-linter, which `nox -s lint` installs
collect_ignore += [  # programs that wrote what lies there, of which some need torch
    f"lowbit/{folder}"
    for folder in (
        *("tensor_formats/data", "quantization/data"),
        *("formats/checkpoint/data", "formats/checkpoint/quantised"),
    )
]
LINES = [line.split() for line in (HERE / "slow.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
MOST = 0.5
"""Of a function whose cases cost more processor seconds than this, only some are run by `nox -s tests`; all of them by
`nox -s conformance`."""
DEAREST = 3.5
"""A case that costs more than this is left to `nox -s conformance`, even if it is the only one of its function."""
SLOW = {name: 0.0 if seconds == "-" else float(seconds) for seconds, name in LINES}
TOOLCHAIN = (
    "lowbit_conformance/test_compiled_helpers.py",
    "lowbit_cppyy/",
    "lowbit_cuda/test_backend.py",
    "lowbit_cuda/test_compiled.py",
    "lowbit_cuda/test_compiler.py",
    "lowbit_cuda/test_driver.py",
    "lowbit_cuda/test_kernels_bits.py",
    "lowbit_cuda/test_stand_in",
    "lowbit_foreign/test_foreign.py",
    "lowbit_foreign/test_library.py",
    "lowbit_gpusim/test_shim",
    "lowbit_prove/test_casts.py",
    "lowbit_prove/test_instructions.py",
    "lowbit_prove/test_replay.py",
)
"""Where tests compile C, C++, Rust or CUDA: the beginnings of their paths."""

os.environ["LOWBIT_CPPYY_TUNED"] = "off"
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

PATIENT = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("lowbit", PATIENT, derandomize=True, database=None)
settings.register_profile("search", PATIENT)
settings.load_profile("lowbit")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what its -m does not choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow and what needs a compiler, and begin with the slowest: no worker waits for it at the end.

    The tests of a module stay together, or each worker would make the fixtures of a module again and again.
    """
    cost = dict.fromkeys((item.path for item in items), 0.0)
    for name, cases in by_function(items).items():
        path = name.partition("::")[0]
        if name in SLOW:
            leave_some(cases, SLOW[name])
            cost[cases[0].path] += SLOW[name]
            for item in cases:
                item.add_marker(pytest.mark.slow)
        if path.startswith(TOOLCHAIN):
            for item in cases:
                item.add_marker(pytest.mark.toolchain)
    items.sort(key=lambda item: -cost[item.path])


def by_function(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test function here, by the name that it has in ``slow.txt``."""
    found = dict[str, list[pytest.Item]]()
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(HERE):
            path = item.path.relative_to(HERE).as_posix()
            found.setdefault(f"{path}::{item.originalname}", []).append(item)
    return found


def leave_some(cases: list[pytest.Item], seconds: float) -> None:
    """Mark cases of a function as ``whole``, so that those without the marker cost `MOST` seconds or are one.

    Those that are left are evenly spaced, the same on every machine. None is left if each costs more than `DEAREST`.
    """
    often = [item for item in cases if item.get_closest_marker("whole") is None]
    every = max(1, min(len(often), ceil(seconds / MOST)))
    for place, item in enumerate(often):
        if place % every or seconds > DEAREST * len(cases):
            item.add_marker(pytest.mark.whole)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with outcomes in use, on a processor that has a name."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.setenv(outcomes.VARIABLE, "on")
    for module in (outcomes, hardware):
        monkeypatch.setattr(module, "processor_key", lambda: "Abacus 3000; avx2; L1 49152")
    outcomes.forget()
    yield tmp_path
    outcomes.forget()


def pytest_collection_finish() -> None:
    """Look for no garbage among the tests and modules themselves, which take long to look through."""
    gc.freeze()
