"""A decoder on a device whose memory need not hold all experts.

It is a `lowbit.model.decoder.AnyDecoder`: it takes tokens and returns hidden states and logits, and it computes,
layer by layer, what the chapter `lowbit.model.decoder` computes. The difference is where. The residual stream stays on
the device from the first layer to the last. The host reads only each layer's gate scores, and tells the engine which
experts to run (`sparse`).

**One token in a layer.** One graph runs the layer up to its gate. The host waits for the scores, the engine issues
copies and kernels, and the next layer's graph begins by adding the experts' answers. A chunk of a prompt takes the same
steps without graphs.

**What the answer depends on.** The kernels, their order, and the tokens that they process do not depend on what the
engine has cached or guessed, or on the memory mode. So logits equal, bit for bit, those of a device that holds every
expert. The one exception is optional: experts that another backend runs on the host.

**One sequence at a time.** There is one cache for attention within the budget. A new state takes it over, and the
previous state is refused from then on. A state is also refused after an error, because the contents of its cache are
unknown; a new state starts from an empty cache.

Source: the chapter `lowbit.model.decoder`; MoE offloading §3.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.backend.whole_model import DeviceAccount, DeviceSettings
from lowbit.errors import ArgumentError
from lowbit.model.block import check_scores
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import token_ids
from lowbit.model.replay import Recall
from lowbit.model.weights import LayeredWeights, Progress
from lowbit.moe.offload import Event
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.model.block import norm
from lowbit_cuda.model.loading import Loader
from lowbit_cuda.model.workspace import LOGIT_ROWS
from lowbit_cuda.port import DevicePort, Graph, finish_after_failure


@dataclass(eq=False)
class State:
    """The state of a sequence.

    Attributes:
        length: number of tokens in the cache.
        sound: whether the cache holds exactly these tokens.
    """

    length: int = 0
    sound: bool = True


class Decoder:
    """A model on a device; closing it releases the device's memory.

    Attributes:
        events: the engine's decisions so far, if they are recorded.
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
        """Load a model; after a failure, nothing is left on the device.

        Args:
            port: the device; the model stays within its budget.
            weights: the model.
            settings: options of the run.
            progress: called after each layer.
            owns_port: whether closing the decoder closes the device.
            record: whether `events`, and the engine's `requests`, are kept.

        Raises:
            NotDeclaredError: the kernels do not support the model.
            ArgumentError: the budget is too small (the message says how much is needed), or layers are stored
                differently.
            DeviceError: the device failed.
        """
        self._port, self._settings, self._record = port, settings, record
        self.events: list[Event] = []
        with ExitStack() as closing:
            if owns_port:
                closing.callback(port.close)
            self._arena = Arena(port, "model")
            closing.callback(self._arena.close)
            self._model = Loader(self._arena, weights, settings, record).load(closing, progress)
            self._closing = closing.pop_all()
        self._stages = len(self._model.blocks)
        self._graphs: dict[int, Graph] = {}
        self._state = State()
        self._consistent = True  # False from the start of work until it has succeeded

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration, with the requested context."""
        return self._model.config

    @property
    def engine(self) -> Engine | None:
        """The offload engine; None for a dense model."""
        return self._model.engine

    # From tokens to logits.

    def new_state(self, capacity: int = 64) -> State:
        """The state of an empty sequence; the previous state becomes invalid. There is room for the whole context."""
        self._state.sound = False
        self._state = State()
        return self._state

    def hidden(self, tokens: Sequence[int], state: State, progress: Progress | None = None) -> F64:
        """Process tokens after those in `state`: float64, T × hidden, after the last norm.

        Args:
            tokens: at least one.
            state: the latest from `new_state`.
            progress: called after each layer, with tokens times layers.

        Raises:
            ArgumentError: there are no tokens, a token is not in the vocabulary, or the context is exceeded; the state
                is not the latest, or an error has invalidated it; the weights overflow.
            DeviceLostError: the device, or an expert, is lost; every later call raises this too.
            DeviceError: the device failed; a new state can be started.
        """
        if state is not self._state or not state.sound:
            raise ArgumentError("state", "not the latest, or invalid after an error", "the latest from new_state")
        ids = token_ids(tokens, self.config, already=state.length)
        with self._port.batch():
            return self._read(ids, state, progress)

    def _read(self, ids: I64, state: State, progress: Progress | None) -> F64:
        self._recover()
        self._consistent = state.sound = False
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
        self._consistent = state.sound = True
        return np.concatenate(parts).astype(np.float64)

    def logits(self, hidden: F64) -> F32:
        """The score of every token: float32, T × vocabulary, for float64, T × hidden.

        Raises:
            ArgumentError: a logit is not finite.
            DeviceError: the device failed.
        """
        rows = np.ascontiguousarray(hidden, np.float32)
        with self._port.batch():
            self._recover()
            self._consistent = False
            scores = np.concatenate([self._scores(rows[i : i + LOGIT_ROWS]) for i in range(0, len(rows), LOGIT_ROWS)])
            self._consistent = True
        check_scores(scores, "a logit")
        return scores

    # One chunk of tokens.

    def _layer(self, stage: int, ids: I64, position: int) -> None:
        model, tokens = self._model, len(ids)
        if stage == 0:
            rows = model.config.embedding_scale * model.embedding[ids].astype(np.float64)
            self._port.write(model.work.host["x"], rows.astype(np.float32))
            self._port.write(model.work.host["position"], np.array([position], np.int32))
        self._issue(stage, tokens)
        gate = model.blocks[stage].gate
        if gate is not None:
            assert model.sparse is not None
            self._arena.wait()
            events = model.sparse.run(stage, model.work, tokens, gate.columns)
            if self._record:
                self.events += events

    def _end(self, tokens: int) -> F32:
        """After the last layer: float32, T × hidden."""
        self._issue(self._stages, tokens)
        self._arena.wait()
        answer: F32 = self._port.read(self._model.work.host["normed"], np.float32, (tokens, self._model.config.hidden))
        return answer

    def _issue(self, stage: int, tokens: int) -> None:
        """Issue a stage; for one token, by its graph."""
        if tokens > 1:
            self._enqueue(stage, tokens)
            return
        if stage not in self._graphs:
            with self._port.capture(self._arena.stream) as captured:
                self._enqueue(stage, tokens)
            self._graphs[stage] = captured()
        self._port.replay(self._graphs[stage], self._arena.stream)

    def _enqueue(self, stage: int, tokens: int) -> None:
        """Issue the end of the layer before, and then a layer or the last norm."""
        model, arena, hidden = self._model, self._arena, self._model.config.hidden
        if stage == 0:
            arena.copy(model.work["position"], model.work.host["position"])
            arena.copy(model.work.rows("x", tokens, hidden), model.work.host["x"])
        elif model.sparse is not None:
            model.sparse.combine(model.work, tokens)
        if stage < self._stages:
            model.blocks[stage].enqueue(model.work, tokens)
        else:
            norm(arena, model.config, model.work, model.norm, tokens)
            arena.copy(model.work.host["normed"], model.work.rows("normed", tokens, hidden))

    def _scores(self, rows: F32) -> F32:
        """Logits of a few rows."""
        work, count, arena = self._model.work, len(rows), self._arena
        vocabulary = self._model.config.vocabulary
        self._port.write(work.host["head_in"], rows)
        arena.copy(work.rows("head_in", count, rows.shape[1]), work.host["head_in"])
        self._model.head(work["logits"], work["head_in"], count)
        arena.copy(work.host["logits"], work.rows("logits", count, vocabulary))
        arena.wait()
        scores: F32 = self._port.read(work.host["logits"], np.float32, (count, vocabulary))
        return scores

    def _recover(self) -> None:
        """Restore a consistent state after an error.

        The device may still be using memory that the host is about to write, and a graph may have been captured during
        the failure. The engine is reset here and not at its next layer, because errors that the device reports later
        would be taken for errors of the new tokens.
        """
        if self._consistent:
            return
        finish_after_failure(self._port)
        self._graphs.clear()  # after waiting, no graph is running
        if self._model.engine is not None:
            self._model.engine.reset()
        self._consistent = True

    # Account and end.

    def account(self) -> DeviceAccount:
        """What the decoder has done so far."""
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
        """Release everything; a failure does not stop the rest. Closing twice is harmless."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
