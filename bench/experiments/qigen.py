"""QIGen, table 2: perplexity by bits, group size and quantiser, with the error of the layers beside it.

All matrices of the blocks are quantised; embedding, head and norms stay floats, as in the paper. GPTQ is calibrated
block by block on text that the model was trained on. The error of a layer is that of its results on the inputs that the
unquantised model gives it there: squared, over the squared results, as a mean over all matrices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from experiments.measuring import DENSE, WINDOW, Subject, losses, subject
from experiments.running import Experiment, Row
from lowbit.arrays import F32, F64
from lowbit.model.calibration import Streams, source_of
from lowbit.model.decoder import Decoder
from lowbit.model.weights import LayerWeights, LlamaWeights, Matrix, to_float
from lowbit.quantization.gptq import layer_error
from lowbit.rewriting.methods import Method, Rounding

GROUPS = (0, 128, 64, 32, 16)
"""Rows of a group; 0 for a whole column."""
GROUPS_OF = {"GPTQ act-order": (0, 128)}
"""Of the method that takes the longest; of the others all."""
BITS = (4, 3, 2)
METHODS: Mapping[str, tuple[Method, bool]] = {
    "nearest": ("rtn", False),
    "GPTQ": ("gptq", False),
    "GPTQ act-order": ("gptq", True),
    "HQQ": ("hqq", False),
}
"""By name: the method of `lowbit.rewriting.methods`, and whether it orders rows."""


def rows(quick: bool) -> list[Row]:
    """For each model the floats, and then every quantiser."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for model in DENSE[:1] if quick else DENSE:
        yield Row({"model": model, "method": "floats", "bits": 16, "group": 0}, partial(floats, model, quick))
        for method in METHODS:
            for bits in BITS[1:2] if quick else BITS:
                for group in GROUPS[2:3] if quick else GROUPS_OF.get(method, GROUPS):
                    settings: dict[str, str | int] = {"model": model, "method": method, "bits": bits, "group": group}
                    yield Row(settings, partial(measured, model, method, bits, group, quick))


def floats(model: str, quick: bool) -> dict[str, Any]:
    """The losses of the model as it is."""
    it = subject(model, quick)
    return losses(Decoder(it.weights), it.windows)


def measured(model: str, method: str, bits: int, group: int, quick: bool) -> dict[str, Any]:
    """The losses of the quantised model, and the mean error of its layers."""
    it = subject(model, quick)
    new = quantised(it, *METHODS[method], bits, group)
    pairs = zip(it.weights.layers, new.layers, inputs_of_layers(model, quick), strict=True)
    errors = [error for one, other, squares in pairs for error in layer_errors(one, other, squares)]
    return losses(Decoder(new), it.windows) | {"layer_error": float(np.mean(errors))}


def quantised(it: Subject, method: Method, act_order: bool, bits: int, group: int) -> LlamaWeights:
    """A model with the numbers that its codes stand for."""
    streams, layers = _streams(it) if method == "gptq" else None, []
    for number, layer in enumerate(it.weights.layers):
        seen = None if streams is None else streams.seen(number, layer)

        def rounded(name: str, matrix: Matrix, seen: Any = seen) -> F32:
            weights = to_float(matrix)
            rounding = Rounding(method, group or len(weights), act_order=act_order, real_zeros=True)
            square = None if seen is None else seen.hessian(name)
            inputs = None if square is None else rounding.of_inputs(square)
            return rounding(weights, bits, inputs).floats

        layers.append(layer.changed(rounded))
        if streams is not None:
            streams = streams.through(number, layers[-1])
    return replace(it.weights, layers=tuple(layers))


def _streams(it: Subject) -> Streams:
    window = min(WINDOW, len(it.calibration))
    return Streams.of(it.weights.config, it.weights.embedding, it.calibration, window)


@cache
def inputs_of_layers(model: str, quick: bool) -> list[dict[str, F64]]:
    """For each block of the unquantised model, X^T X of what its matrices read in the calibration text."""
    it = subject(model, quick)
    streams, found = _streams(it), []
    for number, layer in enumerate(it.weights.layers):
        seen = streams.seen(number, layer)
        squares = {name: seen.hessian(name) for name in seen.parts}
        found.append({name: square for name, square in squares.items() if square is not None})
        streams = streams.through(number, layer)
    return found


def layer_errors(one: LayerWeights, other: LayerWeights, squares: Mapping[str, F64]) -> Iterator[float]:
    """For each matrix the squared error of its results over its squared results."""
    after = other.linears()
    for name, matrix in one.linears().items():
        weights, square = to_float(matrix), squares[source_of(name)]
        whole = layer_error(weights, np.zeros_like(weights), square)
        yield layer_error(weights, to_float(after[name]), square) / whole


EXPERIMENT = Experiment("qigen", "Perplexity by bits, group size and quantiser (QIGen, table 2).", rows)
