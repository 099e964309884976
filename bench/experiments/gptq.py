"""Rounding to the nearest, HQQ and GPTQ on a real model: the error of layers, and perplexity.

    python bench/experiments/gptq.py --layers 0 10 20 29
    python bench/experiments/gptq.py --perplexity --bits 3

The model is read from `lowbit.formats.fetch` (SmolLM2-135M, stored in 4 bits already, so every result is
*re-quantised*). The Hessians come from the inputs that its linear layers see while it reads the calibration text, which
is not the text on which perplexity is measured. All Hessians are those of the unquantised model; nothing is calibrated
again layer by layer. The head and the embedding stay as they are.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.formats.fetch import fetch, read_text
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.model.decoder import Decoder
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import LlamaWeights, Matrix, matrices, to_float
from lowbit.quantization import affine, hqq
from lowbit.quantization.gptq import layer_error, quantize

SAME_INPUT = {"key": "query", "value": "query", "up": "gate"}
"""Matrices that read what another one reads share its Hessian."""


def source_of(name: str) -> str:
    """The name under which the Hessian of a matrix is kept."""
    layer, _, part = name.rpartition(".")
    return f"{layer}.{SAME_INPUT.get(part, part)}"


def hessians(weights: LlamaWeights, tokens: list[int], window: int) -> dict[str, F64]:
    """X^T X of what every linear layer of the blocks reads, over the windows of a text."""
    names = {id(matrix): name for name, matrix in matrices(weights)}
    sums: dict[str, F64] = {}

    def watched(matrix: Matrix) -> Callable[[F32], F32]:
        plain, name = to_float(matrix), names[id(matrix)]
        watch = name != "head" and source_of(name) == name

        def linear(x: F32) -> F32:
            if watch:
                wide = x.astype(np.float64)
                sums[name] = sums.get(name, 0.0) + wide.T @ wide
            return x @ plain

        return linear

    decoder = Decoder(weights, watched)
    for start in range(0, len(tokens), window):
        decoder.hidden(tokens[start : start + window], decoder.new_state())
    return sums


Method = Callable[[F32, F64, int, int], F32]


def nearest(w: F32, square: F64, bits: int, group_size: int) -> F32:
    """Rounded to the nearest, integer zero-points."""
    return affine.dequantize(affine.quantize(w, bits=bits, group_size=group_size, convention="zero_point"))


METHODS: Mapping[str, Method] = {
    "nearest": nearest,
    "HQQ": lambda w, square, bits, size: hqq.dequantize(hqq.quantize(w, bits=bits, group_size=size)),
    "GPTQ": lambda w, square, bits, size: quantize(w, square, bits=bits, group_size=size).dequantize(),
    "GPTQ act-order": lambda w, square, bits, size: quantize(
        w, square, bits=bits, group_size=size, act_order=True
    ).dequantize(),
}


def compare_layers(
    weights: LlamaWeights,
    squares: Mapping[str, F64],
    measured_on: Mapping[str, F64],
    layers: list[int],
    bits: int,
    where: str,
) -> None:
    """The relative error of each layer under each method; says at the end in how many a method lost to the nearest."""
    print(f"\n{bits} bits, groups of 64: squared error / squared output on {where}")
    print(f"{'matrix':27}" + "".join(f"{name:>16}" for name in METHODS))
    worse = dict.fromkeys(METHODS, 0)
    for name, matrix in matrices(weights):
        if not any(name.startswith(f"layers[{layer}].") for layer in layers):
            continue
        plain, square = to_float(matrix), squares[source_of(name)]
        seen = measured_on[source_of(name)]
        whole = layer_error(plain, np.zeros_like(plain), seen)
        errors = {m: layer_error(plain, method(plain, square, bits, 64), seen) / whole for m, method in METHODS.items()}
        for method, error in errors.items():
            worse[method] += error > errors["nearest"]
        print(f"{name:27}" + "".join(f"{error:16.3e}" for error in errors.values()), flush=True)
    print("worse than nearest:        " + "".join(f"{count:16}" for count in worse.values()))


def compare_perplexity(
    weights: LlamaWeights, squares: Mapping[str, F64], tokens: list[int], bits: int, window: int
) -> None:
    """Perplexity of the model with every linear layer of its blocks re-quantised by each method."""

    def measured(method: Method | None) -> float:
        values = {}
        for name, matrix in matrices(weights):
            plain = to_float(matrix)
            keep = method is None or name == "head"
            values[id(matrix)] = plain if keep else method(plain, squares[source_of(name)], bits, 64)  # type: ignore[misc]  # keep covers None
        decoder = Decoder(weights, lambda matrix: lambda x: x @ values[id(matrix)])
        return perplexity(decoder, tokens, window).value

    print(f"\nperplexity on {len(tokens)} tokens, windows of {window}; {bits} bits, groups of 64, re-quantised")
    print(f"{'as stored':16}{measured(None):10.3f}", flush=True)
    for name, method in METHODS.items():
        print(f"{name:16}{measured(method):10.3f}", flush=True)


def main() -> None:
    """Read the arguments, the model and the texts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--held-out", action="store_true", help="also measure layers on text that is not calibrated on")
    parser.add_argument("--calibration", type=int, default=4096, help="tokens of alice29 to calibrate on")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of lcet10, the text that is not calibrated on")
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    source = open_gguf(fetch("smollm2-135m"))
    tokenizer, weights = read_tokenizer(source), read_llama(source)
    calibration = tokenizer.encode(read_text(fetch("alice29")))[: options.calibration]
    held_out = tokenizer.encode(read_text(fetch("lcet10")))[: options.tokens]
    if options.perplexity:
        squares = hessians(weights, calibration, options.window)
        for bits in options.bits:
            compare_perplexity(weights, squares, held_out, bits, options.window)
    if options.layers:
        beginning = first_layers(weights, 1 + max(options.layers))  # what comes after changes nothing
        squares = hessians(beginning, calibration, options.window)
        for bits in options.bits:
            where = f"{len(calibration)} tokens of calibration"
            compare_layers(beginning, squares, squares, options.layers, bits, where)
            if options.held_out:
                others = hessians(beginning, held_out, options.window)
                where = f"{len(held_out)} other tokens, after {len(calibration)} of calibration"
                compare_layers(beginning, squares, others, options.layers, bits, where)


def first_layers(weights: LlamaWeights, count: int) -> LlamaWeights:
    """The model cut off after its first layers."""
    return replace(weights, config=replace(weights.config, layers=count), layers=weights.layers[:count])


if __name__ == "__main__":
    main()
