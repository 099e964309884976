"""Probes: the meanings of intrinsics, compared with a processor or an emulator of one.

For each intrinsic that a table calls, a function of C++ applies it to many registers, and its meaning is applied to the
same. Each 8-bit number is combined with every other, in every place of a register and beside random ones. All 16-bit
numbers are tried alone, and each beside 256 others. 32-bit numbers are edges, in all combinations, and random bits.
Shifts use all counts. Results must have the same bits; a NaN is any NaN.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from lowbit.arrays import U8, Array
from lowbit.errors import UnavailableError
from lowbit_prove.bodies import intrinsic
from lowbit_prove.intrinsics import register
from lowbit_prove.processors import Probe, lacking, running
from lowbit_prove.registers import Vector
from lowbit_prove.theorem import Outcome, Proof, Refutation, Undecided

RANDOM = 1 << 18
"""The number of random bytes of each operand."""
OTHERS = 256
"""The count of 16-bit numbers with which each other one is combined."""
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


# **Numbers.**


def operands(lane: int, count: int) -> Iterator[list[U8]]:
    """Bytes for `count` operands with numbers of `lane` bits; each run has equal length for all operands."""
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
    """All combinations of edge cases, and all edge cases combined with random bits."""
    floats = np.array([*FLOATS, *(-each for each in FLOATS)], np.float32).view(np.uint32)
    edges = np.unique(np.concatenate([np.array([*INTEGERS, SIGNALLING], np.uint32), floats]))
    yield [np.ascontiguousarray(each).view(np.uint8) for each in np.array(list(product(edges, repeat=count))).T]


# **Comparing.**


def decide(probe: Probe, meaning: Callable[..., Any] | None = None) -> Outcome:
    """Whether the processor's results match the meaning of an intrinsic, or another given meaning."""
    if not probe.possible:
        return Undecided(f"this processor lacks {', '.join(lacking(probe.table))}")
    try:
        return _compared(probe, meaning or intrinsic(probe.use[0])[0].meaning)
    except UnavailableError as error:
        return Undecided(str(error))


def _compared(probe: Probe, meaning: Callable[..., Any]) -> Outcome:
    (found, lanes), steps = intrinsic(probe.use[0]), 0
    inputs = [kind for kind in found.takes if kind != "constant"]
    gives = register(found.gives, lanes)
    with running(probe) as run:
        for count, given in product(counts(probe), operands(found.lane, len(inputs)) if inputs else [[]]):
            taken = _alike([_registers(register(kind, lanes), each) for kind, each in zip(inputs, given, strict=True)])
            constants = iter(count if each is None else each for each in probe.use[1])
            rest = iter(taken)
            arguments = [next(constants) if kind == "constant" else _seen(next(rest)) for kind in found.takes]
            with np.errstate(all="ignore"):
                wanted = np.ascontiguousarray(meaning(lanes, *arguments))
            number = len(taken[0]) if taken else 1
            result = run(taken, np.zeros((number, gives.lanes), gives.dtype), count)
            wrong = _different(result, wanted)
            if len(wrong):
                return Refutation(f"{probe.use[0]} gives another register here", _told(taken, wrong[0], count))
            steps += result.size
    return Proof(steps, "enumeration")


def counts(probe: Probe) -> range:
    """The bit counts `i` of a shift, below the width of its lanes; for other intrinsics one unused count."""
    return range(intrinsic(probe.use[0])[0].lane) if None in probe.use[1] else range(1)


def _registers(kind: Vector, given: U8) -> Array:
    """Bytes as registers; the last one is padded with zeros."""
    padded = np.concatenate([given, np.zeros(-len(given) % kind.size, np.uint8)])
    return np.ascontiguousarray(padded.reshape(-1, kind.size)).view(kind.dtype)


def _alike(taken: list[Array]) -> list[Array]:
    """The same number of registers for each operand: longer registers are fewer, so they are repeated."""
    number = max(map(len, taken), default=1)
    return [np.resize(each, (number, each.shape[-1])) for each in taken]


def _seen(registers: Array) -> Array:
    """Registers as a meaning takes them: single numbers for a scalar."""
    return registers[:, 0] if registers.shape[-1] == 1 else registers


def _bits(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")


def _different(result: Array, wanted: Array) -> Array:
    """The indices of registers with different bits."""
    expected = np.broadcast_to(wanted.view(result.dtype), result.shape)
    same = _bits(result) == _bits(expected)
    if result.dtype.kind == "f":
        same |= np.isnan(result) & np.isnan(expected)
    found: Array = np.flatnonzero(~same.all(axis=-1))
    return found


def _told(taken: list[Array], register: int, count: int) -> dict[str, int]:
    numbers = {
        f"{'abc'[n]}_{lane}": int(bits)
        for n, each in enumerate(taken)
        for lane, bits in enumerate(_bits(each[register]))
    }
    return {**numbers, "i": count}
