"""One decoder block on a device, without its experts.

The kernels are launched in the order of the program that the chapter `lowbit.model.step` writes. For a single token
the launches are captured once and replayed: only memory contents change from token to token, because kernels read the
token's position from device memory.

A sparse block ends with the scores of its gate and with those of the next block's gate for the same input, which
predict the next block's experts (MoE offloading §3.2; errata M5). Both are one product: the routers of all layers are
stored one after another.

Source: the chapters `lowbit.model.step`, `lowbit.attention.rope`, `lowbit.attention.attention`; MoE offloading §3.2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowbit.errors import NotDeclaredError
from lowbit.model.caches import Keys
from lowbit.model.config import LlamaConfig
from lowbit.model.program import Line, Program, overwritten
from lowbit.model.step import block_of, gated
from lowbit.model.weights import GatedWeights, LayerWeights
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.model.matrices import ExpertLayout, Resident
from lowbit_cuda.model.workspace import Workspace
from lowbit_cuda.port import Number, Span


@dataclass(frozen=True)
class Gate:
    """The gate at the end of a sparse block.

    Attributes:
        routers: the router of this block and, if there are 2 E columns, of the next: float32, column by column.
        columns: E or 2 E.
        inputs: whether the gate's input is also copied to the host.
    """

    routers: Span
    columns: int
    inputs: bool


class DenseFeedForward:
    """The feed-forward part of a dense block."""

    def __init__(self, arena: Arena, weights: GatedWeights, what: str) -> None:
        self._arena, self._layout = arena, ExpertLayout.of(weights)
        arena.load(*self._layout.kernels())
        self._packed = arena.store(self._layout.apply(weights), what)

    def enqueue(self, work: Workspace, tokens: int) -> None:
        """Issue the kernels, which add their result to the residual stream."""
        spare = work.device.get("spare")
        self._layout.run(self._arena, self._packed, work["out"], work["normed"], work["inner"], spare, tokens)
        count = tokens * work.sizes.config.hidden
        self._arena.launch(kernel("add"), y=work["x"], x=work["out"], count=count)


BUFFERS = {
    **dict.fromkeys(("x", "middle", "result"), "x"),
    **dict.fromkeys(("normed", "middle_normed"), "normed"),
    **dict.fromkeys(("query", "query_rotated"), "queries"),
    **dict.fromkeys(("key", "key_rotated"), "keys"),
    **dict.fromkeys(("attention", "feed_forward"), "out"),
    "value": "values",
    "mixed": "mixed",
}
"""Where the values of a program lie in the workspace."""
KERNELS = {"norm": ("x", "normed"), "add": ("x", "out", "x"), "gate": ("normed", "")}
"""The buffers that the kernels of these lines read and write, whatever the names of values."""


def refused(line: Line) -> NotDeclaredError:
    """The error for a line that no kernel runs, or that no kernel runs at its place."""
    return NotDeclaredError("cuda", f"models whose step has {line} where it stands")


def check_buffers(program: Program) -> None:
    """Refuse a program that reads a value whose buffer was reused, or that uses other buffers than its kernels.

    Raises:
        NotDeclaredError: the program is not supported; the message names the line.
    """
    places = {name: BUFFERS.get(name, name) for line in program for name in (*line.inputs, line.out)}
    late = overwritten(program, places)
    for line in program:
        used = *(places[name] for name in line.inputs), BUFFERS.get(line.out, "")
        if line is late or used != KERNELS.get(line.kind, used):
            raise refused(line)


Issue = Callable[[Workspace, int], None]
"""Issues the launches of a line, for a workspace and a number of tokens."""


class DeviceBlock:
    """One decoder block on a device: its resident weights, and the launches of each line of its program."""

    def __init__(self, arena: Arena, config: LlamaConfig, number: int, layer: LayerWeights, keys: Keys) -> None:
        """Copy its weights to the device, and load its kernels.

        Raises:
            NotDeclaredError: the program has a line for which there is no kernel.
        """
        self._arena, self._config, self._number, self._layer = arena, config, number, layer
        self._plain = "float32" if keys == "float32" else "float16"
        self._appends = {"keys": kernel("append", keys=keys), "values": kernel("append", keys=self._plain)}
        self._attends = kernel("attend", keys=keys, values=self._plain)
        arena.load(*self._appends.values(), self._attends)
        arena.load(kernel("rms_norm"), kernel("rope"), kernel("add"), kernel("dense", weights="float32"))
        self._keys = keys
        self.gate: Gate | None = None
        program = block_of(config, number, layer)
        check_buffers(program)
        self._issues = list(self._read(list(program)))

    def enqueue(self, work: Workspace, tokens: int) -> None:
        """Issue everything up to the gate's scores; for a dense block, everything."""
        for issue in self._issues:
            issue(work, tokens)

    def _read(self, lines: list[Line]) -> Iterator[Issue]:
        """The launches of each line. A gated unit is one, and ends the block; so does a gate, because the host chooses
        the experts."""
        feed_forward = self._layer.feed_forward
        for number, line in enumerate(lines):
            if isinstance(feed_forward, GatedWeights) and tuple(lines[number:-1]) == gated(
                self._config.activation, "middle_normed", "feed_forward", "feed_forward."
            ):
                yield DenseFeedForward(self._arena, feed_forward, self._named("feed-forward part")).enqueue
                return
            make = getattr(self, f"_{line.kind}", None)
            named = {*line.inputs, line.out} <= {*BUFFERS, ""} or line.kind == "gate"
            if make is None or not named:
                raise refused(line)
            yield make(line)
            if line.kind == "gate":
                return

    def _named(self, what: str) -> str:
        return f"{what} of layer {self._number}"

    # A method for each kind of line.

    def _norm(self, line: Line) -> Issue:
        gain = self._arena.store(getattr(self._layer, str(line.parameter)), self._named("norm"))
        return lambda work, tokens: norm(self._arena, self._config, work, gain, tokens)

    def _product(self, line: Line) -> Issue:
        name = str(line.parameter)
        matrix = Resident(self._arena, getattr(self._layer, name), self._named(name))
        out, source = BUFFERS[line.out], BUFFERS[line.inputs[0]]
        return lambda work, tokens: matrix(work[out], work[source], tokens)

    def _add(self, line: Line) -> Issue:
        out, source = (BUFFERS[name] for name in line.inputs)

        def add(work: Workspace, tokens: int) -> None:
            self._arena.launch(kernel("add"), y=work[out], x=work[source], count=tokens * self._config.hidden)

        return add

    def _rotate(self, line: Line) -> Issue:
        name, head_dim, frequencies = BUFFERS[line.out], line.setting("head_dim"), line.frequencies
        heads = self._config.heads if name == "queries" else self._config.kv_heads

        def rotate(work: Workspace, tokens: int) -> None:
            self._arena.launch(
                kernel("rope"),
                x=work[name],
                table=work.tables[frequencies],
                position=work["position"],
                tokens=tokens,
                heads=heads,
                head_dim=head_dim,
                context=work.sizes.context,
            )

        return rotate

    def _append(self, line: Line) -> Issue:
        def append(work: Workspace, tokens: int) -> None:
            cache, (exponents, sized) = work.caches[self._number], self._sized(work, tokens)
            keys, values = (BUFFERS[name] for name in line.inputs)
            self._arena.launch(self._appends["keys"], cache=cache["keys"], x=work[keys], **exponents, **sized)
            self._arena.launch(self._appends["values"], cache=cache["values"], x=work[values], **sized)

        return append

    def _attend(self, line: Line) -> Issue:
        def attend(work: Workspace, tokens: int) -> None:
            cache, (exponents, sized) = work.caches[self._number], self._sized(work, tokens)
            self._arena.launch(
                self._attends,
                y=work[BUFFERS[line.out]],
                queries=work[BUFFERS[line.inputs[0]]],
                keys=cache["keys"],
                values=cache["values"],
                heads=self._config.heads,
                window=line.setting("window") or 0,
                **exponents,
                **sized,
            )

        return attend

    def _sized(self, work: Workspace, tokens: int) -> tuple[dict[str, Span | Number], dict[str, Span | Number]]:
        """The common arguments of kernels of the cache: exponents of keys, if there are any, and sizes."""
        cache = work.caches[self._number]
        sized: dict[str, Span | Number] = {
            "position": work["position"],
            "tokens": tokens,
            "kv_heads": self._config.kv_heads,
            "head_dim": self._config.head_dim,
            "capacity": work.sizes.context,
        }
        return ({"exponents": cache["exponents"]} if self._keys == "bfp12" else {}), sized

    def _gate(self, line: Line) -> Issue:
        """Write scores directly to the host: a copy would wait behind an expert that is being copied back."""

        def scores(work: Workspace, tokens: int) -> None:
            gate, hidden = self.gate, self._config.hidden
            if gate is None:
                return
            self._arena.launch(
                kernel("dense", weights="float32"),
                y=work.host["scores"],
                x=work["normed"],
                weights=gate.routers,
                tokens=tokens,
                rows=hidden,
                columns=gate.columns,
            )
            if gate.inputs:
                self._arena.copy(work.host["normed"], work.rows("normed", tokens, hidden))

        return scores


def norm(arena: Arena, config: LlamaConfig, work: Workspace, gain: Span, tokens: int) -> None:
    """Issue the norm of the residual stream, with a gain."""
    arena.launch(
        kernel("rms_norm"),
        y=work["normed"],
        x=work["x"],
        gain=gain,
        tokens=tokens,
        columns=config.hidden,
        epsilon=config.rms_epsilon,
    )
