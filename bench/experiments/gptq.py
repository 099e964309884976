"""The error of single layers of a published model by quantiser, on the text that is calibrated on and on another.

    cd bench
    python -m experiments.gptq 0 15 29 --bits 2 3 4
    python -m experiments.gptq 15 --bits 3 --held-out

The model is SmolLM2-135M, which is stored in 4 bits already, so every result is *re-quantised*. The inputs of a layer
are those that the unquantised layers before it give. ``lowbit perplexity --bits 3 --method gptq`` measures what the
errors do to perplexity.
"""

import argparse
from collections.abc import Mapping, Sequence

from experiments.measuring import PUBLISHED, WINDOW, subject
from experiments.qigen import METHODS, layer_errors, quantised_layer, squares
from lowbit.arrays import F64
from lowbit.model.calibration import Seen, Streams
from lowbit.model.weights import LayerWeights, LlamaWeights

GROUP = 64


def inputs_of(weights: LlamaWeights, tokens: list[int], layers: Sequence[int]) -> dict[int, Seen]:
    """What the matrices of some layers see in a text."""
    streams, found = Streams.of(weights.config, weights.embedding, tokens, WINDOW), {}
    for number in range(1 + max(layers)):
        seen, streams = streams.passed(number, weights.layers[number])
        if number in layers:
            found[number] = seen
    return found


def compare(number: int, layer: LayerWeights, seen: Seen, measured: Mapping[str, F64], bits: int) -> None:
    """Print the relative error of each matrix of a layer by quantiser."""
    errors = []
    for method, act_order in METHODS.values():
        new = quantised_layer(layer, seen, method, act_order, bits, GROUP)
        errors.append(list(layer_errors(layer, new, measured)))
    print(f"\nlayer {number}, {bits} bits, groups of {GROUP}: squared error / squared results")
    print(f"{'matrix':18}" + "".join(f"{name:>16}" for name in METHODS))
    for name, row in zip(layer.linears(), zip(*errors, strict=True), strict=True):
        print(f"{name:18}" + "".join(f"{error:16.3e}" for error in row), flush=True)
    worse = (sum(error > nearest for error, nearest in zip(each, errors[0], strict=True)) for each in errors)
    print("worse than nearest" + "".join(f"{count:16}" for count in worse), flush=True)


def main() -> None:
    """Read the arguments, the model and the texts, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", type=int, nargs="+")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--held-out", action="store_true", help="measure on the text that is not calibrated on")
    parser.add_argument("--calibration", type=int, default=2048, help="tokens of alice29 to calibrate on")
    parser.add_argument("--tokens", type=int, default=4096, help="with --held-out: tokens of lcet10 to measure on")
    options = parser.parse_args()
    it = subject(PUBLISHED, False)
    seen = inputs_of(it.weights, it.calibration[: options.calibration], options.layers)
    other = [token for window in it.windows for token in window][: options.tokens]
    measured = inputs_of(it.weights, other, options.layers) if options.held_out else seen
    for number in options.layers:
        for bits in options.bits:
            compare(number, it.weights.layers[number], seen[number], squares(measured[number]), bits)


if __name__ == "__main__":
    main()
