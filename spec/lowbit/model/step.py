r"""The step of a decoder as a program: which operations it runs, on which values, in which order.

A decoder does the same for every token: its *step*. It is written here once, as a program of operations over named
values, and everything else reads it: the interpreter of the chapter `block` runs it operation by operation on any
backend, one backend may compile it whole, another may make a graph of it. So an architecture is a program, and adding
one means writing its program. A backend may refuse a program, with an error that names a line.

**A program** is a list of lines such as ``query = product(normed; query)``. A line names an operation, the values that
it reads, a parameter among the weights (`lowbit.model.weights`) and the value that it writes. A value is a matrix with
a row for each of the :math:`T` tokens of the call; heads lie side by side in its columns. No value is written twice. A
block begins with the residual stream ``x`` and ends with the value ``result``, which is the ``x`` of the next.

**What is checked.** `check` refuses a program that reads a value before it is written, writes one twice, combines
values and parameters of mismatched sizes, or attends before the keys and values of its tokens are in the cache. A
reader that keeps several values in one place asks `overwritten` whether a program reads one too late.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2.1; Qwen2 (arXiv 2407.10671) §2.2; Gemma 3
(arXiv 2503.19786) §2.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any, Literal

from lowbit.attention.rope import Frequencies
from lowbit.attention.rope_scaling import Scaling
from lowbit.errors import ArgumentError
from lowbit.model.config import Activation, LlamaConfig
from lowbit.model.weights import LayerWeights, LlamaWeights, linear_shapes, vector_sizes

Kind = Literal[
    "embed",
    "norm",
    "product",
    "bias",
    "rotate",
    "rotate_sorted",
    "append",
    "attend",
    "attend_shaped",
    "swiglu",
    "geglu",
    "clamped_swiglu",
    "gate",
    "experts",
    "add",
    "scale",
    "soft_cap",
]

OPERATIONS: Mapping[Kind, tuple[str | None, str]] = MappingProxyType(
    {
        "embed": (None, "rows of the embedding, times a factor"),
        "norm": ("blocks.rms_norm", "RMSNorm of runs as long as the gain"),
        "product": ("linear.gemm", "a linear layer"),
        "bias": (None, "a vector added to every row"),
        "rotate": ("rope.rotate", "heads rotated by their positions"),
        "rotate_sorted": ("rope.rotate", "the same, of heads whose channels stand in another order"),
        "append": (None, "keys and values go to the cache"),
        "attend": ("attention.attend", "attention over the cache, these tokens included"),
        "attend_shaped": ("attention.attend_shaped", "the same with a factor, a soft cap and sinks"),
        "swiglu": ("blocks.swiglu", "silu of the first times the second"),
        "geglu": ("blocks.geglu", "gelu of the first times the second"),
        "clamped_swiglu": ("blocks.clamped_swiglu", "the clamped unit of both"),
        "gate": ("routing.gate", "the scores of the experts"),
        "experts": ("routing.sparse", "the experts that scores choose, weighted"),
        "add": (None, "the sum of two values"),
        "scale": (None, "a value times a factor"),
        "soft_cap": ("blocks.soft_cap", "numbers kept between a cap and its negative"),
    }
)
"""For each kind of line its operation of the specification, if it is one, and a sentence. Backends compute operations
only; every other line is a copy or one rounding. The operation of a product follows from the format of its matrix and
the contract."""

BEGIN, END = "x", "result"
"""The residual stream before a block, and after it."""


Setting = int | float | str | Scaling


@dataclass(frozen=True)
class Line:
    """One line of a program.

    Attributes:
        kind: what it does, one of `OPERATIONS`.
        out: the value that it writes; empty for ``append``, which writes to the cache.
        inputs: the values that it reads.
        parameter: its weights, by their name in the block; None if it has none.
        settings: numbers and choices of the model, by name; such as ``epsilon`` of a norm.
    """

    kind: Kind
    out: str
    inputs: tuple[str, ...]
    parameter: str | None = None
    settings: tuple[tuple[str, Setting], ...] = ()

    def setting(self, name: str) -> Any:
        """One of its settings; None if it has none of this name."""
        return dict(self.settings).get(name)

    @property
    def frequencies(self) -> Frequencies:
        """Those of a rotation."""
        return Frequencies(self.setting("base"), self.setting("scaling"))

    def __str__(self) -> str:
        """Its printed form.

        >>> str(Line("attend", "mixed", ("query_rotated",), settings=(("head_dim", 64), ("window", 512))))
        'mixed = attend(query_rotated; head_dim 64, window 512)'
        """
        behind = [] if self.parameter is None else [self.parameter]
        behind += [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in self.settings
        ]
        call = f"{self.kind}({', '.join(self.inputs)}{'; ' if behind else ''}{', '.join(behind)})"
        return f"{self.out} = {call}" if self.out else call


Program = tuple[Line, ...]


# **The block**: attention and a feed-forward part, each added to the residual stream (`block`).


def block(config: LlamaConfig, number: int, vectors: Collection[str]) -> Program:
    """The program of one block.

    >>> config = LlamaConfig(1, 64, 128, 4, 2, 16, 100, 32, 10000.0, 1e-5)
    >>> for line in block(config, 0, ["attention_norm", "feed_forward_norm"])[:6]:
    ...     print(line)
    normed = norm(x; attention_norm, epsilon 1e-05)
    query = product(normed; query)
    key = product(normed; key)
    value = product(normed; value)
    query_rotated = rotate(query; head_dim 16, base 10000)
    key_rotated = rotate(key; head_dim 16, base 10000)

    Args:
        config: of the model.
        number: of the block, from 0; a model may alternate between kinds of blocks.
        vectors: the vectors that the block has, by their names in `LayerWeights`.
    """
    attended = "attention_normed" if "attention_post_norm" in vectors else "attention"
    fed = "feed_forward_normed" if "feed_forward_post_norm" in vectors else "feed_forward"
    normed = "normed" if "attention_norm" in vectors else BEGIN
    middle_normed = "middle_normed" if "feed_forward_norm" in vectors else "middle"
    return (
        *([_norm(config, normed, BEGIN, "attention_norm")] if normed != BEGIN else []),
        *_attention(config, number, vectors, normed),
        *_post_norm(config, "attention", vectors),
        *_sum(config, "middle", BEGIN, attended),
        *([_norm(config, middle_normed, "middle", "feed_forward_norm")] if middle_normed != "middle" else []),
        *_feed_forward(config, vectors, middle_normed),
        *_post_norm(config, "feed_forward", vectors),
        *_sum(config, END, "middle", fed),
    )


def block_of(config: LlamaConfig, number: int, layer: LayerWeights) -> Program:
    """The program of a block with these weights."""
    return block(config, number, [name for name in vector_sizes(config) if getattr(layer, name) is not None])


def _attention(config: LlamaConfig, number: int, vectors: Collection[str], source: str) -> Iterator[Line]:
    """From the source to ``attention``."""
    latest: dict[str, str] = {}
    for name in ("query", "key", "value"):
        yield Line("product", name, (source,), name)
        latest[name] = name
    for name in latest:
        if f"{name}_bias" in vectors:
            yield Line("bias", f"{name}_biased", (latest[name],), f"{name}_bias")
            latest[name] = f"{name}_biased"
    for name in ("query", "key"):
        if f"{name}_norm" in vectors:
            yield _norm(config, f"{name}_normed", latest[name], f"{name}_norm")
            latest[name] = f"{name}_normed"
    heads, window = ("head_dim", config.head_dim), config.layer_window(number)
    shape = [("scale", config.score_scale), ("cap", config.score_cap)]
    turned = config.layer_frequencies(number)
    if turned is not None:
        scaling = () if turned.scaling is None else (("scaling", turned.scaling),)
        for name in ("query", "key"):
            settings = heads, ("base", turned.base), *scaling
            if "key_order" in vectors:
                own = ("heads", config.heads if name == "query" else config.kv_heads)
                line = Line("rotate_sorted", f"{name}_rotated", (latest[name],), "key_order", (*settings, own))
            else:
                line = Line("rotate", f"{name}_rotated", (latest[name],), settings=settings)
            yield line
            latest[name] = f"{name}_rotated"
    yield Line("append", "", (latest["key"], latest["value"]))
    seen = () if window is None else (("window", window),)
    if config.shaped:
        settings = (heads, *seen, *((name, number) for name, number in shape if number is not None))
        yield Line("attend_shaped", "mixed", (latest["query"],), "sinks" if config.sinks else None, settings)
    else:
        yield Line("attend", "mixed", (latest["query"],), settings=(heads, *seen))
    biased = "output_bias" in vectors
    yield Line("product", "attention_product" if biased else "attention", ("mixed",), "output")
    if biased:
        yield Line("bias", "attention", ("attention_product",), "output_bias")


def _feed_forward(config: LlamaConfig, vectors: Collection[str], source: str) -> Iterator[Line]:
    """From the source to ``feed_forward``: dense, or the experts that a router chooses."""
    routing, limit = config.routing, config.activation_limit if config.activation == "clamped" else None
    if routing is None:
        yield from gated(config.activation, source, "feed_forward", "feed_forward.", limit=limit)
        return
    biases = [name for name in EXPERT_BIASES if f"expert_{name}" in vectors]
    choice: tuple[tuple[str, Setting], ...] = (
        ("top_k", routing.top_k),
        ("softmax", routing.softmax),
        ("activation", config.activation),
        *(() if limit is None else (("limit", limit),)),
        *((("biases", " ".join(biases)),) if biases else ()),
    )
    biased = "router_bias" in vectors
    yield Line("gate", "plain_scores" if biased else "scores", (source,), "feed_forward.router")
    if biased:
        yield Line("bias", "scores", ("plain_scores",), "router_bias")
    yield Line("experts", "feed_forward", (source, "scores"), "feed_forward.experts", choice)


EXPERT_BIASES = ("gate_bias", "up_bias", "down_bias")
GATES: Mapping[Activation, Kind] = MappingProxyType({"silu": "swiglu", "gelu": "geglu", "clamped": "clamped_swiglu"})


def gated(
    activation: Activation,
    source: str,
    out: str,
    prefix: str = "",
    *,
    limit: float | None = None,
    biases: Collection[str] = (),
) -> Program:
    """A gated linear unit: a dense feed-forward part, or one expert.

    Args:
        activation: of the gate.
        source: the value that it reads.
        out: the value that it writes.
        prefix: what the names of its matrices begin with.
        limit: of a clamped unit.
        biases: which of `EXPERT_BIASES` it has.
    """

    def product(name: str, source: str, out: str) -> Program:
        if f"{name}_bias" not in biases:
            return (Line("product", out, (source,), f"{prefix}{name}"),)
        plain = f"{out}_product"
        return Line("product", plain, (source,), f"{prefix}{name}"), Line("bias", out, (plain,), f"{name}_bias")

    settings = () if limit is None else (("limit", limit),)
    return (
        *product("gate", source, "gate"),
        *product("up", source, "up"),
        Line(GATES[activation], "inner", ("gate", "up"), settings=settings),
        *product("down", "inner", out),
    )


def _norm(config: LlamaConfig, out: str, source: str, gain: str) -> Line:
    return Line("norm", out, (source,), gain, (("epsilon", config.rms_epsilon),))


def _sum(config: LlamaConfig, out: str, stream: str, part: str) -> Program:
    """The residual stream plus a part of the block, which is first scaled if the model has a factor for it."""
    if config.residual_scale == 1:
        return (Line("add", out, (stream, part)),)
    scaled = f"{part}_scaled"
    factor = (("factor", config.residual_scale),)
    return Line("scale", scaled, (part,), settings=factor), Line("add", out, (stream, scaled))


def _post_norm(config: LlamaConfig, part: str, vectors: Collection[str]) -> Iterator[Line]:
    if f"{part}_post_norm" in vectors:
        yield _norm(config, f"{part}_normed", part, f"{part}_post_norm")


# **The step** is the embedding, the blocks, the last norm and the head.


@dataclass(frozen=True)
class Step:
    """The program of a model.

    Attributes:
        config: of the model.
        blocks: a program for each block.
    """

    config: LlamaConfig
    blocks: tuple[Program, ...]

    @property
    def first(self) -> Program:
        """From the tokens to the residual stream."""
        return (Line("embed", BEGIN, ("tokens",), "embedding", (("scale", self.config.embedding_scale),)),)

    @property
    def last(self) -> Program:
        """From the residual stream to the logits."""
        cap, divisor = self.config.logit_cap, self.config.logit_divisor
        changes: list[tuple[Kind, str, float]] = []
        if divisor != 1:
            changes.append(("scale", "factor", 1 / divisor))
        if cap is not None:
            changes.append(("soft_cap", "cap", cap))
        names = (*("plain_logits", "scaled_logits")[: len(changes)], "logits")
        changed = [
            Line(kind, out, (source,), settings=((name, number),))
            for (kind, name, number), (source, out) in zip(changes, pairwise(names), strict=True)
        ]
        product = Line("product", names[0], ("hidden",), "head")
        return (_norm(self.config, "hidden", BEGIN, "norm"), product, *changed)

    @property
    def alike(self) -> list[tuple[range, Program]]:
        """Runs of neighbouring blocks with the same program."""
        found, first = [], 0
        for program, run in groupby(self.blocks):
            count = len(list(run))
            found.append((range(first, first + count), program))
            first += count
        return found


def step_of(weights: LlamaWeights) -> Step:
    """The program of a model.

    Raises:
        ArgumentError: it is not sound (`check`).
    """
    blocks = (block_of(weights.config, number, layer) for number, layer in enumerate(weights.layers))
    step = Step(weights.config, tuple(blocks))
    for program in set(step.blocks):
        check(program, weights.config)
    return step


# **Sizes.** Every value has T rows; its width follows from the inputs and the parameter of its line.


def widths(program: Program, config: LlamaConfig) -> dict[str, int]:
    """The width of every value of a block's program.

    Raises:
        ArgumentError: a value is read before it is written or written twice, or sizes do not match.
    """
    known = {BEGIN: config.hidden}
    for line in program:
        for name in line.inputs:
            if name not in known:
                raise _unsound(line, f"a value that is written before the line reads it, not {name}")
        if line.out in known:
            raise _unsound(line, f"a value that no other line writes, not {line.out}")
        width = _width(line, [known[name] for name in line.inputs], config)
        if line.out:
            known[line.out] = width
    return known


def check(program: Program, config: LlamaConfig) -> None:
    """Refuse a block's program that is not sound.

    Raises:
        ArgumentError: as `widths`; it does not end with a residual stream; it attends before it appends to the cache,
            or appends twice.
    """
    if widths(program, config).get(END) != config.hidden or program[-1].out != END:
        raise ArgumentError("program", "another end", f"{END}, {config.hidden} wide")
    appends = [number for number, line in enumerate(program) if line.kind == "append"]
    for number, line in enumerate(program):
        if line.kind in ("attend", "attend_shaped") and not (appends and appends[0] < number):
            raise _unsound(line, "attention behind the line that appends to the cache")
    if len(appends) > 1:
        raise _unsound(program[appends[1]], "one append in a block")


def overwritten(program: Program, places: Mapping[str, Hashable]) -> Line | None:
    """The first line that reads a value whose place another value has overwritten; None if there is none.

    >>> program = Line("norm", "a", ("x",)), Line("norm", "b", ("x",)), Line("add", "result", ("x", "a"))
    >>> str(overwritten(program, {"x": 0, "a": 1, "b": 1, "result": 0}))
    'result = add(x, a)'

    Args:
        program: a sound one.
        places: where a reader keeps each value.
    """
    held = {places[BEGIN]: BEGIN}
    for line in program:
        if any(held.get(places[name]) != name for name in line.inputs):
            return line
        if line.out:
            held[places[line.out]] = line.out
    return None


def _width(line: Line, given: list[int], config: LlamaConfig) -> int:
    """The width of a line's value, from the widths of its inputs."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if line.kind in ("product", "gate"):
        rows, columns = linear_shapes(config).get(str(line.parameter), (0, 0))
        _fits(line, given, [rows])
        return columns
    if line.kind in ("norm", "bias"):
        size = vector_sizes(config).get(str(line.parameter), 0)
        if not size or given[0] % size or (line.kind == "bias" and given[0] != size):
            raise _unsound(line, f"a vector for {given[0]} columns, not one of {size}")
        return given[0]
    if line.kind.startswith("rotate") and given[0] % config.head_dim:
        raise _unsound(line, f"whole heads of {config.head_dim} columns, not {given[0]}")
    if line.kind == "append":
        _fits(line, given, [keys, keys])
    elif line.kind in ("attend", "attend_shaped"):
        _fits(line, given, [queries])
    elif line.kind == "experts":
        _fits(line, given, [config.hidden, config.routing.experts if config.routing else 0])
    elif line.kind in ("swiglu", "geglu", "clamped_swiglu", "add"):
        _fits(line, given, [given[0]] * 2)
    return given[0]


def _fits(line: Line, given: list[int], allowed: list[int]) -> None:
    if given != allowed:
        raise _unsound(line, f"values {allowed} columns wide, not {given}")


def _unsound(line: Line, allowed: str) -> ArgumentError:
    return ArgumentError("line of a program", repr(str(line)), allowed)
