"""The theorems of places, layouts, formats and storage: they hold, and planted mistakes are refuted with numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from lowbit.kernels.layouts import ColumnPanels
from lowbit.quantization import packing
from lowbit.tensor_formats import gguf_k
from lowbit.tensor_formats.stored import FORMATS
from lowbit_cppyy.layout import interleaving
from lowbit_cppyy.layout.interleaving import Field
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.stored import formats as backend
from lowbit_prove import formats, layouts, places, storage
from lowbit_prove.symbols import Symbols
from lowbit_prove.theorem import Proof, Refutation, Theorem, Undecided

QUICK = [
    *("formats/q4_0/qs", "formats/q5_1/qh", "formats/q3_k/scales", "formats/q4_k/scales", "formats/q6_k/ql"),
    *(
        "formats/iq4_nl/qs",
        "formats/gptq-v1-wrapped-u3/qzeros",
        "formats/hqq-axis0-u4/W_q",
        "formats/ct-pack-u5/weight_packed",
    ),
    *("storage/q4_0/qs", "storage/q3_k/hmask", "storage/q5_k/scales", "storage/iq4_xs/scales_l"),
    *("storage/gptq-v2-u3/qweight", "storage/awq-gemm/qweight"),
]
ALL = [each for chapter in (places, layouts, formats, storage) for each in chapter.theorems()]


@pytest.mark.parametrize("theorem", [e for e in ALL if e.id in QUICK or e.kind == "places"], ids=lambda each: each.id)
def test_a_theorem_is_proved(theorem: Theorem) -> None:
    assert isinstance(theorem.decide(), Proof)


def test_the_quick_ones_exist() -> None:
    assert set(QUICK) <= {each.id for each in ALL}


def test_every_field_of_integers_has_a_theorem_or_a_reason() -> None:
    """A format that is added gets its theorems, or its reason is written down."""
    for name, table in FORMATS.items():
        for row in table.fields:
            if row.numpy_dtype.kind in "ui" and row.role in formats.ROLES and row.below is None:
                reason = formats.LEFT_OUT.get(name) or formats.LEFT_OUT.get(f"{name}/{row.name}")
                ids = [each.id for each in ALL if each.id.startswith("formats/") and each.id.endswith(f"/{row.name}")]
                proved = any(each.split("/")[1].startswith(name) for each in ids)
                assert proved != (reason is not None), (name, row.name)


# Places.


def test_a_code_at_other_bits_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes exchanged, or a plane that begins with another bit."""

    def exchanged(bits: int, code: int) -> tuple[Field, ...]:
        return interleaving.fields(bits, {1: 2, 2: 1}.get(code, code))

    monkeypatch.setattr(places, "fields", exchanged)
    for bits in (2, 3, 4, 8):
        assert isinstance(places.interleaved(bits), Refutation)
    monkeypatch.setattr(
        places, "fields", lambda bits, code: tuple(replace(f, first=0) for f in interleaving.fields(bits, code))
    )
    assert isinstance(places.interleaved(4), Proof) and isinstance(places.interleaved(3), Refutation)


def test_a_wrong_packing_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes from the highest bits down: the inverse does not hold, and the places are others."""
    original = places._unchecked

    def backwards(words: Any, bits: int) -> Any:
        return original(packing.unpack)(words, bits)[::-1]

    monkeypatch.setattr(places, "_unchecked", lambda each: backwards if each is packing.unpack else original(each))
    for bits in (2, 3, 4, 8):
        assert isinstance(places.packed(bits), Refutation)


# Layouts.


@dataclass(frozen=True)
class Repeated(ColumnPanels):
    """The second panel lies where the first does."""

    @property
    def starts(self) -> dict[tuple[int, int], int]:
        return dict.fromkeys(super().starts, 0)


@dataclass(frozen=True)
class Shifted(ColumnPanels):
    """Every word lies one place behind its own."""

    def index(self, row: int, column: int) -> int:
        return super().index(row, column) + 1


@dataclass(frozen=True)
class Backwards(ColumnPanels):
    """Columns from right to left: one to one, and not what `apply` does."""

    def index(self, row: int, column: int) -> int:
        return super().index(row, self.columns - 1 - column)


@pytest.mark.parametrize("layout", (Repeated, Shifted, Backwards))
def test_a_wrong_layout_is_refuted(layout: type[ColumnPanels]) -> None:
    assert layouts.one_to_one(ColumnPanels(2, 6, 2)) is None
    assert layouts.one_to_one(layout(2, 6, 2)) is not None


class Narrow(PanelLayout):
    """Scales begin a row of words too early."""

    def index_scale(self, group: int, panel: int) -> int:
        return super().index_scale(group, panel) - self.panel


class Mixed(PanelLayout):
    """All rows of a unit lie at the bits of its first."""

    def index(self, row: int, column: int) -> list[tuple[int, Field]]:
        return super().index(row // self.unit_codes * self.unit_codes, column)


@pytest.mark.parametrize("layout", (Narrow, Mixed))
def test_prepared_matrices_that_share_bits_are_refuted(layout: type[PanelLayout]) -> None:
    assert layouts.disjoint(PanelLayout(4, 16, 70, 8, "float16", "zero_point", 64)) is None
    assert layouts.disjoint(layout(4, 16, 70, 8, "float16", "zero_point", 64)) is not None


@pytest.mark.parametrize("theorem", [each for each in ALL if each.kind == "layouts"], ids=lambda each: each.id)
def test_layouts_are_proved(theorem: Theorem) -> None:
    assert isinstance(theorem.decide(), Proof)


# Formats: a decoder that loses a bit, or reads one twice.

Change = Callable[[Symbols], Symbols]


def lost(field: Symbols) -> Symbols:
    """The lowest bit of every integer is not read."""
    found: Symbols = field >> field.dtype.type(1) << field.dtype.type(1)
    return found


def twice(field: Symbols) -> Symbols:
    """The second integer is read as the first again."""
    found = field.copy()
    found[..., 1] = found[..., 0]
    return found


def mixed(field: Symbols) -> Symbols:
    """Each integer is read together with its neighbour."""
    found = field.copy()
    found[..., 1:] = field[..., 1:] & field[..., :-1]
    return found


@pytest.mark.parametrize("name", ("q4_0/qs", "q3_k/hmask", "q4_k/scales", "awq-gemm/qweight", "gptq-v2/qweight"))
@pytest.mark.parametrize("change", (lost, twice, mixed), ids=lambda change: change.__name__)
def test_a_decoder_that_loses_bits_is_refuted(name: str, change: Change) -> None:
    name, _, field = name.partition("/")
    table, at = FORMATS[name], formats.smallest(name)[0]
    row = next(each for each in table.fields if each.name == field)

    def decode(fields: Any, at: Any) -> Any:
        changed: dict[str, Any] = {**fields, field: change(fields[field])}
        return table.decode(changed, at)

    outcome = formats.decide(replace(table, decode=decode), row, at)
    assert isinstance(outcome, Refutation) and outcome.numbers


# Storage: the backend, or the specification, exchanges what the other does not.


def exchanged(field: Any) -> Any:
    """The first two integers are exchanged."""
    found = field.copy()
    found[..., 0], found[..., 1] = field[..., 1].copy(), field[..., 0].copy()
    return found


@pytest.mark.parametrize(
    "name", ("q4_0/qs", "q3_k/scales", "q5_k/qh", "iq4_xs/qs", "awq-gemv/qweight", "gptq-v1/qweight")
)
@pytest.mark.parametrize("change", (exchanged, lost), ids=lambda change: change.__name__)
def test_a_backend_that_reads_otherwise_is_refuted(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, field = name.partition("/")
    row = next(each for each in FORMATS[name].fields if each.name == field)
    read = backend.PARTS[name]

    def wrong(stored: Any) -> Any:
        return read(replace(stored, by_name={**stored.by_name, field: change(stored.by_name[field])}))

    monkeypatch.setattr(backend, "PARTS", {**backend.PARTS, name: wrong})
    outcome = storage.decide(name, row, formats.smallest(name)[0])
    assert isinstance(outcome, Refutation) and outcome.numbers


def test_a_specification_that_reads_otherwise_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The theorem takes no side: Q4_K's minima read as its scales."""
    read = gguf_k.scales_and_minima
    monkeypatch.setattr(gguf_k, "scales_and_minima", lambda packed: read(packed)[::-1])
    row = next(each for each in FORMATS["q4_k"].fields if each.name == "scales")
    assert isinstance(storage.decide("q4_k", row, formats.smallest("q4_k")[0]), Refutation)


def test_what_cannot_be_decided_is_no_proof() -> None:
    """A decoder that rounds."""
    table, at = FORMATS["q4_0"], formats.smallest("q4_0")[0]

    def decode(fields: Any, at: Any) -> Any:
        found = table.decode(fields, at)
        return replace(found, products=np.sqrt(found.products))

    assert isinstance(formats.decide(replace(table, decode=decode), table.fields[1], at), Undecided)
