"""Checks of special contents (`lowbit_conformance.suite.contents`): each array of an operation has each of them once.

An exact operation gives the reference's result, and any other stays within its bound. A call that the reference
refuses for its contents, such as a row without any score, has no case.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention import rope
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit_conformance.bounds import BOUNDS
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_on_lattice, share_used
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.clauses.test_experts import lattice_experts
from lowbit_conformance.suite.compare import assert_exact, refuses
from lowbit_conformance.suite.contents import CONTENTS, EXTREMES, filled
from lowbit_conformance.suite.marking import Record, Settings, checks, grid
from lowbit_conformance.suite.routing_cases import RoutingCase

TIER = "exhaustive"


@dataclass(frozen=True)
class ContentsCase(Case):
    """A call in which one array has special contents; the variant names the array and the contents."""

    size: int

    def parameters(self) -> dict[str, object]:
        return dict(OPERATIONS[self.operation].parameters(*values_of(self)))


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.normal(size=shape).astype(np.float32)


# **Typical calls**: for each operation the arrays that may hold any numbers, and the arguments made from them.

Arrays = dict[str, F32]
Arguments = tuple[Any, ...]
SIZES = (8, 33)


def plain(rng: np.random.Generator, arrays: Arrays) -> Arguments:
    return tuple(arrays.values())


@dataclass(frozen=True)
class Call:
    """One operation.

    Attributes:
        arrays: the arrays that may hold any numbers, at one size.
        arguments: of the operation, from these arrays; by default the arrays in their order.
    """

    arrays: Callable[[np.random.Generator, int], Arrays]
    arguments: Callable[[np.random.Generator, Arrays], Arguments] = plain


def heads_of(rng: np.random.Generator, size: int) -> Arrays:
    return {"queries": normal(rng, 3, 4, 8), "keys": normal(rng, 2, size, 8), "values": normal(rng, 2, size, 8)}


CALLS: Mapping[str, Call] = {
    "attention.softmax/C2": Call(lambda rng, n: {"scores": 3 * normal(rng, 3, n)}),
    "attention.attend/C3": Call(heads_of, lambda rng, arrays: (*arrays.values(), None)),
    "attention.attend_shaped/C3": Call(
        lambda rng, n: {**heads_of(rng, n), "sinks": normal(rng, 4)},
        lambda rng, arrays: (
            *(arrays[name] for name in ("queries", "keys", "values")),
            None,
            *((0.5, None), (0.5, 2.0), (None, 30.0))[int(rng.integers(3))],
            arrays["sinks"],
        ),
    ),
    "blocks.rms_norm/C3": Call(
        lambda rng, n: {"x": normal(rng, 3, n), "gain": normal(rng, n)},
        lambda rng, arrays: (*arrays.values(), (1e-5, 0.5, 1e-12)[int(rng.integers(3))]),
    ),
    "blocks.swiglu/C2": Call(lambda rng, n: {"gate": 3 * normal(rng, 3, n), "up": normal(rng, 3, n)}),
    "blocks.geglu/C2": Call(lambda rng, n: {"gate": 3 * normal(rng, 3, n), "up": normal(rng, 3, n)}),
    "blocks.clamped_swiglu/C2": Call(
        lambda rng, n: {"gate": 3 * normal(rng, 3, n), "up": 3 * normal(rng, 3, n)},
        lambda rng, arrays: (*arrays.values(), (7.0, 1.0, 2.0**20)[int(rng.integers(3))]),
    ),
    "blocks.soft_cap/C2": Call(
        lambda rng, n: {"x": 30 * normal(rng, 3, n)},
        lambda rng, arrays: (*arrays.values(), (30.0, 1.0, 2.0**20)[int(rng.integers(3))]),
    ),
    "rope.rotate/C2": Call(
        lambda rng, n: {"x": normal(rng, n, 2, 6)},
        lambda rng, arrays: (arrays["x"], rope.rotation(rope.half_split(6), 10000.0, 5, len(arrays["x"]))),
    ),
    "routing.gate/C1": Call(lambda rng, n: {"x": normal(rng, 3, n), "router": normal(rng, n, 6)}),
    "routing.weights/C1": Call(
        lambda rng, n: {"scores": 3 * normal(rng, 5, n)},
        lambda rng, arrays: (arrays["scores"], np.resize(np.array([[3, 0], [7, 6]], np.int64), (5, 2)), "after"),
    ),
    "routing.expert/C2": Call(
        lambda rng, n: {
            "x": normal(rng, 3, n),
            "gate": normal(rng, n, 7),
            "up": normal(rng, n, 7),
            "down": normal(rng, 7, n),
        },
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
            *(arrays[name] for name in ("x", "gate", "up", "down")),
            np.argsort(rng.random((5, 4)), axis=1)[:, :2].astype(np.int64) % (2 if rng.random() < 0.5 else 4),
            arrays["weights"],
        ),
    ),
    "routing.top_k/C1": Call(
        lambda rng, n: {"scores": normal(rng, 5, n)},
        lambda rng, arrays: (arrays["scores"], 3),
    ),
    "ksort.permutation/C2": Call(
        lambda rng, n: {"sizes": normal(rng, 2 * n)},
        lambda rng, arrays: (arrays["sizes"].astype(np.float64),),
    ),
    "pooling.pool/C1": Call(
        lambda rng, n: {"weights": normal(rng, n, 24)},
        lambda rng, arrays: (arrays["weights"], 6, 2, "mean"),
    ),
    "pooling.pool/C2": Call(
        lambda rng, n: {"weights": normal(rng, n, 24)},
        lambda rng, arrays: (arrays["weights"], 6, 2, "first"),
    ),
    "gptq.hessian/C2": Call(lambda rng, n: {"x": normal(rng, n, 6)}),
    "gptq.targets/C2": Call(
        lambda rng, n: {"weights": normal(rng, n, 5), "above": normal(rng, n, n), "values": normal(rng, n, 5)},
        lambda rng, arrays: (
            arrays["weights"],
            np.triu(arrays["above"], 1)
            + np.diag(np.abs(arrays["above"].diagonal()) + (np.abs(arrays["above"]).max() or np.float32(1))),
            arrays["values"],
        ),
    ),
}


LINEAR = (
    dict.fromkeys(
        ("pooling.pool/C1:weights", "pooling.pool/C2:weights", "routing.top_k/C1:scores", "ksort.permutation/C2:sizes"),
        tuple(EXTREMES),
    )
    | dict.fromkeys(
        ("blocks.soft_cap/C2:x", "blocks.clamped_swiglu/C2:gate", "blocks.clamped_swiglu/C2:up"), tuple(EXTREMES)
    )
    | dict.fromkeys(("gptq.targets/C2:weights", "gptq.targets/C2:values", "rope.rotate/C2:x"), ("vast",))
)
"""The arrays that may also hold extreme values, with the extremes allowed in each."""
SAME = "as-"
"""Prefix for the name of another array that holds the same numbers."""


def values_of(case: ContentsCase) -> Arguments:
    """The arguments; the array that the variant names has the contents that it names."""
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


@checks(CALLS, contents_cases)
def test_special_contents(backend: Remote, case: ContentsCase, record_property: Record) -> None:
    """The result is the reference's or within the bound; calls that the reference refuses are refused."""
    reference, arguments = OPERATIONS[case.operation].reference, values_of(case)
    try:
        given = backend.run(case.operation, *arguments)
    except ArgumentError:
        with refuses():
            reference(*arguments)
        return
    if case.operation not in BOUNDS:
        assert_exact("the result", given, reference(*arguments))
        return
    record_property("share", share_used(backend, case, given, *arguments))


# **Routes.**


ROUTES: Mapping[str, Callable[[int], int]] = {
    "all-to-the-first": lambda token: 0,
    "all-to-the-last": lambda token: 4,
    "in-turn": lambda token: token,
    "half-and-half": lambda token: 3 * (token % 2),
}
"""The first expert of each token."""


ROUTED = [(tokens, 9, 5, k, 6) for tokens, k in ((9, 1), (9, 2), (1, 5), (40, 1))]


@checks("routing.sparse/C1", grid(RoutingCase, TIER, ROUTES, *ROUTED))
def test_routes(backend: Remote, case: RoutingCase) -> None:
    """All tokens go to one expert, to two, or to all in turn: the sum of exact experts is equal."""
    rng = case.generator()
    first = np.array([ROUTES[case.variant](token) for token in range(case.tokens)])
    chosen = (first[:, np.newaxis] + np.arange(case.k)).astype(np.int64) % case.experts
    factors = rng.choice((0.0, 0.25, 0.5, 1), chosen.shape).astype(np.float32)
    assert_on_lattice(backend, case, *lattice_experts(case), chosen, factors)
