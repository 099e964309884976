"""Replay against every possible choice by brute force, against the state machine, and against published ends."""

from collections.abc import Sequence
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lowbit.errors import ArgumentError
from lowbit.model.layers import rms_norm
from lowbit.model.replay import RULES, Norm, Recall, guess, guess_recall, recall, replay, replay_layers, residual_walk
from lowbit.moe.offload import Arrangement, Request, trace

PASSES = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple)
RECORDINGS = st.lists(PASSES, min_size=1, max_size=9)


def best_possible(recording: Sequence[tuple[int, ...]], slots: int) -> int:
    """The most hits of any way to keep up to k of residents and newcomers, by trying all of them."""
    reached = {frozenset[int](): 0}
    for needed in recording:
        following: dict[frozenset[int], int] = {}
        for resident, hits in reached.items():
            total = hits + len(resident & set(needed))
            candidates = sorted(resident | set(needed))
            for kept in combinations(candidates, min(slots, len(candidates))):
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), total)
        reached = following
    return max(reached.values())


@given(RECORDINGS, st.integers(1, 4))
@settings(max_examples=60)
def test_belady_is_the_best_possible_and_no_rule_beats_it(recording: list[tuple[int, ...]], slots: int) -> None:
    """Belady's hits are the maximum over all choices; the other rules have at most as many."""
    best = best_possible(recording, slots)
    assert replay(recording, slots, "belady").resident == best
    for rule in RULES:
        result = replay(recording, slots, rule)
        assert result.resident <= best
        assert result.needed == sum(map(len, recording))


@given(st.lists(st.lists(PASSES, min_size=3, max_size=3), min_size=1, max_size=12), st.integers(1, 6))
def test_lru_is_the_state_machine_without_guesses(passes: list[list[tuple[int, ...]]], slots: int) -> None:
    """Three layers replayed one by one have the hits of the offload trace of all of them."""
    requests = [Request(layer, needed) for one in passes for layer, needed in enumerate(one)]
    layers = [[one[layer] for one in passes] for layer in range(3)]
    counted = recall(trace(Arrangement(3, 6, slots), requests))
    assert replay_layers(layers, slots, "lru") == counted


@given(RECORDINGS, st.lists(st.integers(0, 5).map(lambda e: (e,)), min_size=1, max_size=20), st.integers(1, 4))
def test_the_ends_of_lfru(recording: list[tuple[int, ...]], singly: list[tuple[int, ...]], slots: int) -> None:
    """With ρ = 1 it is LFU, with ρ = 1/2 and an expert a pass it is LRU."""
    assert replay(recording, slots, "lfru", rho=1.0) == replay(recording, slots, "lfu")
    assert replay(singly, slots, "lfru", rho=0.5) == replay(singly, slots, "lru")


def test_each_rule_by_hand() -> None:
    """Runs in which the rules part, with the hits counted on paper."""
    # 0 is used often and early, then 1 and 2 take turns: LFU clings to 0, LRU lets it go.
    phases = [(0,)] * 4 + [(1,), (2,)] * 3
    assert [replay(phases, 2, rule).resident for rule in ("lru", "lfu", "static", "belady")] == [7, 3, 5, 7]
    assert replay(phases, 2, "lfru").resident == 5  # 0 fades: after the sixth turn 1 and 2 are worth more
    # Experts 1 and 2 come in between the uses of 0: LRU forgets 0, LFU does not.
    mixed = [(0,), (0,), (1,), (2,), (0,), (1,), (2,), (0,)]
    assert [replay(mixed, 2, rule).resident for rule in ("lru", "lfu", "belady")] == [1, 3, 4]
    # With room for all of them, every use but the first is a hit, whatever the rule.
    assert {replay(mixed, 3, rule).resident for rule in RULES if rule != "static"} == {5}


@given(RECORDINGS)
def test_more_slots_never_hurt(recording: list[tuple[int, ...]]) -> None:
    """Recall of LRU, static and Belady grows with k; with all experts resident only first uses miss."""
    for rule in ("lru", "static", "belady"):
        hits = [replay(recording, slots, rule).resident for slots in range(1, 7)]
        assert hits == sorted(hits)
    assert hits[-1] == sum(map(len, recording)) - len({e for needed in recording for e in needed})


# Guesses.


def test_a_guess_is_the_next_gate_on_this_input() -> None:
    """M5: the later gate is applied to this layer's gate input as it is; its norm first is another guess."""
    rng = np.random.default_rng(3)
    x, router = rng.standard_normal((40, 16)).astype(np.float32), rng.standard_normal((16, 8)).astype(np.float32)
    gain = np.exp(rng.standard_normal(16))
    for norm, stream in ((None, x), (Norm(gain, 1e-5), rms_norm(x.astype(float), gain, 1e-5))):
        scores = stream.astype(np.float64) @ router
        expected = [[int(e) for e in np.argsort(-row)[:2]] for row in scores]
        assert guess(x, router, 2, norm).tolist() == expected
    assert (guess(x, router, 2) != guess(x, router, 2, Norm(gain, 1e-5))).any()


def test_recall_of_guesses() -> None:
    """By counting; with all experts guessed it is 1, and with none of the needed ones 0."""
    needed = np.array([[0, 1], [2, 3], [4, 0]])
    assert guess_recall(needed, np.array([[1], [3], [5]])) == Recall(6, 2)
    assert guess_recall(needed, np.tile(np.arange(6), (3, 1))).value == 1
    assert guess_recall(needed, np.full((3, 1), 7)).value == 0


def test_the_stand_in_has_the_two_properties() -> None:
    """The synthetic stream has locality in time, and guesses that get worse with distance; without memory, neither."""
    walk = residual_walk(0, tokens=200, layers=8, experts=8)
    layers = [walk.needed(layer, 2).tolist() for layer in range(8)]
    assert replay_layers(layers, 2, "lru").value > 0.4
    ahead = {a: guess_recall(walk.needed(7, 2), walk.guessed(7, a, 2)).value for a in (1, 2, 6)}
    assert ahead[1] > ahead[2] > ahead[6] > 0.25  # by chance: 2 of 8
    still = residual_walk(0, tokens=200, layers=2, experts=8, memory=0.0)
    assert replay(still.needed(0, 2).tolist(), 2, "lru").value < 0.3


def test_errors_say_what_is_allowed() -> None:
    """One line each."""
    with pytest.raises(ArgumentError, match="slots is 0; allowed: an integer of at least 1"):
        replay([(0,)], 0, "lru")
    with pytest.raises(ArgumentError, match="rule is 'fifo'; allowed: lru, lfu, lfru, static or belady"):
        replay([(0,)], 1, "fifo")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match=r"recording\[1\] is \(2, 2\); allowed: distinct experts"):
        replay([(0,), (2, 2)], 1, "lru")
    with pytest.raises(ArgumentError, match="recording is empty"):
        replay([], 1, "lru")
    with pytest.raises(ArgumentError, match="rho is 0; allowed: above 0, at most 1"):
        replay([(0,)], 1, "lfru", rho=0)
