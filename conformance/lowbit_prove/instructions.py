r"""The theorems of instructions: the words of the tables are those of the vocabulary.

A table defines a word of the vocabulary by a few intrinsics (`lowbit_cppyy.codegen.isa`). With the meanings of these
intrinsics (`lowbit_prove.intrinsics`) and of C++'s operators (`lowbit_prove.operators`), for all registers, all memory
and all numbers of bits below 32,

.. math:: \mathrm{body}(a, b, c) = \mathrm{word}(a, b, c) .

Both sides are executed on unknowns, and the solver compares them lane by lane.

The meanings are not theorems. They are compared with this processor, for the registers of `lowbit_prove.probes`: each
comparison is a statement about those registers and this processor. Without an ARM processor, NEON's are compared with
QEMU. That is a statement about QEMU, and says so. Intrinsics that neither has are not in the list of theorems, and
``lowbit prove`` says so.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import z3

from lowbit.kernels.vector import VOCABULARY, multiply_then_add
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_prove import probes, processors, sums, symbols, terms
from lowbit_prove.bodies import NO_VALUE, executed
from lowbit_prove.machine import DEFINED_BELOW
from lowbit_prove.processors import Probe
from lowbit_prove.solver import satisfied
from lowbit_prove.sums import Question
from lowbit_prove.symbols import Symbols, unknowns
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

STATEMENT = "by the meanings of its intrinsics, the body is the word, for all registers"
COMPARED = "{} does what the intrinsic means, for bytes in all pairs, edges and random registers"
BITS = 32
"""Bits of a lane; shift counts are smaller."""
TRIALS = 8


def theorems() -> Iterator[Theorem]:
    """One theorem for each word of each table, and one for each intrinsic that can run here."""
    for table in TABLES.values():
        for word in (each for each in table.words if each not in NO_VALUE):
            text = partial(_text, table, word)
            runs = partial(decide, table, word), partial(ran, table, word)
            yield Theorem("instructions", f"{word}_{table.name}", STATEMENT, text, *runs)
    for probe in processors.probes():
        if probe.possible:
            text = partial(_subject, probe)
            runs = partial(probes.decide, probe), partial(again, probe)
            yield Theorem("instructions", probe.name, COMPARED.format(probe.processor), text, *runs)


def _text(table: InstructionSet, word: str) -> str:
    return "\n".join([f"{table.name} {table.lanes} {word}", table.words[word], table.types])


def _subject(probe: Probe) -> str:
    return f"{probe.use}\n{probe.described}"


# **Words.**


def decide(table: InstructionSet, word: str) -> Outcome:
    """Whether a table's body of a word implements the word."""
    steps = 0
    try:
        for trial in _trials(table):
            if (found := ran(table, word, trial)) is not None:
                return Refutation(found.reason, trial)
        for i in range(BITS) if "count" in VOCABULARY[word].takes else (0,):
            given, wanted = both(table, word, i, partial(_unknown, table.lanes))
            for place, (found, right) in enumerate(zip(given.data.flat, wanted.data.flat, strict=True)):
                for each in _differences(found, right, wanted.dtype):
                    different = each.condition
                    if word in DEFINED_BELOW:
                        different = z3.And(different, z3.ULT(z3.BitVec(f"a_{place}", 32), DEFINED_BELOW[word]))
                    if (numbers := satisfied(different, "QF_FPBV", each.byte)) is not None:
                        registers = {name: bits << each.shifts.get(name, 0) for name, bits in numbers.items()}
                        return _confirmed(table, word, {**registers, "i": i})
                    steps += 1
    except UndecidedError as error:
        return Undecided(str(error))
    return Proof(steps)


def _differences(a: terms.Term, b: terms.Term, dtype: terms.Dtype) -> Iterator[Question]:
    """Questions, of which at least one holds where two numbers differ."""
    if dtype.kind == "u" and not terms.known(a, b):
        yield from sums.differences(terms.expression(a, dtype), terms.expression(b, dtype))
        return
    same = terms.same(a, b, dtype)
    yield Question(z3.Not(same) if isinstance(same, z3.ExprRef) else z3.BoolVal(not same))


def _trials(table: InstructionSet) -> Iterator[Numbers]:
    """Random registers, of bits and of floats of ordinary size; they reveal most errors without the solver."""
    random = np.random.default_rng(1)
    for trial in range(TRIALS):
        bits = random.integers(0, 2**31, (3, table.lanes), np.uint32)
        registers = bits if trial % 2 else random.standard_normal((3, table.lanes)).astype(np.float32).view(np.uint32)
        numbers = {f"{'abc'[n]}_{lane}": int(each) for (n, lane), each in np.ndenumerate(registers)}
        yield numbers | {"i": int(random.integers(BITS))}


def _confirmed(table: InstructionSet, word: str, numbers: Numbers) -> Outcome:
    """A refutation, if a run on its numbers confirms it."""
    found = ran(table, word, numbers)
    return Undecided("the solver's numbers are right on a run") if found is None else Refutation(found.reason, numbers)


def ran(table: InstructionSet, word: str, numbers: Numbers) -> Refutation | None:
    """Execute a body and a word on the numbers of a refutation; numbers that it does not name are 0."""

    def registers(letter: str, elements: int) -> Any:
        names = [f"{letter}_{lane}" for lane in range(elements)]
        return np.array([whole(numbers, each, 2**32 - 1) if each in numbers else 0 for each in names], np.uint32)

    with np.errstate(all="ignore"):
        found = both(table, word, whole(numbers, "i", BITS - 1) if "i" in numbers else 0, registers)
    given, wanted = (np.ascontiguousarray(each) for each in found)
    same = given.view(np.uint32) == wanted.view(np.uint32)
    if wanted.dtype == np.float32:
        same |= np.isnan(given) & np.isnan(wanted)
    if word in DEFINED_BELOW:
        same |= registers("a", table.lanes) >= DEFINED_BELOW[word]
    for place in np.flatnonzero(~same):
        return Refutation(f"lane {place} is {given[place]}, and the word gives {wanted[place]}")
    return None


def both(table: InstructionSet, word: str, i: int, registers: Callable[[str, int], Any]) -> tuple[Any, Any]:
    """The results of a body and of a word on registers by their letters; for a store, what it writes."""
    told, known, operands = VOCABULARY[word], dict[str, Any](), list[Any]()
    for letter, kind in zip("abc", told.takes, strict=False):
        elements = table.lanes * told.lane_bytes // 4 if kind == "address" else table.lanes
        bits = registers(letter, 1 if kind == "scalar" else elements)
        floating = kind == "float" or (kind == "scalar" and told.gives == "float")
        value = bits.view(np.float32) if floating or (kind == "address" and word == "store") else bits
        operands.append(i if kind == "count" else value[0] if kind == "scalar" else value)
        known[letter] = operands[-1]
    function: Any = multiply_then_add if word == "fmadd" and not table.fused else told.function
    given = executed(table, word, {**known, "i": i})
    if word == "store":
        target = operands[0].copy()
        function(target, operands[1])
        return given, target
    wanted = function(*operands, *([table.lanes] if "scalar" in told.takes else []))
    return (given, wanted) if isinstance(wanted, np.ndarray) else (symbols.of(given), symbols.of(wanted))


def _unknown(lanes: int, letter: str, elements: int) -> Symbols:
    return unknowns(letter, elements, np.uint32)


# **Intrinsics.**


def again(probe: Probe, numbers: Numbers) -> Refutation | None:
    """Compare an intrinsic with this processor again, on all of its few registers."""
    found = probes.decide(probe)
    return found if isinstance(found, Refutation) else None
