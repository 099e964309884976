"""The pool of threads alone, compiled by g++: its promises (pool_stress.cpp), under sanitizers, and when idle.

Beside each test stands one that shows that it can fail, with a line of the pool changed.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from paths import SUPPORT

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

HERE = SUPPORT
HEADERS = Path(str(files("lowbit_cppyy"))) / "cpp"
THREAD = ("-fsanitize=thread",)
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NO_FUTEX = "-DLOWBIT_NO_FUTEX"
OPENS = "open(true, static_cast<int>(workers));"
GATHERS = "gather(workers, std::max<std::chrono::nanoseconds>(patience, least_patience));"
COUNTS = "const int size = 1 + static_cast<int>(came_.fetch_or(too_late, std::memory_order_acq_rel));"
CHANGES = {
    "leaves silently": ("fetch_sub(1, std::memory_order_acq_rel)", "fetch_sub(1, std::memory_order_relaxed)"),
    "leaves shares undone": ("} while (take_over(thread));", "} while (false);"),
    "stays with its caller": ("    separation_.from_caller(workers_);\n", ""),
    "waits for nobody": (f"{OPENS}\n    {GATHERS}\n    {COUNTS}", f"{COUNTS}\n    {OPENS}"),
    "never counts a series": ("return alone_ >= series;", "return false;"),
    "counts any calls as a series": ("alone_ = soon ? alone_ + 1 : 0;", "alone_ = soon ? alone_ + 1 : series;"),
    "watches for 2 ms": ("worker_patience{200}", "worker_patience{2000}"),
}
Program = Callable[..., Callable[[], subprocess.CompletedProcess[str]]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Compile a program that uses the pool, changed or not. Returns a function that runs it."""

    def build(name: str, *options: str, change: str = "") -> Callable[[], subprocess.CompletedProcess[str]]:
        pool = (HEADERS / "pool.h").read_text()
        if change:
            before, after = CHANGES[change]
            assert pool.count(before) == 1
            pool = pool.replace(before, after)
        (tmp_path / "pool.h").write_text(pool)
        for header in ("parking.h", "placement.h"):
            shutil.copy(HEADERS / header, tmp_path)
        warnings = ("-Wall", "-Wextra", "-Wno-unused", "-Werror")
        command = [str(COMPILER), "-std=c++17", "-O1", "-pthread", *warnings, f"-I{tmp_path}", *options]
        subprocess.run([*command, HERE / f"{name}.cpp", "-o", tmp_path / name], check=True, timeout=120)
        return lambda: run(tmp_path / name)

    return build


def run(program: Path) -> subprocess.CompletedProcess[str]:
    command = [str(program)]
    if shutil.which("setarch"):  # ThreadSanitizer needs an address space that is not randomised too far
        command = ["setarch", "-R", *command]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this kernel's address space layout is not one that ThreadSanitizer can use")
    return result


@pytest.mark.parametrize(
    "options", (THREAD, (*THREAD, NO_FUTEX), MEMORY), ids=("races", "races without a futex", "memory")
)
def test_the_pool_holds_what_it_promises(program: Program, options: tuple[str, ...]) -> None:
    """Every index once, with shares stolen, concurrent calls, calls inside calls, and stops in between."""
    stress = program("pool_stress", *options)
    for _ in range(2):
        result = stress()
        assert (result.returncode, result.stdout) == (0, "held\n"), result.stderr[:2000]


def test_the_sanitizer_notices_a_race(program: Program) -> None:
    """The test above can fail: with a worker that leaves before the caller can see its writes."""
    assert "data race" in program("pool_stress", *THREAD, change="leaves silently")().stderr


def test_the_checks_notice_a_pool_that_does_not_do_its_work(program: Program) -> None:
    """And with shares of late workers that nobody steals."""
    assert "not so: every index exactly once" in program("pool_stress", change="leaves shares undone")().stderr


def test_the_checks_notice_a_caller_that_begins_alone(program: Program) -> None:
    """And with a caller that waits for no worker: it counts them before it opens the call."""
    assert "not so: who waits gets all workers" in program("pool_stress", change="waits for nobody")().stderr


def test_the_checks_notice_a_worker_on_the_processor_of_its_caller(program: Program) -> None:
    """And with one that the caller does not send away; on a machine with one processor there is nothing to notice."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one processor only")
    stress = program("pool_stress", change="stays with its caller")
    assert "not so: a worker is kept off the caller's processor only" in stress().stderr


@pytest.mark.parametrize(
    ("change", "said"),
    (
        ("never counts a series", "calls that follow one another wake the workers"),
        ("counts any calls as a series", "calls that are far apart wake nobody"),
    ),
)
def test_the_checks_notice_a_pool_that_wakes_at_the_wrong_time(program: Program, change: str, said: str) -> None:
    """And with one that wakes workers for no series of calls, or for every call."""
    assert f"not so: {said}" in program("pool_stress", change=change)().stderr


def test_an_idle_worker_sleeps_after_a_moment(program: Program) -> None:
    """Its processor time for a call without work, until it sleeps again, the median of a hundred, is less than half of
    that of a worker which watches for 2 ms. Both are measured here, so a slow machine changes both."""
    asleep, watching = (int(program("pool_idle", **change)().stdout) for change in ({}, {"change": "watches for 2 ms"}))
    assert 2 * asleep < watching
