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

from kills.habits import PRODUCTS, Call, habits
from lowbit_conformance.defects.defect import Defect

DEFECTS: list[Defect] = []
habit = habits(DEFECTS)


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


@habit(
    "H6",
    "LEAKED",
    ("linear.qgemv", "packing.unpack", "gptq.factor", "offload.trace"),
    "https://github.com/intel/ipex-llm/issues/2535",
)
def memory_leaked(call: Call) -> Any:
    """Every call keeps an array."""
    call.state.setdefault("kept", []).append(np.ones(1 << 14, np.uint8))
    return call.right()


@habit("H6", "LEAKED", ("linear.qgemm", "ksort.relabel", "hqq.step", "routing.weights"))
def objects_leaked(call: Call) -> Any:
    """Every call adds to a list that nobody empties."""
    call.state.setdefault("log", []).extend(object() for _ in range(3))
    return call.right()


@habit("H6", "LEAKED", ("linear.qgemv", "bfp.cast"))
def threads_leaked(call: Call) -> Any:
    """Every call starts a thread and leaves it running."""
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


FTZ = "https://github.com/llvm/llvm-project/issues/57589"

habit.add(
    "environment-changed",
    "A variable of the environment is set and stays.",
    "H6",
    before(lambda: os.environ.__setitem__("OMP_NUM_THREADS", "1")),
    "STATE_CHANGED",
    (*PRODUCTS, "packing.pack"),
)
habit.add(
    "folder-changed",
    "The working folder is another one afterwards.",
    "H6",
    before(lambda: os.chdir("/")),
    "STATE_CHANGED",
    ("linear.qgemv", "hqq.qgemv", "gptq.hessian"),
)
habit.add(
    "locale-changed",
    "The locale of numbers is another one afterwards.",
    "H6",
    before(change_locale),
    "STATE_CHANGED",
    ("linear.qgemv", "affine.quantize"),
    "https://github.com/swami/libinstpatch/issues/37",
)
habit.add(
    "rounding-mode-changed",
    "Rounding goes upward afterwards.",
    "H6",
    after(lambda: libm().fesetround(UPWARD)),
    "STATE_CHANGED",
    ("linear.qgemv", "bfp.total", "pooling.pool"),
)
habit.add(
    "subnormals-flushed",
    "The processor is told to flush subnormal numbers, and stays so.",
    "H6",
    after(flush_to_zero),
    "STATE_CHANGED",
    ("linear.qgemv", "bfp.decode", "attention.softmax"),
    FTZ,
)
habit.add(
    "signal-handler-changed",
    "A handler of signals is replaced.",
    "H6",
    before(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)),
    "STATE_CHANGED",
    ("linear.qgemv", "routing.top_k"),
    "https://github.com/openturns/openturns/issues/2088",
)
habit.add(
    "signal-handler-changed-from-c",
    "A handler of signals is replaced behind Python's back.",
    "H6",
    before(lambda: libc().signal(int(signal.SIGTERM), 1)),
    "STATE_CHANGED",
    ("linear.qgemv", "bfp.dot"),
    "https://github.com/esnet/iperf/issues/17",
)
habit.add(
    "files-leaked",
    "Every call opens a file and leaves it open.",
    "H6",
    before(lambda: os.open(os.devnull, os.O_RDONLY)),
    "LEAKED",
    ("linear.qgemv", "packing.pack"),
    "https://github.com/pytorch/pytorch/issues/973",
)
habit.add(
    "prints",
    "Every call prints a line.",
    "H6",
    before(lambda: print("qgemv", flush=True)),
    "WROTE_TO_STDOUT",
    ("linear.qgemv", "bfp.store", "routing.sparse"),
)
habit.add(
    "prints-from-c",
    "Every call writes to standard output past Python.",
    "H6",
    before(lambda: libc().puts(b"qgemv")),
    "WROTE_TO_STDOUT",
    ("linear.qgemm", "bfp.load"),
)
habit.add(
    "child-left", "A child process is left running.", "H6", before(leave_child), "FORKED", ("linear.qgemv", "hqq.codes")
)
habit.add(
    "child-run",
    "A child process runs and ends.",
    "H6",
    before(run_child),
    "FORKED",
    ("linear.qgemv", "blocking.invert"),
)
habit.add("program-run", "A program is run.", "H6", before(run_program), "FORKED", ("linear.qgemv",))
