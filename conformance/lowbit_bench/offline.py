"""Operations that prepare a model or place its experts, and those that keep a state."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.attention.rope import half_split
from lowbit.kernels.layouts import ColumnPanels
from lowbit.moe.offload import Arrangement, Request
from lowbit.quantization import hqq
from lowbit.quantization.bfp import bfp16
from lowbit.quantization.hqq_solver import codes
from lowbit_bench.sizes import Inputs

BITS, GROUP, PANEL, NUMBERS = 4, 64, 64, "float8_e4m3fn"
P, BETA = 0.7, 10.0  # of HQQ's shrinkage

Offline = tuple[tuple[str, ...], Callable[[Inputs], tuple[Any, ...]]]


def groups(i: Inputs) -> tuple[Array, Array, Array]:
    """Weights in groups, g × G, with a scale and a zero for each."""
    weights = i.normal(GROUP, i.hidden * i.inner // GROUP)
    scales = np.asarray(np.ptp(weights, axis=0) / np.float32(2**BITS - 1), np.float32)
    return weights, scales, np.asarray(-weights.min(axis=0) / scales, np.float32)


def factor(i: Inputs) -> Array:
    """A factor for GPTQ: upper triangular, near the identity."""
    return np.asarray(np.triu(i.normal(i.hidden, i.hidden, deviation=1 / i.hidden), 1) + np.eye(i.hidden), np.float32)


def hessian(i: Inputs) -> Array:
    """A Hessian of twice as many normal rows as columns, which makes it positive definite."""
    x = i.normal(2 * i.hidden, i.hidden)
    return np.asarray(x.T @ x, np.float32)


def layout(i: Inputs) -> ColumnPanels:
    return ColumnPanels(i.hidden * BITS // 32, i.inner, PANEL)


def requests(i: Inputs) -> tuple[Request, ...]:
    """The requests of each layer for `batch` consecutive tokens; half of the guesses are right."""
    asked = [[tuple(map(int, i.some_experts())) for _ in range(i.layers)] for _ in range(i.batch)]
    found: list[Request] = []
    for token in asked:
        guessed = [(after[0], before[-1]) for before, after in pairwise(token)]
        found += [
            Request(layer, needed, guess)
            for layer, (needed, guess) in enumerate(zip(token, [*guessed, ()], strict=True))
        ]
    return tuple(found)


def arrangement(i: Inputs) -> Arrangement:
    return Arrangement(i.layers, i.experts, slots=max(1, i.experts // 2))


def matrix(i: Inputs) -> hqq.HqqMatrix:
    return hqq.quantize(i.normal(i.hidden, i.inner), bits=BITS, group_size=GROUP)


def solving(i: Inputs) -> tuple[Any, ...]:
    """A step of HQQ's solver."""
    weights, scales, zeros = groups(i)
    return weights, codes(weights, scales, zeros, BITS), scales, zeros, P, BETA


WEIGHTS = ("hidden", "inner")
PLACES = ("layers", "experts", "chosen", "batch")
CACHE = ("kv_heads", "head_dim", "context")

OFFLINE: Mapping[str, Offline] = MappingProxyType(
    {
        "affine.quantize": (WEIGHTS, lambda i: (i.normal(i.hidden, i.inner),)),
        "blocking.apply": (WEIGHTS, lambda i: (i.words(layout(i).rows, i.inner), layout(i))),
        "blocking.invert": (WEIGHTS, lambda i: (i.words(layout(i).size), layout(i))),
        "floats.decode": (("hidden", "batch"), lambda i: (i.patterns(i.hidden * i.batch), NUMBERS)),
        "floats.round": (("hidden", "batch"), lambda i: (i.normal(i.hidden * i.batch).astype(np.float64), NUMBERS)),
        "gptq.factor": (("hidden",), lambda i: (hessian(i),)),
        "gptq.targets": (WEIGHTS, lambda i: (i.normal(i.hidden, i.inner), factor(i), i.normal(i.hidden, i.inner))),
        "hqq.codes": (WEIGHTS, lambda i: (*groups(i), BITS)),
        "hqq.dequantize": (WEIGHTS, lambda i: (matrix(i),)),
        "hqq.qgemv": (WEIGHTS, lambda i: (i.normal(i.hidden), matrix(i))),
        "hqq.step": (WEIGHTS, lambda i: solving(i)),
        "ksort.permutation": (("head_dim",), lambda i: (np.abs(i.normal(i.head_dim)).astype(np.float64),)),
        "ksort.relabel": (("head_dim",), lambda i: (half_split(i.head_dim), np.arange(i.head_dim)[::-1].copy())),
        "routing.sparse": (
            ("hidden", "inner", "experts", "chosen", "batch"),
            lambda i: (
                i.normal(i.batch, i.hidden),
                i.weights(i.experts, i.hidden, i.inner),
                i.weights(i.experts, i.hidden, i.inner),
                i.weights(i.experts, i.inner, i.hidden),
                i.chosen_experts(),
                np.full((i.batch, i.chosen), 1 / i.chosen, i.normal(1).dtype),
            ),
        ),
        "offload.trace": (PLACES, lambda i: (arrangement(i), requests(i))),
        "offload.engine": (PLACES, lambda i: (arrangement(i),)),
        "kvcache.bfp": (CACHE, lambda i: (i.kv_heads, i.head_dim, bfp16(GROUP), bfp16(GROUP))),
        "kvcache.kivi": (CACHE, lambda i: (i.kv_heads, i.head_dim, BITS, 32, 32, i.problem.activations)),
    }
)
"""For each operation, the names of its sizes and a function that makes its arguments."""

STEPS: Mapping[str, Callable[[Inputs], list[tuple[Any, ...]]]] = MappingProxyType(
    {
        "offload.engine": lambda i: [(each,) for each in requests(i)],
        **dict.fromkeys(
            ("kvcache.bfp", "kvcache.kivi"),
            lambda i: [tuple(i.normal(i.context, i.kv_heads, i.head_dim) for _ in range(2))],
        ),
    }
)
"""The arguments of each step of an operation that keeps a state."""

CHOICES: Mapping[str, Mapping[str, Any]] = MappingProxyType({"affine.quantize": {"bits": BITS, "group_size": GROUP}})
"""Keyword-only arguments."""
