"""Habits towards the process: state that stays changed, leaks, output, children."""

import ctypes
import locale
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kills.habits import Call, Habit
from kills.memory import PRODUCTS, habit

# **State.**

X86 = platform.machine() in ("x86_64", "AMD64")
UPWARD = 0x800 if X86 else 0x400000
FLUSHING = (28, 0x8040) if X86 else (0, 1 << 24)
"""Where in a fenv_t the control word is, and its bits for subnormal numbers."""


def libc() -> Any:
    return ctypes.CDLL(None)


def libm() -> Any:
    return ctypes.CDLL("libm.so.6")


def before(change: Callable[[], object]) -> Callable[[Call], Any]:
    """Do this, then the call."""

    def act(call: Call) -> Any:
        change()
        return call.right()

    return act


def after(change: Callable[[], object]) -> Callable[[Call], Any]:
    """Do the call, then this."""

    def act(call: Call) -> Any:
        result = call.right()
        change()
        return result

    return act


def flush_to_zero() -> None:
    mode = ctypes.create_string_buffer(64)
    libm().fegetenv(mode)
    at, bits = FLUSHING
    word = ctypes.c_uint32.from_buffer(mode, at)
    word.value |= bits
    libm().fesetenv(mode)


def change_locale() -> None:
    for name in ("C.UTF-8", "C.utf8", "POSIX", "en_US.UTF-8"):
        try:
            locale.setlocale(locale.LC_NUMERIC, name)
            break
        except locale.Error:
            continue


# **Leaks.**


def leak_memory(call: Call) -> Any:
    call.state.setdefault("kept", []).append(np.ones(1 << 14, np.uint8))
    return call.right()


def leak_objects(call: Call) -> Any:
    call.state.setdefault("log", []).extend(object() for _ in range(3))
    return call.right()


def leak_thread(call: Call) -> Any:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return call.right()


# **Children.**


def leave_child() -> None:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)


def run_child() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def run_program() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=False)


STATE = "H6", "STATE_CHANGED"
FTZ = "https://github.com/llvm/llvm-project/issues/57589"

DEFECTS: tuple[Habit, ...] = (
    habit(
        "environment-changed",
        "A variable of the environment is set and stays.",
        *STATE,
        before(lambda: os.environ.__setitem__("OMP_NUM_THREADS", "1")),
        (*PRODUCTS, "packing.pack"),
    ),
    habit(
        "folder-changed",
        "The working folder is another one afterwards.",
        *STATE,
        before(lambda: os.chdir("/")),
        ("linear.qgemv", "hqq.qgemv", "gptq.hessian"),
    ),
    habit(
        "locale-changed",
        "The locale of numbers is another one afterwards.",
        *STATE,
        before(change_locale),
        ("linear.qgemv", "affine.quantize"),
        "https://github.com/swami/libinstpatch/issues/37",
    ),
    habit(
        "rounding-mode-changed",
        "Rounding goes upward afterwards.",
        *STATE,
        after(lambda: libm().fesetround(UPWARD)),
        ("linear.qgemv", "bfp.total", "pooling.pool"),
    ),
    habit(
        "subnormals-flushed",
        "The processor is told to flush subnormal numbers, and stays so.",
        *STATE,
        after(flush_to_zero),
        ("linear.qgemv", "bfp.decode", "attention.softmax"),
        FTZ,
    ),
    habit(
        "signal-handler-changed",
        "A handler of signals is replaced.",
        *STATE,
        before(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)),
        ("linear.qgemv", "routing.top_k"),
        "https://github.com/openturns/openturns/issues/2088",
    ),
    habit(
        "signal-handler-changed-from-c",
        "A handler of signals is replaced behind Python's back.",
        *STATE,
        before(lambda: libc().signal(int(signal.SIGTERM), 1)),
        ("linear.qgemv", "bfp.dot"),
        "https://github.com/esnet/iperf/issues/17",
    ),
    habit(
        "memory-leaked",
        "Every call keeps an array.",
        "H6",
        "LEAKED",
        leak_memory,
        ("linear.qgemv", "packing.unpack", "gptq.factor", "offload.trace"),
        "https://github.com/intel/ipex-llm/issues/2535",
    ),
    habit(
        "objects-leaked",
        "Every call adds to a list that nobody empties.",
        "H6",
        "LEAKED",
        leak_objects,
        ("linear.qgemm", "ksort.relabel", "hqq.step", "routing.weights"),
    ),
    habit(
        "files-leaked",
        "Every call opens a file and leaves it open.",
        "H6",
        "LEAKED",
        before(lambda: os.open(os.devnull, os.O_RDONLY)),
        ("linear.qgemv", "packing.pack"),
        "https://github.com/pytorch/pytorch/issues/973",
    ),
    habit(
        "threads-leaked",
        "Every call starts a thread and leaves it running.",
        "H6",
        "LEAKED",
        leak_thread,
        ("linear.qgemv", "bfp.cast"),
    ),
    habit(
        "prints",
        "Every call prints a line.",
        "H6",
        "WROTE_TO_STDOUT",
        before(lambda: print("qgemv", flush=True)),
        ("linear.qgemv", "bfp.store", "routing.sparse"),
    ),
    habit(
        "prints-from-c",
        "Every call writes to standard output past Python.",
        "H6",
        "WROTE_TO_STDOUT",
        before(lambda: libc().puts(b"qgemv")),
        ("linear.qgemm", "bfp.load"),
    ),
    habit(
        "child-left",
        "A child process is left running.",
        "H6",
        "FORKED",
        before(leave_child),
        ("linear.qgemv", "hqq.codes"),
    ),
    habit(
        "child-run",
        "A child process runs and ends.",
        "H6",
        "FORKED",
        before(run_child),
        ("linear.qgemv", "blocking.invert"),
    ),
    habit("program-run", "A program is run.", "H6", "FORKED", before(run_program), ("linear.qgemv",)),
)
