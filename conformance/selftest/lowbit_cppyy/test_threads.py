"""The threads of the cppyy backend in a process: signals, affinity, fork, the GIL."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lowbit.backend import PreparedLinear
from lowbit.quantization.affine import quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.runtime import compiler

TASKS = Path("/proc/self/task")
linux = pytest.mark.skipif(not TASKS.exists(), reason="only Linux shows a process its threads")


def prepared(backend: CppyyBackend, columns: int) -> PreparedLinear:
    """With so few rows that numpy does not release the GIL when it checks x."""
    return backend.prepare(quantize(np.ones((64, columns), np.float32), bits=4, group_size=64))


def name_of(task: Path) -> str:
    """The name of a thread; empty if it has ended since it was listed."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def workers() -> set[Path]:
    return {task for task in TASKS.iterdir() if name_of(task) == "lowbit"}


def new_workers(before: set[Path], count: int) -> set[Path]:
    """The new workers, once there are this many; each takes its name when it starts."""
    for _ in range(6000):
        if len(new := workers() - before) == count:
            return new
        time.sleep(0.01)
    pytest.fail(f"{count} threads were to come, {len(new)} came")


def status(task: Path, field: str) -> str:
    lines = (task / "status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field + ":"))


@linux
def test_workers_have_a_name_and_take_no_signals_from_outside() -> None:
    """Ctrl-C and timers reach the threads of the program; a fault of a worker is still delivered to the worker."""
    before, mask = workers(), status(TASKS / str(threading.get_native_id()), "SigBlk")
    with CppyyBackend(threads=3) as backend:
        prepared(backend, 64)
        for worker in new_workers(before, 2):
            blocked = int(status(worker, "SigBlk"), 16)
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGCHLD,
                signal.SIGALRM,
                signal.SIGPROF,
                signal.SIGUSR1,
            ):
                assert blocked >> (number - 1) & 1, signal.Signals(number).name
            for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
                assert not blocked >> (number - 1) & 1, signal.Signals(number).name
    assert status(TASKS / str(threading.get_native_id()), "SigBlk") == mask
    assert workers() == before


@linux
def test_workers_run_where_the_thread_that_made_them_may() -> None:
    """Its affinity is inherited; that of another thread, or a later one, is not."""
    before = os.sched_getaffinity(0)
    one, known = {max(before)}, workers()
    with CppyyBackend(threads=2) as backend:
        os.sched_setaffinity(0, one)
        try:
            prepared(backend, 64)
        finally:
            os.sched_setaffinity(0, before)
        (worker,) = new_workers(known, 1)
        assert os.sched_getaffinity(int(worker.name)) == one


@linux
def test_a_worker_is_kept_off_the_processor_of_its_caller() -> None:
    """Off that one only, wherever the caller runs; where there is no other, it may use that one."""
    before, known = os.sched_getaffinity(0), workers()
    with CppyyBackend(threads=2) as backend:
        matrix = prepared(backend, 100_000)
        (worker,) = new_workers(known, 1)
        try:
            for processor in before:
                os.sched_setaffinity(0, {processor})
                matrix.qgemv(np.ones(64, np.float32))
                assert os.sched_getaffinity(int(worker.name)) == (before - {processor} or before)
        finally:
            os.sched_setaffinity(0, before)


@pytest.fixture
def patience() -> Iterator[None]:
    """No Python thread is made to release the GIL by another that waits for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(before)


def runs_during(call: Callable[[], object], times: int) -> bool:
    """Whether another Python thread runs during some of these calls, and not only between them."""
    gate, ran = threading.Lock(), threading.Event()

    def run() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=run)
    with gate:
        thread.start()
        time.sleep(0.05)  # it waits for the gate now
    for _ in range(times):
        call()
        if ran.is_set():
            break
    during = ran.is_set()
    thread.join()
    return during


@pytest.mark.usefixtures("patience")
def test_the_gil_is_free_during_a_kernel() -> None:
    """Another Python thread runs during a call. If the GIL were held it never would, as the same calls show."""
    multiply = compiler.runtime().multiply
    with CppyyBackend(threads=2) as backend:
        matrix = prepared(backend, 100_000)
        x = np.ones(64, np.float32)
        assert runs_during(lambda: matrix.qgemv(x), 20_000)
        multiply.__release_gil__ = False  # type: ignore[attr-defined]  # a function of cppyy's
        try:
            assert not runs_during(lambda: matrix.qgemv(x), 20)
        finally:
            multiply.__release_gil__ = True  # type: ignore[attr-defined]  # an attribute of cppyy's


FORKING = """
    import os, signal, sys, threading, warnings
    import numpy as np
    from lowbit.quantization.affine import quantize
    from lowbit_cppyy import CppyyBackend
    warnings.simplefilter("ignore")  # newer Pythons warn of forking with threads; that is what this is about
    backend = CppyyBackend(threads=2)
    prepared = backend.prepare(quantize(np.ones((256, 20000), np.float32), bits=4, group_size=64))
    x = np.ones(256, np.float32)
    done = threading.Event()
    def call():
        while not done.is_set():
            prepared.qgemv(x)
    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    errors = []
    for _ in range(12):
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs is ended
            try:
                prepared.qgemv(x)
            except Exception as error:
                backend.close()
                os._exit(7 if "do not exist in a forked process" in str(error) else 8)
            os._exit(9)
        errors.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    done.set()
    for caller in callers:
        caller.join()
    print(errors, prepared.qgemv(x)[0])
    """


def test_a_fork_in_the_middle_of_other_threads_calls_gives_errors_and_no_hangs() -> None:
    """Whatever locks other threads hold at that moment, the child gets an error and can close; the parent continues."""
    script = [sys.executable, "-c", textwrap.dedent(FORKING)]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == f"{[7] * 12} 256.0\n", result.stderr
