"""The CUDA backend's engine on a simulated device: the specification's events, the right bytes, no race, no byte more.

Schedules run what was asked for at once, as late as possible, and in random order; the simulation proves the order
whichever it is (`lowbit_gpusim.sim.order`).
"""

import gc
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from engine_rig import NBYTES, Rig, expert_data, room_for, slow_machine
from engine_runs import runs, walk
from hypothesis import given, settings

from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement, Request
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.storage import device_bytes, stride
from lowbit_cuda.model.budget import Need
from lowbit_cuda.port import PIECE, DeviceMemoryError, charge
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.streams import SimEvent

Run = tuple[Arrangement, list[Request]]
SCHEDULES = st.one_of(
    st.just(("eager", 0)), st.just(("late", 0)), st.integers(0, 2**16).map(lambda seed: ("random", seed))
)


@settings(max_examples=90)
@given(runs(), SCHEDULES, st.sampled_from([0, 1, 3]), st.sampled_from(["a100", slow_machine(1.0)]))
def test_any_run(run: Run, schedule: tuple[str, int], waits: int, machine: Any) -> None:
    """Whatever is asked for, in any schedule, on a device that is ahead of its host or far behind it, waiting never,
    always or now and then: events, bytes, order, memory."""
    arrangement, requests = run
    device = SimDevice(
        machine, schedule=schedule[0], seed=schedule[1], budget=room_for(arrangement), on_unwritten="raise"
    )
    rig = Rig(arrangement, device=device)
    for number, request in enumerate(requests):
        rig.ask(request)
        if waits and number % waits == 0:
            rig.wait()
    rig.check(requests)
    rig.check_storage()
    assert device.peak == device.budget, "every byte that was reckoned with, and no more"
    rig.close()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("slots", [1, 3])
def test_long_walks(memory: Any, schedule: str, slots: int) -> None:
    """A run like a program's, with prompts, right and wrong guesses, abandoned passes, and a `reset` in its middle."""
    arrangement = Arrangement(4, 8, slots, 3, memory)
    rig = Rig(arrangement, device=SimDevice(schedule=schedule, seed=1, on_unwritten="raise"))
    for seed in range(2):
        requests = walk(arrangement, seed, 60)
        for request in requests:
            rig.ask(request)
            rig.wait()
        rig.check(requests)
        rig.check_storage()
        rig.engine.reset()
        rig.forget()
        assert rig.engine.requests == []
    rig.close()


def test_a_refused_request_changes_nothing() -> None:
    """Wrong requests are refused by name and the run goes on as if they had not been made."""
    arrangement = Arrangement(3, 4, 1, 2, "swap")
    rig = Rig(arrangement)
    requests = walk(arrangement, 3, 20)
    for request in requests:
        for wrong in (Request(request.layer, (0, 0)), Request(request.layer, (4,)), Request(3, (0,))):
            with pytest.raises(ArgumentError):
                rig.ask(wrong)
        rig.ask(request)
    rig.check(requests)
    rig.close()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_the_account(memory: Any) -> None:
    """What the engine counts is what its trace says, and the bytes are those that the device was asked to copy."""
    arrangement = Arrangement(4, 8, 2, 3, memory)
    rig = Rig(arrangement)
    copied = {"to device": 0, "to host": 0}
    before = sum(record.kind == "copy" for record in rig.device.log)
    for request in walk(arrangement, 4, 80):
        rig.ask(request)
    rig.device.finish()
    for record in [record for record in rig.device.log if record.kind == "copy"][before:]:
        copied[record.engine] += NBYTES
    account, kinds = rig.engine.account, [event.kind for event in rig.events]
    assert (account.hits, account.loads, account.staged) == tuple(map(kinds.count, ("hit", "load", "stage")))
    assert account.dropped == kinds.count("drop") and account.promoted == kinds.count("promote") - kinds.count("load")
    assert {"to device": account.bytes_to_device, "to host": account.bytes_to_host} == copied
    assert min(account.hits, account.loads, account.promoted, account.dropped) > 0
    assert (account.bytes_to_host > 0) == (memory == "swap")
    rig.check()


@pytest.mark.parametrize(("memory", "waits"), [("mirror", [1, 0, 1, 2, 2, 1, 2]), ("swap", [2, 0, 6, 2, 6, 3, 6])])
def test_no_wait_without_a_reason(memory: Any, waits: list[int]) -> None:
    """Streams wait for what they depend on and for nothing else; the counts were computed by hand. An expert's kernels
    wait for its copy, once; a copy waits for the kernels that ran in its storage since it was written. In swap mode the
    victim's copy back waits for the victim's and the newcomer's arrival, and copies into its storage and out of its
    place wait for it."""
    rig = Rig(Arrangement(2, 4, 1, 1, memory), device=SimDevice(slow_machine(1.0), on_unwritten="raise"))
    found = []
    for request in [
        Request(0, (1,)),
        Request(0, (1,)),  # a hit
        Request(0, (2,), (3,)),  # a guess that is wrong
        Request(1, (2,)),
        Request(0, (3,), (3,)),  # and one that is right
        Request(1, (3,)),
        Request(0, (2, 3)),
    ]:
        before = rig.device.calls_by_kind.get("wait", 0)
        rig.ask(request)
        found.append(rig.device.calls_by_kind["wait"] - before)
    assert found == waits
    rig.check()


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_a_long_run_keeps_nothing(memory: Any) -> None:
    """An expert that is guessed wrongly many times leaves nothing behind, nor does one that is always resident."""
    rig = Rig(Arrangement(2, 4, 1, 2, memory), rows=1000, record=False, rates=Rates(1.0, float, float))
    sizes = []
    for _ in range(200):
        rig.run(0, (0, 2), (3, 1))
        rig.run(1, (0,))
        rig.wait()
        engine = rig.engine
        storages = sum(len(storage.seen) + len(storage.read) for storage in engine._all_storage())
        sizes.append(storages + len(engine._on_host._pending) + len(engine.requests))
    assert max(sizes[10:]) <= max(sizes[:10])
    gc.collect()
    assert sum(isinstance(thing, SimEvent) for thing in gc.get_objects()) < 100
    rig.close()


def test_requests_need_not_be_kept() -> None:
    """A program that runs for days keeps no list of what it asked for."""
    rig = Rig(Arrangement(1, 4, 2), record=False)
    rig.run(0, [1])
    assert rig.engine.requests == [] and rig.engine.account.loads == 1


# **Memory.**


def test_slots_are_as_many_as_fit_in_pieces() -> None:
    """A run of bytes that is large counts in pieces of two MiB: what is chosen fits, and one slot more would not."""
    for expert_bytes in (300, 70_000, PIECE - 1, 3 * PIECE + 1):
        need = Need(0, 3, 8, expert_bytes, 4)
        needs = [charge(device_bytes(Arrangement(3, 8, slots), expert_bytes)) for slots in range(1, 9)]
        for budget in {need + more for need in needs for more in (-1, 0, 1, PIECE - 1)} - {needs[0] - 1}:
            fitting = sum(need <= budget for need in needs)
            assert need.slots(budget) == fitting, (expert_bytes, budget)
        with pytest.raises(ArgumentError, match=f"at least {needs[0]}"):
            need.slots(needs[0] - 1)


def test_slots_within_a_budget() -> None:
    """k is the most that fits, to the byte, and never more than there are experts; too little is refused."""
    need = Need(0, 3, 8, 300, 4)
    for slots in (1, 2, 5, 8):
        arrangement = Arrangement(3, 8, slots, 4)
        needed = device_bytes(arrangement, 300)
        assert need.slots(needed) == slots
        if slots > 1:
            assert need.slots(needed - 1) == slots - 1
    assert need.slots(1 << 40) == 8
    with pytest.raises(ArgumentError, match="at least 3584"):
        need.slots(3583)


@pytest.mark.parametrize("memory", ["mirror", "swap"])
def test_one_byte_too_few(memory: Any) -> None:
    """A budget one alignment short of what the engine needs is refused, and nothing is kept."""
    arrangement = Arrangement(3, 4, 2, 2, memory)
    device = SimDevice(budget=device_bytes(arrangement, NBYTES) - 1)
    with pytest.raises(DeviceMemoryError, match="expert slots"):
        Engine(device, arrangement, NBYTES, device.stream("compute"))
    assert device.leaks() == ()


def test_too_little_pinned_memory() -> None:
    """Where the host cannot pin the places of the last layer, all other memory is released."""
    arrangement = Arrangement(3, 4, 2, 2)
    device = SimDevice(host_memory=3 * 4 * 256 - 1)
    with pytest.raises(DeviceMemoryError, match="experts of layer 2"):
        Engine(device, arrangement, NBYTES, device.stream("compute"))
    assert device.leaks() == ()


def test_what_is_pinned() -> None:
    """Mirror pins every expert; swap only those that do not begin on the device, and one more while it is filled."""
    for memory, places in (("mirror", 3 * 4), ("swap", 3 * 2)):
        rig = Rig(Arrangement(3, 4, 2, 2, memory), fill=False)  # type: ignore[arg-type]  # one of the two
        before = rig.device.pinned
        rig.engine.fill(1, 0, expert_data(1, 0))
        assert rig.device.pinned == before + (256 if memory == "swap" else 0)
        rig.fill()
        assert rig.device.pinned - stride(400 * NBYTES) == places * 256
        rig.engine.reset()
        rig.check_storage()
        rig.close()


def test_filling_is_checked() -> None:
    """Wrong sizes, experts that there are not, filling twice, and running before all are there are refused by name."""
    rig = Rig(Arrangement(2, 3, 1, 2, "swap"), fill=False)
    with pytest.raises(ArgumentError, match="without expert 0 of layer 0"):
        rig.run(0, [0])
    for layer, expert, data, name in [
        (2, 0, expert_data(0, 0), "layer"),
        (0, 3, expert_data(0, 0), "expert"),
        (0, 0, expert_data(0, 0)[:-1].copy(), "data"),
        (0, 0, expert_data(0, 0, 2 * NBYTES)[::2], "data"),
    ]:
        with pytest.raises(ArgumentError, match=name):
            rig.engine.fill(layer, expert, data)
    rig.fill()
    with pytest.raises(ArgumentError, match="which was filled already"):
        rig.engine.fill(1, 2, expert_data(1, 2))
    rig.run(0, [0, 1])
    rig.check()
    rig.close()


def test_blobs_of_any_type() -> None:
    """A expert_data is bytes: an array of words is taken as it lies."""
    device = SimDevice(on_unwritten="raise")
    engine = Engine(device, Arrangement(1, 1, 1, 1), 16, device.stream("compute"))
    engine.fill(0, 0, np.arange(4, dtype=np.uint32))
    seen = list[int]()
    engine.run(0, [0], [], lambda expert, span, stream: seen.append(span.nbytes))
    assert seen == [16]
    engine.close()
    engine.close()
    assert device.leaks() == ()
