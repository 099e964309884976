"""Replay: the numbers of a refutation are wrong for what was refuted, and right for what is right, without a solver."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mutants import Change, forgotten, mutants, shifted, too_far, wrong_scale

from lowbit.errors import ArgumentError
from lowbit.kernels.layouts import ColumnPanels
from lowbit.kernels.program import Advance, Program, Step
from lowbit.moe.offload import Arrangement, Request, Trace
from lowbit.numbers import floats
from lowbit.quantization import packing
from lowbit.tensor_formats.stored import FORMATS
from lowbit_cppyy import backend
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen import elementwise
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.layout import interleaving
from lowbit_cppyy.layout.interleaving import Field
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.runtime import decode_operations
from lowbit_cppyy.step.phases import places_of
from lowbit_cppyy.stored import formats as stored
from lowbit_prove import (
    arrays,
    casts,
    catalogue,
    formats,
    memory,
    offload,
    places,
    products,
    roundings,
    steps,
)
from lowbit_prove.demonstration import Demonstration, read
from lowbit_prove.prepared_setting import PreparedSetting, smallest
from lowbit_prove.replay import compiled, on_this_machine, runs
from lowbit_prove.theorem import Outcome, Refutation, Theorem

FLOATS = "gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2"
INTEGERS = "gemv_bfp16_u4_s16z_dot4_1x1c1t1_p64a0_avx2"


def named(name: str) -> Theorem:
    """A theorem of the catalogue."""
    (found,) = catalogue.chosen([name])
    return found


def refuted(outcome: Outcome) -> Refutation:
    assert isinstance(outcome, Refutation), outcome
    return outcome


@pytest.mark.parametrize(
    ("name", "change"),
    [(FLOATS, shifted), (INTEGERS, forgotten), (FLOATS, forgotten), (FLOATS, too_far), (FLOATS, wrong_scale)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_products(name: str, change: Change) -> None:
    kernel = kernel_of(name)
    theorem = products.of_kernel(kernel, next(mutants(kernel.program, change)))
    numbers = refuted(theorem.decide()).numbers
    wrong = theorem.run(numbers)
    assert wrong is not None and wrong.numbers["given"] != wrong.numbers["wanted"]
    assert products.of_kernel(kernel).run(numbers) is None


def further(step: Step) -> Step | None:
    return replace(step, step=step.step + 1) if isinstance(step, Advance) and step.step > 0 else None


def test_memory() -> None:
    kernel = kernel_of(FLOATS)
    theorem = memory.of_kernel(kernel, next(mutants(kernel.program, further)))
    found = refuted(theorem.decide())
    assert "leaves its memory" in refuted(theorem.run(found.numbers) or found).reason
    assert memory.of_kernel(kernel).run(found.numbers) is None
    with pytest.raises(ArgumentError, match="groups"):
        theorem.run({})
    with pytest.raises(ArgumentError, match="turns"):
        theorem.run({**found.numbers, "turns[0]": "two"})


def test_memory_of_one_of_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pass = arrays.of_pass

    def short(name: str) -> arrays.Arrays:
        found = of_pass(name)
        return found if name != "squares" else replace(found, lengths={**found.lengths, "w": 0 * arrays.GROUPS})

    theorem = named("memory/passes_avx2")
    monkeypatch.setattr(arrays, "of_pass", short)
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None and found.numbers["program"] == list(elementwise.PASSES).index(
        "squares"
    )
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None
    with pytest.raises(ArgumentError, match="program"):
        theorem.run({**found.numbers, "program": 1000})


def test_roundings() -> None:
    kernel = kernel_of(FLOATS)
    theorem = roundings.of_kernel(kernel, declared=lambda rows, size: backend.roundings(rows, size) - 5)
    numbers = refuted(theorem.decide()).numbers
    assert theorem.run(numbers) is not None and roundings.of_kernel(kernel).run(numbers) is None


@pytest.mark.parametrize(("kind", "formula"), (("sums", "sum_roundings"), ("heads", "head_roundings")))
def test_roundings_of_rows(kind: str, formula: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundings, "HEAD_DIMS", (16, 64))
    theorem, own = named(f"roundings/{kind}_avx2"), getattr(decode_operations, formula)
    monkeypatch.setattr(decode_operations, formula, lambda length, size: own(length, size) - length // 8)
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.setattr(decode_operations, formula, own)
    assert theorem.run(found.numbers) is None


def test_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = casts.source().replace("lowbit::narrow_half", "[](float x) { return lowbit::narrow_half(x * 1.001f); }")
    found = refuted(casts.decide("float16", 4096, text))
    again = partial(casts.decide, "float16", text=text)
    assert casts.ran(again, found.numbers) is not None and named("casts/float16").run(found.numbers) is None
    own = floats.round_to
    monkeypatch.setattr(floats, "round_to", lambda numbers, kind, overflow: own(numbers, kind, overflow, "up"))
    found, theorem = refuted(casts.fp8("float8_e5m2", 4096)), named("casts/float8_e5m2")
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(bits: int, code: int) -> tuple[Field, ...]:
        return interleaving.fields(bits, {1: 2, 2: 1}.get(code, code))

    theorem = named("places/interleaving-u3")
    monkeypatch.setattr(places, "fields", exchanged)
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None and named("places/packing-u3").run(found.numbers) is None


def test_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    theorem, own = named("places/packing-u4"), places._unchecked

    def backwards(operation: Any) -> Any:
        unchecked = own(operation)
        return (lambda *given: unchecked(*given)[::-1]) if operation is packing.unpack else unchecked

    monkeypatch.setattr(places, "_unchecked", backwards)
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None


def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    theorem, own = named("layouts/column_panels"), ColumnPanels.index
    monkeypatch.setattr(ColumnPanels, "index", lambda self, row, column: own(self, row, 0))
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None


def test_prepared_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    theorem, own = named("layouts/prepared-u4"), PanelLayout.index_scale
    monkeypatch.setattr(PanelLayout, "index_scale", lambda self, group, panel: own(self, group, panel) - 1)
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None
    with pytest.raises(ArgumentError, match="sizes of a prepared matrix"):
        theorem.run({})


@pytest.mark.parametrize("name", ("q4_0/qs", "q4_k/scales", "awq-gemm/qweight"))
def test_formats(name: str) -> None:
    name, _, field = name.partition("/")
    table, at = FORMATS[name], formats.smallest(name)[0]
    row = next(each for each in table.fields if each.name == field)

    def decode(fields: Any, at: Any) -> Any:
        return table.decode({**fields, field: fields[field] >> 1 << 1}, at)

    wrong = replace(table, decode=decode)
    found = refuted(formats.decide(wrong, row, at))
    assert formats.ran(wrong, row, at, found.numbers) is not None
    assert formats.ran(table, row, at, found.numbers) is None


def test_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    theorem, own = named("storage/q5_k/qh"), stored.PARTS["q5_k"]

    def wrong(seen: Any) -> Any:
        return own(replace(seen, by_name={**seen.by_name, "qh": seen.by_name["qh"] >> 1}))

    monkeypatch.setattr(stored, "PARTS", {**stored.PARTS, "q5_k": wrong})
    found = refuted(theorem.decide())
    assert theorem.run(found.numbers) is not None
    monkeypatch.undo()
    assert theorem.run(found.numbers) is None


def test_steps() -> None:
    def crowded(program: Any, phases: Any, config: Any) -> Any:
        own = places_of(program, phases, config)
        return replace(own, of={**own.of, "key": own.of["query"]})

    found = refuted(steps.decide("experts", 501, crowded))
    assert steps.ran("experts", found.numbers, crowded) is not None
    assert named("steps/experts").run(found.numbers) is None


def test_offload() -> None:
    def build(arrangement: Arrangement, state: offload.State) -> Callable[[Request], Trace]:
        step = offload.of_engine(arrangement, state)
        return lambda request: tuple(each for each in step(request) if each.kind != "evict")

    found = refuted(offload.decide(build, "swap", 2, 997))
    assert offload.ran(build, "swap", 2, found.numbers) is not None
    assert named("offload/engine-swap-2").run(found.numbers) is None
    with pytest.raises(ArgumentError, match="number"):
        named("offload/engine-swap-2").run({"number": 10**9})


# Compiled kernels.


class Mutant(Kernel):
    """A kernel whose first code is shifted by a bit too few."""

    @property
    def name(self) -> str:
        return f"{super().name}_mutant"

    @cached_property
    def program(self) -> Program:
        own = Kernel(self.recipe, self.table).program
        return next(mutants(own, forgotten if self.recipe.integer else shifted))


@pytest.mark.parametrize("name", (FLOATS, INTEGERS))
def test_a_kernel_that_is_refuted_is_wrong_when_it_is_compiled(name: str) -> None:
    kernel = kernel_of(name)
    wrong = Mutant(kernel.recipe, kernel.table)
    numbers = refuted(products.of_kernel(kernel, wrong.program).decide()).numbers
    for each in (kernel, wrong):
        assert on_this_machine(each, numbers) == "compiled and called on this processor, it gives the same"
    setting = PreparedSetting(kernel.recipe, kernel.program, smallest(kernel.recipe))
    shown = Demonstration(setting, *read(numbers))
    right, given = compiled(kernel, shown), compiled(wrong, shown)
    place = divmod(int(numbers["place"]), kernel.recipe.panel)
    assert right[place] == numbers["wanted"] and given[place] == numbers["given"] != numbers["wanted"]


def test_a_kernel_of_another_processor_is_not_compiled() -> None:
    kernel = kernel_of(FLOATS.replace("avx2", "neon"))
    assert on_this_machine(kernel, {}) == "not compiled: this processor lacks asimd"


# Files.


def written(folder: Path, content: object) -> Path:
    path = folder / "refuted.json"
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_refutations_is_run(tmp_path: Path) -> None:
    """Those of all names or of one; proofs in it are left out."""
    proof = {"theorem": "places/packing-u2", "outcome": "proof", "steps": 1}
    listed = [
        {"theorem": f"places/{name}", "outcome": "refutation", "numbers": {f"w_{n}_0": n for n in range(3)}}
        for name in ("packing-u3", "interleaving-u3")
    ]
    path = written(tmp_path, {"theorems": [proof, *listed]})
    assert [each.theorem.name for each in runs([], path)] == ["packing-u3", "interleaving-u3"]
    assert [each.document["wrong"] for each in runs(["places/packing-u3"], path)] == [None]


@pytest.mark.parametrize("content", ([1], {"w_0": [1]}, {"numbers": 1}), ids=("list", "number", "numbers"))
def test_other_files_are_refused(content: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        runs([FLOATS], written(tmp_path, content))


def test_numbers_without_a_theorem_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="names"):
        runs([], written(tmp_path, {"w_0": 1}))
    with pytest.raises(ArgumentError, match="names"):
        runs(["places"], written(tmp_path, {"w_0": 1}))
