"""What the kernels mean, held to the specification: exact where it is exact, and else one rounding away."""

from typing import Any

import numpy as np
import pytest
from cuda_cases import floats, integers
from cuda_cases_linear import lattice, ordinary, spans

from lowbit.arrays import F32, Array
from lowbit.attention.attention import attend_to
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.attention.rope import half_split, rotate_heads, rotation
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import silu
from lowbit.linear.linear import qgemm
from lowbit.model.layers import rms_norm_of, swiglu_of
from lowbit.moe.routing import gate
from lowbit.quantization.affine import CONVENTIONS, Convention, dequantize
from lowbit.quantization.bfp import bfp12
from lowbit.quantization.packing import BITS
from lowbit_cuda.kernels.layouts import DenseLayout, MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.port import Number
from lowbit_gpusim.meanings import meaning_of

UNIT = 2.0**-24


def run(name: str, choices: dict[str, Any], arrays: dict[str, Array], **numbers: Number) -> F32:
    """What a kernel's meaning writes to an array ``y`` of its own, or into the first of those that are given."""
    described = kernel(name, **choices)
    described.check(numbers)
    first = described.parameters[0]
    if first.name not in arrays:
        count = first.nbytes(numbers) // np.dtype(first.kind).itemsize
        arrays = {first.name: np.full(count, np.nan, first.kind), **arrays}
    meaning_of(described)(**arrays, **numbers)
    return arrays[first.name]


def close(given: Array, exact: Array, roundings: float = 1.001) -> bool:
    """Whether all numbers are so many roundings from the exact ones, no more."""
    off = np.abs(given.astype(np.float64) - exact)
    return bool((off <= roundings * UNIT * np.abs(exact) + 1e-30).all())


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bits", BITS)
def test_products_are_the_specifications(bits: int, convention: Convention) -> None:
    """On a lattice `gemm` is `linear.qgemm` to the bit; with any scales it is one rounding away."""
    for make in (lattice, ordinary):
        for rows, columns, group, dtype in ((96, 40, 32, "float16"), (224, 33, 96, "float32"), (64, 5, 64, "float32")):
            matrix = make(bits, rows, columns, group, convention, dtype)
            x = integers(1, 3, rows) if make is lattice else floats(1, 3, rows)
            numbers = MatrixLayout.of(matrix).numbers
            given = run("gemm", {"bits": bits, "scales": dtype}, {"x": x.ravel(), **spans(matrix)}, tokens=3, **numbers)
            exact, size = qgemm(x, matrix), qgemm(np.abs(x), matrix)
            off = np.abs(given.reshape(3, columns) - exact)
            assert (off == 0).all() if make is lattice else (off <= UNIT * np.abs(exact) + 2e-15 * np.abs(size)).all()


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bits", BITS)
def test_dequantized_weights_are_the_specifications(bits: int, convention: Convention) -> None:
    """To the bit, in both conventions and dtypes, with short last groups."""
    for dtype in ("float16", "float32"):
        matrix = ordinary(bits, 224, 37, 96, convention, dtype)
        numbers = MatrixLayout.of(matrix).numbers
        given = run("dequantize", {"bits": bits, "scales": dtype}, dict(spans(matrix)), **numbers)
        assert (given.reshape(224, 37) == dequantize(matrix)).all()


def test_the_first_half_of_an_expert() -> None:
    """`expert_in` is silu(x gate) ⊗ (x up) of the specification's products, which here are exact."""
    gate_matrix, up = lattice(4, 64, 33, 32, "minimum", "float16"), lattice(4, 64, 33, 32, "minimum", "float16")
    x = integers(1, 2, 64) / np.float32(64)
    numbers = MatrixLayout.of(up).numbers
    arrays = {"x": x.ravel(), **spans(gate_matrix, "gate_"), **spans(up, "up_")}
    given = run("expert_in", {"bits": 4}, arrays, tokens=2, **numbers).reshape(2, 33)
    assert close(given, silu(qgemm(x, gate_matrix)) * qgemm(x, up))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dense_products(dtype: Any) -> None:
    """A router's scores, and those of the next layer's router that lies behind it, are `routing.gate` of both."""
    x, routers = integers(1, 3, 16), [integers(seed, 16, 4) for seed in (2, 3)]
    blobs = [DenseLayout(16, 4, dtype).apply(router).view(dtype) for router in routers]
    arrays = {"x": x.ravel(), "weights": np.concatenate(blobs)}
    given = run("dense", {"weights": dtype}, arrays, tokens=3, rows=16, columns=8).reshape(3, 8)
    assert (given == np.concatenate([gate(x, router) for router in routers], axis=1)).all()


def test_norms_and_gates() -> None:
    """`rms_norm` and `swiglu` are the specification's, rounded once."""
    x, gain = floats(1, 3, 40), floats(2, 40)
    given = run("rms_norm", {}, {"x": x.ravel(), "gain": gain}, tokens=3, columns=40, epsilon=1e-5)
    assert close(given.reshape(3, 40), rms_norm_of(x, gain, float(np.float32(1e-5))))
    a, b = 30 * floats(3, 1, 99), floats(4, 1, 99)
    assert close(run("swiglu", {}, {"gate": a[0], "up": b[0]}, count=99), swiglu_of(a, b)[0])


def test_rotations() -> None:
    """`rope` is `rope.rotate` of the position and those after it; beyond the table it leaves tokens alone."""
    layout, x = half_split(8), floats(1, 4, 3, 8)
    turns = rotation(layout, 100.0, 0, 7)
    table = np.concatenate([turns.cos[:, :4], turns.sin[:, 4:]], axis=1).astype(np.float32)
    arrays = {"x": x.ravel().copy(), "table": table.ravel(), "position": np.array([5], np.int32)}
    given = run("rope", {}, arrays, tokens=4, heads=3, head_dim=8, context=7).reshape(4, 3, 8)
    exact = rotate_heads(x[:2], rotation(layout, 100.0, 5, 2))
    assert (np.abs(given[:2] - exact) <= 4 * UNIT * (np.abs(x[:2]) + np.abs(x[:2][..., layout.partner]))).all()
    assert (given[2:] == x[2:]).all()


def test_a_cache_in_bfp12_is_the_specifications() -> None:
    """Token by token, and two at once: mantissas and exponents are those that `kvcache` stores, at their positions."""
    keys, capacity = floats(1, 5, 2, 64) * np.exp2(integers(2, 5, 2, 1, most=30)), 6
    keys[1, 0, :32] = 0
    cache = np.zeros((2, capacity, 32), np.uint8)
    exponents = np.zeros((2, capacity, 2), np.uint8)
    for first, count in ((0, 1), (1, 2), (3, 2)):
        arrays: dict[str, Array] = {"cache": cache.ravel(), "exponents": exponents.ravel()}
        arrays |= {"x": keys[first : first + count].ravel(), "position": np.array([first], np.int32)}
        run("append", {"keys": "bfp12"}, arrays, tokens=count, kv_heads=2, head_dim=64, capacity=capacity)
    spec = BfpKeyValueCache(2, 64, bfp12(32), bfp12(32))
    spec.append(keys.astype(np.float64), keys.astype(np.float64))
    for head, blocks in enumerate(spec.key_blocks):
        stored = np.stack([cache[head, :5] & 15, cache[head, :5] >> 4], axis=-1).reshape(5, 64).astype(np.int8)
        assert (np.where(stored > 7, stored - 16, stored) == blocks.mantissas).all()
        assert (exponents[head, :5] == blocks.exponents + 127).all()
    assert not cache[:, 5].any()


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("keys", ["float32", "float16", "bfp12"])
def test_attention_is_the_specifications(keys: str, window: int) -> None:
    """Over a cache that `append` filled, `attend` is `attention.attend` of what the cache holds, rounded once."""
    tokens, heads, groups, channels, capacity = 3, 4, 2, 32, 9
    cached, past = np.zeros((groups, capacity, channels), np.float32), floats(1, 7, groups, channels)
    sized = {"kv_heads": groups, "head_dim": channels, "capacity": capacity}
    made: dict[str, Array] = {}
    elements = groups * capacity * channels
    if keys == "bfp12":
        made = {"cache": np.zeros(elements // 2, np.uint8), "exponents": np.zeros(elements // 32, np.uint8)}
    else:
        made = {"cache": np.zeros(elements, keys)}
    run("append", {"keys": keys}, {**made, "x": past.ravel(), "position": np.zeros(1, np.int32)}, tokens=7, **sized)
    if keys == "bfp12":
        spec = BfpKeyValueCache(groups, channels, bfp12(32), bfp12(32))
        spec.append(past.astype(np.float64), past.astype(np.float64))
        cached[:, :7] = spec.keys
    else:
        cached[:, :7] = past.astype(keys).swapaxes(0, 1)
    values, queries = floats(2, groups, capacity, channels), floats(3, tokens, heads, channels)
    made["keys"] = made.pop("cache")
    arrays = {"queries": queries.ravel(), **made, "values": values.ravel(), "position": np.array([4], np.int32)}
    given = run("attend", {"keys": keys}, arrays, tokens=tokens, heads=heads, window=window, **sized)
    read = np.ascontiguousarray(values[:, :7])
    exact = attend_to(queries, np.ascontiguousarray(cached[:, :7]), read, window or None)
    assert (np.abs(given.reshape(exact.shape) - exact) <= 1e-12 + UNIT * np.abs(exact)).all()


def test_combined_answers() -> None:
    """`combine` adds answers in the order in which they lie, weighted, and their sum once to what was there."""
    y, answers, weights = integers(1, 2, 5), integers(2, 2, 3, 5), integers(3, 2, 3)
    arrays = {"y": y.ravel().copy(), "answers": answers.ravel(), "weights": weights.ravel()}
    given = run("combine", {}, arrays, tokens=2, experts=3, columns=5)
    assert (given.reshape(2, 5) == y + (weights[..., np.newaxis] * answers).sum(axis=1)).all()


def test_rows_that_are_moved() -> None:
    """`gather` and then `scatter` bring rows back; numbers of no row read zeros and write nothing."""
    x, index = floats(1, 4, 6), np.array([2, -1, 0, 4], np.int32)
    numbers: dict[str, Number] = {"count": 4, "rows": 4, "columns": 6}
    taken = run("gather", {}, {"x": x.ravel(), "index": index}, **numbers)
    assert (taken.reshape(4, 6)[[0, 2]] == x[[2, 0]]).all() and not taken.reshape(4, 6)[[1, 3]].any()
    target = np.full(24, 7, np.float32)
    run("scatter", {}, {"y": target, "x": taken, "index": index}, **numbers)
    assert (target.reshape(4, 6)[[0, 2]] == x[[0, 2]]).all() and (target.reshape(4, 6)[[1, 3]] == 7).all()


def test_a_token_does_not_depend_on_how_many_come_with_it() -> None:
    """To the bit: products of one token and of five at once."""
    matrix, x = ordinary(3, 256, 40, 64, "zero_point", "float16"), floats(1, 5, 256)
    weights, numbers = floats(2, 256 * 9), MatrixLayout.of(matrix).numbers

    def both(rows: F32) -> list[F32]:
        quantised = run("gemm", {"bits": 3}, {"x": rows.ravel(), **spans(matrix)}, tokens=len(rows), **numbers)
        arrays: dict[str, Array] = {"x": rows.ravel(), "weights": weights}
        dense = run("dense", {}, arrays, tokens=len(rows), rows=256, columns=9)
        return [quantised.reshape(len(rows), -1), dense.reshape(len(rows), -1)]

    for together, alone in zip(both(x), zip(*(both(x[t : t + 1]) for t in range(5)), strict=True), strict=True):
        assert (together == np.concatenate(alone)).all()


@pytest.mark.parametrize(
    ("name", "choices", "numbers", "message"),
    [
        ("gemm", {"bits": 4}, {"tokens": 1, "rows": 60, "columns": 8, "group_size": 4, "zero_point": 0}, "rows"),
        ("gemm", {"bits": 4}, {"tokens": 1, "rows": 64, "columns": 8, "group_size": 12, "zero_point": 0}, "group_size"),
        ("gemm", {"bits": 4}, {"tokens": 0, "rows": 64, "columns": 8, "group_size": 8, "zero_point": 0}, "tokens"),
        ("gemm", {"bits": 4}, {"tokens": 1, "rows": 64, "columns": 8, "group_size": 8, "zero_point": 2}, "zero_point"),
        (
            "gemm",
            {"bits": 8},
            {"tokens": 1, "rows": 2**20, "columns": 2**14, "group_size": 2**10, "zero_point": 0},
            "words",
        ),
        ("dense", {}, {"tokens": 1, "rows": 12, "columns": 8}, "rows"),
        ("rms_norm", {}, {"tokens": 1, "columns": 8, "epsilon": 0.0}, "epsilon"),
        ("rope", {}, {"tokens": 1, "heads": 1, "head_dim": 7, "context": 8}, "head_dim"),
        ("append", {"keys": "bfp12"}, {"tokens": 1, "kv_heads": 1, "head_dim": 16, "capacity": 8}, "head_dim"),
        (
            "attend",
            {},
            {"tokens": 1, "heads": 3, "kv_heads": 2, "head_dim": 32, "capacity": 8, "window": 0},
            "heads is 3; allowed: a multiple of the 2 key-value heads",
        ),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(
    name: str, choices: dict[str, Any], numbers: dict[str, Number], message: str
) -> None:
    """Before anything is launched, naming the number."""
    with pytest.raises(ArgumentError, match=message):
        kernel(name, **choices).check(numbers)


def test_kernels_that_do_not_exist() -> None:
    """Names and choices are checked."""
    with pytest.raises(ArgumentError, match="kernel"):
        kernel("gemv")
    with pytest.raises(ArgumentError, match="bits"):
        kernel("gemm", bits=5)
    with pytest.raises(ArgumentError, match="choice"):
        kernel("add", bits=4)
