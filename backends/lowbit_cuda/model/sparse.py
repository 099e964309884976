"""The sparse part of a block: the host chooses experts, the engine copies them, the device computes them.

The host needs the gate's scores to decide which copies to issue. It chooses with the functions of the chapter
`lowbit.moe.routing`, so ties and order are the same.

Each expert runs once for all tokens of a chunk that chose it: their rows are gathered, and its answers are written to
the rows that these tokens have for it. A token's rows are ordered by expert number, and they are added only when all
are complete. So an answer does not depend on the engine's decisions.

Source: MoE offloading §2.1, §3; the chapters `lowbit.moe.routing` and `lowbit.model.block`.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lowbit.arrays import F32, I32, U8
from lowbit.model.block import routes
from lowbit.model.config import LlamaConfig, Routing
from lowbit.moe.offload import Trace
from lowbit.moe.routing import Ids, top_k
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.arena import Arena, check_stream
from lowbit_cuda.model.cold import ColdExperts
from lowbit_cuda.model.matrices import ExpertLayout
from lowbit_cuda.model.workspace import FLOAT, INDEX, Workspace
from lowbit_cuda.port import Span, Stream

GUESSES = 2
"""Experts guessed for each token; the paper uses one or two."""

Indices = I32


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of T tokens, each token's by ascending number.

    Attributes:
        chosen: expert numbers, T × k.
        probabilities: float32, T × k, of these experts.
    """

    chosen: Ids
    probabilities: F32

    @property
    def needed(self) -> tuple[int, ...]:
        """All chosen experts, ascending."""
        return tuple(int(expert) for expert in np.unique(self.chosen))

    def of(self, expert: int) -> tuple[Indices, Indices]:
        """The tokens that chose an expert, and the rows of its answers among all T · k."""
        tokens, place = np.nonzero(self.chosen == expert)
        return tokens.astype(np.int32), (tokens * self.chosen.shape[1] + place).astype(np.int32)


def choose(scores: F32, routing: Routing) -> Routes:
    """The routes of tokens with these scores (float32, T × E).

    Raises:
        ArgumentError: a score is not finite.
    """
    chosen, probabilities = routes(scores, routing)
    order = np.argsort(chosen, axis=1)
    ascending = np.take_along_axis(chosen, order, axis=1)
    return Routes(ascending, np.take_along_axis(probabilities, order, axis=1).astype(np.float32))


def guesses(scores: F32, count: int = GUESSES) -> tuple[int, ...]:
    """The experts that most tokens will probably need, likeliest first; ties go to the lowest number.

    The guesses of one token are ordered by score:

    >>> guesses(np.array([[0.0, 3.0, 1.0, 2.0]], np.float32))
    (1, 3)
    """
    if not np.isfinite(scores).all():
        return ()  # the next layer's gate will report the error
    likely = top_k(scores, min(count, scores.shape[1]))
    if len(likely) == 1:
        return tuple(int(expert) for expert in likely[0])
    votes = np.bincount(likely.ravel(), minlength=scores.shape[1])
    order = np.argsort(-votes, kind="stable")
    return tuple(int(expert) for expert in order[votes[order] > 0])


class Sparse:
    """The sparse parts of all blocks."""

    def __init__(
        self, arena: Arena, config: LlamaConfig, layout: ExpertLayout, engine: Engine, cold: ColdExperts | None
    ) -> None:
        assert config.routing is not None
        self._arena, self._config, self._routing = arena, config, config.routing
        self._layout, self._engine, self._cold = layout, engine, cold
        arena.load(*layout.kernels(), kernel("combine"), kernel("gather", table="float32"), kernel("scatter"))

    def run(self, layer: int, work: Workspace, tokens: int, columns: int) -> Trace:
        """Choose experts by the scores on the host, and run them; `combine` adds their answers.

        Returns:
            The engine's events.
        """
        experts = self._routing.experts
        scores = self._arena.port.read(work.host["scores"], np.float32, (tokens, columns))
        found = choose(np.ascontiguousarray(scores[:, :experts]), self._routing)
        likely = guesses(np.ascontiguousarray(scores[:, experts:])) if columns > experts else ()
        self._arena.port.write(work.host["probabilities"], found.probabilities)
        if tokens > 1:
            self._arena.copy(work.rows("probabilities", tokens, self._routing.top_k), work.host["probabilities"])
        places = self._send_indices(work, found) if tokens > 1 else {}
        offered = partial(self._compute_on_host, layer, work, found, places) if self._cold else None
        return self._engine.run(
            layer,
            found.needed,
            likely,
            partial(self._compute, work, found, places),
            tokens={expert: len(found.of(expert)[0]) for expert in found.needed},
            compute_on_host=offered,
        )

    def combine(self, work: Workspace, tokens: int) -> None:
        """Add the weighted answers to the residual stream, by ascending expert.

        One token's weights are read from host memory, because a copy of them would wait behind experts that are being
        copied. A chunk has more weights, which are read several times, so they are copied.
        """
        self._arena.launch(
            kernel("combine"),
            y=work["x"],
            answers=work["answers"],
            weights=work.host["probabilities"] if tokens == 1 else work["probabilities"],
            tokens=tokens,
            experts=self._routing.top_k,
            columns=self._config.hidden,
        )

    # One expert.

    def _compute(
        self,
        work: Workspace,
        found: Routes,
        places: dict[int, tuple[Span, Span]],
        expert: int,
        packed: Span,
        stream: Stream,
    ) -> None:
        check_stream(self._arena, stream)
        hidden, k = self._config.hidden, self._routing.top_k
        spare = work.device.get("spare")
        run = partial(self._layout.run, self._arena, packed, inner=work["inner"], spare=spare)
        if len(found.chosen) == 1:
            place = found.needed.index(expert)
            run(y=work.rows("answers", 1, hidden, first=place), x=work["normed"], tokens=1)
            return
        rows, targets = places[expert]
        count, tokens = rows.nbytes // INDEX, len(found.chosen)
        sized = {"count": count, "columns": hidden}
        self._arena.launch(
            kernel("gather", table="float32"), y=work["picked"], x=work["normed"], index=rows, rows=tokens, **sized
        )
        run(y=work["out"], x=work["picked"], tokens=count)
        self._arena.launch(kernel("scatter"), y=work["answers"], x=work["out"], index=targets, rows=tokens * k, **sized)

    def _compute_on_host(
        self, layer: int, work: Workspace, found: Routes, places: dict[int, tuple[Span, Span]], expert: int, packed: U8
    ) -> None:
        """Run an expert on the host, and copy its answers to their rows."""
        assert self._cold is not None
        hidden, k, tokens = self._config.hidden, self._routing.top_k, len(found.chosen)
        own, targets = found.of(expert)
        inputs = self._arena.port.read(work.host["normed"], np.float32, (tokens, hidden))
        answers = self._cold.answer((layer, expert), packed, np.ascontiguousarray(inputs[own]))
        first = sum(found.of(before)[0].size for before in found.needed if before < expert)
        pinned = work.host["answers"].part(FLOAT * hidden * first)
        if tokens == 1:
            self._send(pinned, work.rows("answers", 1, hidden, first=int(targets[0])), answers)
            return
        self._send(pinned, work["out"], answers)
        sized = {"count": own.size, "columns": hidden}
        index = places[expert][1]
        self._arena.launch(kernel("scatter"), y=work["answers"], x=work["out"], index=index, rows=tokens * k, **sized)

    # Copies to the device.

    def _send(self, pinned: Span, there: Span, data: npt.NDArray[np.generic]) -> None:
        data = np.ascontiguousarray(data)
        self._arena.port.write(pinned, data)
        self._arena.copy(there.part(0, data.nbytes), pinned)

    def _send_indices(self, work: Workspace, found: Routes) -> dict[int, tuple[Span, Span]]:
        """For each expert the rows of its tokens and of its answers, all in one copy."""
        parts: list[Indices] = []
        spans: dict[int, tuple[Span, Span]] = {}
        start = 0
        for expert in found.needed:
            own = found.of(expert)
            parts += own
            size = INDEX * len(own[0])
            spans[expert] = work["index"].part(start, size), work["index"].part(start + size, size)
            start += 2 * size
        self._send(work.host["index"], work["index"], np.concatenate(parts))
        return spans
