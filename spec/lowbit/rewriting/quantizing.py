"""Quantising a model into a directory, block by block.

A request says how. One that does not fit the model is refused before any weight is read, and `quantize` carries the
others out. Matrices of the blocks become codes, routers excepted. Embedding, head, norms and biases stay as they are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.names import matrix_names
from lowbit.formats.fetch import Report, silent
from lowbit.model.weights import LayerWeights, linear_shapes, to_float
from lowbit.quantization.packing import BITS
from lowbit.rewriting.calibration import Seen, Streams, source_of
from lowbit.rewriting.coded import digest
from lowbit.rewriting.journal import Journal, check_destination, journal, read_windows
from lowbit.rewriting.layouts import Description, Layout
from lowbit.rewriting.methods import METHODS, Rounding
from lowbit.rewriting.source import Source
from lowbit.rewriting.writing import Packed, check_room, commit_ends, commit_layer, finish, shard_of
from lowbit.runtime.stored import part_of
from lowbit.system.threads import side_by_side, usable_processors

VERSION = 1
"""Of what a request writes; a folder that another version left is not taken up."""
ROUTER = "feed_forward.router"


@dataclass(frozen=True, eq=False)
class Request:
    """How a model is quantised.

    Attributes:
        rounding: how weights become codes.
        layout: of the directory.
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
        """Refuse choices that do not go together, whatever the model is.

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
            raise ArgumentError("--act-order", "given", "only with --method gptq and a layout of GPTQ")
        if self.rounding.symmetric and method == "hqq":
            raise ArgumentError("--symmetric", "given", "only with rtn or gptq: HQQ moves the zeros")
        if layout.name == "gptq-v1" and not self.rounding.symmetric:
            sentence = "gptq-v1 holds no zero of 0, which some groups have; give --symmetric, or --format gptq-v2"
            raise ArgumentError("--format", layout.name, "gptq-v2", sentence)

    @property
    def _is_uniform(self) -> bool:
        return self.attention_bits == self.experts_bits

    def check_model(self, source: Source) -> None:
        """Refuse a model that has a matrix which the layout cannot hold.

        Raises:
            ArgumentError: names the matrix.
        """
        config = source.config
        shapes, size = linear_shapes(config), self.rounding.group_size
        for stored, names in tensors_of(source, 0):
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
        """What the configuration says."""
        return Description(
            bits=self.experts_bits,
            group_size=self.rounding.group_size,
            symmetric=self.rounding.symmetric,
            act_order=self.rounding.act_order,
            attention_bits=self.attention_bits,
            floats=float_modules(source),
        )

    def call(self, source: Source) -> dict[str, Any]:
        """All that determines what is written, as JSON."""
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


def tensors_of(source: Source, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The quantised tensors of a block without ``.weight``, and the matrices in each."""
    for stored, names in matrix_names(source.architecture, source.config, number).items():
        if ROUTER not in names:
            yield stored.removesuffix(".weight"), tuple(names)


def float_modules(source: Source) -> tuple[str, ...]:
    """The modules that stay floats: the head, and the routers."""
    sparse = source.architecture.sparse
    routers = () if sparse is None else (sparse.router,)
    return ("lm_head", *(f"model.layers.{n}.{each}" for n in range(source.config.layers) for each in routers))


def quantize(source: Source, destination: Path, request: Request, report: Report = silent) -> dict[str, Any]:
    """Quantise a model into a directory, or what an interrupted process has left to do.

    Args:
        source: the model.
        destination: the directory; a free name, or an empty directory.
        request: how.
        report: called while it works.

    Returns:
        ``bytes`` of the tensors, ``resumed``, the number of blocks that were there already, and of each of the
        ``matrices`` its bits, its relative error and whether it was calibrated.

    Raises:
        ArgumentError: a request that does not fit the model; a destination that is taken; weights that cannot be
            quantised so.
        UnavailableError: too little memory or disk space.
        FormatError: a damaged source; a result that is not what was meant.
    """
    request.check()
    request.check_model(source)
    check_destination(destination)
    check_room(destination, room(source, request))
    with journal(destination, request.call(source)) as parts:
        layers = source.config.layers
        resumed = sum(parts.note_of(shard_of(number, layers)) is not None for number in range(layers))
        _quantize_layers(source, request, parts, part_report(report, f"quantising {source.name}"))
        commit_ends(parts, source)
        description = request.description(source)
        config = {"quantization_config": request.layout.config(description)}
        files = {name: make(description) for name, make in request.layout.files.items()}
        told = finish(parts, source, config, files, part_of(report, "checking"))
    return told | {"resumed": resumed}


def part_report(report: Report, what: str) -> Report:
    """Reports of one thing, whatever part of it is named."""
    return lambda _, done, total: report(what, done, total)


def room(source: Source, request: Request) -> int:
    """About the bytes that will be written: codes with scales and zeros of 32 bits a group, and floats at most."""
    config, size = source.config, request.rounding.group_size
    shapes = {name: shape for name, shape in linear_shapes(config).items() if name != ROUTER}
    codes = sum(k * n * (request.bits_of(name) / 8 + 4 / size) for name, (k, n) in shapes.items())
    streams = 16 * len(request.tokens) * config.hidden
    return int(config.layers * codes) + 4 * config.vocabulary * config.hidden + streams


def _quantize_layers(source: Source, request: Request, parts: Journal, report: Report) -> None:
    layers, streams = source.config.layers, None
    for number in range(layers):
        report("", number, layers)
        if parts.note_of(shard_of(number, layers)) is not None:
            continue
        layer, seen = source.layer(number), None
        if request.tokens:
            streams = streams or _streams(source, request, parts, number)
            seen = streams.seen(number, layer)
        packed = quantized_layer(source, request, number, layer, seen)
        if streams is not None and number + 1 < layers:
            streams = streams.through(number, _with_codes(layer, packed))
            parts.commit(_state(number + 1), streams.tensors(), None)
        commit_layer(parts, source, number, layer, packed, request.layout)
        parts.discard(_state(number))
    report("", layers, layers)


def _state(number: int) -> str:
    """The file of the residual streams in front of a block."""
    return f"streams-{number:05}.safetensors"


def _streams(source: Source, request: Request, parts: Journal, number: int) -> Streams:
    """The streams in front of a block: of the embedding, or as an earlier process kept them."""
    if number == 0:
        return Streams.of(source.config, source.rows(), request.tokens, request.window)
    return Streams(source.config, read_windows(parts.folder / _state(number)))


def _with_codes(layer: LayerWeights, packed: Mapping[str, Packed]) -> LayerWeights:
    floats = {name: part.floats for each in packed.values() for name, part in each.parts()}
    return layer.changed(lambda name, matrix: floats[name])


def quantized_layer(
    source: Source, request: Request, number: int, layer: LayerWeights, seen: Seen | None
) -> dict[str, Packed]:
    """The matrices of a block, quantised; those with the same inputs one after another, others side by side.

    Args:
        source: the model.
        request: how.
        number: of the block.
        layer: its weights.
        seen: its inputs, for ``gptq``.
    """
    linears, groups = layer.linears(), dict[str, list[tuple[str, tuple[str, ...]]]]()
    for stored, names in tensors_of(source, number):
        groups.setdefault(source_of(names[0]), []).append((stored, names))

    def work(group: tuple[str, list[tuple[str, tuple[str, ...]]]]) -> dict[str, Packed]:
        name, tensors = group
        hessian = None if seen is None else seen.hessian(name)
        inputs = None if hessian is None else request.rounding.of_inputs(hessian)
        found = {}
        for stored, names in tensors:
            matrices = [to_float(linears[name]) for name in names]
            weights = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1)
            coded = request.rounding(weights, request.bits_of(names[0]), inputs)
            matrix = request.layout.stored(coded, symmetric=request.rounding.symmetric)
            notes = {"error": _error(weights, coded.floats)} | ({} if seen is None else {"calibrated": bool(inputs)})
            ends = tuple(int(end) for end in np.cumsum([each.shape[1] for each in matrices]))
            found[stored] = Packed(names, ends, coded, matrix, notes)
        return found

    done = side_by_side(work, groups.items(), usable_processors())
    return {stored: each for some in done for stored, each in some.items()}


def _error(weights: F32, values: F32) -> float:
    """The norm of the error over the norm of the weights."""
    whole = float(np.linalg.norm(weights))
    return float(np.linalg.norm(weights - values)) / whole if whole else 0.0
