"""The offload state machine by hand: one short run for each sentence of the rulings."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.errors import ArgumentError
from lowbit.moe.offload import MEMORIES, Arrangement, Event, Memory, Offload, Request, trace


def told(events: Sequence[Event]) -> list[str]:
    """Events as words: kind, expert, then s, b and h with their numbers, and the cause."""
    words = []
    for event in events:
        places = zip("sbh", (event.slot, event.buffer, event.host), strict=True)
        where = [f"{name}{number}" for name, number in places if number is not None]
        words.append(" ".join([event.kind, f"{event.layer}.{event.expert}", *where, event.cause]))
    return words


def test_the_least_recently_used_is_evicted() -> None:
    """M1: with two slots, 0 and 1 resident and 0 used again, it is 1 that goes."""
    events = trace(Arrangement(1, 4, 2), [Request(0, (0, 1)), Request(0, (0,)), Request(0, (3,))])
    assert told(events)[4:] == [
        "hit 0.0 s0 request",
        "load 0.3 b0 h3 miss",
        "evict 0.1 s1 miss",
        "promote 0.3 s1 b0 miss",
    ]


def test_guesses_wait_in_buffers() -> None:
    """M2: a right guess is promoted without a load, a wrong one is dropped when its layer has run."""
    requests = [Request(0, (0,), (2, 3)), Request(1, (3, 1), (0,)), Request(2, (1,))]
    events = trace(Arrangement(3, 4, 1), requests)
    assert told(events)[2:] == [
        "stage 1.2 b0 h2 guess",
        "stage 1.3 b1 h3 guess",
        "load 1.1 b2 h1 miss",
        "promote 1.1 s0 b2 miss",
        "evict 1.1 s0 guess",
        "promote 1.3 s0 b1 guess",
        "stage 2.0 b1 h0 guess",
        "drop 1.2 b0 unused",
        "load 2.1 b0 h1 miss",
        "promote 2.1 s0 b0 miss",
        "drop 2.0 b1 unused",
    ]
    assert [event.step for event in events] == [0] * 4 + [1] * 6 + [2] * 3


def test_what_is_there_already_is_not_staged() -> None:
    """M2: a guess that is resident loads nothing, and leaves its buffer to the next guess."""
    requests = [Request(0, (0,)), Request(1, (2,)), Request(0, (0,), (2, 3, 3)), Request(1, (2, 3))]
    events = told(trace(Arrangement(2, 4, 2, buffers=2), requests))
    assert events[4:] == [
        "hit 0.0 s0 request",
        "stage 1.3 b0 h3 guess",
        "hit 1.2 s0 request",
        "promote 1.3 s1 b0 guess",
    ]


def test_no_buffer_no_guess() -> None:
    """M2: guesses beyond the free buffers are not issued, and do not wait for one."""
    events = trace(Arrangement(2, 6, 2, buffers=2), [Request(0, (0,), (5, 4, 3)), Request(1, (3,))])
    assert told(events)[2:4] == ["stage 1.5 b0 h5 guess", "stage 1.4 b1 h4 guess"]
    assert told(events)[4:] == [
        "drop 1.5 b0 buffer",
        "load 1.3 b0 h3 miss",
        "promote 1.3 s0 b0 miss",
        "drop 1.4 b1 unused",
    ]


def test_a_needed_guess_is_not_dropped_for_a_load() -> None:
    """M2: the oldest guess that is not needed gives way; where all are needed, the oldest runs before its turn."""
    first = told(trace(Arrangement(2, 6, 3, buffers=2), [Request(0, (0,), (5, 4)), Request(1, (5, 1))]))
    assert first[4:] == [
        "drop 1.4 b1 buffer",
        "load 1.1 b1 h1 miss",
        "promote 1.1 s0 b1 miss",
        "promote 1.5 s1 b0 guess",
    ]
    second = told(trace(Arrangement(2, 6, 3, buffers=1), [Request(0, (0,), (5,)), Request(1, (5, 1))]))
    assert second[3:] == ["promote 1.5 s0 b0 guess", "load 1.1 b0 h1 miss", "promote 1.1 s1 b0 miss"]


def test_a_prompt_streams_through() -> None:
    """M3: residents run first, misses by ascending id, and the k that ran last remain."""
    machine = Offload(Arrangement(1, 8, 2))
    machine.step(Request(0, (5, 6)))
    events = machine.step(Request(0, (7, 6, 0, 3)))
    assert [(e.kind, e.expert) for e in events if e.kind in ("hit", "promote")] == [
        ("hit", 6),
        ("promote", 0),
        ("promote", 3),
        ("promote", 7),
    ]
    assert [e.expert for e in events if e.kind == "evict"] == [5, 6, 0]
    assert [r.expert for r in machine.slots[0]] == [3, 7]


def test_swap_exchanges_places() -> None:
    """M4: the victim goes to the host place from which the newcomer came, and can be fetched from there."""
    events = told(trace(Arrangement(1, 4, 2, memory="swap"), [Request(0, (3,)), Request(0, (0,))]))
    assert events == [
        "load 0.3 b0 h1 miss",
        "evict 0.0 s0 h1 miss",
        "promote 0.3 s0 b0 miss",
        "load 0.0 b0 h1 miss",
        "evict 0.1 s1 h1 miss",
        "promote 0.0 s1 b0 miss",
    ]


def test_a_pass_that_was_abandoned() -> None:
    """Guesses whose layer never came are dropped when the next pass begins, oldest first."""
    requests = [Request(0, (0,), (1, 2)), Request(0, (0,), (2,))]
    assert told(trace(Arrangement(3, 4, 1), requests))[4:] == [
        "drop 1.1 b0 abandoned",
        "drop 1.2 b1 abandoned",
        "hit 0.0 s0 request",
        "stage 1.2 b0 h2 guess",
    ]


def test_four_buffers_are_enough_for_two_guesses() -> None:
    """§3.3: with b = 4 and two guesses a layer, every guess that is not resident finds a buffer."""
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(50):
        for layer in range(4):
            needed, guesses = (tuple(int(e) for e in rng.permutation(8)[:2]) for _ in range(2))
            requests.append(Request(layer, needed, guesses if layer < 3 else ()))

    def staged(buffers: int) -> int:
        return sum(event.kind == "stage" for event in trace(Arrangement(4, 8, 2, buffers), requests))

    assert staged(3) < staged(4) == staged(8)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_layer_that_needs_nothing_only_turns_over_its_guesses(memory: Memory) -> None:
    """Guesses for it are dropped and its own are staged; what its slots hold and in which order stays."""
    machine = Offload(Arrangement(2, 6, 2, memory=memory))
    machine.step(Request(0, (3, 4), (5,)))
    before = [resident.expert for resident in machine.slots[1]]
    assert [(e.kind, e.expert, e.cause) for e in machine.step(Request(1, ()))] == [("drop", 5, "unused")]
    assert [resident.expert for resident in machine.slots[1]] == before
    assert [(e.kind, e.layer) for e in machine.step(Request(0, (), (5,)))] == [("stage", 1)]


@given(st.integers(0, 2**32))
def test_a_refused_request_changes_nothing(seed: int) -> None:
    """After an error the machine goes on as if it had not been asked."""
    rng = np.random.default_rng(seed)
    requests = [Request(la, tuple(map(int, rng.permutation(6)[:2])), (0, 5) if la == 0 else ()) for la in (0, 1) * 3]
    machine = Offload(Arrangement(2, 6, 2))
    events: list[Event] = []
    for request in requests:
        for wrong in (
            Request(request.layer, (0, 6)),
            Request(1 - request.layer or 2, (0,)),
            Request(request.layer, (0, 0)),
        ):
            with pytest.raises(ArgumentError):
                machine.step(wrong)
        events += machine.step(request)
    assert tuple(events) == trace(Arrangement(2, 6, 2), requests)


def test_errors_say_what_is_allowed() -> None:
    """One line each: the argument, what was given, what is allowed."""
    arrangement = Arrangement(2, 4, 2)
    with pytest.raises(ArgumentError, match=r"slots is 5; allowed: an integer from 1 to 4"):
        Arrangement(2, 4, 5)
    with pytest.raises(ArgumentError, match=r"memory is 'both'; allowed: mirror or swap"):
        Arrangement(2, 4, 2, memory="both")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match=r"layer is 1; allowed: 0 at first"):
        trace(arrangement, [Request(1, (0,))])
    with pytest.raises(ArgumentError, match=r"layer is 2; allowed: an integer from 0 to 1"):
        trace(arrangement, [Request(0, (0,)), Request(2, (0,))])
    with pytest.raises(ArgumentError, match=r"guesses is \(1,\); allowed: none at the last layer"):
        trace(arrangement, [Request(0, (0,)), Request(1, (0,), (1,))])
    with pytest.raises(ArgumentError, match=r"needed is \(1, 1\); allowed: distinct experts"):
        trace(arrangement, [Request(0, (1, 1))])
