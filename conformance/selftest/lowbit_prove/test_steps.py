"""The theorems of steps: every program that is looked at keeps its values, and wrong places are refuted."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lowbit.model.config import LlamaConfig
from lowbit.model.program import Line, Program
from lowbit.model.step import block
from lowbit_cppyy.step import phases
from lowbit_cppyy.step.phases import ROOM, STREAM, Phase, Places, places_of
from lowbit_prove import steps
from lowbit_prove.steps import WrongPlaceError, followed
from lowbit_prove.theorem import Proof, Refutation

SOME = 193
"""One program in so many."""


@pytest.mark.parametrize("kind", steps.KINDS)
def test_values_are_read_as_they_were_written(kind: str) -> None:
    found = steps.decide(kind, SOME)
    assert isinstance(found, Proof) and found.steps > 1000


def test_programs_differ_in_all_that_a_block_may_have() -> None:
    found = {line.parameter for _, program in steps.programs("dense-silu", 31) for line in program}
    assert {*steps.OPTIONAL} <= found
    kinds = {line.kind for kind in steps.KINDS for _, program in steps.programs(kind, SOME) for line in program}
    assert {"rotate", "experts", "swiglu", "geglu", "bias", "clamped_swiglu", "attend_shaped", "scale"} <= kinds


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    (
        *(("dense-silu", "up", "gate"), ("dense-silu", "key", "query"), ("dense-silu", "mixed", "query")),
        *(
            ("dense-gelu", "middle_normed", "gate"),
            ("dense-gelu", "normed", "value"),
            ("experts", ROOM, "middle_normed"),
        ),
        *(("experts", "feed_forward", ROOM), ("dense-silu", "feed_forward", "gate")),
    ),
)
def test_a_value_in_the_place_of_another_is_refuted(kind: str, value: str, other: str) -> None:
    def places(program: Program, found: Sequence[Phase], config: LlamaConfig) -> Places:
        own = places_of(program, found, config)
        return replace(own, of={**own.of, value: own.of.get(other, 0)}) if {value, other} <= own.of.keys() else own

    assert isinstance(steps.decide(kind, SOME, places), Refutation)


@pytest.mark.parametrize("value", ("normed", "query", "gate"))
def test_a_value_over_the_residual_stream_is_refuted(value: str) -> None:
    def places(program: Program, found: Sequence[Phase], config: LlamaConfig) -> Places:
        own = places_of(program, found, config)
        return replace(own, of={name: STREAM if name == value else at for name, at in own.of.items()})

    assert isinstance(steps.decide("dense-silu", SOME, places), Refutation)


def test_a_buffer_that_is_a_column_too_narrow_is_refuted() -> None:
    def places(program: Program, found: Sequence[Phase], config: LlamaConfig) -> Places:
        own = places_of(program, found, config)
        return replace(own, columns=own.columns - 1)

    found = steps.decide("dense-silu", SOME, places)
    assert isinstance(found, Refutation) and "outside" in found.reason


def test_places_that_are_given_twice_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value gets the columns of the first that is still alive."""
    monkeypatch.setattr(phases, "_free", lambda taken, size: min((first for first, _ in taken.values()), default=0))
    assert isinstance(steps.decide("dense-silu", SOME, places_of), Refutation)


def test_an_addition_to_what_the_product_reads_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the residual stream itself is added to it: other threads still read what is written, unless the sum
    is a phase of its own."""
    config = LlamaConfig(1, 64, 64, 4, 4, 16, 100, 32, 10000.0, 1e-5)
    program = (*block(config, 0, []),)
    last = replace(program[-1], inputs=("middle", "again"))
    program = (*program[:-1], Line("product", "again", ("middle",), "feed_forward.up"), last)
    assert followed(program, config, places_of, one_token=False)
    monkeypatch.setattr(phases, "_stream", lambda program: set[str]())
    with pytest.raises(WrongPlaceError, match="at the same time"):
        followed(program, config, places_of, one_token=False)
