"""The theorem of memory: it holds for the generated kernels, and what leaves an array is refuted with a call."""

import doctest
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files

import pytest
import z3
from mutants import CHANGES, Change, mutants
from stored_runs import some_stored

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.runtime.activations import ActivationStream, Segment
from lowbit_cppyy.stored.activations import StoredActivations
from lowbit_cppyy.stored.formats import PARTS, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import layout_of
from lowbit_cppyy.stored.linear import PANEL
from lowbit_cppyy.stored.recipe import default_recipe
from lowbit_prove import accesses, arrays, memory
from lowbit_prove.accesses import Walk
from lowbit_prove.arrays import Call, segments_hold
from lowbit_prove.memory import Subject, decide
from lowbit_prove.prepared_setting import smallest
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Proof, Refutation

FLOATS = "gemv_f32_u4_s16z_fold_1x2c1t1_p64a64_avx2"
TABLE = "gemv_f32_u4_s16m_table_1x1c1t1_p64a0_avx512"
INTEGERS = "gemm_bfp16_u3_s32m_pairs_2x1c1t1_p64a0_avx2"
KERNELS = (
    *(FLOATS, TABLE, INTEGERS),
    "gemv_f32_u2_s32z_sums_1x1c2t1_p64a0_avx512",
    "gemm_f32_u8_s16z_shift_4x1c1t2_p64a0_neon",
)


def of(name: str, program: Program | None = None) -> Subject:
    kernel = kernel_of(name)
    unit = kernel.recipe.unit_codes if kernel.recipe.integer else 0
    return Subject(program or kernel.program, arrays.of_matrix(kernel), unit)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_matrices_stay_inside(name: str) -> None:
    found = memory.of_kernel(kernel_of(name)).decide()
    assert isinstance(found, Proof) and found.steps > 5


@pytest.mark.parametrize("name", ("q4_k", "gguf-mxfp4", "q8_0", "gptq-v2"))
@pytest.mark.parametrize("purpose", ("vector", "integer rows"))
def test_kernels_of_stored_matrices_stay_inside(name: str, purpose: str) -> None:
    for table in (TABLES["avx2"], TABLES["avx512"]):
        recipe = default_recipe(structure_of(name, 4), table, purpose, PANEL)  # type: ignore[arg-type]  # a purpose
        assert isinstance(memory.of_stored(StoredKernel(recipe, table)).decide(), Proof)


@pytest.mark.parametrize(
    "subjects", (memory.passes, memory.scores, memory.mixes, memory.blocks), ids=lambda each: each.__name__
)
def test_passes_heads_and_blocks_stay_inside(
    subjects: Callable[..., Iterator[Subject]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "HEAD_DIMS", (1, 15, 17, 64, 256))
    monkeypatch.setattr(memory, "BLOCKS", (4, 32, 64))
    assert isinstance(memory.decide_all(lambda: subjects(TABLES["avx2"])), Proof)


# Mistakes.


@pytest.mark.parametrize("pointer", "wszxy")
@pytest.mark.parametrize("name", (FLOATS, INTEGERS))
def test_an_array_that_is_an_element_too_short_is_noticed(name: str, pointer: str) -> None:
    """Words and scales are followed by what is read later; a tile of results has room for the largest kernel."""
    kernel, subject = kernel_of(name), of(name)
    layout = smallest(kernel.recipe)
    lengths = dict(subject.arrays.lengths) | {"y": z3.IntVal(kernel.recipe.rows * kernel.recipe.panel)}
    lengths["s"] = lengths["s"] - layout.zero_elements
    lengths["w"] = lengths["s"] - layout.scale_elements
    assert isinstance(decide(replace(subject, arrays=replace(subject.arrays, lengths=lengths))), Proof)
    lengths[pointer] = lengths[pointer] - 1
    found = decide(replace(subject, arrays=replace(subject.arrays, lengths=lengths)))
    assert isinstance(found, Refutation) and found.reason.startswith("the program leaves its memory"), found


def further(step: Step) -> Step | None:
    """A pointer moves by an element too many."""
    return replace(step, step=step.step + 1) if isinstance(step, Advance) and step.step > 0 else None


def in_front(step: Step) -> Step | None:
    """An access lies far in front of its place."""
    if isinstance(step, Instruction) and step.word.startswith(("load", "store")):
        assert isinstance(step.arguments[0], Address)
        return replace(step, arguments=(replace(step.arguments[0], offset=-(10**6)), *step.arguments[1:]))
    return None


def loaded_ahead(step: Step) -> Step | None:
    """What should be prefetched is loaded."""
    if isinstance(step, Instruction) and step.word == "prefetch_once":
        return replace(step, word="load_int", target="ahead")
    return None


@pytest.mark.parametrize("change", (further, in_front, loaded_ahead), ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", (FLOATS, INTEGERS))
def test_a_program_that_leaves_its_memory_is_refuted(name: str, change: Change) -> None:
    found = list(mutants(kernel_of(name).program, change))
    assert found or (name, change) == (INTEGERS, loaded_ahead)
    for program in found[:: max(1, len(found) // 3)]:
        outcome = decide(of(name, program))
        assert isinstance(outcome, Refutation), outcome
        assert outcome.numbers["groups"] in (1, 2, arrays.MANY)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_mistakes_are_decided_as_runs_find_them(change: Change) -> None:
    """Whatever the mistake is, a program that leaves its memory in a call that is run is refuted, and no other is."""
    for program in list(mutants(kernel_of(INTEGERS).program, change))[::7]:
        subject = of(INTEGERS, program)
        left = [memory.ran(subject, call) for call in subject.arrays.calls]
        assert isinstance(decide(subject), Refutation) == any(left)


def test_segments_of_another_length_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(first: int, length: int, before: int, unit: int, ends: bool) -> Segment:
        return Segment(first, length, before % unit, -(-(before % unit + length) // unit), not ends, ends)

    monkeypatch.setattr(Segment, "of", longer)
    segments_hold.cache_clear()
    try:
        assert isinstance(segments_hold(8), str)
        assert isinstance(decide(of(INTEGERS)), Refutation)
    finally:
        segments_hold.cache_clear()


def test_a_product_of_sizes_is_not_decided() -> None:
    inner = Loop("u", "turns", (Instruction("load_int", "a", (Address("w"),)), Advance("w", 8)))
    with pytest.raises(UndecidedError, match="product of sizes"):
        Walk(Program(8, (Loop("g", "groups", (inner,)),)))


# What callers pass is what the backend allocates.


def valued(subject: Subject, pointer: str, call: Call) -> int:
    numbers = [(z3.Int(name), z3.IntVal(value)) for name, value in call.integers.items()]
    return int(z3.simplify(z3.substitute(subject.arrays.lengths[pointer], *numbers)).as_long())


@pytest.mark.parametrize("name", KERNELS)
def test_lengths_of_a_matrix_are_those_that_are_allocated(name: str) -> None:
    kernel, subject = kernel_of(name), of(name)
    recipe = kernel.recipe
    for rows, group in ((96, 96), (256, 96), (352, 32), (352, 64)):
        layout = PanelLayout(recipe.bits, rows, 70, group, recipe.scales, recipe.convention, recipe.panel)
        stream = ActivationStream(recipe, layout)
        if not stream.whole:
            continue
        sizes = {"groups": layout.groups, "turns": stream.iterations.tolist(), "segments": len(stream.segments)}
        sizes["ends"] = [int(each.ends) for each in stream.segments]
        call = Call(sizes, {"units of groups": sum(layout.group_units(group) for group in range(layout.groups))})
        assert valued(subject, "w", call) == layout.panel_elements
        assert valued(subject, "x", call) == recipe.rows * stream.starts[-1]


@pytest.mark.parametrize("name", sorted(set(PARTS) - {"gptq-v1"})[::4])
def test_lengths_of_a_stored_matrix_are_those_that_are_allocated(name: str) -> None:
    parts = PARTS[name](some_stored(name))
    layout = layout_of(parts, PANEL)
    recipe = default_recipe(parts.structure, TABLES["avx2"], "rows", PANEL)
    subject = Subject(Program(8, ()), arrays.of_stored(StoredKernel(recipe, TABLES["avx2"])))
    call = Call({"groups": len(layout.units), "turns": layout.units})
    assert valued(subject, "w", call) == layout.group_starts[-1]
    assert valued(subject, "x", call) == recipe.rows * StoredActivations(recipe, layout, parts).starts[-1]


def test_a_tile_of_results_is_as_long_as_in_c_plus_plus() -> None:
    text = (files("lowbit_cppyy") / "cpp/linear.h").read_text()
    found = dict(re.findall(r"constexpr std::int64_t (max_rows|max_panel) = (\d+);", text))
    assert found == {"max_rows": str(arrays.MOST_ROWS), "max_panel": str(arrays.MOST_PANEL)}


def test_examples_of_docstrings() -> None:
    failed, tried = doctest.testmod(accesses)
    assert failed == 0 and tried > 0
