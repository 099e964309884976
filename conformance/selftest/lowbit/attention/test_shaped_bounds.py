"""The bound of attention with shaped scores, against honest ways to compute it in float32 and against rough ones."""

from collections.abc import Callable

import numpy as np
import pytest

from lowbit.arrays import F32, F64
from lowbit.attention.attention import attend_to
from lowbit.attention.bounds import attend_bound, attend_shaped_bound
from lowbit.attention.shaped import attend_shaped_to
from lowbit.contract.rounding import Arithmetic
from lowbit.linear.elementary import soft_cap
from lowbit.linear.propagation import REFERENCE, declared, soft_cap_error

FLOAT32 = Arithmetic("direct", "float32")
SINKS = np.array([0.5, -np.inf, 3.0, 20.0], np.float32)
SHAPES: list[tuple[float | None, float | None, F32 | None]] = [
    (None, None, None),
    (0.25, None, SINKS),
    (2.0, 50.0, None),
    (1.0, 0.01, SINKS),
    (1.0, 2.0**30, SINKS),
]


def inputs(seed: int = 0) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(2, 4, 16)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 19, 16)).astype(np.float32)
    return queries, keys, values


def in_float32(
    arrays: tuple[F32, F32, F32],
    scale: float | None,
    cap: float | None,
    sinks: F32 | None,
    tanh: Callable[[F32], F32] = np.tanh,
) -> F64:
    """Head by head, every number a float32."""
    queries, keys, values = arrays
    result, factor = np.zeros(queries.shape, np.float32), np.float32(scale or 1 / np.sqrt(queries.shape[2]))
    for t in range(2):
        for h in range(4):
            scores = (keys[h // 2, : 18 + t] @ queries[t, h]) * factor
            if cap is not None:
                scores = np.float32(cap) * tanh(scores / np.float32(cap))
            sink = np.float32(-np.inf) if sinks is None else sinks[h]
            top = np.maximum(scores.max(), sink)
            powers = np.exp(scores - top)
            result[t, h] = (powers / (powers.sum() + np.exp(sink - top))) @ values[h // 2, : 18 + t]
    return result.astype(np.float64)


def fraction(result: F64, shape: tuple[float | None, float | None, F32 | None]) -> float:
    """The largest fraction of the bound that a result uses."""
    exact = attend_shaped_to(*inputs(), None, *shape)
    bound = attend_shaped_bound(*inputs(), None, *shape, FLOAT32, exact)
    return float(np.max(np.abs(result - exact) / bound.limit))


@pytest.mark.parametrize("shape", SHAPES)
def test_honest_attention_passes(shape: tuple[float | None, float | None, F32 | None]) -> None:
    """With small and large caps, and sinks from −∞ to above all scores."""
    assert 0 < fraction(in_float32(inputs(), *shape), shape) < 0.5


@pytest.mark.parametrize(
    "tanh",
    [
        lambda z: np.tanh(z).astype(np.float16).astype(np.float32),
        lambda z: np.float32(1) - np.float32(2) / (np.exp(np.float32(2) * z) + np.float32(1)),
        lambda z: np.clip(z, -1, 1),
    ],
    ids=["of-11-bits", "cancels", "clips"],
)
def test_rough_caps_are_refused(tanh: Callable[[F32], F32]) -> None:
    """A tanh of 11 bits, one that cancels near 0, and a clip, each where it shows."""
    with np.errstate(over="ignore"):
        found = [fraction(in_float32(inputs(), *shape, tanh), shape) for shape in SHAPES[2:]]
    assert max(found) > 10


def test_without_a_shape_the_bound_is_that_of_plain_attention() -> None:
    """To the bit, and so is the result; one further token in the sum widens it where there are sinks."""
    exact = attend_to(*inputs())
    np.testing.assert_array_equal(attend_shaped_to(*inputs()), exact)
    plain = attend_bound(*inputs(), None, FLOAT32, exact)
    np.testing.assert_array_equal(
        attend_shaped_bound(*inputs(), None, None, None, None, FLOAT32, exact).limit, plain.limit
    )


@pytest.mark.parametrize("inner", [None, "bfloat16"])
def test_a_soft_cap_passes_errors_on(inner: str | None) -> None:
    """Whatever the error of the number within its limit, that of the capped one lies within its own; and the limit of a
    number far beyond the cap does not grow with its error."""
    rng = np.random.default_rng(4)
    a = np.concatenate([rng.normal(size=500) * size for size in (1e-3, 1.0, 30.0, 1e9)])
    error = np.abs(a) * 1e-3
    arithmetic = Arithmetic("direct", intermediate="inputs" if inner else "float32")
    limit = soft_cap_error(declared(arithmetic, inner or "float32"), a, error, 5.0)
    for sign in (-1, 1):
        moved = soft_cap(a + sign * error, 5.0)
        assert (np.abs(moved - soft_cap(a, 5.0)) <= limit).all()
    assert limit[np.abs(a) > 1e3].max() < (0.1 if inner else 1e-5)
    assert (soft_cap_error(REFERENCE, a, 0 * a, 5.0) < 1e-13).all()
