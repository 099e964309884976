"""Time on a machine that can be reckoned by hand: a copy takes a second, a kernel what it is told to, all else nothing.

What the engine overlaps, and what it must not, is then a sum of a few numbers.
"""

from typing import Any

import numpy as np
import pytest
from engine_rig import expert_data
from engine_timing import (
    COPY,
    Timed,
    check_a_prompt_streams,
    check_a_right_guess,
    check_a_wrong_guess,
    check_both_ways_at_once,
    check_copies_in_the_order_of_the_trace,
    check_hits_run_during_the_first_copy,
)

from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.prefetch_trial import TrialSchedule


@pytest.mark.parametrize(("expert", "attention"), [(0.5, 0.25), (0.125, 0.0), (2.0, 0.5), (0.25, 0.75)])
def test_a_right_guess(expert: float, attention: float) -> None:
    """The copy of a right guess overlaps this layer's expert and the next layer's attention, and saves that time."""
    check_a_right_guess(expert, attention)


@pytest.mark.parametrize(("expert", "attention"), [(0.5, 0.25), (0.125, 0.0), (2.0, 0.5)])
def test_a_wrong_guess(expert: float, attention: float) -> None:
    """A wrong guess costs what is left of its copy when the layer asks for another expert."""
    check_a_wrong_guess(expert, attention)


def test_hits_run_during_the_first_copy() -> None:
    """An expert in a slot computes while the missing one is copied."""
    check_hits_run_during_the_first_copy()


@pytest.mark.parametrize(("memory", "slots"), [("mirror", 1), ("mirror", 2), ("swap", 2)])
@pytest.mark.parametrize("expert", [0.25, 3.0])
def test_a_prompt_streams(memory: Any, slots: int, expert: float) -> None:
    """All eight experts pass through one or two slots, each copied once, while others compute."""
    check_a_prompt_streams(memory, slots, expert)


def test_both_ways_at_once() -> None:
    """In swap mode experts are copied back while others are copied to the device."""
    check_both_ways_at_once()


def test_copies_in_the_order_of_the_trace() -> None:
    """Loads and guesses reach the link in the order of their events."""
    check_copies_in_the_order_of_the_trace()


def test_the_host_does_not_wait() -> None:
    """A request returns at once, whatever the device has to do for it; and a token that the device has not done when
    the next begins is not measured."""
    for memory in ("mirror", "swap"):
        rig = Timed(Arrangement(3, 8, 2, 4, memory), 0.5, prefetch="auto")
        for _ in range(2):
            rig.run(0, [0, 1, 2], [3, 4])
            rig.run(1, [0, 4, 5], [7])
            rig.run(2, [7])
        assert rig.device.now() == rig.began
        assert rig.engine.account.tokens == 0
        rig.check()


# **Guesses that do not pay.**


def test_wrong_guesses_are_switched_off() -> None:
    """Guesses that are always wrong cost time: measured, switched off, said once, and measured again later."""
    trial_schedule = TrialSchedule(warmup=2, window=2, rounds=2, patience=20)
    rig = Timed(Arrangement(3, 6, 1), 0.25, 0.125, prefetch="auto", trial_schedule=trial_schedule)
    times = [rig.token([[t % 6], [t % 6], [t % 6]], [[(t + 1) % 6], [(t + 2) % 6], []]) for t in range(70)]
    # Each expert is a miss. A guess has 0.375 s to be copied in and takes the 0.625 s after, twice a token.
    plain, guessed = 3 * (COPY + 0.375), 3 * (COPY + 0.375) + 2 * (COPY - 0.375)
    assert times[1] == pytest.approx(guessed) and times[20] == pytest.approx(plain)
    said = rig.engine.account.notes
    assert len(said) == 1
    without, with_guesses = plain - 0.125, guessed - 0.125  # the first layer's attention is before its request
    assert said[0].startswith(
        f"prefetching is switched off: a token takes {with_guesses * 1e3:.3g} ms with it and "
        f"{without * 1e3:.3g} ms without (medians of 4 tokens each)"
    )
    measured = rig.engine.account.measurements
    assert len(measured) == 2 and measured[0].benefit == pytest.approx(-1.25) == measured[1].benefit
    rig.check()  # the requests that were made, with guesses or without, and their events
    assert {bool(request.guesses) for request in rig.engine.requests if request.layer == 0} == {True, False}
    rig.close()


def test_right_guesses_stay_on() -> None:
    """Guesses that are right save time, and stay; prompts, passes without guesses and abandoned ones do not count."""
    trial_schedule = TrialSchedule(warmup=0, window=1, rounds=3, patience=1000)
    rig = Timed(Arrangement(2, 6, 1), 0.25, 0.125, prefetch="auto", trial_schedule=trial_schedule)
    for t in range(30):
        rig.run(0, [0])  # abandoned
        rig.token([[t % 6], [t % 6]], [[t % 6], []])
        rig.run(0, [0])  # abandoned, after one that counts
        rig.run(0, range(6), [2], tokens=dict.fromkeys(range(6), 9))  # a prompt
        rig.run(1, range(6), tokens=dict.fromkeys(range(6), 9))
        rig.token([[1], [2]], [[], []])  # nothing to guess with
        rig.device.finish()
    account = rig.engine.account
    assert account.tokens == 30 and not account.notes
    assert [m.benefit for m in account.measurements] == pytest.approx([0.375])
    rig.check()


@pytest.mark.parametrize(("prefetch", "staged"), [("on", 20), ("off", 0)])
def test_always_and_never(prefetch: str, staged: int) -> None:
    """Switched on or off by the user, guesses are used always or never, and nothing is measured."""
    rig = Timed(Arrangement(2, 6, 1), 0.25, prefetch=prefetch)
    for t in range(20):
        rig.token([[t % 6], [t % 6]], [[(t + 1) % 6], []])
    account = rig.engine.account
    assert (account.staged, account.dropped, account.tokens) == (staged, staged, 0)
    rig.check()


# **Experts that the host computes.**

RATES = Rates(bandwidth=40 / COPY, device=lambda tokens: 0.25 * tokens, host=lambda tokens: 1.5 * tokens)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_the_host_computes(memory: Any) -> None:
    """Two are missing; a copy takes 1 s and the host 1.5: one is copied while the host computes the other, from its
    own bytes, and the layer asks the device for the rest only."""
    rig, answers = Timed(Arrangement(2, 8, 2, 4, memory), 0.25, rates=RATES), dict[int, Any]()

    def compute(expert: int, data: Any) -> None:
        assert not data.flags.writeable
        answers[expert] = data.copy()

    rig.run(0, [0, 1])
    rig.device.finish()
    rig.run(0, [1, 4, 5], [2], compute_on_host=compute)
    assert list(answers) == [4] and (answers[4] == expert_data(0, 4)).all()
    assert rig.engine.requests[-1].needed == (1, 5) and rig.engine.account.on_host == 1
    rig.device.finish()
    rig.run(1, [2], compute_on_host=compute)  # a guess that was right is on the device already
    rig.run(0, [4], tokens={4: 8}, compute_on_host=compute)  # eight tokens are too many for the host
    assert list(answers) == [4]
    rig.check()
    rig.check_storage()
    rig.close()


def test_a_long_queue_moves_work_to_the_host() -> None:
    """Behind three wrong guesses even two missing experts are done sooner by the host, the lower first; then nothing is
    asked of the device, and the request is empty."""
    rig, computed = Timed(Arrangement(2, 8, 1, 4), 0.25, rates=RATES), list[int]()
    rig.run(0, [0], [1, 2, 3])
    rig.wait()
    rig.run(1, [7, 5], compute_on_host=lambda expert, data: computed.append(expert))
    assert computed == [5, 7] and rig.engine.requests[-1].needed == ()
    rig.check()


def test_the_host_waits_for_bytes_on_their_way_back() -> None:
    """Under swap an expert that was just evicted is computed from the host only when its bytes have arrived there."""
    rates = Rates(bandwidth=40 / COPY / 100, device=lambda tokens: 0.0, host=lambda tokens: 0.01)
    rig, answers = Timed(Arrangement(1, 4, 1, 4, "swap"), 0.25, rates=rates), list[bool]()
    rig.run(0, [2])  # evicts 0
    rig.run(0, [0], compute_on_host=lambda expert, data: answers.append(bool((data == expert_data(0, expert)).all())))
    assert answers == [True]
    assert rig.device.now() - rig.began == pytest.approx(2 * COPY), "one copy there, one back"
    rig.check()


def test_off_by_default() -> None:
    """Without rates nothing is computed on the host, whatever the caller offers: the host rounds differently."""
    rig = Timed(Arrangement(1, 4, 1), 0.25)
    rig.run(0, [0, 1, 2], compute_on_host=lambda expert, data: pytest.fail("computed on the host"))
    rig.check()


def test_an_error_on_the_host() -> None:
    """An error of the caller's function comes through, and the engine begins anew."""
    rig = Timed(Arrangement(1, 8, 1), 0.25, rates=RATES)

    def wrong(expert: int, data: Any) -> None:
        raise ArgumentError("x", np.nan, "finite")

    with pytest.raises(ArgumentError, match="x is nan"):
        rig.run(0, range(8), compute_on_host=wrong)
    rig.forget()
    rig.run(0, [5])
    rig.check()
    rig.close()
