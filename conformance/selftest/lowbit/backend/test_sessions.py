"""Operations that remember: what a session checks, what the cases of stateful operations find, and a second driver.

The walks of the suite are drawn from a seed. Hypothesis draws requests without knowing what is likely, and looks for
the smallest run in which two engines differ; the numpy engine, which shares no line with the reference, must not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lowbit.backend import Backend
from lowbit.backend.reference import ReferenceBackend
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.moe.offload import MEMORIES, Arrangement, Memory, Request
from lowbit.moe.offload_engine import engine
from lowbit.quantization.bfp import bfp12, bfp16
from lowbit_conformance.suite.clauses import test_engine, test_kvcache
from lowbit_conformance.suite.marking import MARKS, Settings
from lowbit_numpy import NumpyBackend
from lowbit_numpy.caches import Cache
from lowbit_numpy.engines import Engine

ARRANGEMENT = Arrangement(layers=2, experts=4, slots=2)


@pytest.mark.parametrize("backend", [ReferenceBackend(), NumpyBackend()], ids=lambda backend: str(backend.name))
def test_a_session_checks_then_steps_then_closes(backend: Backend) -> None:
    """A wrong step raises and leaves no trace; a closed session takes none; closing twice is harmless."""
    with backend.open("offload.engine", ARRANGEMENT) as session:
        with pytest.raises(ArgumentError, match=r"layer is 1; allowed: 0 at first"):
            session.step(Request(1, (0,)))
        assert [event.step for event in session.step(Request(0, (0,)))] == [0, 0]
        with pytest.raises(ArgumentError, match=r"layer is 2"):
            session.step(Request(2, (0,)))
        assert session.step(Request(1, (0,)))[0].step == 1
    session.close()
    with pytest.raises(ArgumentError, match=r"session of offload.engine is closed"):
        session.step(Request(0, (0,)))


def test_what_is_opened_and_what_is_run() -> None:
    """A function cannot be opened nor a stateful operation run; the opening is checked, and declared or not."""
    backend = NumpyBackend()
    with pytest.raises(ArgumentError, match=r"operation is 'offload.engine'"):
        backend.run("offload.engine", ARRANGEMENT)
    with pytest.raises(ArgumentError, match=r"operation is 'packing.pack'"):
        backend.open("packing.pack", np.zeros((8, 1), np.uint8), 4)
    with pytest.raises(ArgumentError, match=r"head_dim is 0"):
        backend.open("kvcache.bfp", 2, 0, bfp12(32), bfp16(32))

    class Silent(NumpyBackend):
        def capabilities(self) -> Any:
            return type(super().capabilities())({})

    with pytest.raises(NotDeclaredError, match=r"kvcache.bfp"):
        Silent().open("kvcache.bfp", 2, 8, bfp12(32), bfp16(32))


def test_a_hook_may_have_something_to_give_back() -> None:
    """Closing a session closes what the hook answered with, once."""
    closed = []

    class Closing(Engine):
        def close(self) -> None:
            closed.append(self)

    class Owner(NumpyBackend):
        def _offload_engine(self, arrangement: Arrangement) -> Engine:
            return Closing(arrangement)

    session = Owner().open("offload.engine", ARRANGEMENT)
    session.close()
    session.close()
    assert len(closed) == 1


# Broken sessions, and the clauses whose cases find them.


class Counting(Engine):
    """Counts its requests over all engines."""

    number = -1

    def step(self, request: Request) -> Any:
        self._number = Counting.number
        Counting.number += 1
        return super().step(request)


class Forgetful(Engine):
    """A hit is no use: first in, first out."""

    def _hit(self, layer: int, needed: Any) -> Any:
        kept = self._used.copy()
        missing = super()._hit(layer, needed)
        self._used = kept
        return missing


class Keeper:
    """One engine for all who ask with an arrangement; opening it again goes on where it was."""

    def __init__(self) -> None:
        self.engines: dict[Arrangement, Engine] = {}

    def __call__(self, arrangement: Arrangement) -> Engine:
        return self.engines.setdefault(arrangement, Engine(arrangement))


class Ring(Cache):
    """Room for 64 tokens; the next overwrite the first."""

    def step(self, *tokens: Any) -> Any:
        keys, values = super().step(*tokens)
        if self._length > 64:
            over = self._length - 64
            keys[:, :over] = keys[:, 64:]
        return keys, values


class Neighbours(Cache):
    """The tokens of one step share their exponents, as if they were one row."""

    def step(self, *tokens: Any) -> Any:
        largest = [np.broadcast_to(np.abs(part).max(axis=0), part.shape) for part in tokens]
        rounded = [
            np.where(np.abs(part) < most / 64, np.float32(0), part) for part, most in zip(tokens, largest, strict=True)
        ]
        return super().step(*rounded)


class Swapped(Cache):
    """Keys in the format of values."""

    def __init__(self, casts: Any, kv_heads: int, head_dim: int, keys: Any, values: Any) -> None:
        super().__init__(casts, kv_heads, head_dim, values, values)


def broken(hook: str, opener: Callable[..., Any]) -> Backend:
    """The numpy backend with one stateful operation opened otherwise."""

    class Broken(NumpyBackend):
        def _offload_engine(self, *opening: Any) -> Any:
            return opener(*opening) if hook == "offload.engine" else super()._offload_engine(*opening)

        def _kvcache_bfp(self, *opening: Any) -> Any:
            return opener(self, *opening) if hook == "kvcache.bfp" else super()._kvcache_bfp(*opening)

    return Broken()


@pytest.mark.parametrize(
    ("opener", "clauses"),
    [
        (Counting, "offload.engine/C1 offload.engine/C4 offload.engine/C5"),
        (Forgetful, "offload.engine/C1 offload.engine/C3"),
        (Keeper(), "offload.engine/C4 offload.engine/C5"),
        (Ring, "kvcache.bfp/C2"),
        (Neighbours, "kvcache.bfp/C1 kvcache.bfp/C3"),
        (Swapped, "kvcache.bfp/C1"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "Keeper"),
)
def test_each_broken_session_is_found_by_its_clauses(opener: Callable[..., Any], clauses: str) -> None:
    """A case of each clause fails on the broken session, with the verdict WRONG."""
    for clause in clauses.split():
        operation = clause.partition("/")[0]
        backend = broken(operation, opener)
        module: Any = test_engine if operation == "offload.engine" else test_kvcache
        mark = next(mark for mark in MARKS if mark.clause == clause and mark.test.__module__ == module.__name__)
        with pytest.raises(AssertionError, match=r"^WRONG"):
            for case in mark.generator(clause, Settings(range(3))):
                mark.test(backend, case)


# The second driver.


class Engines(RuleBasedStateMachine):
    """Any requests at all, right and wrong, to an engine of the numpy backend and one of the reference."""

    @initialize(layers=st.integers(1, 3), experts=st.integers(1, 5), data=st.data(), memory=st.sampled_from(MEMORIES))
    def arrange(self, layers: int, experts: int, data: st.DataObject, memory: Memory) -> None:
        slots, buffers = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 3))
        self.arrangement = Arrangement(layers, experts, slots, buffers, memory)
        self.session = NumpyBackend().open("offload.engine", self.arrangement)
        self.reference, self.layer = engine(self.arrangement), -1

    def experts(self) -> st.SearchStrategy[list[int]]:
        return st.lists(st.integers(0, self.arrangement.experts - 1), max_size=6)

    @rule(data=st.data(), restart=st.booleans())
    def ask(self, data: st.DataObject, restart: bool) -> None:
        last = self.arrangement.layers - 1
        self.layer = 0 if restart or self.layer == last else self.layer + 1
        needed = tuple(dict.fromkeys(data.draw(self.experts())))
        guesses = tuple(data.draw(self.experts())) if self.layer < last else ()
        request = Request(self.layer, needed, guesses)
        assert self.session.step(request) == self.reference.step(request)

    @precondition(lambda self: hasattr(self, "session"))
    @rule(layer=st.integers(-1, 3), needed=st.lists(st.integers(-1, 6), max_size=3))
    def ask_wrongly(self, layer: int, needed: list[int]) -> None:
        allowed = 0 <= layer < self.arrangement.layers and layer in (0, self.layer + 1)
        right = {*range(self.arrangement.experts)}
        if not allowed or not {*needed} <= right or len({*needed}) < len(needed):
            with pytest.raises(ArgumentError):
                self.session.step(Request(layer, tuple(needed)))


Engines.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestEngines = Engines.TestCase
