"""Types of 16 bits: what a declaration means that does not name them, and kernels that round between their steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit.arrays import Array
from lowbit.backend import Backend, Capabilities, Declaration, load
from lowbit.contract.rounding import Arithmetic, Intermediate, any_order
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.numbers.floats import FLOATS
from lowbit.profiles import PROFILES, Profile
from lowbit_conformance.suite.clauses import test_types as clauses
from lowbit_conformance.suite.marking import MARKS, Settings

TYPES = ("float16", "bfloat16")


@dataclass
class Eager(Backend):
    """Norms, gates and experts as layers of PyTorch compute them: every step rounds to the type of the inputs."""

    intermediate: Intermediate
    name: str = "eager"

    def capabilities(self) -> Capabilities:
        arithmetic = Arithmetic("direct", "float32", any_order, intermediate=self.intermediate)
        operations = ("blocks.rms_norm", "blocks.swiglu", "routing.expert", "routing.sparse")
        return Capabilities(dict.fromkeys(operations, Declaration({"inputs": TYPES}, arithmetic)))

    def _blocks_rms_norm(self, x: Array, gain: Array, epsilon: float) -> Array:
        wide = x.astype(np.float32)
        normal = (wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + np.float32(epsilon))).astype(x.dtype)
        result: Array = (gain.astype(np.float32) * normal.astype(np.float32)).astype(x.dtype)
        return result

    def _blocks_swiglu(self, gate: Array, up: Array) -> Array:
        wide = gate.astype(np.float32)
        with np.errstate(over="ignore"):
            inner = (wide / (1 + np.exp(-wide))).astype(gate.dtype)
        result: Array = (inner.astype(np.float32) * up.astype(np.float32)).astype(gate.dtype)
        return result

    def _routing_expert(self, x: Array, gate: Array, up: Array, down: Array) -> Array:
        wide, kind = x.astype(np.float32), x.dtype
        a, b = ((wide @ matrix.astype(np.float32)).astype(kind) for matrix in (gate, up))
        inner: Array = self._blocks_swiglu(a, b)
        result: Array = (inner.astype(np.float32) @ down.astype(np.float32)).astype(kind)
        return result

    def _routing_sparse(self, x: Array, *experts: Array) -> Array:
        *matrices, chosen, weights = experts
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            tokens, place = np.nonzero(chosen == e)
            answers = self._routing_expert(x[tokens], *(matrix[e] for matrix in matrices)).astype(np.float32)
            terms = (weights[tokens, place, None].astype(np.float32) * answers).astype(x.dtype)
            y[tokens] = (y[tokens].astype(np.float32) + terms.astype(np.float32)).astype(x.dtype)
        return y


CHECKED = (
    "blocks.rms_norm/C3",
    "blocks.rms_norm/C1",
    "blocks.swiglu/C2",
    "routing.expert/C1",
    "routing.expert/C2",
    "routing.sparse/C1",
    "routing.sparse/C2",
)
CASES = [
    (mark, case)
    for mark in MARKS
    if mark.clause in CHECKED and mark.test.__module__ == clauses.__name__
    for case in mark.generator(mark.clause, Settings(range(1)))
]


def failed(backend: Any) -> int:
    """How many of the cases a backend fails."""
    count = 0
    for mark, case in CASES:
        try:
            mark.run(backend, case)
        except AssertionError:
            count += 1
    return count


def test_rounding_between_the_steps_is_declared() -> None:
    """An eager kernel is right if it says what it is, and wrong if it claims float32 between its steps."""
    assert failed(Eager("inputs")) == 0
    assert failed(Eager("float32")) >= 12


def test_who_names_no_type_means_float32() -> None:
    """A declaration, a call and a profile that do not name the type of their inputs."""
    assert Declaration().lacks({"inputs": "bfloat16"}) == "inputs bfloat16"
    assert Declaration().lacks({"inputs": "float32"}) == Declaration().lacks({}) == ""
    assert Declaration({"inputs": TYPES}).lacks({}) == "inputs float32"
    old = Profile("lowbit-1.1/none", "", ("blocks.swiglu/C2",), {})
    assert old.selects("blocks.swiglu/C2", {}) and old.selects("blocks.swiglu/C2", {"inputs": "float32"})
    assert not old.selects("blocks.swiglu/C2", {"inputs": "float16"})
    new = Profile("lowbit-1.1/none", "", ("blocks.swiglu/C2",), {"inputs": ("float16",)})
    assert new.selects("blocks.swiglu/C2", {"inputs": "float16"}) and not new.selects("blocks.swiglu/C2", {})
    assert not any("inputs" in each.parameters for each in PROFILES.values())


def test_a_type_that_is_not_declared_is_refused() -> None:
    """By a backend that names none, before its hook is called; the arrays of a call agree."""
    ones = {name: np.ones((2, 4), FLOATS[name].dtype) for name in ("float32", *TYPES)}
    backend = Eager("inputs")
    with pytest.raises(NotDeclaredError, match="float32"):
        backend.run("blocks.swiglu", ones["float32"], ones["float32"])
    with pytest.raises(ArgumentError, match="dtype of up"):
        backend.run("blocks.swiglu", ones["float16"], ones["bfloat16"])
    for name in TYPES:
        given = load("reference").run("blocks.swiglu", ones[name], ones[name])
        assert given.dtype == ones[name].dtype


def swiglu(gate: Array, up: Array) -> Array:
    """A kernel of bfloat16 as a plain function."""
    wide = gate.astype(np.float32)
    with np.errstate(over="ignore"):
        result: Array = (wide / (1 + np.exp(-wide)) * up.astype(np.float32)).astype(gate.dtype)
    return result


def test_a_kernel_of_one_narrow_type_is_certified() -> None:
    """It meets no case of float32, and wrong arguments are made of its own type."""
    found = lowbit.certify(swiglu, "blocks.swiglu", inputs="bfloat16")
    assert (found.verdict, found.failed) == ("passed", 0), found.report["failures"]
    assert found.passed >= 25
