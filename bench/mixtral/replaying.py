"""A model of Mixtral-8x7B's size on a port, without its weights: the engine, and kernels that only have a length.

What a token does is given to the port as a program written with tensors gives it, such as the paper's: in each layer
attention, the gate, its scores copied to the host, which waits for them, then the engine with the experts that a
recording says; at the end the head, whose logits the host waits for. (lowbit's own decoder lets a kernel write the
scores to the host.) Memory has sizes and no bytes (``SimDevice(..., backed=False)``), and a kernel says what it
reads and how much it computes. So virtual time, the budget and the order of operations are those of the run, and only
the numbers are missing.

One kernel stands for the several of a layer's attention, and two for an expert's. Each kernel more would cost a few
microseconds of the tens of milliseconds that a token takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.moe.offload import Arrangement, Request
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.transfers import Work
from lowbit_cuda.port import DevicePort, Kernel, Memory, Parameter, Span, Stream


@dataclass(frozen=True)
class Part:
    """Some weights: what they weigh, and how many they are; each is multiplied and added once a token."""

    nbytes: int
    weights: int


@dataclass(frozen=True)
class Sizes:
    """What a model of this size reads.

    Attributes:
        expert: one expert.
        attention: of a layer.
        gate: of a layer and, for the guess, of the next.
        head: the matrix of the logits.
        token_bytes: keys and values that a token adds to a layer.
        hidden, experts, vocabulary: of the model.
        context: the most tokens.
    """

    expert: Part
    attention: Part
    gate: Part
    head: Part
    token_bytes: int
    hidden: int
    experts: int
    vocabulary: int
    context: int


def reader(name: str) -> Kernel:
    """A kernel that reads so many bytes, does so many operations and writes so many float32."""
    return Kernel(
        name=name,
        source="",
        parameters=(
            Parameter("weights", "uint8", "read", lambda numbers: int(numbers["nbytes"])),
            Parameter("results", "float32", "write", lambda numbers: int(numbers["count"])),
            *(Parameter(number, "int64") for number in ("nbytes", "count", "operations")),
        ),
        grid=lambda numbers: (1, 1, 1),
        block=256,
        flops=lambda numbers: float(numbers["operations"]),
    )


ATTENTION, GATE, EXPERT_IN, EXPERT_OUT, HEAD = map(
    reader, ("attention", "gate", "expert, first half", "expert, second half", "head")
)


class Replay:
    """The model on a port.

    Attributes:
        engine: has its experts when this is made.
    """

    def __init__(self, port: DevicePort, sizes: Sizes, arrangement: Arrangement, *, prefetch: bool) -> None:
        self._port, self._sizes, self._compute = port, sizes, port.stream("compute")
        layer_bytes = sizes.attention.nbytes + sizes.context * sizes.token_bytes
        self._attention = [port.allocate(layer_bytes, f"attention {layer}") for layer in range(arrangement.layers)]
        self._gate, self._head = (port.allocate(part.nbytes, "weights") for part in (sizes.gate, sizes.head))
        self._hidden = port.allocate(16 * sizes.hidden, "hidden")
        self._scores, self._logits = (
            (port.allocate(4 * count, "answer"), port.pin(4 * count, "answer"))
            for count in (2 * sizes.experts, sizes.vocabulary)
        )
        self.engine = Engine(
            port, arrangement, sizes.expert.nbytes, self._compute, prefetch="on" if prefetch else "off"
        )
        packed = np.zeros(sizes.expert.nbytes, np.uint8)
        for layer in range(arrangement.layers):
            for expert in range(arrangement.experts):
                self.engine.fill(layer, expert, packed)

    def token(self, position: int, requests: Sequence[Request], chosen: Sequence[Sequence[int]]) -> float:
        """One token, as `mixtral.following` asks for it; answers with its seconds on the host's clock."""
        sizes, began = self._sizes, self._port.now()
        for request, experts in zip(requests, chosen, strict=True):
            past = Part(sizes.attention.nbytes + (position + 1) * sizes.token_bytes, sizes.attention.weights)
            self._launch(ATTENTION, self._attention[request.layer].span(), past, self._hidden)
            self._launch(GATE, self._gate.span(), sizes.gate, self._scores[0], 2 * sizes.experts)
            self._to_host(*self._scores)
            self.engine.run(request.layer, request.needed, request.guesses, self._work(frozenset(experts)))
        self._launch(HEAD, self._head.span(), sizes.head, self._logits[0], sizes.vocabulary)
        self._to_host(*self._logits)
        return self._port.now() - began

    def _work(self, chosen: frozenset[int]) -> Work:
        whole = self._sizes.expert
        first = Part(whole.nbytes * 2 // 3, whole.weights * 2 // 3)
        rest = Part(whole.nbytes - first.nbytes, whole.weights - first.weights)

        def work(expert: int, packed: Span, stream: Stream) -> None:
            if expert in chosen:
                self._launch(EXPERT_IN, packed, first, self._hidden)
                self._launch(EXPERT_OUT, packed.part(first.nbytes), rest, self._hidden)

        return work

    def _launch(self, kernel: Kernel, weights: Span, part: Part, results: Memory, count: int | None = None) -> None:
        numbers = {"nbytes": part.nbytes, "operations": 2 * part.weights}
        count = self._sizes.hidden if count is None else count
        self._port.launch(
            kernel, {"weights": weights, "results": results.span(), "count": count, **numbers}, self._compute
        )

    def _to_host(self, there: Memory, here: Memory) -> None:
        """Copy an answer, wait for it, and read it."""
        self._port.copy(here.span(), there.span(), self._compute)
        self._port.synchronize(self._port.record(self._compute))
        self._port.read(here.span(), np.float32, (here.nbytes // 4,))
