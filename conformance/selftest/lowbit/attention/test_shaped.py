"""Attention with shaped scores against loops over single numbers, and what a factor, a cap and sinks are for."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from lowbit.arrays import F64
from lowbit.attention.attention import attend
from lowbit.attention.shaped import attend_shaped
from lowbit.errors import ArgumentError

SHAPES = ((1, 5, 4, 2, 8), (5, 5, 2, 1, 4), (3, 9, 6, 3, 2), (1, 1, 1, 1, 2))
"""T of S tokens, H heads on G, d_h channels."""


def inputs(shape: tuple[int, int, int, int, int], size: float = 1.0) -> tuple[F64, F64, F64, F64]:
    tokens, length, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(sum(shape))
    queries = size * rng.normal(size=(tokens, heads, head_dim))
    keys, values = rng.normal(size=(2, kv_heads, length, head_dim))
    return queries, keys, values, rng.normal(size=heads)


def by_loops(
    arrays: tuple[F64, F64, F64, F64], window: int | None, scale: float, cap: float | None, *, sunk: bool
) -> F64:
    """One score, one exponential and one sum at a time."""
    queries, keys, values, sinks = arrays
    (tokens, heads, head_dim), (kv_heads, length, _) = queries.shape, keys.shape
    result = np.zeros(queries.shape)
    for t in range(tokens):
        last = length - tokens + t
        first = 0 if window is None else max(0, last + 1 - window)
        for h in range(heads):
            j = h // (heads // kv_heads)
            powers = []
            for u in range(first, last + 1):
                score = scale * math.fsum(queries[t, h, c] * keys[j, u, c] for c in range(head_dim))
                powers.append(math.exp(score if cap is None else cap * math.tanh(score / cap)))
            total = math.fsum(powers) + (math.exp(sinks[h]) if sunk else 0.0)
            for power, u in zip(powers, range(first, last + 1), strict=True):
                result[t, h] += power / total * values[j, u]
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", (None, 1, 3))
@pytest.mark.parametrize("cap", (None, 0.7))
@pytest.mark.parametrize("sunk", (False, True))
def test_against_loops(
    shape: tuple[int, int, int, int, int], window: int | None, cap: float | None, *, sunk: bool
) -> None:
    """For every choice of window, cap and sinks, with a factor of its own."""
    arrays = inputs(shape)
    found = attend_shaped(*arrays[:3], window, 0.3, cap, arrays[3] if sunk else None)
    np.testing.assert_allclose(found, by_loops(arrays, window, 0.3, cap, sunk=sunk), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_choices_it_is_plain_attention(shape: tuple[int, int, int, int, int]) -> None:
    """To the bit; a cap that no score reaches and a sink far below them change little."""
    queries, keys, values, sinks = inputs(shape)
    plain = attend(queries, keys, values)
    np.testing.assert_array_equal(attend_shaped(queries, keys, values), plain)
    far = attend_shaped(queries, keys, values, cap=1e6, sinks=np.full_like(sinks, -1e3))
    np.testing.assert_allclose(far, plain, rtol=0, atol=1e-9)


def test_a_cap_bounds_what_a_score_can_do() -> None:
    """With a cap of c no token is more than e^2c times as likely as another, however large the products are."""
    queries, keys, values, _ = inputs((1, 6, 2, 1, 4), size=1e6)
    for head in range(2):
        only = np.zeros_like(values)
        least = math.exp(-2 * 1.5) / 6
        for token in range(6):
            only[...] = 0
            only[0, token] = 1
            assert attend_shaped(queries, keys, only, cap=1.5)[0, head, 0] >= least


def test_a_sink_takes_what_tokens_leave() -> None:
    """A sink far above all scores leaves nothing, without an overflow; one far below leaves all."""
    queries, keys, _, sinks = inputs((2, 4, 2, 1, 4))
    ones = np.ones_like(keys)
    np.testing.assert_array_equal(attend_shaped(queries, keys, ones, sinks=np.full_like(sinks, 1e300)), 0.0)
    np.testing.assert_allclose(attend_shaped(queries, keys, ones, sinks=np.full_like(sinks, -1e300)), 1.0, rtol=1e-15)
    taken = 1 - attend_shaped(queries, keys, ones, sinks=sinks)[..., 0]
    assert ((taken > 0) & (taken < 1)).all()


REFUSED: list[tuple[str, Callable[[F64, F64, F64, F64], object]]] = [
    ("window", lambda q, k, v, s: attend_shaped(q, k, v, 0)),
    ("scale", lambda q, k, v, s: attend_shaped(q, k, v, scale=0.0)),
    ("scale", lambda q, k, v, s: attend_shaped(q, k, v, scale=math.nan)),
    ("cap", lambda q, k, v, s: attend_shaped(q, k, v, cap=math.inf)),
    ("cap", lambda q, k, v, s: attend_shaped(q, k, v, cap=-1.0)),
    ("sinks", lambda q, k, v, s: attend_shaped(q, k, v, sinks=np.zeros(3))),
    ("query heads", lambda q, k, v, s: attend_shaped(q[:, :3].copy(), k, v)),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[f"{n}-{name}" for n, (name, _) in enumerate(REFUSED)])
def test_what_is_refused(name: str, call: Callable[[F64, F64, F64, F64], object]) -> None:
    """A number out of range or sinks for other heads: the argument is named."""
    with pytest.raises(ArgumentError, match=name):
        call(*inputs((2, 6, 4, 2, 4)))
