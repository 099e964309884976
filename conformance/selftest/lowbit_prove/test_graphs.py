"""The theorems of graphs: on a device values are read as they were written, and other buffers are refuted."""

import pytest

from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model.config import LlamaConfig
from lowbit.model.program import Line
from lowbit.model.step import block
from lowbit.model.weights import NORMS
from lowbit_cuda.model import loading
from lowbit_cuda.model.block import BUFFERS, DeviceBlock
from lowbit_prove import graphs
from lowbit_prove.graphs import decide, followed, ran, touched
from lowbit_prove.steps import WrongPlaceError
from lowbit_prove.theorem import Proof, Refutation

KINDS = ("dense-silu", "experts")


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_read_as_they_were_written(kind: str) -> None:
    found = decide(kind)
    assert isinstance(found, Proof) and found.steps > 100


@pytest.mark.parametrize(
    ("value", "buffer"),
    (
        *(("query", "keys"), ("key", "queries"), ("value", "keys"), ("key_rotated", "values"), ("mixed", "queries")),
        *(("attention", "mixed"), ("attention", "x"), ("normed", "out"), ("query_rotated", "mixed")),
        *(("middle", "out"), ("feed_forward", "x"), ("query", "x")),
    ),
)
def test_a_value_in_another_buffer_is_refuted(value: str, buffer: str) -> None:
    wrong = {**BUFFERS, value: buffer}
    found = decide("dense-silu", wrong)
    assert isinstance(found, Refutation), found
    assert ran("dense-silu", found.numbers, wrong) is not None and ran("dense-silu", found.numbers) is None


def test_a_value_without_a_buffer_is_refuted() -> None:
    found = decide("experts", {name: buffer for name, buffer in BUFFERS.items() if name != "mixed"})
    assert isinstance(found, Refutation) and "mixed has no buffer" in found.reason


def test_a_buffer_that_is_too_narrow_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the buffer of values fit; queries do not, where there are more of them."""
    monkeypatch.setattr(graphs, "SIZES", ((64, 128, 4, 2, 16),))
    wrong = {**BUFFERS, "query": "keys", "query_rotated": "keys", "key": "queries", "key_rotated": "queries"}
    found = decide("dense-silu", wrong)
    assert isinstance(found, Refutation) and "which has 32" in found.reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_a_norm_in_front_of_its_feed_forward_part_is_refuted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input would be read from a buffer that no launch has written. The backend refuses it."""
    with pytest.raises(NotDeclaredError, match="layers without a feed_forward_norm"):
        loading.check_norms(["attention_norm"])
    monkeypatch.setattr(loading, "check_norms", lambda vectors: None)
    found = decide(kind)
    assert isinstance(found, Refutation) and "reads normed, in which middle does not lie" in found.reason


def test_a_program_in_another_order_is_refuted() -> None:
    config = LlamaConfig(1, 64, 128, 4, 2, 16, 100, 32, 10000.0, 1e-5)
    own = block(config, 0, NORMS)
    assert followed(own, config, BUFFERS) > 10
    early = next(n for n, line in enumerate(own) if line.kind == "add")
    wrong = (*own[: early + 1], Line("add", "again", ("middle", "attention")), *own[early + 1 :])
    with pytest.raises(WrongPlaceError, match="in which middle does not lie"):
        followed(wrong, config, {**BUFFERS, "again": "x"})


def test_every_kind_of_line_of_the_backend_is_followed() -> None:
    """A launch that is added to the backend needs its buffers here."""
    made = {name[1:] for name in vars(DeviceBlock) if name.startswith("_") and not name.startswith("__")}
    kinds = {line.kind for kind in KINDS for _, program in graphs.programs(kind) for line in program}
    helpers = {"read", "named", "sized"}
    assert made - helpers == kinds - {"swiglu", "experts"}


def test_numbers_of_no_program_are_refused() -> None:
    with pytest.raises(ArgumentError, match="number"):
        ran("experts", {"number": 10**6})


def test_an_addition_is_in_place() -> None:
    assert touched(Line("add", "middle", ("x", "attention")), BUFFERS) == (["x", "out"], "x")
