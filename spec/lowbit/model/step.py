r"""The step of a decoder as a program: which operations it runs, on which values, in which order.

A decoder does the same for every token: its *step*. It is written here once, as a program of operations over named
values (`program`), and everything else reads it: the interpreter of the chapter `block` runs it operation by operation
on any backend, one backend may compile it whole, another may make a graph of it. A backend may refuse a program, with
an error that names a line.

**A block** begins with the residual stream ``x`` and ends with the value ``result``, which is the ``x`` of the next.
`block` writes the programs of the models that lowbit reads. A block of another architecture has its program beside its
weights (`LayerWeights.program`), and every reader takes that instead.

**What is checked.** `check` refuses a program with a line that does not have the form of its kind, that reads a value
before it is written, writes one twice, combines values and parameters of mismatched sizes, or attends before the keys
and values of its tokens are in the cache. The program says what is computed from what; the numbers of a model are those
of its configuration. So `check` also refuses a line with another number, which some readers would take from the line
and others from the configuration. A reader that keeps several values in one place asks `overwritten` whether a program
reads one too late.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2.1; Qwen2 (arXiv 2407.10671) §2.2; Gemma 3
(arXiv 2503.19786) §2.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import MappingProxyType

from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError
from lowbit.model.config import Activation, LlamaConfig
from lowbit.model.program import BEGIN, END, FORMS, Kind, Line, Program, Setting, check_form, unsound
from lowbit.model.weights import LayerWeights, LlamaWeights, linear_shapes, vector_sizes

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
    """The program of a block with these weights: its own, if it has one.

    Raises:
        ArgumentError: the program is not sound (`check`), or the block lacks a vector that a line names.
    """
    program = layer.program
    if program is None:
        program = block(config, number, [name for name in vector_sizes(config) if getattr(layer, name) is not None])
    check(program, config)
    for line in program:
        for name in vectors_of(line):
            if getattr(layer, name) is None:
                raise ArgumentError(f"layers[{number}].{name}", "missing", f"given, since a line reads it: {line}")
    return program


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
        ArgumentError: as `block_of`.
    """
    blocks = (block_of(weights.config, number, layer) for number, layer in enumerate(weights.layers))
    return Step(weights.config, tuple(blocks))


def vectors_of(line: Line) -> list[str]:
    """The names of the vectors that a line reads."""
    if line.kind == "experts":
        return [f"expert_{name}" for name in (line.setting("biases") or "").split()]
    return [] if line.parameter is None or line.kind in ("product", "gate") else [line.parameter]


# **Sizes.** Every value has T rows; its width follows from the inputs and the parameter of its line.


def widths(program: Program, config: LlamaConfig) -> dict[str, int]:
    """The width of every value of a block's program.

    Raises:
        ArgumentError: a line does not have its form; a value is read before it is written or written twice; sizes do
            not match; a number is not that of the configuration.
    """
    known, shapes = {BEGIN: config.hidden}, linear_shapes(config)
    for line in program:
        check_form(line)
        _check_numbers(line, config)
        for name in line.inputs:
            if name not in known:
                raise unsound(line, f"a value that is written before the line reads it, not {name}")
        if line.out in known:
            raise unsound(line, f"a value that no other line writes, not {line.out}")
        width = _width(line, [known[name] for name in line.inputs], config, shapes)
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
            raise unsound(line, "attention behind the line that appends to the cache")
    if len(appends) > 1:
        raise unsound(program[appends[1]], "one append in a block")


def _check_numbers(line: Line, config: LlamaConfig) -> None:
    """Refuse a line that has another number or choice than the configuration."""
    unit, attention = GATES[config.activation], "attend_shaped" if config.shaped else "attend"
    kinds = dict.fromkeys(GATES.values(), unit) | dict.fromkeys(("attend", "attend_shaped"), attention)
    if (kind := kinds.get(line.kind, line.kind)) != line.kind:
        raise unsound(line, f"{kind}, as the configuration says")
    form = FORMS[line.kind]
    for name, allowed in _numbers(line.kind, config).items():
        if name in (*form.settings, *form.optional) and line.setting(name) not in allowed:
            raise unsound(line, f"{name} {spoken(allowed)}, as the configuration says")
    if line.kind == "attend_shaped" and line.parameter != ("sinks" if config.sinks else None):
        raise unsound(line, f"{'the parameter sinks' if config.sinks else 'no parameter'}, as the configuration says")
    if line.kind.startswith("rotate") and line.frequencies not in config.frequencies:
        raise unsound(line, "a base and a scaling of the configuration")


def _numbers(kind: Kind, config: LlamaConfig) -> dict[str, list[object]]:
    """The numbers and choices of a configuration that lines of a kind repeat, by the names of their settings."""
    limit = config.activation_limit if config.activation == "clamped" else None
    windows = {config.layer_window(number) for number in range(config.layers)}
    found: dict[str, list[object]] = {
        "head_dim": [config.head_dim],
        "window": sorted(windows, key=str),
        "limit": [limit],
        "activation": [config.activation],
    }
    if config.routing is not None:
        found |= {"top_k": [config.routing.top_k], "softmax": [config.routing.softmax]}
    return found | ({"scale": [config.score_scale], "cap": [config.score_cap]} if kind == "attend_shaped" else {})


def _width(line: Line, given: list[int], config: LlamaConfig, shapes: Mapping[str, tuple[int, int]]) -> int:
    """The width of a line's value, from the widths of its inputs."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if line.kind in ("product", "gate"):
        if line.parameter is None or line.parameter not in shapes or "[" in line.parameter:  # single experts
            raise unsound(line, f"a matrix among {spoken([name for name in shapes if '[' not in name])}")
        _fits(line, given, [shapes[line.parameter][0]])
        return shapes[line.parameter][1]
    sizes = vector_sizes(config)
    for name in vectors_of(line):
        if name not in sizes:
            raise unsound(line, f"a vector among {spoken([*sizes])}")
    if line.kind in ("norm", "bias"):
        size = sizes[str(line.parameter)]
        if given[0] % size or (line.kind == "bias" and given[0] != size):
            raise unsound(line, f"a vector for {given[0]} columns, not one of {size}")
        return given[0]
    if line.kind.startswith("rotate") and given[0] % config.head_dim:
        raise unsound(line, f"whole heads of {config.head_dim} columns, not {given[0]}")
    if line.kind == "rotate_sorted" and line.setting("heads") * config.head_dim != given[0]:
        raise unsound(line, f"heads {given[0] // config.head_dim}")
    if line.kind == "append":
        _fits(line, given, [keys, keys])
    elif line.kind in ("attend", "attend_shaped"):
        _fits(line, given, [queries])
    elif line.kind == "experts":
        if config.routing is None:
            raise unsound(line, "experts of a configuration with experts")
        _fits(line, given, [config.hidden, config.routing.experts])
    elif line.kind in ("swiglu", "geglu", "clamped_swiglu", "add"):
        _fits(line, given, [given[0]] * 2)
    return given[0]


def _fits(line: Line, given: list[int], allowed: list[int]) -> None:
    if given != allowed:
        raise unsound(line, f"values {allowed} columns wide, not {given}")
