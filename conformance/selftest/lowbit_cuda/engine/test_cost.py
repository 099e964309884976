"""Copy or compute: the choice against every choice there is."""

from itertools import chain, combinations
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.errors import ArgumentError
from lowbit_cuda.engine import on_host
from lowbit_cuda.engine.cost import Choice, Job, Rates, choose, measured
from lowbit_cuda.engine.on_host import OnHost

TIMES = st.integers(0, 20).map(float)  # whole seconds, so that sums are exact and equal choices are equal


def makespan(jobs: list[Job], on_host: tuple[int, ...], queued: float, busy: float) -> float:
    """The model, for one choice, in the plainest words."""
    arrived, finished, host = queued, busy, 0.0
    for job in jobs:
        if job.expert in on_host:
            assert job.host is not None
            host += job.host
        else:
            arrived += job.copy
            finished = max(finished, arrived) + job.device
    return max(finished, host)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(TIMES, TIMES, st.none() | TIMES), max_size=8).map(
        lambda rows: [Job(expert, *row) for expert, row in enumerate(rows)]
    ),
    TIMES,
    TIMES,
)
def test_no_subset_is_better(jobs: list[Job], queued: float, busy: float) -> None:
    """Of all subsets of up to eight experts none ends earlier, and the time that is told is the time it takes."""
    movable = [job.expert for job in jobs if job.host is not None]
    subsets = chain.from_iterable(combinations(movable, size) for size in range(len(movable) + 1))
    best = min(makespan(jobs, subset, queued, busy) for subset in subsets)
    choice = choose(jobs, queued, busy)
    assert choice.makespan == best == makespan(jobs, choice.on_host, queued, busy)
    assert set(choice.on_host) <= set(movable)


def test_what_it_weighs() -> None:
    """A fast link leaves the host idle; a link with a queue before it does not; nothing is moved for no gain."""
    fast = [Job(expert, copy=0.1, device=0.1, host=5.0) for expert in range(2)]
    assert choose(fast).on_host == ()
    assert choose(fast, queued=9.0).on_host == (0,)
    assert choose(fast, queued=20.0).on_host == (0, 1)
    free = [Job(expert, copy=0.1, device=0.0, host=5.0) for expert in range(2)]
    assert choose(free, busy=50.0) == Choice((), 50.0), "the device is the last to end in any case"
    assert choose([Job(3, copy=9.0, device=1.0)]) == Choice((), 10.0), "there is nobody else to run it"
    assert choose([]) == Choice((), 0.0)


def test_many_experts_end() -> None:
    """A prompt over 128 experts is decided in a moment, and not worse than by sharing them out one by one."""
    rng = np.random.default_rng(0)
    times = rng.uniform(0.1, 2.0, (128, 2))
    jobs = [Job(expert, 1.0, float(device), 3 * float(host)) for expert, (device, host) in enumerate(times)]
    greedy: tuple[int, ...] = ()
    for job in jobs:
        greedy = min(greedy, (*greedy, job.expert), key=lambda some: makespan(jobs, some, 0.0, 0.0))
    assert choose(jobs).makespan <= makespan(jobs, greedy, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_little_beyond_the_exact(seed: int) -> None:
    """Of ten experts, more than all partial choices are kept for, what is kept still leads to the best of all."""
    times = np.random.default_rng(seed).integers(1, 100, (10, 3))
    jobs = [Job(expert, float(copy), float(device), 3.0 * host) for expert, (copy, device, host) in enumerate(times)]
    subsets = chain.from_iterable(combinations(range(10), size) for size in range(11))
    assert choose(jobs).makespan == min(makespan(jobs, subset, 0.0, 0.0) for subset in subsets)


def test_what_the_choice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in slots keep the device busy, those in buffers cost no copy and stay, the others cost one or the host;
    copies that have not arrived are before them."""
    told = []

    def listen(jobs: list[Job], queued: float, busy: float) -> Choice:
        told.append((jobs, queued, busy))
        return Choice((5,), 0.0)

    class Arrived:
        """Of a port, all that is asked for here."""

        def reached(self, event: Any) -> bool:
            return bool(event == "arrived")

    monkeypatch.setattr(on_host, "choose", listen)
    rates = Rates(bandwidth=10.0, device=lambda tokens: 0.25 * tokens, host=lambda tokens: 1.5 * tokens)
    chooser = OnHost(Arrived(), rates, 40)  # type: ignore[arg-type]  # no more of a port is needed
    for event in ("arrived", "arrived", "on its way", "behind it"):
        chooser.expect(event)
    where = {0: "slot", 1: "slot", 2: "buffer", 3: "host", 5: "host"}
    assert chooser.choose(where, {0: 2, 2: 3, 3: 4}) == (5,)
    assert told == [([Job(2, 0.0, 0.75), Job(3, 4.0, 1.0, 6.0), Job(5, 4.0, 0.25, 1.5)], 8.0, 0.75)]


def test_measured_points() -> None:
    """Between points a line, below the first its value, beyond the last the last line."""
    seconds = measured({4: 2.0, 2: 1.0, 8: 6.0})
    assert [seconds(tokens) for tokens in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert measured({1: 3.0})(5) == 15.0


def test_nonsense_is_refused() -> None:
    """Times that are not above zero or have no end, and a bandwidth of nothing, are refused by name."""
    for points in ({}, {0: 1.0}, {1: 0.0}, {1: float("inf")}):
        with pytest.raises(ArgumentError, match="points"):
            measured(points)
    for bandwidth in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="bandwidth"):
            Rates(bandwidth, float, float)
