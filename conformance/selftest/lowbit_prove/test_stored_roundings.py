"""Roundings of products with stored matrices: as declared, and smaller formulas and other programs are refuted."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from stored_runs import some_stored

from lowbit.contract.rounding import Roundings
from lowbit.kernels.program import Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.stored import linear
from lowbit_cppyy.stored.activations import StoredActivations
from lowbit_cppyy.stored.formats import PARTS, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import layout_of
from lowbit_cppyy.stored.linear import PANEL
from lowbit_cppyy.stored.recipe import HEAD, default_recipe, separate_recipe
from lowbit_prove import stored_roundings
from lowbit_prove.depths import EXACT
from lowbit_prove.stored_roundings import ROUNDED, Derived, blocks
from lowbit_prove.theorem import Outcome, Proof, Refutation


@cache
def kernel(name: str, purpose: Purpose | None, table: str = "avx2") -> StoredKernel:
    """The default kernel of a format with codes of 4 bits; without a purpose the one for bytes with other scales."""
    structure = structure_of(name, 4)
    if purpose is None:
        return StoredKernel(separate_recipe(structure, PANEL), TABLES[table])
    return StoredKernel(default_recipe(structure, TABLES[table], purpose, PANEL), TABLES[table])


@pytest.mark.parametrize("table", ("avx2", "plain", "avx512vnni"))
@pytest.mark.parametrize("purpose", ("vector", "rows", "integer vector", None))
@pytest.mark.parametrize("name", ("q4_0", "q4_k", "q3_k", "iq4_xs", "gguf-mxfp4", "gptq-v2", "awq-gemm", "q8_0"))
def test_kernels_round_no_more_than_is_declared(name: str, purpose: Purpose | None, table: str) -> None:
    found = stored_roundings.of_kernel(kernel(name, purpose, table)).decide()
    assert isinstance(found, Proof), found


def refuted(outcome: Outcome) -> dict[str, int]:
    assert isinstance(outcome, Refutation), outcome
    numbers = {name: int(number) for name, number in outcome.numbers.items()}
    assert numbers["given"] > numbers["wanted"]
    return numbers


def test_roundings_of_a_small_kernel_are_those_counted_by_hand() -> None:
    """Q4_0: the sum takes ⌈n/8⌉ + 2, the center 1, then n multiply-adds, and the scale 1; another group adds 1."""
    own = kernel("q4_0", "vector")
    derived = Derived(own, own.program, EXACT)
    for n in (1, 8, 9, 32):
        assert derived.depth([n]) == -(-n // 8) + 2 + 1 + n + 1
    assert derived.depth([32, 32]) == derived.depth([32]) + 1


def test_a_matrix_of_larger_groups_meets_more_roundings_than_was_declared() -> None:
    """Without the sum in front of the chain, n + 36 roundings and two for each group would be enough."""
    own = kernel("q4_0", "vector")
    numbers = refuted(stored_roundings.of_kernel(own, declared=lambda rows, n: n + 36 + 2 * -(-rows // n)).decide())
    assert numbers["group_size"] > 248


def test_bytes_with_other_scales_meet_more_roundings_than_was_declared() -> None:
    def earlier(rows: int, run: int) -> int:
        n = min(rows, run)
        return 7 + 2 * -(-n // 16) + 2 * -(-rows // n)

    refuted(stored_roundings.of_kernel(kernel("q4_0", None), declared=earlier).decide())
    assert isinstance(stored_roundings.of_kernel(kernel("q4_0", "integer vector"), declared=earlier).decide(), Proof)


FORMULAS = {
    "fewer": lambda own: lambda rows, n: own(rows, n) - 40,
    "half": lambda own: lambda rows, n: own(rows, n) // 2,
    "of 64 rows": lambda own: lambda rows, n: own(min(rows, 64), 64),
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("name", "purpose"), (("gptq-v2", "vector"), ("q4_0", None)))
def test_smaller_formulas_are_refuted(name: str, purpose: Purpose | None, formula: str) -> None:
    own: Roundings = linear.roundings if purpose else linear.cast_roundings
    declared = FORMULAS[formula](own)
    theorem = stored_roundings.of_kernel(kernel(name, purpose), declared=declared)
    numbers = refuted(theorem.decide())
    assert theorem.run(numbers) is not None
    assert stored_roundings.of_kernel(kernel(name, purpose)).run(numbers) is None


@pytest.mark.parametrize("name", ("q4_k", "q3_k"))
def test_smaller_formulas_are_refuted_for_blocks_with_runs(name: str) -> None:
    theorem = stored_roundings.of_kernel(kernel(name, "vector"), declared=lambda rows, n: 30 + -(-rows // n))
    assert refuted(theorem.decide())["group_size"] == 256


def scaled(register: str, index: str) -> Callable[[Step], Step]:
    """A register is multiplied by a number at the end of each iteration of a loop."""

    def change(step: Step) -> Step:
        if not isinstance(step, Loop):
            return step
        more = Instruction("broadcast_float", "more", (1.5,)), Instruction("multiply", register, (register, "more"))
        return replace(step, body=(*map(change, step.body), *(more if step.index == index else ())))

    return change


@pytest.mark.parametrize(
    ("name", "register", "index"),
    (("gptq-v2", "acc_0_0_0", "u"), ("gptq-v2", "y_0_0", "g"), ("q4_k", "blk_0_0", "u"), ("q4_k", "y_0_0", "g")),
)
def test_a_program_that_rounds_more_is_refuted(name: str, register: str, index: str) -> None:
    own = kernel(name, "vector")
    program = Program(own.program.lanes, tuple(map(scaled(register, index), own.program.body)))

    def tight(rows: int, n: int) -> int:
        """What the right program needs, and hardly more."""
        return (40 if name == "q4_k" else n + 2) + 2 * -(-rows // n)

    assert isinstance(stored_roundings.of_kernel(own, declared=tight).decide(), Proof)
    refuted(stored_roundings.of_kernel(own, program, tight).decide())


@pytest.mark.parametrize("name", sorted(set(PARTS) - {"gptq-v1"})[::3])
@pytest.mark.parametrize("purpose", ("rows", "integer rows"))
def test_the_stream_has_the_length_that_is_allocated(name: str, purpose: Purpose) -> None:
    parts = PARTS[name](some_stored(name))
    layout = replace(layout_of(parts, PANEL), block_rows=10**6)
    own = StoredKernel(default_recipe(parts.structure, TABLES["avx2"], purpose, PANEL), TABLES["avx2"])
    counts = list(Derived(own, own.program, ROUNDED).activations(list(layout.lengths)))
    rows, head = own.recipe.rows, HEAD * own.recipe.headed
    assert len(counts) - head == rows * (StoredActivations(own.recipe, layout, parts).starts[-1] - head)


def test_blocks_with_runs_are_those_of_the_formats() -> None:
    assert blocks(structure_of("q4_k", 4)) == (256,) and blocks(structure_of("q4_0", 4)) == ()
