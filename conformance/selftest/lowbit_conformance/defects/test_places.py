"""Names for arrays that are read or written elsewhere, and for steps of a layer that are done otherwise."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.attention import attention
from lowbit.linear import linear
from lowbit.model import layers as blocks
from lowbit.moe import routing
from lowbit.operations import OPERATIONS
from lowbit.quantization import packing
from lowbit.quantization.affine import quantize
from lowbit_conformance.defects import activations, places, routes
from lowbit_conformance.defects.attention import replacing
from lowbit_conformance.defects.diagnosis import common_defects
from lowbit_conformance.defects.seen import Seen
from lowbit_conformance.suite.explaining import Asked

RNG = np.random.default_rng(11)


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


CODES = [(RNG.integers(0, 16, (8 * k, n), np.uint8), 4) for k, n in ((2, 3), (3, 5), (4, 9))]
PRODUCTS = [
    (drawn(k), quantize(drawn(k, n), bits=4, group_size=g)) for k, n, g in ((16, 1, 8), (24, 11, 8), (40, 7, 16))
]
SCORES = [(drawn(r, s),) for r, s in ((2, 7), (3, 12), (5, 9))]
HEADS = [(drawn(t, h, 4), drawn(2, s, 4), drawn(2, s, 4)) for t, h, s in ((2, 4, 6), (3, 2, 7), (4, 6, 9))]
GATES = [(drawn(t, m), drawn(t, m)) for t, m in ((1, 9), (3, 5), (2, 16))]
NORMS = [(*pair, 0.3) for pair in ((drawn(2, 8), drawn(8)), (drawn(3, 5), drawn(5)), (drawn(4, 12), drawn(12)))]
NAMED: dict[str, tuple[str, list[Any], Callable[..., Any]]] = {
    "codes-reversed-along-axis-0": ("packing.pack", CODES, lambda c, b: packing.pack(c[::-1].copy(), b)),
    "result-last-dropped-along-axis-1": (
        "packing.pack",
        CODES,
        lambda c, b: packing.pack(c, b) * (np.arange(c.shape[1]) < c.shape[1] - 1).astype(np.uint32),
    ),
    "x-reversed-along-axis-0": ("linear.qgemv", PRODUCTS, lambda x, m: linear.qgemv(x[::-1].copy(), m)),
    "result-never-negative": ("linear.qgemv", PRODUCTS, lambda x, m: np.maximum(linear.qgemv(x, m), 0)),
    "scores-negated": ("attention.softmax", SCORES, lambda s: attention.softmax_of(-s)),
    "sigmoid-for-softmax": ("attention.softmax", SCORES, lambda s: 1 / (1 + np.exp(-s.astype(np.float64)))),
    "keys-and-values-exchanged": ("attention.attend", HEADS, lambda q, k, v: attention.attend_to(q, v, k)),
    "scores-capped-at-5": (
        "attention.attend",
        HEADS,
        replacing(masked=lambda s, mask: np.where(mask, 5 * np.tanh(s / 5), -np.inf)),
    ),
    "tanh-for-silu": ("blocks.swiglu", GATES, lambda a, b: np.tanh(a.astype(np.float64)) * b),
    "epsilon-squared": ("blocks.rms_norm", NORMS, lambda x, g, e: blocks.rms_norm_of(x, g, e * e)),
}


def seen(operation: str, arguments: tuple[Any, ...], function: Callable[..., Any]) -> Seen:
    given = function(*arguments)
    given = given.astype(np.float32) if given.dtype == np.float64 else given
    return Seen.of(operation, Asked(operation, arguments, {}, given))


@pytest.mark.parametrize("name", NAMED)
def test_it_has_its_name(name: str) -> None:
    """Three calls of a mistake have its name, alone or beside another that gives the same."""
    operation, calls, function = NAMED[name]
    found = common_defects(operation, [seen(operation, call, function) for call in calls], [])
    assert name in {defect.name for defect in found}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_place_of_an_operation_has_one_name(operation: str) -> None:
    """No two members of the families have one name, and each says its cause in a sentence."""
    found = (*places.of_results(operation), *places.of_arguments(operation))
    assert found
    assert not [name for name, count in Counter(each.name for each in found).items() if count > 1]
    assert all(each.cause[0].isupper() and each.cause.endswith(".") for each in found)


def test_changes_keep_the_form_of_an_array() -> None:
    """Every change gives an array of the same shape and dtype, of each kind, however small."""
    for array in (np.arange(3, dtype=np.uint32), drawn(1, 1), drawn(5, 3), np.ones((2, 3, 4), np.int16)):
        for name, _, change in places.changes():
            changed = change(array)
            assert (changed.shape, changed.dtype) == (array.shape, array.dtype), name


def test_operations_of_steps_are_right_but_for_their_step() -> None:
    """With all steps as they are, operations that are made of steps give what the reference gives."""
    pairs = [
        *((replacing()(*call), attention.attend_to(*call)) for call in HEADS),
        *((replacing()(*call, 3), attention.attend_to(*call, 3)) for call in HEADS),
        *((activations.under(activations.right)(*call), blocks.rms_norm_of(*call)) for call in NORMS),
    ]
    x, router, chosen = drawn(3, 6), drawn(6, 4), np.array([[0, 2], [3, 1], [1, 2]])
    for scores in routing.SCORES:
        pairs.append((routes.from_logits(routes.product)(x, router, scores), routing.gate(x, router, scores)))
    whens: tuple[tuple[routing.Softmax, Any], ...] = (("after", x), ("before", np.abs(x)))
    for when, each in whens:
        pairs.append((routes.weighed()(each, chosen, when), routing.weights(each, chosen, when)))
    for given, right in pairs:
        assert np.allclose(given, right, rtol=1e-6, atol=1e-7)
