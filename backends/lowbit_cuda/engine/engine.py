"""The engine: experts that do not fit, brought to a device and run there.

The paper's section 3, step by step. For every layer the model asks the engine to run the experts that its gate has
chosen (`Engine.run`). The *placement* decides what that brings about, as a list of events (§3.1, §3.2); the engine does
what each event says, in this order, and moves nothing else:

======== ==============================================================================================
hit      the expert's kernels are given to the compute stream
load     its copy from the host is given to the copy stream, into a block that is free
evict    its slot loses its block; under swap a copy back to the host is given to a stream of its own
promote  the buffer's block becomes the slot's, and the expert's kernels wait in the compute stream for the copy
stage    the copy of a guess is given to the copy stream, behind those of this layer
drop     a guess's block is free again
======== ==============================================================================================

So the experts that are there run while the first copy is on its way, each newcomer runs while the next one comes, and
guesses are copied while the layer computes and the next layer's attention after it (§3.2). A promotion moves no bytes.
A prompt that needs more experts than there are slots streams through the blocks in the same way: each is copied once.

**The host never waits here**, with three exceptions: to fill (`fill`), to begin again (`reset`), and for an expert that
it is to compute itself while that is still being copied back.

**When something fails**, `run` raises an `EngineError` that says what was being done, or lets through what came from
elsewhere, an interrupt for example. The engine then knows that its decisions and the device may have parted. It holds
what it held, leaks nothing, and begins again with the next `run`, which must be for layer 0, or with `reset`: it waits
for the device, forgets what is cached, under swap brings every expert back to where it began
(`lowbit_cuda.engine.journal`, `lowbit_cuda.engine.recovery`), and the trace and `requests` begin anew. An error that
the device tells elsewhere, when the caller waits for its own work for example, may be of the engine's copies: then
`reset` is the caller's to call.

**When the device is lost**, as a GPU is whose work has failed, nothing can begin again. The call that learns of it
raises an `EngineLostError`, and so does every later one, at once, with the first error in its text. `close` still gives
back what it can.

Source: MoE offloading §3.1 to §3.3; errata M1 to M5.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, Self

from lowbit.arrays import Array
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement, Event, Request, Trace, check_request
from lowbit_cuda.engine.account import Account, EngineError, EngineLostError
from lowbit_cuda.engine.blobs import Blocks, Home, HostMemory
from lowbit_cuda.engine.cost import Rates
from lowbit_cuda.engine.filling import Filling
from lowbit_cuda.engine.journal import Journal
from lowbit_cuda.engine.on_host import ComputeOnHost, OnHost
from lowbit_cuda.engine.pace import Pace
from lowbit_cuda.engine.placement import Placement
from lowbit_cuda.engine.recovery import Inventory, Recovery, inventories, missing
from lowbit_cuda.engine.speculation import Plan
from lowbit_cuda.engine.traffic import Traffic, Work
from lowbit_cuda.port import DeviceError, DeviceLostError, DevicePort, Stream

Prefetch = Literal["auto", "on", "off"]


class Engine:
    """Experts of one model on one device.

    Attributes:
        arrangement: what is placed where.
        blob_bytes: of one expert.
        requests: what was asked for since the beginning or the last `reset`, with guesses where they were used:
            `lowbit.moe.offload.trace` of these is the trace of all `run` since then.
        account: what was done, counted.
    """

    def __init__(
        self,
        port: DevicePort,
        arrangement: Arrangement,
        blob_bytes: int,
        stream: Stream,
        *,
        prefetch: Prefetch = "auto",
        plan: Plan | None = None,
        rates: Rates | None = None,
        on_note: Callable[[str], None] | None = None,
        record: bool = True,
    ) -> None:
        """Allocates blocks and pins the host's places; afterwards each expert is filled once (`fill`).

        Args:
            port: the device.
            arrangement: layers, experts, slots, buffers, and where experts lie.
            blob_bytes: of one expert, at least 1.
            stream: what kernels run on.
            prefetch: ``on`` and ``off`` use guesses always or never; ``auto`` finds out whether they pay.
            plan: how ``auto`` measures.
            rates: of this machine; with them, missing experts may be computed by the host in a `run` that offers it.
                The host's rounding differs from the device's, so this is off by default.
            on_note: is called with each sentence for the user.
            record: False keeps no `requests`, which otherwise grow by a few hundred bytes with each layer of a token.

        Raises:
            ArgumentError: a number out of range, or a wrong choice.
            DeviceMemoryError: the budget has no room for the blocks, or the host none for the places; nothing is kept.
        """
        check_integer("blob_bytes", blob_bytes, least=1)
        check_choice("prefetch", prefetch, ("auto", "on", "off"))
        self.arrangement, self.blob_bytes = arrangement, blob_bytes
        self.requests, self.account = list[Request](), Account()
        self._port, self._record = port, record
        journal = Journal() if arrangement.memory == "swap" else None
        self._traffic = Traffic(port, stream, journal)
        self._pace = Pace(port, stream, prefetch, plan, self.account, on_note)
        self._blocks = Blocks(port, arrangement, blob_bytes)
        try:
            self._host = HostMemory(port, arrangement, blob_bytes)
        except BaseException:
            self._blocks.close()
            raise
        self._journal = journal
        self._recovery = Recovery(self._traffic, self._blocks.all) if journal else None
        self._filling = Filling(port, arrangement, self._host, self._blocks, self._traffic)
        self._on_host = OnHost(port, rates, blob_bytes)
        self._lost: EngineLostError | None = None
        self._whole = False  # whether the placement is where the device is
        self._doing: tuple[str, int | None, int | None] = ("beginning", None, None)
        self._placement, self._layer = Placement(arrangement), -1
        self._in_slot: list[dict[int, Home]] = []
        self._in_buffer: dict[int, Home] = {}
        self._places: list[list[Home]] = []

    # What a model asks.

    def fill(self, layer: int, expert: int, data: Array) -> None:
        """Give the engine an expert, once; all of them before the first `run`, in any order.

        Under swap those that begin on the device are copied there through pinned memory, which is given back when the
        last of them is there.

        Args:
            layer: from 0.
            expert: from 0.
            data: C-contiguous, of `blob_bytes` bytes, any dtype.

        Raises:
            ArgumentError: an expert that there is not or that is there already; a wrong size.
            EngineError: the device failed; the expert is not there and can be filled again.
        """
        with self._explained():
            self._doing = "filling", layer, expert
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

        It returns when everything has been asked for, not when it has been done.

        Args:
            layer: from 0, one after the other; 0 begins a new pass at any time.
            needed: the experts, distinct.
            guesses: experts of the next layer, likeliest first; ignored while prefetching is switched off.
            work: is called with the number of each needed expert, its blob on the device and the stream, and gives
                the stream the kernels that read the blob. The order is that of the trace.
            tokens: for how many tokens each needed expert runs, where it is not one.
            compute_on_host: is called with the number of an expert and its blob on the host, uint8 and read only, and
                computes it there; only with `rates`, and after everything else was asked for.

        Returns:
            The events: those that `lowbit.moe.offload` gives for `requests`.

        Raises:
            ArgumentError: a wrong request, or an expert that was not filled; nothing has changed.
            EngineError: the device failed. See the top of this file for what then holds.
        """
        with self._explained():
            if not self._whole:
                self.reset()
            needed, offered = tuple(needed), tuple(guesses)
            tokens = {} if tokens is None else tokens
            request = Request(layer, needed, offered)
            check_request(request, self.arrangement, self._layer)
            self._whole = False
            self._doing = "beginning a pass", None, None
            if layer == 0:
                self._pace.begin()
            computed = self._choose(layer, needed, tokens) if compute_on_host else ()
            used = self._pace.guesses(offered, max(tokens.values(), default=1))
            if computed or used is not offered:
                request = Request(layer, tuple(expert for expert in needed if expert not in computed), used)
            events = self._carry_out(request, work)
            if layer == self.arrangement.layers - 1:
                self._pace.end()
            if compute_on_host:
                self._compute_on_host(layer, computed, compute_on_host)
            self._layer = layer
            if self._record:
                self.requests.append(request)
            self.account.add(events, self.blob_bytes, len(computed))
            self._whole = True
            return events

    def reset(self) -> None:
        """Begin again: nothing is cached, under swap every expert is where it was at first, and the trace is empty.

        Waits for the device. May be called at any time, and again where it failed.

        Raises:
            ArgumentError: an expert was not filled.
            EngineError: the device failed.
        """
        with self._explained():
            self._whole = False
            self._doing = "waiting for the device", None, None
            self._finish()
            found = inventories(self._host.places, self._blocks.all)
            self._check_complete(found)
            self._doing = "bringing experts back", None, None
            if self._recovery:
                self._recovery.run(found, self.arrangement.slots)
            self._begin(found)
            self._whole = True

    def close(self) -> None:
        """Give all memory back; what the device fails to take stops nothing else. Closing twice is harmless."""
        self._whole = False
        with ExitStack() as rest:
            for step in (self._blocks.close, self._host.close, self._filling.close):
                rest.callback(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What an event says, done.

    def _carry_out(self, request: Request, work: Work) -> Trace:
        if self._journal:
            self._doing = "looking at copies", None, None
            self._journal.settle(self._port)
        events = self._placement.step(request)
        for event in events:
            if event.kind == "hit":
                self._compute(event, work)
            elif event.kind in ("load", "stage"):
                self._bring(event)
            elif event.kind == "evict":
                self._evict(event)
            elif event.kind == "promote":
                self._promote(event)
                self._compute(event, work)
            else:
                self._drop(event)
        return events

    def _compute(self, event: Event, work: Work) -> None:
        self._doing = "running", event.layer, event.expert
        self._traffic.compute_with(event.expert, self._block(event), work)

    def _bring(self, event: Event) -> None:
        self._doing = "loading" if event.kind == "load" else "prefetching", event.layer, event.expert
        assert event.buffer is not None and event.host is not None
        block = self._in_buffer[event.buffer] = self._blocks.take()
        arrived = self._traffic.copy((event.layer, event.expert), block, self._places[event.layer][event.host])
        self._on_host.expect(arrived)

    def _evict(self, event: Event) -> None:
        """The victim has run. Who takes its block next waits for its kernels and, under swap, for its copy back."""
        block = self._block(event)
        if event.host is not None:
            self._doing = "taking back", event.layer, event.expert
            self._traffic.copy((event.layer, event.expert), self._places[event.layer][event.host], block)
        self._blocks.give(block)

    def _promote(self, event: Event) -> None:
        assert event.slot is not None and event.buffer is not None
        self._in_slot[event.layer][event.slot] = self._in_buffer.pop(event.buffer)

    def _drop(self, event: Event) -> None:
        assert event.buffer is not None
        self._blocks.give(self._in_buffer.pop(event.buffer))

    def _block(self, event: Event) -> Home:
        assert event.slot is not None
        return self._in_slot[event.layer][event.slot]

    # Experts that the host computes.

    def _choose(self, layer: int, needed: tuple[int, ...], tokens: Mapping[int, int]) -> tuple[int, ...]:
        self._doing = "choosing what the host computes", None, None
        where = {expert: self._placement.whereabouts(layer, expert) for expert in sorted(needed)}
        return self._on_host.choose(where, tokens)

    def _compute_on_host(self, layer: int, experts: tuple[int, ...], function: ComputeOnHost) -> None:
        for expert in experts:
            self._doing = "computing on the host", layer, expert
            place = self._placement.host(layer, expert)
            assert place is not None
            self._on_host.compute(layer, expert, self._places[layer][place], function)

    # Beginning.

    def _finish(self) -> None:
        """Wait until nothing is on its way, and learn where it ended."""
        try:
            self._port.finish()
        except DeviceLostError:
            raise
        except DeviceError:  # perhaps only the news of what has failed before
            self._port.finish()
        if self._journal:
            self._journal.resolve(self._port)
        for home in self._homes():
            home.settle()

    def _check_complete(self, found: Sequence[Inventory]) -> None:
        for layer, expert in missing(found, self.arrangement.experts):
            if self._filling.complete:
                self._doing = "looking for", layer, expert
                raise DeviceError("its bytes are lost; a new engine must be filled")
            raise ArgumentError("experts", f"without expert {expert} of layer {layer}", "each filled before a run")

    def _begin(self, found: Sequence[Inventory]) -> None:
        self._placement, self._layer = Placement(self.arrangement), -1
        self.requests = []
        self._in_buffer, self._in_slot = {}, [{} for _ in range(self.arrangement.layers)]
        self._places = [list(places) for places in self._host.places]
        if self.arrangement.memory == "swap":
            for layer, counted in enumerate(found):
                self._in_slot[layer] = counted.on_device
                self._places[layer] = [counted.on_host[expert] for expert in sorted(counted.on_host)]
        self._blocks.free_all_but(block for slots in self._in_slot for block in slots.values())
        self._on_host.forget()

    def _homes(self) -> Iterator[Home]:
        yield from self._blocks.all
        for places in self._host.places:
            yield from places

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What the device says, with what was being done; on a device that is lost, nothing is begun."""
        if self._lost is not None:
            raise EngineLostError("using the engine", None, None, f"it is lost with its device: {self._lost}")
        try:
            yield
        except EngineError:
            raise
        except DeviceLostError as error:
            self._lost = EngineLostError(*self._doing, error)
            raise self._lost from error
        except DeviceError as error:
            raise EngineError(*self._doing, error) from error
