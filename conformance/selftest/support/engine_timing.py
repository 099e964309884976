"""Checks of the engine's timing on a machine whose times follow from a few numbers.

A copy takes one second, a kernel the time that it is told to take, and everything else none. What the engine overlaps,
and what it must not, is then a sum of a few numbers. The tests run these checks on the engine as it is, and on engines
with planted mistakes.
"""

from typing import Any

import pytest
from engine_rig import Rig, show, slow_machine

from lowbit.moe.offload import Arrangement
from lowbit_cuda.engine.transfers import Transfers
from lowbit_gpusim.meanings import Meant
from lowbit_gpusim.sim.device import SimDevice

COPY = 1.0  # seconds of an expert's copy


class Timed(Rig):
    """A rig on the slow machine: an expert computes for `expert` seconds, attention before it for `attention`."""

    def __init__(self, arrangement: Arrangement, expert: float, attention: float = 0.0, **options: Any) -> None:
        device = SimDevice(slow_machine(COPY), schedule="late", on_unwritten="raise")
        super().__init__(arrangement, device=device, kernel=show(40, expert), rows=3000, **options)
        self._attention = Meant(
            "attention", "none", (), lambda _: (1, 1, 1), 32, meaning=lambda: None, flops=lambda _: attention
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
        """Seconds since the rig was built, when all is done."""
        self.device.finish()
        return self.device.now() - self.began


def check_a_right_guess(expert: float, attention: float) -> None:
    """The copy of a right guess runs under this layer's expert and the next layer's attention, and saves that much."""
    times = [Timed(Arrangement(2, 4, 1), expert, attention).token([[1], [2]], [guess, []]) for guess in ([], [2])]
    assert times[0] == pytest.approx(2 * (attention + COPY + expert))
    assert times[0] - times[1] == pytest.approx(min(COPY, expert + attention))


def check_a_wrong_guess(expert: float, attention: float) -> None:
    """A wrong one costs what of its copy is left when the layer asks for another expert."""
    times = [Timed(Arrangement(2, 4, 1), expert, attention).token([[1], [2]], [guess, []]) for guess in ([], [3])]
    assert times[1] - times[0] == pytest.approx(max(0.0, COPY - expert - attention))


def check_hits_run_during_the_first_copy() -> None:
    """An expert in a slot computes under the copy of the one that is missing, and that under the next one's."""
    rig = Timed(Arrangement(1, 4, 2), 0.5)
    rig.token([[0, 1]], [[]])
    assert rig.elapsed() == pytest.approx(2 * COPY + 0.5)
    assert rig.token([[1, 3]], [[]]) == pytest.approx(COPY + 0.5)
    assert rig.token([[1, 3]], [[]]) == pytest.approx(2 * 0.5)


def check_a_prompt_streams(memory: Any, slots: int, expert: float) -> None:
    """All eight experts through one or two slots: each is copied once, copying and computing go on together, and
    whichever is slower sets the pace."""
    rig = Timed(Arrangement(1, 8, slots, 2, memory), expert)
    events = rig.run(0, range(8))
    hits = slots if memory == "swap" else 0
    assert sum(event.kind == "load" for event in events) == 8 - hits
    if expert > COPY:
        expected = (0.0 if hits else COPY) + 8 * expert
    else:
        expected = (8 - hits) * COPY + expert
    rig.wait()  # not for what is still on its way back
    assert rig.device.now() - rig.began == pytest.approx(expected)
    rig.check()
    rig.close()


def check_both_ways_at_once() -> None:
    """Under swap experts go back while others come: with two buffers a token of misses takes no longer than under
    mirror. With one, the only free storage is the one whose expert is on its way back, and each copy waits for it."""

    def tokens(memory: Any, buffers: int) -> list[float]:
        rig = Timed(Arrangement(1, 8, 2, buffers, memory), 0.25)
        rig.run(0, [2, 3])
        rig.device.finish()
        return [rig.token([needed], [[]]) for needed in ([4, 5], [6, 7], [0, 1])]

    for memory, buffers in (("mirror", 1), ("mirror", 4), ("swap", 2), ("swap", 4)):
        assert tokens(memory, buffers) == pytest.approx([2 * COPY + 0.25] * 3)
    assert tokens("swap", 1)[0] == pytest.approx(3 * COPY + 0.25)


def check_copies_in_the_order_of_the_trace() -> None:
    """Loads and guesses reach the link in the order of their events, so that no guess delays what is needed."""
    copied = list[tuple[int, int]]()
    original = Transfers.copy

    def copy(transfers: Transfers, expert: tuple[int, int], target: Any, source: Any) -> Any:
        if target.on_device:
            copied.append(expert)
        return original(transfers, expert, target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfers, "copy", copy)
        rig = Rig(Arrangement(2, 8, 2))
        rig.run(0, [5, 1, 3], [7, 2])
        rig.run(1, [0, 2], [])
    assert copied == [(e.layer, e.expert) for e in rig.events if e.kind in ("load", "stage")]
    assert copied == [(0, 1), (0, 3), (0, 5), (1, 7), (1, 2), (1, 0)]
