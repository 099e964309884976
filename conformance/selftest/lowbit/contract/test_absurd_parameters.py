"""Parameters that nobody means are refused by the operations' own checks, before memory is taken."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
from tracing import traced

from lowbit.attention import attention, ksort, kvcache, rope
from lowbit.backend.wire import decode
from lowbit.errors import ArgumentError
from lowbit.moe import offload, offload_engine
from lowbit.quantization import hqq_solver
from lowbit.quantization.bfp import bfp12

LAYOUT = rope.half_split(4)
TURN = rope.rotation(LAYOUT, 10000.0, 0, 2)
X = np.zeros((2, 1, 4), np.float32)
ORDER = np.arange(4)
PLACED = offload.Arrangement(2, 4, 2)


def other(**fields: object) -> rope.Layout:
    """A layout of which somebody has changed a field."""
    return dataclasses.replace(LAYOUT, **fields)  # type: ignore[arg-type]  # which is the point


def turned(**fields: object) -> rope.Rotation:
    """The same of a rotation."""
    return dataclasses.replace(TURN, **fields)  # type: ignore[arg-type]  # fields of any type


def requested(*fields: object) -> offload.Request:
    """A request of anything."""
    return offload.Request(*fields)  # type: ignore[arg-type]  # fields of any type


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "layers": (lambda: offload.Arrangement(2**40, 4, 2), "layers is 1099511627776; allowed: an integer from 1 to"),
    "experts": (lambda: offload.Arrangement(2**9, 2**10, 2), "experts is 1024; allowed: an integer from 1 to 512"),
    "buffers": (lambda: offload.Arrangement(2, 4, 2, 2**30), "buffers is 1073741824; allowed: an integer from 1 to"),
    "needed": (lambda: offload_engine.engine(PLACED).step(requested(0, 3)), "needed is an int; allowed: a tuple"),
    "guesses": (lambda: offload.trace(PLACED, [requested(0, (1,), "23")]), "guesses is a str; allowed: a tuple"),
    "requests": (lambda: offload.trace(PLACED, requested(0, (1,))), "requests is a Request"),  # type: ignore[arg-type]  # wrong on purpose
    "kv_heads": (lambda: kvcache.cache(2**30, 2, bfp12(2), bfp12(2)), "kv_heads is 1073741824; allowed: an integer"),
    "head_dim": (lambda: kvcache.cache(2**10, 2**11, bfp12(2), bfp12(2)), "head_dim is 2048; allowed: .* 1 to 1024"),
    "cache": (lambda: attention.KeyValueCache(2**20, 2), "head_dim is 2; allowed: an integer from 1 to 1"),
    "count": (lambda: rope.rotation(LAYOUT, 10000.0, 0, 2**27), "count is 134217728; allowed: .* 1 to 67108864"),
    "hadamard": (lambda: ksort.hadamard(2**20), "head_dim is 1048576; allowed: an integer from 1 to 4096"),
    "p": (lambda: hqq_solver.check_norm("1", 1.0), "p is a str; allowed: a number"),  # type: ignore[arg-type]  # wrong on purpose
    "beta": (lambda: hqq_solver.check_norm(1.0, (1,)), "beta is a tuple; allowed: a number"),  # type: ignore[arg-type]  # wrong on purpose
    "layout": (
        lambda: rope.rotate_heads(X, turned(layout=3)),
        "layout is an int; allowed: a lowbit.attention.rope.Layout",
    ),
    "partner": (lambda: rope.rotate_heads(X, turned(layout=other(partner=ORDER + 1))), "partner .* is from 1 to 4"),
    "negative": (lambda: ksort.permuted_layout(other(partner=ORDER - 1), ORDER), "partner of layout is from -1 to 2"),
    "size": (lambda: ksort.permuted_layout(other(partner=True), ORDER), "partner of layout is a bool"),
    "pair": (lambda: ksort.permuted_layout(other(pair=ORDER[:2]), ORDER), "shape of pair of layout"),
    "sign": (lambda: ksort.permuted_layout(other(sign=np.float64(1)), ORDER), "sign of layout is a float64"),
    "cos": (lambda: rope.rotate_heads(X, turned(cos="1")), "cos of turn is a str; allowed: a numpy array"),
    "sin": (lambda: rope.rotate_heads(X, turned(sin=TURN.sin[:, :2])), "shape of sin of turn"),
    "rank": (lambda: rope.rotate_heads(X, turned(cos=TURN.cos[0])), "shape of cos of turn"),
}


@pytest.mark.parametrize("name", CALLS)
def test_absurd_parameters_are_refused_before_memory_is_taken(name: str) -> None:
    """An ArgumentError that names the parameter, and less than a megabyte."""
    call, text = CALLS[name]
    with traced():
        with pytest.raises(ArgumentError, match=text):
            call()
        assert tracemalloc.get_traced_memory()[1] < 2**20


def test_a_window_beyond_every_integer_sees_all() -> None:
    """The window is compared with the tokens before numpy meets it."""
    queries, keys = np.ones((2, 1, 2)), np.arange(4.0).reshape(1, 2, 2)
    everything = attention.attend(queries, keys, keys)
    np.testing.assert_array_equal(attention.attend(queries, keys, keys, window=2**64 - 1), everything)


@pytest.mark.parametrize("shape", [[2**62, 4], [2**40], [0, 2**39], [-1], [2**32, 2], [1] * 9, [True], [1.0]], ids=str)
def test_a_carrier_is_not_asked_for_an_absurd_array(shape: list[object]) -> None:
    """The shape in a reply, of a host or a library, is refused before anybody multiplies its sizes."""

    def get(*asked: object) -> NoReturn:
        raise AssertionError("asked")

    with pytest.raises(ArgumentError, match="shape of value is a list"):
        decode({"array": "<f4", "shape": shape, "at": 0}, get)
