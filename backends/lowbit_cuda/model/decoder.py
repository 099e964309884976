"""A decoder on a device, of which only a part of the experts lies there.

It is a `lowbit.model.decoder.AnyDecoder`: tokens in, hidden states and logits out, like the chapter
`lowbit.model.decoder`, and layer after layer it computes what that chapter computes. What differs is where. A token's
stream stays on the device from the first layer to the last; the host learns of each layer only its gate's scores, and
answers with the experts to be brought (`sparse`).

**A token goes through a layer** in one graph, then the host waits for the scores, then the engine asks for copies and
kernels, and the next layer's graph begins by adding up the experts' answers. A chunk of a prompt goes the same way,
without graphs.

**What decides an answer.** The kernels, their order, and which tokens they are given, do not depend on what the engine
has cached, guessed or kept in which memory. So logits are to the bit those of a device that holds every expert. The one
exception is asked for: experts that another backend runs on the host.

**One sequence at a time.** The cache has its place in the budget once. A new state takes it over, and the state before
it is refused from then on. A state is also refused after an error, because it is not known what its cache holds; the
next state begins afresh.

Source: the chapter `lowbit.model.decoder`; MoE offloading §3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.backend.whole_model import DeviceAccount, DeviceSettings
from lowbit.errors import ArgumentError
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import check_logits, token_ids
from lowbit.model.replay import Recall
from lowbit.model.weights import LayeredWeights, Progress
from lowbit.moe.offload import Event
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.model.block import norm
from lowbit_cuda.model.lane import Lane
from lowbit_cuda.model.loading import Loader
from lowbit_cuda.model.workspace import LOGIT_ROWS
from lowbit_cuda.port import DeviceError, DeviceLostError, DevicePort, Graph


@dataclass(eq=False)
class State:
    """A sequence, as far as it was read.

    Attributes:
        length: tokens in the cache.
        sound: whether the cache holds just these.
    """

    length: int = 0
    sound: bool = True


class Decoder:
    """A model on a device; leaving it gives the device's memory back.

    Attributes:
        events: all that the engine decided so far, where it is recorded.
    """

    def __init__(
        self,
        port: DevicePort,
        weights: LayeredWeights,
        settings: DeviceSettings,
        progress: Progress | None = None,
        *,
        owns_port: bool = False,
        record: bool = False,
    ) -> None:
        """Load a model; where that fails, nothing of it is left on the device.

        Args:
            port: the device; its budget is what the model may use.
            weights: the model.
            settings: how to run it.
            progress: called after each layer.
            owns_port: whether the device is closed with the decoder.
            record: whether `events`, and the engine's `requests`, are kept.

        Raises:
            NotDeclaredError: a model that the kernels do not do.
            ArgumentError: too little memory, and how much is needed; layers that differ in how they are stored.
            DeviceError: the device failed.
        """
        self._port, self._settings, self._owns_port, self._record = port, settings, owns_port, record
        self.events: list[Event] = []
        self._lane: Lane | None = None
        self._loader: Loader | None = None
        try:
            self._lane = Lane(port, "model")
            self._loader = Loader(self._lane, weights, settings, record)
            self._model = self._loader.load(progress)
        except BaseException:
            self.close()
            raise
        self._stages = len(self._model.blocks)
        self._graphs: dict[int, Graph] = {}
        self._state = State()
        self._calm = True  # whether the device has done all that was asked of it

    @property
    def config(self) -> LlamaConfig:
        """The model's shape; the context is the one that was asked for."""
        return self._model.config

    @property
    def engine(self) -> Engine | None:
        """What brings experts; None for a dense model."""
        return self._model.engine

    # Tokens in, logits out.

    def new_state(self) -> State:
        """The state of an empty sequence; the one before it is not used any more."""
        self._state.sound = False
        self._state = State()
        return self._state

    def hidden(self, tokens: Sequence[int], state: State, progress: Progress | None = None) -> F64:
        """Read tokens after those that `state` holds: float64, T × hidden, after the last norm.

        Args:
            tokens: at least one.
            state: the latest from `new_state`.
            progress: called after each layer, with tokens times layers.

        Raises:
            ArgumentError: no tokens, a token outside the vocabulary, more tokens than the context; a state that is not
                the latest or that an error has spoilt; weights that overflow.
            DeviceLostError: the device failed for good; every later call raises this too.
            DeviceError: the device failed; a new state can be begun.
        """
        if state is not self._state or not state.sound:
            raise ArgumentError("state", "of another sequence, or spoilt by an error", "the latest from new_state")
        ids = token_ids(tokens, self.config, already=state.length)
        with self._port.batch():
            return self._read(ids, state, progress)

    def _read(self, ids: I64, state: State, progress: Progress | None) -> F64:
        self._calm_down()
        self._calm = state.sound = False
        chunk, parts, done = self._model.work.sizes.chunk, [], 0
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            for stage in range(self._stages):
                self._layer(stage, part, state.length)
                done += len(part)
                if progress is not None:
                    progress(done, len(ids) * self._stages)
            parts.append(self._end(len(part)))
            state.length += len(part)
        self._calm = state.sound = True
        return np.concatenate(parts).astype(np.float64)

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary, for float64, T × hidden.

        Raises:
            ArgumentError: a logit that is not finite.
            DeviceError: the device failed.
        """
        rows = np.ascontiguousarray(hidden, np.float32)
        with self._port.batch():
            self._calm_down()
            self._calm = False
            scores = np.concatenate([self._scores(rows[i : i + LOGIT_ROWS]) for i in range(0, len(rows), LOGIT_ROWS)])
            self._calm = True
        check_logits(scores)
        return scores

    # A chunk goes through.

    def _layer(self, stage: int, ids: I64, position: int) -> None:
        model, tokens = self._model, len(ids)
        if stage == 0:
            rows = model.config.embedding_scale * model.embedding[ids].astype(np.float64)
            self._port.write(model.work.host["x"], rows.astype(np.float32))
            self._port.write(model.work.host["position"], np.array([position], np.int32))
        self._give(stage, tokens)
        gate = model.blocks[stage].gate
        if gate is not None:
            assert model.sparse is not None and self._lane is not None
            self._lane.wait()
            events = model.sparse.run(stage, model.work, tokens, gate.columns)
            if self._record:
                self.events += events

    def _end(self, tokens: int) -> F32:
        """After the last layer: float32, T × hidden."""
        assert self._lane is not None
        self._give(self._stages, tokens)
        self._lane.wait()
        answer: F32 = self._port.read(self._model.work.host["normed"], np.float32, (tokens, self._model.config.hidden))
        return answer

    def _give(self, stage: int, tokens: int) -> None:
        """Ask for a stage, of one token by its graph."""
        assert self._lane is not None
        if tokens > 1:
            self._enqueue(stage, tokens)
            return
        if stage not in self._graphs:
            with self._port.capture(self._lane.stream) as captured:
                self._enqueue(stage, tokens)
            self._graphs[stage] = captured()
        self._port.replay(self._graphs[stage], self._lane.stream)

    def _enqueue(self, stage: int, tokens: int) -> None:
        """What the stream does for a stage: what the layer before left to be done, and then a layer, or the end."""
        model, lane = self._model, self._lane
        assert lane is not None
        hidden = model.config.hidden
        if stage == 0:
            lane.copy(model.work["position"], model.work.host["position"])
            lane.copy(model.work.rows("x", tokens, hidden), model.work.host["x"])
        elif model.sparse is not None:
            model.sparse.combine(model.work, tokens)
        if stage < self._stages:
            model.blocks[stage].enqueue(model.work, tokens)
        else:
            norm(lane, model.config, model.work, model.norm, tokens)
            lane.copy(model.work.host["normed"], model.work.rows("normed", tokens, hidden))

    def _scores(self, rows: F32) -> F32:
        """Logits of a few rows."""
        work, count, lane = self._model.work, len(rows), self._lane
        assert lane is not None
        vocabulary = self._model.config.vocabulary
        self._port.write(work.host["head_in"], rows)
        lane.copy(work.rows("head_in", count, rows.shape[1]), work.host["head_in"])
        self._model.head(work["logits"], work["head_in"], count)
        lane.copy(work.host["logits"], work.rows("logits", count, vocabulary))
        lane.wait()
        scores: F32 = self._port.read(work.host["logits"], np.float32, (count, vocabulary))
        return scores

    def _calm_down(self) -> None:
        """Begin again after an error.

        The device may still be at work, with memory that the host is about to write, and a graph may have been captured
        while it failed. The engine begins again now and not with its next layer: what the device has to tell by then
        would be news of the present tokens.
        """
        if self._calm:
            return
        try:
            self._port.finish()
        except DeviceLostError:
            raise
        except DeviceError:  # perhaps only the news of what has failed before
            self._port.finish()
        self._graphs.clear()  # only now, when none of them can be running
        if self._model.engine is not None:
            self._model.engine.reset()
        self._calm = True

    # The account, and the end.

    def account(self) -> DeviceAccount:
        """What it did so far."""
        device = self._port.describe().get("device", "a device")
        engine = self._model.engine
        account = DeviceAccount(device, self._port.budget, self._port.peak)
        if engine is None:
            return account
        counted, arrangement = engine.account, engine.arrangement
        needed = counted.hits + counted.loads + counted.promoted + counted.on_host
        measured = counted.measurements
        guessing = self._settings.prefetch != "off" and not (measured and measured[-1].benefit < 0)
        return replace(
            account,
            layers=arrangement.layers,
            experts=arrangement.experts,
            slots=arrangement.slots,
            recall=Recall(needed, counted.hits, counted.promoted) if needed else None,
            copied=counted.bytes_to_device,
            prefetch="on" if guessing else "off",
            prefetch_why=counted.notes[-1] if counted.notes else "",
            cold=counted.on_host,
        )

    def close(self) -> None:
        """Give everything back. Closing twice is harmless."""
        steps = []
        if self._loader is not None and self._loader.engine is not None:
            steps.append(self._loader.engine.close)
        if self._lane is not None:
            steps.append(self._lane.close)
        if self._owns_port:
            steps.append(self._port.close)
        failures = []
        for step in steps:
            try:
                step()
            except DeviceError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
