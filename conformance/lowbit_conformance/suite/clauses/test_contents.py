"""Checks of special contents (`lowbit_conformance.suite.contents`): each array of an operation has each of them once.

An exact operation gives the reference's result, and any other stays within its bound. A call that the reference
refuses for its contents, such as a row without any score, has no case.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention import attention, ksort, pooling, rope
from lowbit.attention.bounds import attend_bound, softmax_bound
from lowbit.contract.rounding import Bound
from lowbit.errors import ArgumentError
from lowbit.model import layers as blocks
from lowbit.model.bounds import rms_norm_bound, swiglu_bound
from lowbit.moe import routing
from lowbit.moe.bounds import expert_bound, gate_bound, sparse_bound, weights_bound
from lowbit.quantization import gptq
from lowbit.quantization.gptq_bounds import hessian_bound, targets_bound
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import Record, arithmetic, limit_of
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_experts import lattice_experts
from lowbit_conformance.suite.compare import assert_array, assert_equal_values, assert_exact, assert_within, refuses
from lowbit_conformance.suite.contents import CONTENTS, EXTREMES, filled
from lowbit_conformance.suite.marking import Settings, checks
from lowbit_conformance.suite.routing_cases import RoutingCase

TIER = "exhaustive"


@dataclass(frozen=True)
class ContentsCase(Case):
    """A call one of whose arrays has special contents; the variant says which, and what."""

    size: int

    def parameters(self) -> dict[str, object]:
        return {}


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.normal(size=shape).astype(np.float32)


# **Calls as they occur**: for each operation the arrays that may hold anything, and the arguments made of them.

Arrays = dict[str, F32]
Arguments = tuple[Any, ...]
SIZES = (8, 33)


@dataclass(frozen=True)
class Call:
    """One operation.

    Attributes:
        arrays: those that may hold anything, at one size.
        arguments: of the operation, from these arrays.
        bound: what a result may differ by, from the declared arithmetic, the exact result and the arguments; None if
            the operation is exact.
        reference: the exact result.
    """

    arrays: Callable[[np.random.Generator, int], Arrays]
    arguments: Callable[[np.random.Generator, Arrays], Arguments]
    reference: Callable[..., Any]
    bound: Callable[..., Bound] | None = None


def plain(rng: np.random.Generator, arrays: Arrays) -> Arguments:
    return tuple(arrays.values())


def heads_of(rng: np.random.Generator, size: int) -> Arrays:
    return {"queries": normal(rng, 3, 4, 8), "keys": normal(rng, 2, size, 8), "values": normal(rng, 2, size, 8)}


def experts_of(rng: np.random.Generator, arrays: Arrays) -> Arguments:
    return arrays["x"], arrays["gate"], arrays["up"], arrays["down"]


CALLS: Mapping[str, Call] = {
    "attention.softmax/C2": Call(
        lambda rng, n: {"scores": 3 * normal(rng, 3, n)},
        plain,
        attention.softmax_of,
        lambda declared, exact, scores: softmax_bound(scores, declared, exact),
    ),
    "attention.attend/C3": Call(
        heads_of,
        lambda rng, arrays: (*arrays.values(), None),
        attention.attend_to,
        lambda declared, exact, q, k, v, window: attend_bound(q, k, v, declared, exact, window),
    ),
    "blocks.rms_norm/C3": Call(
        lambda rng, n: {"x": normal(rng, 3, n), "gain": normal(rng, n)},
        lambda rng, arrays: (*arrays.values(), (1e-5, 0.5, 1e-12)[int(rng.integers(3))]),
        blocks.rms_norm_of,
        lambda declared, exact, x, gain, epsilon: rms_norm_bound(x, gain, epsilon, declared, exact),
    ),
    "blocks.swiglu/C2": Call(
        lambda rng, n: {"gate": 3 * normal(rng, 3, n), "up": normal(rng, 3, n)},
        plain,
        blocks.swiglu_of,
        lambda declared, exact, gate, up: swiglu_bound(gate, up, declared, exact),
    ),
    "rope.rotate/C2": Call(
        lambda rng, n: {"x": normal(rng, n, 2, 6)},
        lambda rng, arrays: (arrays["x"], rope.rotation(rope.half_split(6), 10000.0, 5, len(arrays["x"]))),
        rope.rotate_heads,
        lambda declared, exact, x, turn: rope.rotate_bound(x, turn, declared, exact),
    ),
    "routing.gate/C1": Call(
        lambda rng, n: {"x": normal(rng, 3, n), "router": normal(rng, n, 6)},
        plain,
        routing.gate,
        lambda declared, exact, x, router: gate_bound(x, router, "logits", declared, exact),
    ),
    "routing.weights/C1": Call(
        lambda rng, n: {"scores": 3 * normal(rng, 5, n)},
        lambda rng, arrays: (arrays["scores"], np.resize(np.array([[3, 0], [7, 6]], np.int64), (5, 2)), "after"),
        routing.weights,
        lambda declared, exact, scores, chosen, when: weights_bound(scores, chosen, when, declared, exact),
    ),
    "routing.expert/C2": Call(
        lambda rng, n: {
            "x": normal(rng, 3, n),
            "gate": normal(rng, n, 7),
            "up": normal(rng, n, 7),
            "down": normal(rng, 7, n),
        },
        plain,
        routing.expert,
        lambda declared, exact, x, gate, up, down: expert_bound(x, gate, up, down, declared, exact),
    ),
    "routing.sparse/C2": Call(
        lambda rng, n: {
            "x": normal(rng, 5, n),
            "gate": normal(rng, 4, n, 7),
            "up": normal(rng, 4, n, 7),
            "down": normal(rng, 4, 7, n),
            "weights": np.abs(normal(rng, 5, 2)),
        },
        lambda rng, arrays: (
            *experts_of(rng, arrays),
            np.argsort(rng.random((5, 4)), axis=1)[:, :2].astype(np.int64) % (2 if rng.random() < 0.5 else 4),
            arrays["weights"],
        ),
        routing.sparse,
        lambda declared, exact, x, gate, up, down, chosen, weights: sparse_bound(
            x, gate, up, down, chosen, weights, declared, exact
        ),
    ),
    "routing.top_k/C1": Call(
        lambda rng, n: {"scores": normal(rng, 5, n)},
        lambda rng, arrays: (arrays["scores"], 3),
        routing.top_k,
    ),
    "ksort.permutation/C2": Call(
        lambda rng, n: {"sizes": normal(rng, 2 * n)},
        lambda rng, arrays: (arrays["sizes"].astype(np.float64),),
        ksort.permutation,
    ),
    "pooling.pool/C1": Call(
        lambda rng, n: {"weights": normal(rng, n, 24)},
        lambda rng, arrays: (arrays["weights"], 6, 2, "mean"),
        pooling.pool,
    ),
    "pooling.pool/C2": Call(
        lambda rng, n: {"weights": normal(rng, n, 24)},
        lambda rng, arrays: (arrays["weights"], 6, 2, "first"),
        pooling.pool,
    ),
    "gptq.hessian/C2": Call(
        lambda rng, n: {"x": normal(rng, n, 6)},
        plain,
        gptq.hessian,
        lambda declared, exact, x: hessian_bound(x, declared, exact),
    ),
    "gptq.targets/C2": Call(
        lambda rng, n: {"weights": normal(rng, n, 5), "above": normal(rng, n, n), "values": normal(rng, n, 5)},
        lambda rng, arrays: (
            arrays["weights"],
            np.triu(arrays["above"], 1)
            + np.diag(np.abs(arrays["above"].diagonal()) + (np.abs(arrays["above"]).max() or np.float32(1))),
            arrays["values"],
        ),
        gptq.targets,
        lambda declared, exact, weights, factor, values: targets_bound(weights, factor, values, declared, exact),
    ),
}


LINEAR = dict.fromkeys(
    ("pooling.pool/C1:weights", "pooling.pool/C2:weights", "routing.top_k/C1:scores", "ksort.permutation/C2:sizes"),
    tuple(EXTREMES),
) | dict.fromkeys(("gptq.targets/C2:weights", "gptq.targets/C2:values", "rope.rotate/C2:x"), ("vast",))
"""The arrays that may also hold extremes, with those that they may hold."""
SAME = "as-"
"""Before the name of another array, which holds the same numbers."""


def values_of(case: ContentsCase) -> Arguments:
    """The arguments, the array that the variant names with the contents that it names."""
    rng, call = case.generator(), CALLS[case.clause]
    arrays = call.arrays(rng, case.size)
    name, _, kind = case.variant.partition(":")
    arrays[name] = arrays[kind.removeprefix(SAME)] if kind.startswith(SAME) else filled(kind, arrays[name])
    return call.arguments(rng, arrays)


def contents_cases(clause: str, settings: Settings) -> Iterator[ContentsCase]:
    """Each contents in each array, at two sizes, and those of each other array of its shape."""
    for size in SIZES:
        arrays = CALLS[clause].arrays(np.random.default_rng(0), size)
        for name, array in arrays.items():
            same = [f"{SAME}{other}" for other, its in arrays.items() if other != name and its.shape == array.shape]
            for kind in (*CONTENTS, *same, *LINEAR.get(f"{clause}:{name}", ())):
                yield ContentsCase(clause, TIER, f"{name}:{kind}", size)


def assert_call(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """The reference's result, or within the bound; refused where the reference refuses it."""
    __tracebackhide__ = True
    call, arguments = CALLS[case.clause], values_of(case)
    try:
        given = backend.run(case.operation, *arguments)
    except ArgumentError:
        with refuses():
            call.reference(*arguments)
        return
    exact = call.reference(*arguments)
    if call.bound is None:
        assert_exact("the result", given, exact)
        return
    assert_array("the result", given, np.float32, exact.shape)
    limit = limit_of(partial(call.bound, arithmetic(backend, case), exact, *arguments))
    record_property("share", assert_within(given, exact, limit))


@checks("attention.softmax/C2", contents_cases)
def test_scores(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Scores with special contents."""
    assert_call(backend, case, record_property)


@checks("attention.attend/C3", contents_cases)
def test_heads(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Queries, keys or values with special contents."""
    assert_call(backend, case, record_property)


@checks("blocks.rms_norm/C3", contents_cases)
def test_norms(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Rows or a gain with special contents."""
    assert_call(backend, case, record_property)


@checks("blocks.swiglu/C2", contents_cases)
def test_gated_rows(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Gates or the rows beside them with special contents."""
    assert_call(backend, case, record_property)


@checks("rope.rotate/C2", contents_cases)
def test_turns(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Heads with special contents."""
    assert_call(backend, case, record_property)


@checks("routing.gate/C1", contents_cases)
def test_gates(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Tokens or a router with special contents."""
    assert_call(backend, case, record_property)


@checks("routing.weights/C1", contents_cases)
def test_weights(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Scores with special contents."""
    assert_call(backend, case, record_property)


@checks("routing.expert/C2", contents_cases)
def test_experts(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Tokens or the matrices of an expert with special contents."""
    assert_call(backend, case, record_property)


@checks("routing.sparse/C2", contents_cases)
def test_layers(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Tokens, experts or their weights with special contents."""
    assert_call(backend, case, record_property)


@checks("routing.top_k/C1", contents_cases)
def test_choices(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Scores with special contents."""
    assert_call(backend, case, record_property)


@checks("ksort.permutation/C2", contents_cases)
def test_orders(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Sizes with special contents."""
    assert_call(backend, case, record_property)


@checks("pooling.pool/C1", contents_cases)
def test_means(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Heads with special contents."""
    assert_call(backend, case, record_property)


@checks("pooling.pool/C2", contents_cases)
def test_firsts(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Heads with special contents."""
    assert_call(backend, case, record_property)


@checks("gptq.hessian/C2", contents_cases)
def test_hessians(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Inputs with special contents."""
    assert_call(backend, case, record_property)


@checks("gptq.targets/C2", contents_cases)
def test_targets(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """Weights, a factor or values with special contents."""
    assert_call(backend, case, record_property)


# **Routes.**


def routed(clause: str, settings: Settings) -> Iterator[RoutingCase]:
    for variant in ROUTES:
        for tokens, k in ((9, 1), (9, 2), (1, 5), (40, 1)):
            yield RoutingCase(clause, TIER, variant, tokens, 9, 5, k, 6)


ROUTES: Mapping[str, Callable[[int], int]] = {
    "all-to-the-first": lambda token: 0,
    "all-to-the-last": lambda token: 4,
    "in-turn": lambda token: token,
    "half-and-half": lambda token: 3 * (token % 2),
}
"""The first expert of each token."""


@checks("routing.sparse/C1", routed)
def test_routes(backend: Remote, case: RoutingCase) -> None:
    """Tokens that all go to one expert, to two, and to all in turn: the sum of exact experts is equal."""
    rng = case.generator()
    first = np.array([ROUTES[case.variant](token) for token in range(case.tokens)])
    chosen = (first[:, np.newaxis] + np.arange(case.k)).astype(np.int64) % case.experts
    arguments = *lattice_experts(case), chosen, rng.choice((0.0, 0.25, 0.5, 1), chosen.shape).astype(np.float32)
    assert_equal_values(backend.run(case.operation, *arguments), routing.sparse(*arguments))
