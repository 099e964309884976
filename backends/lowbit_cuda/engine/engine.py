"""The engine: experts that do not fit into device memory are copied there and run.

This is section 3 of the paper. For every layer the model asks the engine to run the experts that its gate has chosen
(`Engine.run`). The *placement* turns the request into a list of events (§3.1, §3.2), and the engine carries them out in
order:

======== ==============================================================================================
hit      launch the expert's kernels in the compute stream
load     issue its copy from the host, in the copy stream, into free device storage
evict    take the storage from its slot; in swap mode issue its copy back to the host, in a third stream
promote  give the staging buffer's storage to the slot; launch the expert's kernels, which wait for the copy
stage    issue the copy of a guessed expert, behind the copies of this layer
drop     mark the storage of a guessed expert as free
======== ==============================================================================================

So resident experts run while the first copy is in progress, each newcomer runs while the next one is copied, and
guessed experts are copied while the layer computes and during the next layer's attention (§3.2). A promotion moves no
bytes. A prompt that needs more experts than there are slots streams through the storage in the same way: each expert is
copied once.

**The host never waits here**, with three exceptions: in `fill`, in `reset`, and for an expert that the host is to
compute while it is still being copied back.

**Errors.** `run` raises an `EngineError` that says what was being done, and lets every other exception through, for
example a `KeyboardInterrupt`. The placement and the device may then disagree. Nothing leaks, and the engine starts
again with the next `run`, which must be for layer 0, or with `reset`: it waits for the device, forgets what is cached,
in swap mode returns every expert to its initial place (`lowbit_cuda.engine.recovery`), and starts a new trace with
empty `requests`. If the device reports an error elsewhere, for example while the caller waits for its own work, the
error may concern the engine's copies; the caller must then call `reset`.

**A lost device.** A GPU whose work has failed is lost to the process, and nothing can start again. The call that learns
of it raises an `EngineLostError`, and so does every later call, immediately, with the first error in its text. `close`
still releases what it can. In swap mode the same error follows when the only copy of an expert was destroyed.

Source: MoE offloading §3.1 to §3.3; errata M1 to M5.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Self

from lowbit.arrays import Array
from lowbit.backend.whole_model import PREFETCHES, Prefetch
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement, Event, Request, Trace, check_request
from lowbit_cuda.engine.account import Account, EngineError, EngineLostError
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.filling import Filling
from lowbit_cuda.engine.on_host import ComputeOnHost, OnHost
from lowbit_cuda.engine.placement import Placement
from lowbit_cuda.engine.prefetch_trial import TrialSchedule
from lowbit_cuda.engine.recovery import Inventory, inventories, missing, recover
from lowbit_cuda.engine.storage import DeviceStorage, ExpertStorage, HostStorage
from lowbit_cuda.engine.token_timer import TokenTimer
from lowbit_cuda.engine.transfers import Transfers, Work
from lowbit_cuda.port import DeviceError, DeviceLostError, DevicePort, Stream, finish_after_failure


class Engine:
    """The experts of one model on one device.

    Attributes:
        arrangement: layers, experts, slots, staging buffers and memory mode.
        expert_bytes: bytes of one expert.
        requests: the requests since the start or the last `reset`, with guesses where they were used;
            `lowbit.moe.offload.trace` of these is the trace of all calls of `run` since then.
        account: counts of what was done.
    """

    def __init__(
        self,
        port: DevicePort,
        arrangement: Arrangement,
        expert_bytes: int,
        stream: Stream,
        *,
        prefetch: Prefetch = "auto",
        trial_schedule: TrialSchedule | None = None,
        rates: Rates | None = None,
        record: bool = True,
    ) -> None:
        """Allocate device storage and pin the host's places; afterwards each expert is filled once (`fill`).

        Args:
            port: the device.
            arrangement: layers, experts, slots, staging buffers and memory mode.
            expert_bytes: bytes of one expert, at least 1.
            stream: the stream in which kernels run.
            prefetch: ``on`` always uses guesses, ``off`` never; ``auto`` measures whether they pay.
            trial_schedule: how ``auto`` measures.
            rates: the speed of this machine; with it, the host may compute missing experts in a `run` that offers to.
                The host rounds differently from the device, so this is off by default.
            record: False keeps no `requests`, which otherwise grow by a few hundred bytes with each layer of a token.

        Raises:
            ArgumentError: a number is out of range, or a choice is unknown.
            DeviceMemoryError: the budget cannot hold the experts, or the host cannot pin its places; nothing is kept.
        """
        check_integer("expert_bytes", expert_bytes, least=1)
        check_choice("prefetch", prefetch, PREFETCHES)
        self.arrangement, self.expert_bytes = arrangement, expert_bytes
        self.requests, self.account = list[Request](), Account()
        self._port, self._record = port, record
        self._transfers = Transfers(port, stream)
        self._timer = TokenTimer(port, stream, prefetch, trial_schedule or TrialSchedule(), self.account)
        self._device_storage = DeviceStorage(port, arrangement, expert_bytes)
        try:
            self._host = HostStorage(port, arrangement, expert_bytes)
        except BaseException:
            self._device_storage.close()
            raise
        self._filling = Filling(port, arrangement, self._host, self._device_storage, self._transfers)
        self._on_host = OnHost(port, rates, expert_bytes)
        self._lost: EngineLostError | None = None
        self._consistent = False  # whether the placement describes the device
        self._operation: tuple[str, int | None, int | None] = ("starting", None, None)
        self._placement, self._layer = Placement(arrangement), -1
        self._in_slot: list[dict[int, ExpertStorage]] = []
        self._in_buffer: dict[int, ExpertStorage] = {}
        self._places: list[list[ExpertStorage]] = []

    # What a model calls.

    def fill(self, layer: int, expert: int, data: Array) -> None:
        """Store an expert's bytes; each expert once and all before the first `run`, in any order.

        In swap mode the experts that start on the device are copied there through a pinned staging buffer, which is
        released after the last of them.

        Args:
            layer: from 0.
            expert: from 0.
            data: C-contiguous, of `expert_bytes` bytes, any dtype.

        Raises:
            ArgumentError: the expert does not exist or was filled already, or `data` has a wrong size.
            EngineError: the device failed; the expert was not stored and can be filled again.
        """
        with self._explained():
            self._operation = "filling", layer, expert
            self._filling.fill(layer, expert, data)

    def run(
        self,
        layer: int,
        needed: Iterable[int],
        guesses: Iterable[int],
        work: Work,
        *,
        tokens: Mapping[int, int] | None = None,
        compute_on_host: ComputeOnHost | None = None,
    ) -> Trace:
        """Run the experts that a layer needs, and copy those that the next layer will probably need.

        It returns when all work has been issued, not when it has been done.

        Args:
            layer: layers are run in order from 0; layer 0 starts a new pass at any time.
            needed: the experts, distinct.
            guesses: experts of the next layer, likeliest first; ignored while prefetching is off.
            work: called with the number of each needed expert, its buffer on the device and the stream; launches the
                kernels that read the buffer. It is called in the order of the trace.
            tokens: the number of tokens of each needed expert, where it is not 1.
            compute_on_host: called with the number of an expert and its buffer on the host, uint8 and read only;
                computes the expert there. Called only if the engine has `rates`, and after all other work was issued.

        Returns:
            The events, equal to those of `lowbit.moe.offload` for `requests`.

        Raises:
            ArgumentError: the request is invalid, or an expert was not filled; nothing has changed.
            EngineError: the device failed; the top of this file says what holds then.
        """
        with self._explained():
            if not self._consistent:
                self.reset()
            needed, offered = tuple(needed), tuple(guesses)
            tokens = {} if tokens is None else tokens
            request = Request(layer, needed, offered)
            check_request(request, self.arrangement, self._layer)
            self._consistent = False
            self._operation = "starting a pass", None, None
            if layer == 0:
                self._timer.begin()
            computed = self._choose(layer, needed, tokens) if compute_on_host else ()
            used = self._timer.guesses(offered, max(tokens.values(), default=1))
            if computed or used is not offered:
                request = Request(layer, tuple(expert for expert in needed if expert not in computed), used)
            events = self._carry_out(request, work)
            if layer == self.arrangement.layers - 1:
                self._timer.end()
            if compute_on_host:
                self._compute_on_host(layer, computed, compute_on_host)
            self._layer = layer
            if self._record:
                self.requests.append(request)
            self.account.add(events, self.expert_bytes, len(computed))
            self._consistent = True
            return events

    def reset(self) -> None:
        """Return to the initial state: an empty cache and an empty trace, and in swap mode the initial placement.

        Waits for the device. It can be called at any time, and again after it failed.

        Raises:
            ArgumentError: an expert was not filled.
            EngineLostError: in swap mode, the only copy of an expert was destroyed; the model must be loaded again.
            EngineError: the device failed.
        """
        with self._explained():
            self._consistent = False
            self._operation = "waiting for the device", None, None
            finish_after_failure(self._port)
            for storage in self._all_storage():
                storage.settle(self._port)
            found = inventories(self._host.places, self._device_storage.all)
            self._check_complete(found)
            self._operation = "returning experts to their places", None, None
            if self.arrangement.memory == "swap":
                recover(self._transfers, self._device_storage.all, found, self.arrangement.slots)
            self._begin(found)
            self._consistent = True

    def close(self) -> None:
        """Release all memory; a failure to free one part does not stop the others. Closing twice is harmless."""
        self._consistent = False
        with ExitStack() as rest:
            for part in (self._device_storage, self._host, self._filling):
                rest.callback(part.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Carrying out events.

    def _carry_out(self, request: Request, work: Work) -> Trace:
        events = self._placement.step(request)
        for event in events:
            if event.kind == "hit":
                self._compute(event, work)
            elif event.kind in ("load", "stage"):
                self._fetch(event)
            elif event.kind == "evict":
                self._evict(event)
            elif event.kind == "promote":
                self._promote(event)
                self._compute(event, work)
            else:
                self._drop(event)
        return events

    def _compute(self, event: Event, work: Work) -> None:
        self._operation = "running", event.layer, event.expert
        self._transfers.compute_with(event.expert, self._storage(event), work)

    def _fetch(self, event: Event) -> None:
        self._operation = "loading" if event.kind == "load" else "prefetching", event.layer, event.expert
        assert event.buffer is not None and event.host is not None
        storage = self._in_buffer[event.buffer] = self._device_storage.take()
        arrived = self._transfers.copy((event.layer, event.expert), storage, self._places[event.layer][event.host])
        self._on_host.expect(arrived)

    def _evict(self, event: Event) -> None:
        """The next copy into the storage waits for the victim's kernels and, in swap mode, for its copy back."""
        storage = self._storage(event)
        if event.host is not None:
            self._operation = "copying back", event.layer, event.expert
            self._transfers.copy((event.layer, event.expert), self._places[event.layer][event.host], storage)
        self._device_storage.give(storage)

    def _promote(self, event: Event) -> None:
        assert event.slot is not None and event.buffer is not None
        self._in_slot[event.layer][event.slot] = self._in_buffer.pop(event.buffer)

    def _drop(self, event: Event) -> None:
        assert event.buffer is not None
        self._device_storage.give(self._in_buffer.pop(event.buffer))

    def _storage(self, event: Event) -> ExpertStorage:
        assert event.slot is not None
        return self._in_slot[event.layer][event.slot]

    # Experts that the host computes.

    def _choose(self, layer: int, needed: tuple[int, ...], tokens: Mapping[int, int]) -> tuple[int, ...]:
        self._operation = "choosing what the host computes", None, None
        locations = {expert: self._placement.location(layer, expert) for expert in sorted(needed)}
        return self._on_host.choose(locations, tokens)

    def _compute_on_host(self, layer: int, experts: tuple[int, ...], function: ComputeOnHost) -> None:
        for expert in experts:
            self._operation = "computing on the host", layer, expert
            place = self._placement.host(layer, expert)
            assert place is not None
            self._on_host.compute(layer, expert, self._places[layer][place], function)

    # Starting again.

    def _check_complete(self, found: Sequence[Inventory]) -> None:
        for layer, expert in missing(found, self.arrangement.experts):
            if self._filling.complete:
                self._operation = "restoring", layer, expert
                raise DeviceLostError("a copy that failed destroyed its only copy; load the model again")
            raise ArgumentError("experts", f"without expert {expert} of layer {layer}", "each filled before a run")

    def _begin(self, found: Sequence[Inventory]) -> None:
        self._placement, self._layer = Placement(self.arrangement), -1
        self.requests = []
        self._in_buffer, self._in_slot = {}, [{} for _ in range(self.arrangement.layers)]
        self._places = [list(places) for places in self._host.places]
        if self.arrangement.memory == "swap":
            for layer, inventory in enumerate(found):
                self._in_slot[layer] = inventory.on_device
                self._places[layer] = [inventory.on_host[expert] for expert in sorted(inventory.on_host)]
        self._device_storage.free_all_but(storage for slots in self._in_slot for storage in slots.values())
        self._on_host.forget()

    def _all_storage(self) -> Iterator[ExpertStorage]:
        return chain(self._device_storage.all, *self._host.places)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the current operation to errors of the device; refuse every operation on a lost device."""
        if self._lost is not None:
            raise EngineLostError("using the engine", None, None, f"it is lost: {self._lost}")
        try:
            yield
        except EngineError:
            raise
        except DeviceLostError as error:
            self._lost = EngineLostError(*self._operation, error)
            raise self._lost from error
        except DeviceError as error:
            raise EngineError(*self._operation, error) from error
