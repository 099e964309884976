"""Probes: the meanings of intrinsics, compared with what this processor does.

For each intrinsic that a table calls, a function of C++ applies it to many registers, and its meaning is applied to the
same. Numbers of 8 bits meet all others, in every place of a register and beside random ones. Numbers of 16 bits are
all tried alone, and each beside 256 others. Numbers of 32 bits are edges, in all combinations, and random bits. Shifts
go through all counts. Results must have the same bits; a NaN is any NaN.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

from lowbit.arrays import U8, Array
from lowbit.system.storage import code_folder
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.kept.libraries import LIBRARY, compiler, kept_library
from lowbit_cppyy.runtime import processor
from lowbit_prove.bodies import READ, Use, intrinsic, uses
from lowbit_prove.theorem import Outcome, Proof, Refutation, Undecided

RANDOM = 1 << 18
"""Random bytes of each operand."""
OTHERS = 256
"""Numbers of 16 bits that each other one meets."""
INTEGERS = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF),
    *(0x80008000, 0x7FFF7FFF, 0x80007FFF, 0x7FFF8000, 0xFFFF0000, 0x00010001),
    *(0x80808080, 0x7F7F7F7F, 0x807F807F, 0x7F807F80, 0xFF00FF00, 0x00FF00FF, 0x01010101),
)
FLOATS = (
    *(0.0, 2.0**-149, 2.0**-126, 2.0**-127, 1.0, 1 + 2.0**-23, 1 - 2.0**-24, 1 + 2.0**-12, 3.0, 2.0**24, 2.0**24 - 1),
    *(2.0**127, float(np.finfo(np.float32).max), 2.0**-60, float("inf"), float("nan")),
)
SIGNALLING = 0x7F800001


@dataclass(frozen=True)
class Probe:
    """An intrinsic as tables call it.

    Attributes:
        table: the first table, in order, that has it; whose features the processor needs.
        use: its name and constants.
    """

    table: InstructionSet
    use: Use

    @property
    def name(self) -> str:
        constants = [f"{each:#x}" for each in self.use[1] if each is not None]
        return "-".join((self.use[0], *constants[:1]))

    @property
    def possible(self) -> bool:
        """Whether this processor has the instruction."""
        return not lacking(self.table)


def lacking(table: InstructionSet) -> list[str]:
    """The features of a table that this processor lacks; all of them where archspec, which knows them, is missing."""
    if find_spec("archspec") is None:
        return list(table.requires)
    return [each for each in table.requires if not processor.has(each)]


def probes() -> list[Probe]:
    """One for each use of an intrinsic in any table that is read; of tables the least that have it."""
    found = dict[Use, Probe]()
    for name in sorted(READ, key=lambda each: len(TABLES[each].requires)):
        for use in uses(TABLES[name]):
            found.setdefault(use, Probe(TABLES[name], use))
    return list(found.values())


def unchecked() -> list[str]:
    """What cannot be compared here: intrinsics of other processors, and tables without meanings."""
    without = [f"the words of {name}" for name in TABLES if name not in READ]
    return [*(each.name for each in probes() if not each.possible), *without]


# **Numbers.**


def operands(lane: int, count: int) -> Iterator[list[U8]]:
    """Bytes for `count` operands that work on numbers of `lane` bits; each run is as long for all of them."""
    random = np.random.default_rng(1)
    yield [random.integers(0, 256, RANDOM, np.uint8) for _ in range(count)]
    yield from _edges(count)
    if lane == 8:
        numbers = np.arange(2**16, dtype=np.uint16)
        for turn in range(4):
            order = random.permutation(numbers) if turn else numbers
            pair = [(order >> 8).astype(np.uint8), order.astype(np.uint8)]
            rest = [random.integers(0, 256, 2**16, np.uint8) for _ in range(count)]
            yield [*rest, *pair][-count:] if count > 1 else pair[1:]
    if lane == 16:
        numbers = np.arange(2**16, dtype=np.uint16)
        yield [random.permutation(numbers).view(np.uint8) for _ in range(count)]
        edges = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint16)
        few = np.concatenate([edges, random.integers(0, 2**16, OTHERS - len(edges), np.uint16)])
        for number in few if count == 2 else ():
            every, one = random.permutation(numbers), np.full(2**16, number, np.uint16)
            for first, second in ((every, one), (one, every)):
                yield [first.view(np.uint8), second.view(np.uint8)]


def _edges(count: int) -> Iterator[list[U8]]:
    """All combinations of edges, and all of them beside random bits."""
    floats = np.array([*FLOATS, *(-each for each in FLOATS)], np.float32).view(np.uint32)
    edges = np.unique(np.concatenate([np.array([*INTEGERS, SIGNALLING], np.uint32), floats]))
    yield [np.ascontiguousarray(each).view(np.uint8) for each in np.array(list(product(edges, repeat=count))).T]


# **Comparing.**


def decide(probe: Probe, meaning: Callable[..., Any] | None = None) -> Outcome:
    """Whether the processor gives what an intrinsic means; another meaning may stand in the place of its own."""
    if not probe.possible:
        return Undecided(f"this processor lacks {', '.join(lacking(probe.table))}")
    compiled = library()
    if compiled is None:
        return Undecided("there is no C++ compiler; install g++ or clang++")
    found, lanes = intrinsic(probe.use[0])
    function, steps = compiled[_function(probe)], 0
    inputs = [kind for kind in found.takes if kind != "constant"]
    for count, given in product(counts(probe), operands(found.lane, len(inputs)) if inputs else [[]]):
        taken = [_registers(kind, lanes, each) for kind, each in zip(inputs, given, strict=True)]
        constants = iter(count if each is None else each for each in probe.use[1])
        rest = iter(taken)
        arguments = [next(constants) if kind == "constant" else _seen(kind, next(rest)) for kind in found.takes]
        with np.errstate(all="ignore"):
            wanted = np.ascontiguousarray((meaning or found.meaning)(lanes, *arguments))
        number = len(taken[0]) if taken else 1
        result = np.zeros((number, wanted.shape[-1]), np.uint32)
        addresses = [each.ctypes.data for each in taken] + [None] * (3 - len(taken))
        function(*map(ctypes.c_void_p, addresses), result.ctypes.data_as(ctypes.c_void_p), number, count)
        wrong = _different(result, wanted, floating=found.gives in ("float", "double"))
        if len(wrong):
            return Refutation(f"{probe.use[0]} gives another register here", _told(taken, wrong[0], count))
        steps += result.size
    return Proof(steps, "enumeration")


def counts(probe: Probe) -> range:
    """The numbers `i` of bits of a shift, below the width of its lanes; of others one that means nothing."""
    return range(intrinsic(probe.use[0])[0].lane) if None in probe.use[1] else range(1)


def _bytes(kind: str, lanes: int) -> int:
    return {"half": 2 * lanes, "quarter": 16}.get(kind, 4 * lanes)


def _registers(kind: str, lanes: int, given: U8) -> Array:
    """Bytes as registers, uint32; the last one is filled with zeros."""
    each = _bytes(kind, lanes)
    padded = np.concatenate([given, np.zeros(-len(given) % each, np.uint8)])
    return np.ascontiguousarray(padded.reshape(-1, each)).view(np.uint32)


def _seen(kind: str, registers: Array) -> Array:
    """Registers as a meaning takes them."""
    if kind in ("float", "double"):
        return registers.view(np.float32)
    if kind.startswith("scalar"):
        return registers[:, 0].view(np.float32 if kind == "scalar float" else np.uint32)
    return registers


def _different(result: Array, wanted: Array, *, floating: bool) -> Array:
    """The numbers of registers that have other bits."""
    expected = np.broadcast_to(wanted.view(np.uint32), result.shape)
    same = result == expected
    if floating:
        same |= np.isnan(result.view(np.float32)) & np.isnan(np.ascontiguousarray(expected).view(np.float32))
    found: Array = np.flatnonzero(~same.all(axis=-1))
    return found


def _told(taken: list[Array], register: int, count: int) -> dict[str, int]:
    numbers = {
        f"{'abc'[n]}_{lane}": int(bits) for n, each in enumerate(taken) for lane, bits in enumerate(each[register])
    }
    return {**numbers, "i": count}


# **C++.**

TYPES = {"int": "__m{}i", "float": "__m{}", "double": "__m{}d"}


def _function(probe: Probe) -> str:
    return "probe_" + probe.name.replace("-", "_")


@cache
def library() -> ctypes.CDLL | None:
    """The functions of all probes that this processor can run, compiled; None without a compiler."""
    command = compiler()
    if command is None:
        return None
    folder = code_folder("proofs")
    return ctypes.CDLL(str(folder / kept_library(folder, "probes", command, source(), LIBRARY)))


def source() -> str:
    """Their C++."""
    lines = ["#include <cstdint>", "#include <cstring>", "#include <immintrin.h>"]
    lines += [_text(each) for each in probes() if each.possible]
    return "\n".join(lines) + "\n"


def _text(probe: Probe) -> str:
    """One function: it applies an intrinsic to `n` registers one after the other."""
    (found, lanes), name = intrinsic(probe.use[0]), probe.use[0]
    constants = iter("i" if each is None else str(each) for each in probe.use[1])
    loads, arguments, letters = [], [], iter("abc")
    for kind in found.takes:
        if kind == "constant":
            arguments.append(next(constants))
            continue
        letter, size = next(letters), _bytes(kind, lanes)
        place = f"{letter} + {size} * k"
        if kind == "pointer":
            cast = "float*" if "ps" in name else f"__m{32 * lanes}i*"
            arguments.append(f"reinterpret_cast<{cast}>({place})" if found.gives != "none" else "target")
            continue
        arguments.append(letter.upper())
        loads.append(
            f"{_type(kind, lanes)} {letter.upper()}; std::memcpy(&{letter.upper()}, {place}, sizeof {letter.upper()});"
        )
    call = f"{name}({', '.join(arguments)})"
    size = {"quarter": 16}.get(found.gives, 4 * lanes)
    kept = f"const auto r = {call}; std::memcpy(out + {size} * k, &r, {size});"
    if found.gives == "none":
        kept = f"float* const target = reinterpret_cast<float*>(out + {size} * k); {call};"
    head = f'extern "C" {probe.table.attribute} void {_function(probe)}'
    parameters = "unsigned char* a, unsigned char* b, unsigned char* c, unsigned char* out, std::int64_t n, int i"
    return f"{head}({parameters}) {{\n  for (std::int64_t k = 0; k < n; ++k) {{ {' '.join(loads)} {kept} }}\n}}"


def _type(kind: str, lanes: int) -> str:
    if kind.startswith("scalar"):
        return "int" if kind == "scalar int" else "float"
    if kind in ("half", "quarter"):
        return f"__m{8 * _bytes(kind, lanes)}i"
    return TYPES[kind].format(32 * lanes if lanes > 4 or kind == "int" else "")
