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
from lowbit.model.calibration import Seen, Streams, source_of
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LayerWeights, LlamaWeights
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
    errors = [error for one, other, inputs in pairs for error in layer_errors(one, other, inputs)]
    return losses(Decoder(new), it.windows) | {"layer_error": float(np.mean(errors))}


def quantised(it: Subject, method: Method, act_order: bool, bits: int, group: int) -> LlamaWeights:
    """A model with the numbers that its codes stand for."""
    streams, layers = streams_of(it) if method == "gptq" else None, []
    for number, layer in enumerate(it.weights.layers):
        seen = None if streams is None else streams.seen(number, layer)
        layers.append(quantised_layer(layer, seen, method, act_order, bits, group))
        if streams is not None:
            streams = streams.through(number, layers[-1])
    return replace(it.weights, layers=tuple(layers))


def quantised_layer(
    layer: LayerWeights, seen: Seen | None, method: Method, act_order: bool, bits: int, group: int
) -> LayerWeights:
    """A block with the numbers that its codes stand for; `seen` is for GPTQ."""

    def rounded(name: str, matrix: Matrix) -> F32:
        weights = to_float(matrix)
        rounding = Rounding(method, group or len(weights), act_order=act_order, real_zeros=True)
        square = None if seen is None else seen.hessian(name)
        inputs = None if square is None or method != "gptq" else rounding.of_inputs(square)
        return rounding(weights, bits, inputs).floats

    return layer.changed(rounded)


def streams_of(it: Subject) -> Streams:
    """Those of the calibration text of a model."""
    window = min(WINDOW, len(it.calibration))
    return Streams.of(it.weights.config, it.weights.embedding, it.calibration, window)


@cache
def inputs_of_layers(model: str, quick: bool) -> list[dict[str, F64]]:
    """For each block of the unquantised model, X^T X of what its matrices read in the calibration text."""
    it = subject(model, quick)
    streams, found = streams_of(it), []
    for number, layer in enumerate(it.weights.layers):
        seen, streams = streams.passed(number, layer)
        found.append(squares(seen))
    return found


def squares(seen: Seen) -> dict[str, F64]:
    """X^T X of what the matrices of a block read, by the names of `source_of`."""
    named = {name: seen.hessian(name) for name in seen.parts}
    return {name: square for name, square in named.items() if square is not None}


def layer_errors(one: LayerWeights, other: LayerWeights, inputs: Mapping[str, F64]) -> Iterator[float]:
    """For each matrix the squared error of its results over its squared results."""
    after = other.linears()
    for name, matrix in one.linears().items():
        weights, square = to_float(matrix), inputs[source_of(name)]
        whole = layer_error(weights, np.zeros_like(weights), square)
        yield layer_error(weights, to_float(after[name]), square) / whole


EXPERIMENT = Experiment("qigen", "Perplexity by bits, group size and quantiser (QIGen, table 2).", rows)
