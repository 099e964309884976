"""Orders of key channels and a Hadamard rotation, compared on a real model's keys.

    python bench/experiments/ksort.py
    python bench/experiments/ksort.py --model qwen2.5-coder-0.5b --block 16 --json

A model reads a text. Its keys are taken from the cache, as they are after the rotary embedding, and turned back for the
cache that stores them before it. Each head's keys are cast to BFP12 in the order that a sort key gives, and the squared
error of what comes back is divided by that of the keys in their own order. The calibrated order is found on the first
half of the tokens; every error is measured on the second half.
"""

import argparse
import json

import numpy as np

from lowbit import backend as registry
from lowbit.arrays import F32, F64, I64
from lowbit.attention.ksort import channel_sizes, hadamard, magnitudes, permutation
from lowbit.attention.rope import Layout, Rotation, half_split, rotate, rotation
from lowbit.formats.fetch import DEFAULT_MODEL, DEFAULT_TEXT, TABLE, fetch, read_text
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.quantization.bfp import bfp12, cast, decode
from lowbit.runtime import BackendLinears


def keys_of(weights: LlamaWeights, tokens: list[int]) -> list[F64]:
    """The rotated keys of each layer, float64, G × S × d_h."""
    decoder = Decoder(weights, BackendLinears(registry.load("numpy")))
    state = decoder.new_state(capacity=len(tokens))
    decoder.hidden(tokens, state)
    return [cache.keys.copy() for cache in state]


def turned_back(keys: F64, layout: Layout, base: float) -> F64:
    """The keys of one head before their rotation: turned by the opposite angles."""
    turn = rotation(layout, base, 0, len(keys))
    return rotate(keys[:, np.newaxis], Rotation(layout, turn.cos, -turn.sin))[:, 0]


def squared_error(keys: F64, block: int) -> float:
    """Of the second half of the tokens, cast to BFP12 and back."""
    second: F32 = np.ascontiguousarray(keys[len(keys) // 2 :], np.float32)
    return float(np.sum((decode(cast(second, bfp12(block))).astype(np.float64) - second) ** 2))


def within_pairs(sizes: F64) -> I64:
    """The order in which the larger channel of each half-split pair stands in the second half."""
    half = len(sizes) // 2
    order = np.arange(2 * half).reshape(2, half)
    swapped = sizes[:half] > sizes[half:]
    order[:, swapped] = order[::-1, swapped]
    return order.reshape(-1)


def ratios(weights: LlamaWeights, keys: list[F64], block: int) -> dict[str, list[float]]:
    """For each way, the error of every head divided by that of its keys as they stand in the same cache."""
    config, found = weights.config, dict[str, list[float]]()
    layout = half_split(config.head_dim)
    for layer, heads in zip(weights.layers, keys, strict=True):
        columns = to_float(layer.key).reshape(config.hidden, config.kv_heads, config.head_dim)
        for head, after in enumerate(heads):
            own = np.ascontiguousarray(columns[:, head])
            bias = None if layer.key_bias is None else layer.key_bias.reshape(config.kv_heads, -1)[head].copy()
            gain = layer.key_norm
            before = turned_back(after, layout, config.rope_base)
            half = np.ascontiguousarray(before[: len(before) // 2], np.float32)
            half_after = np.ascontiguousarray(after[: len(after) // 2], np.float32)
            plain, plain_after = squared_error(before, block), squared_error(after, block)
            with_bias = channel_sizes(own, "norm_and_bias", bias=bias, gain=gain)
            pairs = channel_sizes(own, "rotated_norm", bias=bias, gain=gain, layout=layout)
            ways = {
                "before RoPE: row norm": squared_error(before[:, permutation(channel_sizes(own, gain=gain))], block)
                / plain,
                "before RoPE: row norm and bias": squared_error(before[:, permutation(with_bias)], block) / plain,
                "before RoPE: calibrated": squared_error(before[:, permutation(magnitudes(half))], block) / plain,
                "before RoPE: norm within pairs": squared_error(
                    before[:, within_pairs(channel_sizes(own, gain=gain))], block
                )
                / plain,
                "before RoPE: calibrated within pairs": squared_error(before[:, within_pairs(magnitudes(half))], block)
                / plain,
                "after RoPE: norm of the pair": squared_error(after[:, permutation(pairs)], block) / plain_after,
                "after RoPE: calibrated": squared_error(after[:, permutation(magnitudes(half_after))], block)
                / plain_after,
                "after RoPE: Hadamard": squared_error(after @ hadamard(config.head_dim), block) / plain_after,
            }
            for way, ratio in ways.items():
                found.setdefault(way, []).append(ratio)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, choices=[name for name in TABLE if "29" not in name])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = open_gguf(fetch(options.model))
    weights, tokenizer = read_llama(source), read_tokenizer(source)
    tokens = tokenizer.encode(read_text(fetch(DEFAULT_TEXT)))[: options.tokens]
    found = ratios(weights, keys_of(weights, tokens), options.block)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{TABLE[options.model].file}, {len(tokens)} tokens, BFP12 in blocks of {options.block}: squared error by order"
    )
    for way, values in found.items():
        low, middle, high = np.percentile(values, [10, 50, 90])
        worse = f"worse in {sum(value > 1 for value in values)} of {len(values)} heads"
        print(f"{way:36} median {middle:.2f}, 10 to 90 %: {low:.2f} to {high:.2f}, {worse}")


if __name__ == "__main__":
    main()
