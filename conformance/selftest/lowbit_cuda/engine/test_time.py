"""Time on a machine that can be reckoned by hand: a copy takes a second, a kernel what it is told to, all else nothing.

What the engine overlaps, and what it must not, is then a sum of a few numbers.
"""

from typing import Any

import numpy as np
import pytest
from engine_house import House, blob, show, slow_machine

from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine import Plan, Rates
from lowbit_cuda.engine.traffic import Traffic
from lowbit_cuda.port import Kernel
from lowbit_gpusim.sim import SimDevice

COPY = 1.0  # seconds of an expert's copy


class Timed(House):
    """A house on the slow machine: an expert computes for `expert` seconds, attention before it for `attention`."""

    def __init__(self, arrangement: Arrangement, expert: float, attention: float = 0.0, **options: Any) -> None:
        device = SimDevice(slow_machine(COPY), schedule="late", on_unwritten="raise")
        super().__init__(arrangement, device=device, kernel=show(40, expert), rows=3000, **options)
        self._attention = Kernel(
            "attention", "none", (), lambda _: (1, 1, 1), 32, lambda: None, flops=lambda _: attention
        )
        self.device.finish()
        self.began = self.device.now()

    def token(self, needed: list[list[int]], guesses: list[list[int]]) -> float:
        """One pass; before each layer the host waits for what its gate depends on. Answers with its seconds."""
        began = self.device.now()
        for layer, experts in enumerate(needed):
            self.device.launch(self._attention, {}, self.stream)
            self.wait()
            self.run(layer, experts, guesses[layer])
        self.wait()
        return self.device.now() - began

    def elapsed(self) -> float:
        """Seconds since the house was built, when all is done."""
        self.device.finish()
        return self.device.now() - self.began


@pytest.mark.parametrize(("expert", "attention"), [(0.5, 0.25), (0.125, 0.0), (2.0, 0.5), (0.25, 0.75)])
def test_a_right_guess(expert: float, attention: float) -> None:
    """The copy of a right guess runs under this layer's expert and the next layer's attention, and saves that much."""
    times = [Timed(Arrangement(2, 4, 1), expert, attention).token([[1], [2]], [guess, []]) for guess in ([], [2])]
    assert times[0] == pytest.approx(2 * (attention + COPY + expert))
    assert times[0] - times[1] == pytest.approx(min(COPY, expert + attention))


@pytest.mark.parametrize(("expert", "attention"), [(0.5, 0.25), (0.125, 0.0), (2.0, 0.5)])
def test_a_wrong_guess(expert: float, attention: float) -> None:
    """A wrong one costs what of its copy is left when the layer asks for another expert."""
    times = [Timed(Arrangement(2, 4, 1), expert, attention).token([[1], [2]], [guess, []]) for guess in ([], [3])]
    assert times[1] - times[0] == pytest.approx(max(0.0, COPY - expert - attention))


def test_hits_run_while_the_first_copy_comes() -> None:
    """An expert in a slot computes under the copy of the one that is missing, and that under the next one's."""
    house = Timed(Arrangement(1, 4, 2), 0.5)
    house.token([[0, 1]], [[]])
    assert house.elapsed() == pytest.approx(2 * COPY + 0.5)
    assert house.token([[1, 3]], [[]]) == pytest.approx(COPY + 0.5)
    assert house.token([[1, 3]], [[]]) == pytest.approx(2 * 0.5)


@pytest.mark.parametrize(("memory", "slots"), [("mirror", 1), ("mirror", 2), ("swap", 2)])
@pytest.mark.parametrize("expert", [0.25, 3.0])
def test_a_prompt_streams(memory: Any, slots: int, expert: float) -> None:
    """All eight experts through one or two slots: each is copied once, copying and computing go on together, and
    whichever is slower sets the pace."""
    house = Timed(Arrangement(1, 8, slots, 2, memory), expert)
    events = house.run(0, range(8))
    hits = slots if memory == "swap" else 0
    assert sum(event.kind == "load" for event in events) == 8 - hits
    if expert > COPY:
        expected = (0.0 if hits else COPY) + 8 * expert
    else:
        expected = (8 - hits) * COPY + expert
    house.wait()  # not for what is still on its way back
    assert house.device.now() - house.began == pytest.approx(expected)
    house.check()
    house.close()


def test_both_ways_at_once() -> None:
    """Under swap experts go back while others come: with two buffers a token of misses takes no longer than under
    mirror. With one, the only free block is the one whose expert is on its way back, and each copy waits for it."""

    def tokens(memory: Any, buffers: int) -> list[float]:
        house = Timed(Arrangement(1, 8, 2, buffers, memory), 0.25)
        house.run(0, [2, 3])
        house.device.finish()
        return [house.token([needed], [[]]) for needed in ([4, 5], [6, 7], [0, 1])]

    for memory, buffers in (("mirror", 1), ("mirror", 4), ("swap", 2), ("swap", 4)):
        assert tokens(memory, buffers) == pytest.approx([2 * COPY + 0.25] * 3)
    assert tokens("swap", 1)[0] == pytest.approx(3 * COPY + 0.25)


def test_the_host_does_not_wait() -> None:
    """A request returns at once, whatever the device has to do for it; and a token that the device has not done when
    the next begins is not measured."""
    for memory in ("mirror", "swap"):
        house = Timed(Arrangement(3, 8, 2, 4, memory), 0.5, prefetch="auto")
        for _ in range(2):
            house.run(0, [0, 1, 2], [3, 4])
            house.run(1, [0, 4, 5], [7])
            house.run(2, [7])
        assert house.device.now() == house.began
        assert house.engine.account.tokens == 0
        house.check()


# **Guesses that do not pay.**


def test_wrong_guesses_are_switched_off() -> None:
    """Guesses that are always wrong cost time: measured, switched off, said once, and measured again later."""
    said = list[str]()
    plan = Plan(warmup=2, window=2, rounds=2, patience=20)
    house = Timed(Arrangement(3, 6, 1), 0.25, 0.125, prefetch="auto", plan=plan, on_note=said.append)
    times = [house.token([[t % 6], [t % 6], [t % 6]], [[(t + 1) % 6], [(t + 2) % 6], []]) for t in range(70)]
    # Each expert is a miss. A guess has 0.375 s to be copied in and takes the 0.625 s after, twice a token.
    plain, guessed = 3 * (COPY + 0.375), 3 * (COPY + 0.375) + 2 * (COPY - 0.375)
    assert times[1] == pytest.approx(guessed) and times[20] == pytest.approx(plain)
    assert said == house.engine.account.notes and len(said) == 1
    without, with_guesses = plain - 0.125, guessed - 0.125  # the first layer's attention is before its request
    assert said[0].startswith(
        f"prefetching is switched off: a token takes {with_guesses * 1e3:.3g} ms with it and "
        f"{without * 1e3:.3g} ms without (medians of 4 tokens each)"
    )
    measured = house.engine.account.measurements
    assert len(measured) == 2 and measured[0].benefit == pytest.approx(-1.25) == measured[1].benefit
    house.check()  # the requests that were made, with guesses or without, and their events
    assert {bool(request.guesses) for request in house.engine.requests if request.layer == 0} == {True, False}
    house.close()


def test_right_guesses_stay_on() -> None:
    """Guesses that are right save time, and stay; prompts, passes without guesses and abandoned ones do not count."""
    plan = Plan(warmup=0, window=1, rounds=3, patience=1000)
    house = Timed(Arrangement(2, 6, 1), 0.25, 0.125, prefetch="auto", plan=plan)
    for t in range(30):
        house.run(0, [0])  # abandoned
        house.token([[t % 6], [t % 6]], [[t % 6], []])
        house.run(0, [0])  # abandoned, after one that counts
        house.run(0, range(6), [2], tokens=dict.fromkeys(range(6), 9))  # a prompt
        house.run(1, range(6), tokens=dict.fromkeys(range(6), 9))
        house.token([[1], [2]], [[], []])  # nothing to guess with
        house.device.finish()
    account = house.engine.account
    assert account.tokens == 30 and not account.notes
    assert [m.benefit for m in account.measurements] == pytest.approx([0.375])
    house.check()


@pytest.mark.parametrize(("prefetch", "staged"), [("on", 20), ("off", 0)])
def test_always_and_never(prefetch: str, staged: int) -> None:
    """Switched on or off by the user, guesses are used always or never, and nothing is measured."""
    house = Timed(Arrangement(2, 6, 1), 0.25, prefetch=prefetch)
    for t in range(20):
        house.token([[t % 6], [t % 6]], [[(t + 1) % 6], []])
    account = house.engine.account
    assert (account.staged, account.dropped, account.tokens) == (staged, staged, 0)
    house.check()


# **Experts that the host computes.**

RATES = Rates(bandwidth=40 / COPY, device=lambda tokens: 0.25 * tokens, host=lambda tokens: 1.5 * tokens)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_the_host_computes(memory: Any) -> None:
    """Two are missing; a copy takes 1 s and the host 1.5: one is copied while the host computes the other, from its
    own bytes, and the layer asks the device for the rest only."""
    house, answers = Timed(Arrangement(2, 8, 2, 4, memory), 0.25, rates=RATES), dict[int, Any]()

    def compute(expert: int, data: Any) -> None:
        assert not data.flags.writeable
        answers[expert] = data.copy()

    house.run(0, [0, 1])
    house.device.finish()
    house.run(0, [1, 4, 5], [2], compute_on_host=compute)
    assert list(answers) == [4] and (answers[4] == blob(0, 4)).all()
    assert house.engine.requests[-1].needed == (1, 5) and house.engine.account.on_host == 1
    house.device.finish()
    house.run(1, [2], compute_on_host=compute)  # a guess that was right is on the device already
    house.run(0, [4], tokens={4: 8}, compute_on_host=compute)  # eight tokens are too many for the host
    assert list(answers) == [4]
    house.check()
    house.check_homes()
    house.close()


def test_a_long_queue_moves_work_to_the_host() -> None:
    """Behind three wrong guesses even two missing experts are done sooner by the host, the lower first; then nothing is
    asked of the device, and the request is empty."""
    house, computed = Timed(Arrangement(2, 8, 1, 4), 0.25, rates=RATES), list[int]()
    house.run(0, [0], [1, 2, 3])
    house.wait()
    house.run(1, [7, 5], compute_on_host=lambda expert, data: computed.append(expert))
    assert computed == [5, 7] and house.engine.requests[-1].needed == ()
    house.check()


def test_the_host_waits_for_bytes_on_their_way_back() -> None:
    """Under swap an expert that was just evicted is computed from the host only when its bytes have arrived there."""
    rates = Rates(bandwidth=40 / COPY / 100, device=lambda tokens: 0.0, host=lambda tokens: 0.01)
    house, answers = Timed(Arrangement(1, 4, 1, 4, "swap"), 0.25, rates=rates), list[bool]()
    house.run(0, [2])  # evicts 0
    house.run(0, [0], compute_on_host=lambda expert, data: answers.append(bool((data == blob(0, expert)).all())))
    assert answers == [True]
    assert house.device.now() - house.began == pytest.approx(2 * COPY), "one copy there, one back"
    house.check()


def test_off_by_default() -> None:
    """Without rates nothing is computed on the host, whatever the caller offers: its rounding is another."""
    house = Timed(Arrangement(1, 4, 1), 0.25)
    house.run(0, [0, 1, 2], compute_on_host=lambda expert, data: pytest.fail("computed on the host"))
    house.check()


def test_an_error_on_the_host() -> None:
    """An error of the caller's function comes through, and the engine begins anew."""
    house = Timed(Arrangement(1, 8, 1), 0.25, rates=RATES)

    def wrong(expert: int, data: Any) -> None:
        raise ArgumentError("x", np.nan, "finite")

    with pytest.raises(ArgumentError, match="x is nan"):
        house.run(0, range(8), compute_on_host=wrong)
    house.forget()
    house.run(0, [5])
    house.check()
    house.close()


# **The queue of copies** is what the trace says, in its order.


def test_copies_in_the_order_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and guesses reach the link in the order of their events, so that no guess delays what is needed."""
    copied = list[tuple[int, int]]()
    original = Traffic.copy

    def copy(traffic: Traffic, expert: tuple[int, int], target: Any, source: Any) -> Any:
        if target.on_device:
            copied.append(expert)
        return original(traffic, expert, target, source)

    monkeypatch.setattr(Traffic, "copy", copy)
    house = House(Arrangement(2, 8, 2))
    house.run(0, [5, 1, 3], [7, 2])
    house.run(1, [0, 2], [])
    assert copied == [(e.layer, e.expert) for e in house.events if e.kind in ("load", "stage")]
    assert copied == [(0, 1), (0, 3), (0, 5), (1, 7), (1, 2), (1, 0)]
