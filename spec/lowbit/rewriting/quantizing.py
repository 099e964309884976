"""Quantising a model into a directory or a file, block by block.

A request says how. One that does not fit the model is refused before any weight is read; `quantize` carries out the
others. Matrices of the blocks become codes, except for routers. Embedding, head, norms and biases stay unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import Report, silent
from lowbit.model.calibration import Seen, Streams, source_of
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LayerWeights, linear_shapes
from lowbit.quantization.coded import digest
from lowbit.quantization.gptq_blocks import check_block_size
from lowbit.quantization.hqq_published import RECIPES
from lowbit.quantization.packing import BITS
from lowbit.rewriting.journal import Journal, journal, read_windows
from lowbit.rewriting.layouts import Description, Layout
from lowbit.rewriting.methods import METHODS, Rounding
from lowbit.rewriting.source import Source
from lowbit.rewriting.targets import target_of
from lowbit.rewriting.writing import (
    ROUTER,
    Packed,
    Target,
    check_room,
    columns_together,
    commit_ends,
    commit_layer,
    finish,
    shard_of,
    shards_of,
)
from lowbit.runtime.stored import part_of
from lowbit.system.threads import side_by_side, usable_processors

VERSION = 2
"""The version of a request's output; a folder left by another version is not resumed."""


@dataclass(frozen=True, eq=False)
class Request:
    """How a model is quantised.

    Attributes:
        rounding: how weights become codes.
        layout: of the output.
        attention_bits: of the matrices of attention.
        experts_bits: of the feed-forward matrices: those of the experts, or of dense blocks.
        tokens: of the calibration text, for ``gptq``; else empty.
        window: tokens of a window of that text.
    """

    rounding: Rounding
    layout: Layout
    attention_bits: int
    experts_bits: int
    tokens: tuple[int, ...] = ()
    window: int = 512

    def bits_of(self, name: str) -> int:
        """The bits of a matrix, by its name in `LayerWeights.linears`."""
        return self.experts_bits if name.startswith("feed_forward.") else self.attention_bits

    def check(self) -> None:
        """Refuse choices that conflict for any model.

        Raises:
            ArgumentError: names the option.
        """
        method, layout = self.rounding.method, self.layout
        check_choice("--method", method, METHODS)
        check_integer("--group-size", self.rounding.group_size, least=1)
        for option, bits in (("--attention-bits", self.attention_bits), ("--experts-bits", self.experts_bits)):
            allowed = tuple(each for each in BITS if each in layout.bits)
            check_choice(option.replace("--attention-", "--") if self._is_uniform else option, bits, allowed)
        if not self._is_uniform and not layout.mixes_bits:
            given = f"{self.attention_bits} and {self.experts_bits} bits"
            raise ArgumentError("--format", f"{layout.name} with {given}", "gptq-v2, which has other bits for some")
        if self.rounding.act_order and (method != "gptq" or not layout.has_order):
            possible = "only with --method gptq and a layout of GPTQ"
            raise ArgumentError("--act-order", "given", possible, f"--act-order is possible {possible}")
        if self.rounding.block_size is not None:
            if method != "gptq":
                possible = "only with --method gptq"
                raise ArgumentError("--block-size", "given", possible, f"--block-size is possible {possible}")
            check_block_size("--block-size", self.rounding.block_size, self.rounding.group_size)
        check_choice("--recipe", self.rounding.recipe, RECIPES)
        if self.rounding.recipe != "ruled" and not (method == "hqq" and layout.has_real_zeros):
            possible = "only with --method hqq and --format hqq"
            raise ArgumentError("--recipe", self.rounding.recipe, possible, f"--recipe is possible {possible}")
        if self.rounding.symmetric and method == "hqq":
            possible = "only with --method rtn or gptq, since HQQ moves the zeros"
            raise ArgumentError("--symmetric", "given", possible, f"--symmetric is possible {possible}")
        if layout.is_file and not self.rounding.symmetric and max(self.attention_bits, self.experts_bits) > 4:
            sentence = "gguf holds codes of 8 bits only with zeros in their middle; give --symmetric, or --bits 4"
            raise ArgumentError("--format", layout.name, "gptq-v2", sentence)
        if layout.name == "gptq-v1" and not self.rounding.symmetric:
            sentence = "gptq-v1 holds no zero of 0, which some groups have; give --symmetric, or --format gptq-v2"
            raise ArgumentError("--format", layout.name, "gptq-v2", sentence)

    @property
    def _is_uniform(self) -> bool:
        return self.attention_bits == self.experts_bits

    def check_model(self, source: Source) -> None:
        """Refuse a model with a matrix that the layout cannot hold.

        Raises:
            ArgumentError: names the matrix.
        """
        config, target = source.config, target_of(self.layout)
        target.check(source)
        shapes, size = linear_shapes(config), self.rounding.group_size
        for stored, names in target.holders(source, 0):
            rows, columns = shapes[names[0]][0], sum(shapes[name][1] for name in names)
            self.layout.check(f"matrix {stored}", self.bits_of(names[0]), size, rows, columns)
            if self.rounding.method == "hqq" and rows % size:
                raise ArgumentError("--group-size", size, f"a divisor of {rows}, the rows of {stored}, for hqq")
        if self.tokens and self.window > config.context:
            raise ArgumentError("--window", self.window, f"at most {config.context}, the model's context")
        if (self.rounding.method == "gptq") != bool(self.tokens):
            given = f"{len(self.tokens)} tokens"
            raise ArgumentError("--calibration", given, "at least one token with --method gptq, and none without it")

    def description(self, source: Source) -> Description:
        """The description for the configuration."""
        return Description(
            bits=self.experts_bits,
            group_size=self.rounding.group_size,
            symmetric=self.rounding.symmetric,
            act_order=self.rounding.act_order,
            floats=float_modules(source),
            other_bits={} if self._is_uniform else {ATTENTION: self.attention_bits},
        )

    def call(self, source: Source) -> dict[str, Any]:
        """Everything that determines the output, as JSON."""
        return {
            "command": "quantize",
            "version": [VERSION, version_of("lowbit")],
            "source": source.identity(),
            "layout": self.layout.name,
            "rounding": asdict(self.rounding),
            "bits": [self.attention_bits, self.experts_bits],
            "tokens": digest(np.array(self.tokens, np.float32)) if self.tokens else "",
            "window": self.window,
        }


ATTENTION = r".*\.self_attn\..*"
"""The pattern of the modules of attention."""


def float_modules(source: Source) -> tuple[str, ...]:
    """The modules that stay floats: the head, and the routers."""
    sparse = source.architecture.sparse
    routers = () if sparse is None else (sparse.router,)
    return ("lm_head", *(f"model.layers.{n}.{each}" for n in range(source.config.layers) for each in routers))


def quantize(
    source: Source,
    destination: Path,
    request: Request,
    report: Report = silent,
    blocks: Callable[[Source, Target, Request, Journal, Report], None] | None = None,
) -> dict[str, Any]:
    """Quantise a model, or finish what an interrupted process began.

    Args:
        source: the model.
        destination: of the output; a free name, or for a directory an empty one.
        request: how to quantise.
        report: called while it works.
        blocks: commits the parts of unfinished blocks; by default one after another in this process.

    Returns:
        ``bytes`` of the tensors, ``resumed``, the number of blocks that already existed, and ``matrices``, the bits,
        the relative error and the calibration of each.

    Raises:
        ArgumentError: a request that does not fit the model; a destination that exists; weights that cannot be
            quantised in this way.
        UnavailableError: too little memory or disk space.
        FormatError: a damaged source; a result that differs from the intended one.
    """
    request.check()
    request.check_model(source)
    target = target_of(request.layout)
    with writing(source, destination, target, request.call(source), room(source, request)) as parts:
        layers = source.config.layers
        if request.tokens:
            _check_streams(parts, layers)
        resumed = sum(parts.note_of(shard_of(number, layers)) is not None for number in range(layers))
        (blocks or _quantize_layers)(source, target, request, parts, part_report(report, f"quantising {source.name}"))
        commit_ends(parts, target, source)
        told = finish(parts, target, source, request.description(source), part_of(report, "checking"))
    return told | {"resumed": resumed}


@contextmanager
def writing(
    source: Source, destination: Path, target: Target, call: Mapping[str, Any], needed: int
) -> Iterator[Journal]:
    """The journal of a result, if the destination is free and the disk has room for it.

    Args:
        source: the model.
        destination: what is written.
        target: how.
        call: everything that determines the output; JSON.
        needed: the approximate bytes of all parts.

    Raises:
        ArgumentError: the destination is taken.
        UnavailableError: too little disk space, or a folder that cannot be written.
    """
    is_file = target.layout.is_file
    with journal(destination, call, is_file=is_file) as parts:
        whole = 2 * needed if is_file else needed  # a file is assembled from its parts
        check_room(destination, whole - parts.nbytes)
        yield parts


def part_report(report: Report, what: str) -> Report:
    """Reports of one task, without the names of its parts."""
    return lambda _, done, total: report(what, done, total)


def room(source: Source, request: Request) -> int:
    """An upper estimate of the output's bytes: codes, 32 bits a group for scale and zero, and floats."""
    config, size = source.config, request.rounding.group_size
    shapes = {name: shape for name, shape in linear_shapes(config).items() if name != ROUTER}
    codes = sum(k * n * (request.bits_of(name) / 8 + 4 / size) for name, (k, n) in shapes.items())
    streams = 16 * len(request.tokens) * config.hidden
    return int(config.layers * codes) + 4 * config.vocabulary * config.hidden + streams


@dataclass(frozen=True, eq=False)
class Block:
    """A block to quantise.

    Attributes:
        number: of the block.
        layer: its weights.
        seen: the inputs of its matrices, with a calibration text.
    """

    number: int
    layer: LayerWeights
    seen: Seen | None


@dataclass(eq=False)
class InOrder:
    """The unfinished blocks in order.

    With a calibration text a block is read only after the previous one is committed, since it is calibrated on the
    outputs of the quantised blocks before it.

    Attributes:
        source: the model.
        target: what is written.
        request: how.
        parts: of the result.
        report: called with each block.
    """

    source: Source
    target: Target
    request: Request
    parts: Journal
    report: Report
    _streams: Streams | None = None

    def __iter__(self) -> Iterator[Block]:
        layers = self.source.config.layers
        for number in range(layers):
            self.report("", number, layers)
            if self.parts.note_of(shard_of(number, layers)) is None:
                yield self._block(number)
        self.report("", layers, layers)

    def commit(self, block: Block, packed: Mapping[str, Packed]) -> None:
        """Write the part of a block, and the calibration inputs of the next; `packed` is from `quantized_layer`."""
        number = block.number
        if self._streams is not None and number + 1 < self.source.config.layers:
            self._streams = self._streams.through(number, _with_codes(block.layer, packed))
            self.parts.commit(_state(number + 1), self._streams.tensors(), None)
        commit_layer(self.parts, self.target, self.source, number, block.layer, packed)
        self.parts.discard(_state(number))

    def _block(self, number: int) -> Block:
        layer = self.source.layer(number)
        if not self.request.tokens:
            return Block(number, layer, None)
        if self._streams is None:
            self._streams = self._begun(number)
        return Block(number, layer, self._streams.seen(number, layer))

    def _begun(self, number: int) -> Streams:
        """The streams before a block: from the embedding, or as kept by an earlier process."""
        if number == 0:
            return Streams.of(self.source.config, self.source.rows(), self.request.tokens, self.request.window)
        return Streams(self.source.config, read_windows(self.parts.folder / _state(number)))


def _check_streams(parts: Journal, layers: int) -> None:
    """Start over if the streams before the first unfinished block are missing or damaged."""
    shards = shards_of(layers)[:-1]
    first = next((number for number, file in enumerate(shards) if file not in parts.parts), 0)
    if first > 0 and _state(first) not in parts.parts:
        for file in shards:
            parts.discard(file)


def _quantize_layers(source: Source, target: Target, request: Request, parts: Journal, report: Report) -> None:
    blocks = InOrder(source, target, request, parts, report)
    for block in blocks:
        blocks.commit(block, quantized_layer(source, target, request, block))
        del block  # so that two blocks are not in memory at once


def _state(number: int) -> str:
    """The file of the residual streams before a block."""
    return f"streams-{number:05}.safetensors"


def _with_codes(layer: LayerWeights, packed: Mapping[str, Packed]) -> LayerWeights:
    floats = {name: numbers for each in packed.values() for name, numbers in each.parts()}
    return layer.changed(lambda name, matrix: floats[name])


Tensors = tuple[tuple[str, tuple[str, ...]], ...]
"""Names of tensors, each with the matrices in it."""


def quantized_layer(
    source: Source, target: Target, request: Request, block: Block, threads: int | None = None
) -> dict[str, Packed]:
    """The matrices of a block, quantised; those with the same inputs one after another, others in parallel.

    Args:
        source: the model.
        target: what is written.
        request: how.
        block: with its inputs, for ``gptq``.
        threads: the number to use; None for one per usable processor.
    """
    linears, seen = block.layer.linears(), block.seen

    def work(group: tuple[str, Tensors]) -> dict[str, Packed]:
        return quantized_group(request, linears, *group, seen)

    done = side_by_side(work, groups_of(source, target, block.number).items(), threads or usable_processors())
    return {stored: each for some in done for stored, each in some.items()}


def groups_of(source: Source, target: Target, number: int) -> dict[str, Tensors]:
    """The tensors of a block that share their inputs, by the matrix of `source_of`."""
    groups = dict[str, Tensors]()
    for stored, names in target.holders(source, number):
        name = source_of(names[0])
        groups[name] = (*groups.get(name, ()), (stored, names))
    return groups


def quantized_group(
    request: Request, linears: Mapping[str, Matrix], name: str, tensors: Tensors, seen: Seen | None
) -> dict[str, Packed]:
    """The matrices that share their inputs, quantised.

    Args:
        request: how.
        linears: the matrices of the block, or at least these.
        name: of the matrix whose inputs they share.
        tensors: that hold them.
        seen: the inputs, for ``gptq``.

    Raises:
        ArgumentError: weights that cannot be quantised in this way; names the matrix.
    """
    hessian = None if seen is None else seen.hessian(name)
    inputs = None if hessian is None else request.rounding.of_inputs(hessian)
    found = {}
    for stored, names in tensors:
        weights, ends = columns_together([to_float(linears[each]) for each in names])
        with _about(stored):
            coded = request.rounding(weights, request.bits_of(names[0]), inputs)
            matrix, numbers = request.layout.stored(coded, symmetric=request.rounding.symmetric), coded.floats
        notes: dict[str, Any] = {"bits": coded.bits, "error": _error(weights, numbers)}
        notes |= {} if seen is None else {"calibrated": bool(inputs)}
        found[stored] = Packed(names, ends, numbers, matrix, notes)
    return found


@contextmanager
def _about(matrix: str) -> Iterator[None]:
    """Add the name of the matrix to an error.

    Raises:
        ArgumentError: the error of the block, with the name before it.
    """
    try:
        yield
    except ArgumentError as error:
        sentence = f"{matrix} cannot be quantised: {error}"
        raise ArgumentError(error.argument, error.given, error.allowed, sentence) from error


def _error(weights: F32, values: F32) -> float:
    """The norm of the error over the norm of the weights."""
    whole = float(np.linalg.norm(weights))
    return float(np.linalg.norm(weights - values)) / whole if whole else 0.0
