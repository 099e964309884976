"""Mistakes that engines like this one make, planted into it one at a time: each is caught without a GPU.

What catches them is one examination: a run like a program's, under both memories, in three schedules, whose events,
bytes, order and copies are looked at. The engine as it is passes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from engine_failures import LATER, check_each_call, swapped
from engine_rig import Rig, slow_machine
from engine_runs import walk
from engine_timing import (
    check_a_prompt_streams,
    check_a_right_guess,
    check_a_wrong_guess,
    check_both_ways_at_once,
    check_copies_in_the_order_of_the_trace,
    check_hits_run_during_the_first_copy,
)

from lowbit.moe.offload import Arrangement, Event, Request, Trace
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.placement import Buffers, LayerCache, Placement, Waiting
from lowbit_cuda.engine.storage import DeviceStorage, ExpertStorage
from lowbit_cuda.engine.transfers import Transfers
from lowbit_cuda.port import DevicePort, Stream
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.order import RaceError

Patch = Callable[[pytest.MonkeyPatch], None]


ARRANGEMENTS = [
    (Arrangement(3, 6, 2, 2), walk(Arrangement(3, 6, 2, 2), 7, 45)),
    (Arrangement(1, 3, 1, 4), [Request(0, (number % 2,)) for number in range(6)]),  # what has gone comes again
]


def examine() -> None:
    """Look at everything that an engine promises while nothing fails, on a device that is far behind its host."""
    for arrangement, requests in ARRANGEMENTS:
        for memory in (arrangement, swapped(arrangement)):
            for schedule in ("eager", "late", "random"):
                device = SimDevice(slow_machine(1.0), schedule=schedule, seed=2, on_unwritten="raise")
                rig = Rig(memory, device=device)
                for request in requests:
                    rig.ask(request)
                rig.check(requests)
                rig.check_storage()
                rig.close()


def examine_failures() -> None:
    """Look at what is left when something fails."""
    for kind, part in product(("error", "interrupt", "late"), range(len(LATER))):
        check_each_call(kind, "swap", "eager", part)


def examine_time() -> None:
    """Look at what is copied when."""
    check_a_right_guess(0.5, 0.25)
    check_a_wrong_guess(0.5, 0.25)
    check_hits_run_during_the_first_copy()
    check_a_prompt_streams("mirror", 1, 0.25)
    check_both_ways_at_once()
    check_copies_in_the_order_of_the_trace()


def test_the_engine_as_it_is_passes() -> None:
    """Otherwise nothing below would mean anything. (That it passes with failures is what the tests of these say.)"""
    examine()
    examine_time()


# **Waits that are forgotten.** The simulation calls them races, in every schedule.


def no_wait_for_the_load(patch: pytest.MonkeyPatch) -> None:
    """Kernels run without waiting for their expert's copy."""
    original = Transfers._before_reading

    def careless(transfers: Transfers, storage: ExpertStorage, stream: Stream) -> None:
        if stream is not transfers.compute:
            original(transfers, storage, stream)

    patch.setattr(Transfers, "_before_reading", careless)


def eviction_in_use(patch: pytest.MonkeyPatch) -> None:
    """A copy overwrites an expert whose kernels may still run."""
    patch.setattr(Transfers, "_before_writing", lambda transfers, storage, stream: None)


def eviction_waits_for_the_newcomer_only(patch: pytest.MonkeyPatch) -> None:
    """The kernels of a resident are forgotten when they were hits."""

    def compute_with(transfers: Transfers, expert: int, storage: ExpertStorage, work: Any) -> None:
        fresh = transfers.compute not in storage.seen
        transfers._before_reading(storage, transfers.compute)
        work(expert, storage.span, transfers.compute)
        if fresh:
            storage.read[id(transfers.compute)] = transfers.compute, transfers._port.record(transfers.compute)

    patch.setattr(Transfers, "compute_with", compute_with)


def back_before_the_newcomer_arrived(patch: pytest.MonkeyPatch) -> None:
    """Under swap the victim overwrites the newcomer's place while that is still being copied from."""
    original = Transfers._before_writing

    def careless(transfers: Transfers, storage: ExpertStorage, stream: Stream) -> None:
        if stream is not transfers.to_host:
            original(transfers, storage, stream)

    patch.setattr(Transfers, "_before_writing", careless)


def load_before_it_is_back(patch: pytest.MonkeyPatch) -> None:
    """Under swap an expert is loaded again from its place while it is still being copied there."""
    original = Transfers._before_reading

    def careless(transfers: Transfers, storage: ExpertStorage, stream: Stream) -> None:
        if storage.on_device or stream is not transfers.to_device:
            original(transfers, storage, stream)

    patch.setattr(Transfers, "_before_reading", careless)


def marks_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The event that says "arrived" is recorded before the copy."""
    original = Transfers.copy

    class Early:
        """A port that records too early."""

        def __init__(self, port: DevicePort) -> None:
            self._port, self._early = port, list[Any]()

        def copy(self, target: Any, source: Any, stream: Stream) -> None:
            self._early.append(self._port.record(stream))
            self._port.copy(target, source, stream)

        def record(self, stream: Stream) -> Any:
            return self._early.pop()

        def wait(self, stream: Stream, event: Any) -> None:
            self._port.wait(stream, event)

    def copy(transfers: Transfers, expert: Any, target: ExpertStorage, source: ExpertStorage) -> Any:
        port = transfers._port
        transfers._port = Early(port)  # type: ignore[assignment]  # all of it that a copy uses
        try:
            return original(transfers, expert, target, source)
        finally:
            transfers._port = port

    patch.setattr(Transfers, "copy", copy)


def block_free_too_early(patch: pytest.MonkeyPatch) -> None:
    """A staging buffer's storage counts as free as soon as its copy was asked for, and is used again."""
    original = DeviceStorage.take

    def take(device_storage: DeviceStorage) -> ExpertStorage:
        storage = original(device_storage)
        device_storage._free.appendleft(storage)
        return storage

    patch.setattr(DeviceStorage, "take", take)


@pytest.mark.parametrize(
    "bug",
    [
        no_wait_for_the_load,
        eviction_in_use,
        eviction_waits_for_the_newcomer_only,
        back_before_the_newcomer_arrived,
        load_before_it_is_back,
        marks_before_the_copy,
    ],
)
def test_a_missing_wait(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found as a race, when the second of the two operations is asked for."""
    bug(monkeypatch)
    with pytest.raises(Exception, match="race on bytes") as caught:
        examine()
    assert isinstance(caught.value, RaceError) or isinstance(caught.value.__cause__, RaceError)


# **Decisions that are wrong**, and decisions that are carried out wrongly: events or bytes are not what they should be.


def wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """A promotion puts its storage into the slot of another layer."""

    def promote(engine: Engine, event: Event) -> None:
        assert event.slot is not None and event.buffer is not None
        layer = (event.layer + 1) % engine.arrangement.layers
        engine._in_slot[layer][event.slot] = engine._in_buffer.pop(event.buffer)

    patch.setattr(Engine, "_promote", promote)


def guess_for_the_wrong_layer(patch: pytest.MonkeyPatch) -> None:
    """A guess is copied from this layer's experts instead of the next layer's."""
    original = Engine._fetch

    def fetch(engine: Engine, event: Event) -> None:
        if event.kind == "stage":
            fields = {**vars(event), "layer": event.layer - 1}
            event = Event(**fields)
        original(engine, event)

    patch.setattr(Engine, "_fetch", fetch)


def hits_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """The order of LRU is that of loading, not of running."""
    patch.setattr(LayerCache, "run", lambda cache, expert: cache._slot_of[expert])


def last_used_goes(patch: pytest.MonkeyPatch) -> None:
    """The paper's sentence taken at its word: the least recently used are kept (errata M1)."""
    original = LayerCache.admit

    def admit(cache: LayerCache, expert: int) -> Any:
        if not cache._free:
            cache._slot_of.move_to_end(next(reversed(cache._slot_of)), last=False)
        return original(cache, expert)

    patch.setattr(LayerCache, "admit", admit)


def staged_before_loaded(patch: pytest.MonkeyPatch) -> None:
    """Guesses are decided on before this layer's own experts are loaded."""
    original = Placement._decide

    def decide(placement: Placement, request: Request) -> Iterator[Any]:
        decided = list(original(placement, request))
        return iter(sorted(decided, key=lambda fields: fields[0] != "stage"))

    patch.setattr(Placement, "_decide", decide)


def wrong_guesses_stay(patch: pytest.MonkeyPatch) -> None:
    """Guesses of a layer that has run are not dropped."""
    original = Placement._drop

    def drop(placement: Placement, unused: Sequence[Waiting], cause: str) -> Any:
        return original(placement, unused if cause != "unused" else [], cause)

    patch.setattr(Placement, "_drop", drop)


def not_copied_back(patch: pytest.MonkeyPatch) -> None:
    """Under swap the victim is evicted and its bytes are forgotten."""

    def evict(engine: Engine, event: Event) -> None:
        engine._device_storage.give(engine._storage(event))

    patch.setattr(Engine, "_evict", evict)


def buffer_taken_twice(patch: pytest.MonkeyPatch) -> None:
    """Any buffer is taken, whether it is free or not."""
    patch.setattr(Buffers, "full", property(lambda buffers: False))


@pytest.mark.parametrize(
    "bug",
    [
        wrong_layer,
        guess_for_the_wrong_layer,
        hits_do_not_count,
        last_used_goes,
        staged_before_loaded,
        wrong_guesses_stay,
        not_copied_back,
        buffer_taken_twice,
        block_free_too_early,
    ],
)
def test_a_wrong_decision(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its events, by bytes that are another expert's, or because what it speaks of is not there."""
    bug(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        examine()


# **Time.** The events are right and the bytes are right, and yet.


def staged_too_early(patch: pytest.MonkeyPatch) -> None:
    """Guesses are decided on in time, and copied before the experts that this layer waits for."""
    decide, bring = Placement.step, Engine._fetch
    engines, early = list[Engine](), dict[tuple[int, int], ExpertStorage]()

    def run(engine: Engine, request: Request, work: Any) -> Trace:
        engines[:] = [engine]
        return carry_out(engine, request, work)

    def step(placement: Placement, request: Request) -> Trace:
        events, engine = decide(placement, request), engines[0]
        for event in events:
            if event.kind == "stage":
                assert event.host is not None
                storage = early[event.layer, event.expert] = engine._device_storage.take()
                place = engine._places[event.layer][event.host]
                engine._transfers.copy((event.layer, event.expert), storage, place)
        return events

    def already(engine: Engine, event: Event) -> None:
        if event.kind == "load":
            bring(engine, event)
        else:
            assert event.buffer is not None
            engine._in_buffer[event.buffer] = early.pop((event.layer, event.expert))

    carry_out = Engine._carry_out
    patch.setattr(Engine, "_carry_out", run)
    patch.setattr(Placement, "step", step)
    patch.setattr(Engine, "_fetch", already)


def staged_too_late(patch: pytest.MonkeyPatch) -> None:
    """Guesses are copied when the layer has run."""
    original = Engine._fetch

    def fetch(engine: Engine, event: Event) -> None:
        if event.kind == "stage":
            transfers = engine._transfers
            engine._port.wait(transfers.to_device, engine._port.record(transfers.compute))
        original(engine, event)

    patch.setattr(Engine, "_fetch", fetch)


def always_the_same_block(patch: pytest.MonkeyPatch) -> None:
    """The storage that became free last is taken first, so that each copy waits for the kernels before it."""
    patch.setattr(DeviceStorage, "take", lambda device_storage: device_storage._free.pop())


def one_stream_for_copies(patch: pytest.MonkeyPatch) -> None:
    """Copies back share the stream of copies to the device, and hold them up."""
    original = Transfers.__init__

    def init(transfers: Transfers, *arguments: Any) -> None:
        original(transfers, *arguments)
        transfers.to_host = transfers.to_device

    patch.setattr(Transfers, "__init__", init)


def waits_for_each_copy(patch: pytest.MonkeyPatch) -> None:
    """The host waits for each copy before it asks for anything else."""
    original = Transfers.copy

    def copy(transfers: Transfers, *arguments: Any) -> Any:
        arrived = original(transfers, *arguments)
        transfers._port.synchronize(arrived)
        return arrived

    patch.setattr(Transfers, "copy", copy)


@pytest.mark.parametrize(
    "bug", [staged_too_early, staged_too_late, always_the_same_block, one_stream_for_copies, waits_for_each_copy]
)
def test_a_waste_of_time(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the virtual clock."""
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        examine_time()


# **Failures** after which something is believed that is not so.


def believed_after_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    """Storage is said to hold what it held before, although a copy into it was issued and interrupted."""
    original = Transfers.copy

    def copy(transfers: Transfers, expert: Any, target: ExpertStorage, source: ExpertStorage) -> Any:
        before = target.holds
        try:
            return original(transfers, expert, target, source)
        except BaseException:
            target.holds = before
            raise

    patch.setattr(Transfers, "copy", copy)


def failed_copy_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    """A copy that was issued counts as done, whether or not its event was reached."""
    original = ExpertStorage.settle

    def settle(storage: ExpertStorage, port: DevicePort) -> None:
        storage.written = None
        original(storage, port)

    patch.setattr(ExpertStorage, "settle", settle)


def does_not_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """After a failure the engine goes on where it was."""
    original = Engine.run

    def run(engine: Engine, *arguments: Any, **options: Any) -> Trace:
        engine._consistent = engine._consistent or bool(engine._in_slot)
        return original(engine, *arguments, **options)

    patch.setattr(Engine, "run", run)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (believed_after_an_interrupt, AssertionError),
        (failed_copy_taken_for_done, AssertionError),
        (does_not_begin_anew, IndexError),  # of its own books, which no longer agree
    ],
)
def test_a_false_belief(bug: Patch, found: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by letting every call fail in turn; while nothing fails all of these are right."""
    bug(monkeypatch)
    examine()
    with pytest.raises(found):
        examine_failures()
