"""The theorem of roundings: it holds for the kernels' own formulas, and not for smaller ones or other programs."""

import doctest
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import z3

from lowbit.contract.rounding import Roundings
from lowbit.kernels.program import Instruction, Loop, Program, Step
from lowbit_cppyy import backend
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.runtime import decode_operations
from lowbit_prove import depths, formulas, roundings
from lowbit_prove.depths import EXACT, INTEGER, POWER, ZERO, Count
from lowbit_prove.formulas import ways
from lowbit_prove.roundings import Derived
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Outcome, Proof, Refutation, Undecided

FLOATS = "gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2"
INTEGERS = "gemm_bfp16_u4_s16z_dot4_2x1c1t1_p64a0_avxvnni"
KERNELS = (
    *(FLOATS, INTEGERS, "gemv_f32_u8_s32m_shift_1x1c2t2_p64a0_plain", "gemv_bfp16_u2_s32m_pairs_1x1c1t1_p64a0_avx2"),
    "gemv_f32_u2_s16z_sums_1x1c2t1_p64a0_avx512",
)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_round_no_more_than_is_declared(name: str) -> None:
    found = roundings.of_kernel(kernel_of(name)).decide()
    assert isinstance(found, Proof) and found.steps > 30


def test_sums_and_heads_round_no_more_than_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundings, "HEAD_DIMS", (1, 15, 64, 256))
    found = {each.name: each.decide() for each in roundings.theorems() if each.name.endswith(("_avx2", "_plain"))}
    assert len(found) == 4 and all(isinstance(each, Proof) for each in found.values()), found


def refuted(outcome: Outcome) -> dict[str, int]:
    """The numbers of a refutation, which show more roundings than are declared."""
    assert isinstance(outcome, Refutation), outcome
    numbers = {name: int(number) for name, number in outcome.numbers.items()}
    assert numbers["given"] > numbers["wanted"]
    return numbers


# What a program rounds, counted by hand.


def test_depths_of_a_small_kernel_are_those_counted_by_hand() -> None:
    """Of n codes: n roundings in a chain, then a scale, and a sum with the offset; X has ⌈n/8⌉ + 2, its offset 1."""
    derived = Derived(kernel_of(FLOATS), kernel_of(FLOATS).program)
    for n in (1, 7, 8, 9, 64):
        assert derived.depth(n, n) == max(n + 1, -(-n // 8) + 2 + 1) + 1
    assert derived.depth(96, 32) == derived.depth(32, 32) + 2 * 2 and derived.growth == (8, 2)


def test_counts_of_operations() -> None:
    assert depths.fused(EXACT, EXACT, ZERO) == Count(1) and depths.fused(EXACT, ZERO, Count(3)) == Count(3)
    assert depths.fused(EXACT, EXACT, Count(3)) == Count(4) == depths.added(Count(3), Count(1))
    assert depths.multiplied(Count(2), Count(3)) == Count(6) and depths.multiplied(Count(2), POWER) == Count(2)
    assert depths.added(INTEGER, INTEGER) == INTEGER and depths.added(ZERO, Count(5)) == Count(5)


# Mistakes.


@pytest.mark.parametrize("name", (FLOATS, INTEGERS))
@pytest.mark.parametrize(
    "formula",
    (
        lambda own: lambda rows, size: own(rows, size) - 5,
        lambda own: lambda rows, size: own(rows, size) - -(-rows // size),
        lambda own: lambda rows, size: own(rows, size) - min(rows, size) // 64,
        lambda own: lambda rows, size: own(rows, size) if rows < 5000 else 100,
    ),
    ids=("fewer", "one for a group", "too slowly", "to 5000 rows"),
)
def test_smaller_formulas_are_refuted(name: str, formula: Callable[[Roundings], Roundings]) -> None:
    kernel = kernel_of(name)
    declared = formula(backend.integer_roundings if kernel.recipe.integer else backend.roundings)
    found = refuted(roundings.of_kernel(kernel, declared=declared).decide())
    assert declared(found["rows"], found["group_size"]) == found["wanted"]


def scaled(register: str, index: str) -> Callable[[Step], Step]:
    """A register is multiplied by a number at the end of each iteration of a loop."""

    def change(step: Step) -> Step:
        if not isinstance(step, Loop):
            return step
        more = (Instruction("broadcast_float", "m", (1.5,)), Instruction("multiply", register, (register, "m")))
        return replace(step, body=(*map(change, step.body), *(more if step.index == index else ())))

    return change


@pytest.mark.parametrize(
    ("name", "register", "index"),
    ((FLOATS, "acc_0_0_0", "u"), (FLOATS, "y_0_0", "g"), (INTEGERS, "acc_1_0_0", "i"), (INTEGERS, "y_1_0", "e")),
)
def test_a_program_that_rounds_once_more_in_each_iteration_is_refuted(name: str, register: str, index: str) -> None:
    kernel = kernel_of(name)
    program = Program(kernel.program.lanes, tuple(map(scaled(register, index), kernel.program.body)))
    found = roundings.of_kernel(kernel, program).decide()
    assert isinstance(found, Refutation) and "rows" in found.numbers, found


@pytest.mark.parametrize(
    ("name", "formula"),
    (
        ("sum_roundings", lambda length, _: -(-length // 64) + 5),
        ("sum_roundings", lambda length, _: 6 + min(-(-length // 64), 1000)),
        ("head_roundings", lambda length, _: length // 2 + 7),
        ("head_roundings", lambda length, _: length // 2 + length // 64 + 3),
    ),
    ids=("a halving less", "to 64000 elements", "without chunks", "fewer for heads"),
)
def test_smaller_formulas_of_rows_are_refuted(name: str, formula: Roundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundings, "HEAD_DIMS", (1, 64))
    monkeypatch.setattr(decode_operations, name, formula)
    kind = name.split("_")[0] + "s"
    (theorem,) = (each for each in roundings.theorems() if each.name == f"{kind}_avx2")
    refuted(theorem.decide())


def test_a_word_that_is_not_counted_is_undecided() -> None:
    kernel = kernel_of(FLOATS)
    more = Instruction("divide", "y_0_0", ("y_0_0", "y_0_0"))
    program = Program(8, (*kernel.program.body[:-1], more, kernel.program.body[-1]))
    found = roundings.of_kernel(kernel, program).decide()
    assert isinstance(found, Undecided) and "divide" in found.reason


# Formulas.


def test_every_way_through_a_formula_gives_what_the_formula_gives() -> None:
    """For numbers, one way's conditions hold, and its result is the formula's own."""
    rows, size = z3.Ints("rows size")
    for formula in (backend.roundings, backend.integer_roundings):
        found = list(ways(formula, rows, size))
        for numbers in ((1, 1), (7, 3), (96, 32), (100, 70), (4096, 4096), (33, 64)):
            solver = z3.Solver()
            result = z3.Int("result")
            solver.add(rows == numbers[0], size == numbers[1])
            solver.add(z3.Or(*(z3.And(*each.conditions, result == each.result) for each in found)))
            solver.add(z3.Int("-rows // size") == -numbers[0] // numbers[1], z3.Int("32 mod size") == 32 % numbers[1])
            assert solver.check() == z3.sat and solver.model()[result].as_long() == formula(*numbers)
            solver.add(result != formula(*numbers))
            assert solver.check() == z3.unsat


def test_formulas_that_are_not_linear_are_undecided() -> None:
    with pytest.raises(UndecidedError):
        list(ways(lambda rows, size: rows * size, *z3.Ints("rows size")))
    with pytest.raises(UndecidedError, match="ways"):
        list(ways(lambda rows: sum(max(rows, n) for n in range(9)), z3.Int("rows")))


@pytest.mark.parametrize("module", (formulas,), ids=lambda each: each.__name__)
def test_examples_of_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0


def test_every_instruction_set_has_sums_and_heads() -> None:
    assert len(list(roundings.theorems())) == 2 * len(TABLES)
