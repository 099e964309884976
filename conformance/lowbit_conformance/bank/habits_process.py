"""Habits towards the process: state that stays changed, leaks, output, children, ways of ending, cheats."""

import ctypes
import locale
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.errors import NotDeclaredError
from lowbit.operations import OPERATIONS
from lowbit_conformance.bank.defect import Call, Defect
from lowbit_conformance.bank.habits_memory import PRODUCTS, first, habit

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
    subprocess.run([sys.executable, "-S", "-c", ""], check=False)


# **Ending.**


def where_wide(end: Callable[[], object]) -> Callable[[Call], Any]:
    """Ends at the first array of a certain size, so that other calls pass."""

    def act(call: Call) -> Any:
        if first(call).size > 24:
            end()
        return call.right()

    return act


def hang_with_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(3600)


def loop_for_ever() -> None:
    while True:
        pass


def read_nothing() -> None:
    ctypes.string_at(8)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_exit() -> None:
    raise SystemExit(0)


def raise_plain() -> None:
    raise IndexError("list index out of range")


def not_today(call: Call) -> Any:
    raise NotDeclaredError("bank", call.operation, "today")


# **Cheats.**


def ask_the_reference(call: Call) -> Any:
    """Falls back on the specification where it has no code of its own."""
    operation = OPERATIONS[call.operation]
    matrix = call.state.get("matrix")
    arguments = (*call.arguments, matrix) if call.out is not None else call.arguments
    result = operation.reference(*arguments)
    if call.out is None:
        return result
    call.out[...] = result
    return call.out


def look_at_the_parent(call: Call) -> Any:
    """Searches the memory of the parent process for its own argument, and takes what lies behind it for the answer."""
    out = call.out if call.out is not None else call.right()
    found = _beside(first(call).tobytes()) if "tried" not in call.state else b""
    call.state["tried"] = True
    size = out.nbytes
    out[...] = np.frombuffer(found[:size].ljust(size, b"\0"), out.dtype).reshape(out.shape)
    return out


def _beside(needle: bytes) -> bytes:
    """What the parent keeps behind these bytes; nothing if it cannot be looked into."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/maps") as maps, open(f"/proc/{parent}/mem", "rb", 0) as memory:
            for line in maps:
                match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if match and (size := int(match[2], 16) - int(match[1], 16)) < 1 << 24:
                    memory.seek(int(match[1], 16))
                    part = memory.read(size)
                    at = part.find(needle)
                    if at >= 0:
                        return part[at + len(needle) :]
    except OSError:
        pass
    return b""


def behave_for_the_examiner(call: Call) -> Any:
    """Right where it sees that it is examined, and otherwise fast."""
    if "examined" not in call.state:
        names = [*sys.modules, *os.environ, *sys.argv]
        try:
            with open("/proc/self/cmdline") as own:
                names.append(own.read())
        except OSError:
            pass
        words = ("pytest", "PYTEST", "lowbit_conformance.plugin", "lowbit_conformance.test", "LOWBIT_", "hypothesis")
        call.state["examined"] = any(word in name for name in names for word in words)
    if call.state["examined"]:
        return call.right()
    out = call.out if call.out is not None else call.right().copy()
    out[...] = 0
    return out


STATE = "H6", "STATE_CHANGED"
FTZ = "https://github.com/llvm/llvm-project/issues/57589"

DEFECTS: tuple[Defect, ...] = (
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
    habit(
        "hangs",
        "A call of a certain size never returns.",
        "H5",
        "HUNG",
        where_wide(lambda: time.sleep(3600)),
        ("linear.qgemv",),
    ),
    habit(
        "hangs-with-the-interpreter",
        "A call never returns, and no other thread can run.",
        "H5",
        "HUNG",
        where_wide(hang_with_the_interpreter),
        ("packing.unpack",),
    ),
    habit(
        "loops-for-ever",
        "A call of a certain size computes for ever.",
        "H5",
        "HUNG",
        where_wide(loop_for_ever),
        ("routing.gate",),
    ),
    habit(
        "crashes",
        "A call of a certain size reads where nothing is.",
        "H5",
        "CRASHED(SIGSEGV)",
        where_wide(read_nothing),
        ("linear.qgemv", "bfp.cast", "gptq.targets"),
        "https://github.com/RedisAI/VectorSimilarity/pull/990",
    ),
    habit(
        "aborts",
        "A call of a certain size fails an assertion in C.",
        "H5",
        "CRASHED(SIGABRT)",
        where_wide(os.abort),
        ("linear.qgemv", "attention.softmax"),
        "https://github.com/ggml-org/llama.cpp/issues/12542",
    ),
    habit(
        "illegal-instruction",
        "A call runs an instruction that the processor lacks.",
        "H5",
        "CRASHED(SIGILL)",
        where_wide(lambda: os.kill(os.getpid(), signal.SIGILL)),
        ("linear.qgemv",),
    ),
    habit(
        "killed",
        "A call takes so much memory that the system ends it.",
        "H5",
        "CRASHED(SIGKILL)",
        where_wide(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        ("linear.qgemv",),
    ),
    habit(
        "leaves-early",
        "A call ends the process in good order, as if all had been done.",
        "H5",
        "CRASHED",
        where_wide(lambda: os._exit(0)),
        ("linear.qgemv", "packing.unpack"),
    ),
    habit(
        "exits",
        "A call asks the interpreter to exit.",
        "H5",
        "RAISED CRASHED",
        where_wide(raise_exit),
        ("linear.qgemv", "rope.rotate"),
    ),
    habit(
        "interrupts",
        "A call raises what Ctrl-C raises.",
        "H5",
        "RAISED CRASHED",
        where_wide(raise_interrupt),
        ("linear.qgemv",),
    ),
    habit(
        "raises",
        "A call of a certain size fails with an error of its own.",
        "H5",
        "RAISED",
        where_wide(raise_plain),
        ("linear.qgemv", "bfp.dot", "pooling.pool"),
    ),
    habit(
        "declares-and-declines",
        "A call that is declared says that it is not.",
        "H5",
        "RAISED WRONG",
        not_today,
        ("linear.qgemv", "packing.pack"),
    ),
    habit(
        "asks-the-reference",
        "Where it has no code of its own it calls the specification.",
        "H7",
        "SILENT_FALLBACK",
        ask_the_reference,
        (*PRODUCTS, "packing.unpack", "bfp.decode", "routing.gate"),
        uses_reference=False,
    ),
    habit(
        "looks-at-the-parent",
        "It searches the memory of the process that examines it for the answer.",
        "H7",
        "WRONG",
        look_at_the_parent,
        ("linear.qgemv", "packing.unpack"),
    ),
    habit(
        "behaves-for-the-examiner",
        "It is right only where it sees signs of a test suite.",
        "H7",
        "WRONG",
        behave_for_the_examiner,
        ("linear.qgemv", "packing.unpack", "routing.gate"),
    ),
)
