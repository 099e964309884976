"""The theorem of products of stored matrices: it holds for their kernels, and planted mistakes are refuted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mutants import CHANGES, Change, mutants, shifted
from stored_runs import laid_out

from lowbit.kernels.program import Address, Instruction, Program, Step
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.layout.interleaving import Field
from lowbit_cppyy.layout.interleaving import fields as places
from lowbit_cppyy.layout.panels import row_elements
from lowbit_cppyy.stored import layout as stored_layout
from lowbit_cppyy.stored.formats import GGUF, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.recipe import Method, StoredRecipe, separate_recipe
from lowbit_prove import products, stored_setting
from lowbit_prove.demonstration import Demonstration, bits_on, read
from lowbit_prove.products import setting_of
from lowbit_prove.replay import compiled, on_this_machine
from lowbit_prove.theorem import Outcome, Proof, Refutation

PANEL = 16


def kernel(name: str, method: Method, table: str = "avx2", bits: int = 4, **tile: int) -> StoredKernel:
    """A small kernel of a format: one register of columns, in the second half of a panel."""
    chosen: Any = {"registers": 1, "panel": PANEL, "ahead": 0} | tile
    return StoredKernel(StoredRecipe(structure_of(name, bits), method, **chosen), TABLES[table])


TABULAR = ("iq4_nl", "iq4_xs", "gguf-mxfp4", "q4_0", "q4_k", "gptq-v2", "q5_0", "q5_1", "q5_k", "q3_k")
SMALL = (
    *(kernel(name, method) for name in ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k") for method in ("fold", "dot4")),
    *(kernel(name, "subnormal") for name in ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k", "q3_k", "gptq-v2")),
    *(kernel(name, method) for name in ("q2_k", "q3_k", "q5_k", "q5_1") for method in ("shift", "dot4")),
    *(kernel(name, method) for name in ("iq4_nl", "iq4_xs", "gguf-mxfp4") for method in ("high", "bytes", "dot4")),
    *(kernel(name, "table", "avx512") for name in TABULAR),
    *(kernel("gptq-v2", "fold", bits=bits) for bits in (2, 3, 4, 8)),
    *(kernel("gptq-v1-bf16", "shift"), kernel("awq-gemm", "dot4"), kernel("gptq-v1", "dot4", bits=8)),
    *(kernel("q4_k", "fold", "plain", rows=2), kernel("q6_k", "dot4", "plain", rows=2)),
    *(kernel("q4_0", "shift", chains=8), kernel("awq-gemm", "fold", chains=2, ahead=1024)),
    *(kernel(name, "float", rows=2) for name in ("float16", "bfloat16", "float32")),
    *(StoredKernel(separate_recipe(structure_of(name, 4), PANEL), TABLES["avx2"]) for name in ("q4_0", "iq4_xs")),
)


def names(kernels: tuple[StoredKernel, ...]) -> dict[str, Any]:
    return {"argvalues": kernels, "ids": [each.name for each in kernels]}


@pytest.mark.parametrize("own", SMALL, ids=names(SMALL)["ids"])
def test_a_kernel_is_proved(own: StoredKernel) -> None:
    found = products.of_kernel(own).decide()
    assert isinstance(found, Proof) and found.steps > 64, found


def refuted(outcome: Outcome) -> dict[str, Any]:
    """The numbers of a refutation that is wrong when it is run."""
    assert isinstance(outcome, Refutation), outcome
    leaves = outcome.reason.startswith("the program leaves its memory")
    assert leaves or outcome.numbers["given"] != outcome.numbers["wanted"], outcome
    return dict(outcome.numbers)


MUTATED = (kernel("q4_k", "fold"), kernel("q6_k", "dot4"), kernel("awq-gemm", "fold"), kernel("iq4_nl", "high"))


@pytest.mark.parametrize("own", **names(MUTATED))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_mistake_is_refuted(own: StoredKernel, change: Change) -> None:
    """At two places of each kind where the program can have it."""
    found = list(mutants(own.program, change))
    for program in {found[0], found[len(found) // 2]} if found else ():
        refuted(products.of_kernel(own, program).decide())


def off_by_four(step: Step) -> Step | None:
    """A code is taken from the nibble beside its own."""
    if isinstance(step, Instruction) and step.word == "srli":
        word, by = step.arguments
        assert isinstance(by, int)
        return replace(step, arguments=(word, by ^ 4))
    return None


def added_zero(step: Step) -> Step | None:
    """A zero takes the place of its product with the scale."""
    if isinstance(step, Instruction) and step.word == "multiply" and step.target.startswith("o_"):
        return replace(step, arguments=(step.arguments[0], step.arguments[0]))
    return None


def in_16_bits(step: Step) -> Step | None:
    """Products of bytes are added in 16 bits, with saturation."""
    if isinstance(step, Instruction) and step.word == "dot4":
        return replace(step, word="dot4_pairs", arguments=step.arguments[1:])
    return None


def of_another_row(step: Step) -> Step | None:
    """The high bits of a code are those of another one."""
    if isinstance(step, Instruction) and step.word == "and_or":
        low, mask, to = step.arguments
        return replace(step, arguments=(to, mask, to) if low != to else (low, mask, low))
    return None


def of_unmasked_planes(step: Step) -> Step | None:
    """The high bits of codes are added to all other bits of a word, not put in their place."""
    if isinstance(step, Instruction) and step.word == "select":
        return replace(step, word="or", arguments=step.arguments[1:])
    return None


def of_one_register(step: Step) -> Step | None:
    """The highest bit of an index is ignored."""
    if isinstance(step, Instruction) and step.word == "permute_pair":
        return replace(step, arguments=(*step.arguments[:2], step.arguments[0]))
    return None


def of_the_other_half(step: Step) -> Step | None:
    """A bfloat16 is taken from the other half of its word."""
    if isinstance(step, Instruction) and step.word == "slli":
        return replace(step, word="and", arguments=(step.arguments[0], "m_ffff0000"))
    return None


def of_the_next_row(step: Step) -> Step | None:
    """A float16 is taken from the row behind its own."""
    if isinstance(step, Instruction) and step.word == "load_half":
        (address,) = step.arguments
        assert isinstance(address, Address)
        return replace(step, arguments=(replace(address, offset=address.offset + row_elements(PANEL, "float16")),))
    return None


@pytest.mark.parametrize(
    ("own", "change"),
    (
        (kernel("q4_0", "shift"), off_by_four),
        (kernel("gguf-mxfp4", "dot4"), off_by_four),
        (kernel("gptq-v2", "fold"), added_zero),
        (kernel("q8_0", "dot4"), in_16_bits),
        (kernel("q6_k", "dot4"), of_another_row),
        (kernel("q5_0", "dot4"), of_another_row),
        (kernel("q5_0", "table", "avx512"), of_unmasked_planes),
        (kernel("q3_k", "table", "avx512"), of_unmasked_planes),
        (kernel("q5_0", "table", "avx512"), of_one_register),
        (kernel("bfloat16", "float"), of_the_other_half),
        (kernel("float16", "float"), of_the_next_row),
    ),
    ids=lambda each: each.name if isinstance(each, StoredKernel) else each.__name__,
)
def test_usual_mistakes_of_stored_kernels_are_refuted(own: StoredKernel, change: Change) -> None:
    refuted(products.of_kernel(own, next(mutants(own.program, change))).decide())


def exchanged(bits: int, code: int) -> tuple[Field, ...]:
    """The nibbles of a byte, exchanged."""
    return places(bits, code ^ 4)


def test_a_layout_with_exchanged_nibbles_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel("q4_0", "fold", panel=32)
    monkeypatch.setattr(stored_layout, "fields", exchanged)
    refuted(products.of_kernel(own).decide())
    for each in (stored_setting.unknown_parts, stored_setting.unknown_stream):
        each.cache_clear()


# The setting.


def test_formats_of_one_structure_have_one_center_and_one_table() -> None:
    for blocks in GGUF.values():
        center, table = stored_setting.constants(blocks.structure)
        assert center == blocks.center and (table is None) == (not blocks.table)


@pytest.mark.parametrize("own", **names(SMALL[::3]))
def test_activations_are_laid_out_as_by_the_docstrings(own: StoredKernel) -> None:
    """On mantissas or floats that differ, in a second layout that the tests of kernels use."""
    small: Any = setting_of(own)
    setting = replace(small, layout=replace(small.layout, lengths=(64, 32)))  # whole units, as the other layout has
    rows = [np.arange(1, setting.rows + 1) % 100 + r for r in range(own.recipe.rows)]
    leaves = {f"x_{r}_{k}": float(number) for r, row in enumerate(rows) for k, number in enumerate(row)}
    ones = np.ones(setting.rows, np.float32)
    kind = np.int8 if own.recipe.integer else np.float32
    given = [(row.astype(kind), ones) for row in rows]
    (wanted, sizes), *more = laid_out(own.recipe, setting.parts, setting.layout, given)
    assert not more and sizes == {"groups": 2, "turns": setting.layout.units}
    elements = list(setting.x_elements())
    leaves |= {name: 1.0 for each in elements for name in each.leaves if name.startswith("e_")}
    found = [bits_on(each, {}, leaves) for each in elements]
    assert found == wanted.astype(np.float32).view(np.uint32).tolist()


# Numbers.


class Mutant(StoredKernel):
    """A kernel whose first code is shifted by a bit too few."""

    @property
    def name(self) -> str:
        return f"{super().name}_mutant"

    @cached_property
    def program(self) -> Program:
        return next(mutants(StoredKernel(self.recipe, self.table).program, shifted))


@pytest.mark.parametrize("method", ("fold", "dot4"))
def test_a_kernel_that_is_refuted_is_wrong_when_it_is_compiled(method: Method) -> None:
    own = kernel("q4_0", method, panel=64)
    wrong = Mutant(own.recipe, own.table)
    theorem = products.of_kernel(own, wrong.program)
    numbers = refuted(theorem.decide())
    assert theorem.run(numbers) is not None and products.of_kernel(own).run(numbers) is None
    for each in (own, wrong):
        assert on_this_machine(each, numbers) == "compiled and called on this processor, it gives the same"
    shown = Demonstration(setting_of(own), *read(numbers))
    place = divmod(numbers["place"], own.recipe.panel)
    assert compiled(own, shown)[place] == numbers["wanted"] != compiled(wrong, shown)[place] == numbers["given"]
