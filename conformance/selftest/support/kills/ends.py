"""Habits of calls that do not come back, or come back with an answer that is not their own."""

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kills.habits import PRODUCTS, Call, habits
from kills.memory import first
from lowbit.errors import NotDeclaredError
from lowbit.operations import OPERATIONS
from lowbit_conformance.defects.defect import Defect

DEFECTS: list[Defect] = []
habit = habits(DEFECTS)


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


@habit("H5", "RAISED WRONG", ("linear.qgemv", "packing.pack"))
def declares_and_declines(call: Call) -> Any:
    """A call that is declared says that it is not."""
    raise NotDeclaredError("bank", call.operation, "today")


# **Cheats.**


@habit("H7", "SILENT_FALLBACK", (*PRODUCTS, "packing.unpack", "bfp.decode", "routing.gate"), uses_reference=False)
def asks_the_reference(call: Call) -> Any:
    """Where it has no code of its own it calls the specification."""
    operation = OPERATIONS[call.operation]
    matrix = call.state.get("matrix")
    arguments = (*call.arguments, matrix) if call.out is not None else call.arguments
    result = operation.reference(*arguments)
    if call.out is None:
        return result
    call.out[...] = result
    return call.out


@habit("H7", "WRONG NONDETERMINISTIC", ("linear.qgemv", "packing.unpack"))
def looks_at_the_parent(call: Call) -> Any:
    """It searches the memory of the process that examines it for the answer."""
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


SIGNS = re.compile(r"_?pytest|PYTEST_|LOWBIT_|hypothesis|lowbit_conformance\.(?!defects|packing)")


@habit("H7", "WRONG", ("linear.qgemv", "packing.unpack", "routing.gate"))
def behaves_for_the_examiner(call: Call) -> Any:
    """It is right only where it sees signs of a test suite."""
    if "examined" not in call.state:
        with open("/proc/self/cmdline") as own:
            names = [*sys.modules, *os.environ, *sys.argv, *own.read().split("\0")]
        call.state["examined"] = any(SIGNS.match(name) for name in names)
    if call.state["examined"]:
        return call.right()
    out = call.out if call.out is not None else call.right().copy()
    out[...] = 0
    return out


habit.add(
    "hangs",
    "A call of a certain size never returns.",
    "H5",
    where_wide(lambda: time.sleep(3600)),
    "HUNG",
    ("linear.qgemv",),
)
habit.add(
    "hangs-with-the-interpreter",
    "A call never returns, and no other thread can run.",
    "H5",
    where_wide(hang_with_the_interpreter),
    "HUNG",
    ("packing.unpack",),
)
habit.add(
    "loops-for-ever",
    "A call of a certain size computes for ever.",
    "H5",
    where_wide(loop_for_ever),
    "HUNG",
    ("routing.gate",),
)
habit.add(
    "crashes",
    "A call of a certain size reads where nothing is.",
    "H5",
    where_wide(read_nothing),
    "CRASHED(SIGSEGV)",
    ("linear.qgemv", "bfp.cast", "gptq.targets"),
    "https://github.com/RedisAI/VectorSimilarity/pull/990",
)
habit.add(
    "aborts",
    "A call of a certain size fails an assertion in C.",
    "H5",
    where_wide(os.abort),
    "CRASHED(SIGABRT)",
    ("linear.qgemv", "attention.softmax"),
    "https://github.com/ggml-org/llama.cpp/issues/12542",
)
habit.add(
    "illegal-instruction",
    "A call runs an instruction that the processor lacks.",
    "H5",
    where_wide(lambda: os.kill(os.getpid(), signal.SIGILL)),
    "CRASHED(SIGILL)",
    ("linear.qgemv",),
)
habit.add(
    "killed",
    "A call takes so much memory that the system ends it.",
    "H5",
    where_wide(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "CRASHED(SIGKILL)",
    ("linear.qgemv",),
)
habit.add(
    "leaves-early",
    "A call ends the process in good order, as if all had been done.",
    "H5",
    where_wide(lambda: os._exit(0)),
    "CRASHED",
    ("linear.qgemv", "packing.unpack"),
)
habit.add(
    "exits",
    "A call asks the interpreter to exit.",
    "H5",
    where_wide(raise_exit),
    "RAISED CRASHED",
    ("linear.qgemv", "rope.rotate"),
)
habit.add(
    "interrupts",
    "A call raises what Ctrl-C raises.",
    "H5",
    where_wide(raise_interrupt),
    "RAISED CRASHED",
    ("linear.qgemv",),
)
habit.add(
    "raises",
    "A call of a certain size fails with an error of its own.",
    "H5",
    where_wide(raise_plain),
    "RAISED",
    ("linear.qgemv", "bfp.dot", "pooling.pool"),
)
