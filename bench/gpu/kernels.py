"""Each kernel of the table on small arrays, against its meaning in numpy.

The arrays are small enough for compute-sanitizer, under which a kernel is a thousand times slower; `sanitizer` runs
this part under it. What is compared is how far the device is from the meaning, of the largest magnitude there. The
suite (`conformance`) holds the operations to bounds on arrays of every size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.parts import Answer, Setting
from lowbit.affine import SCALE_DTYPES
from lowbit.packing import BITS
from lowbit_cuda.calls import Calls
from lowbit_cuda.kernels.layouts import MatrixLayout
from lowbit_cuda.kernels.pieces import FLOAT_NAMES
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.port import Kernel, Number

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "uint8": 0.0}
"""Of the largest magnitude: sums in another order, functions that differ in the last bits, one rounding to float16."""

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        kernel: of the table.
        numbers: it is given.
        arrays: what it reads; what it only writes is made for it.
    """

    kernel: Kernel
    numbers: Mapping[str, Number]
    arrays: Arrays


def run(setting: Setting) -> Answer:
    """All cases."""
    found, worst = [], ""
    with setting.device() as device:
        calls = Calls(device)
        for case in cases(np.random.default_rng(2)):
            errors = differences(case, calls)
            found.append({"kernel": case.kernel.name, "numbers": dict(case.numbers), "errors": errors})
            if any(not error <= TOLERANCE[kind] for kind, error in errors.values()):
                worst = worst or f"{case.kernel.name} is off by {errors}"
        calls.close()
    if worst:
        return Answer("failed", worst, {"launches": found})
    return Answer("simulated" if setting.simulate else "passed", f"{len(found)} launches", {"launches": found})


def differences(case: Case, calls: Calls) -> dict[str, tuple[str, float]]:
    """For each array that it writes its kind, and how far the device is from the meaning."""
    wanted, got = dict[str, Array](), dict[str, Array]()
    for parameter in case.kernel.parameters:
        if parameter.access is None:
            continue
        there = case.arrays.get(parameter.name)
        if there is None:
            there = np.zeros(parameter.nbytes(case.numbers) // np.dtype(parameter.kind).itemsize, parameter.kind)
        wanted[parameter.name], got[parameter.name] = there.copy().ravel(), there.copy().ravel()
    calls(case.kernel, got, **case.numbers)
    case.kernel.meaning(**wanted, **case.numbers)
    written = [parameter for parameter in case.kernel.parameters if parameter.access in ("write", "update")]
    return {one.name: (one.kind, difference(got[one.name], wanted[one.name])) for one in written}


def difference(got: Array, wanted: Array) -> float:
    """The largest, of the largest magnitude; a great number where one of the two is not finite."""
    apart = np.abs(got.astype(np.float64) - wanted.astype(np.float64)).max()
    largest = float(apart / max(np.abs(wanted.astype(np.float64)).max(), 1e-30))
    return largest if np.isfinite(largest) else 1e308


# **The cases.**


def cases(random: np.random.Generator) -> Iterator[Case]:
    """Every kernel, with sizes that fill no block and are no multiple of anything they need not be."""
    yield from quantized(random)
    yield from between(random)
    yield from attention(random)


def normal(random: np.random.Generator, *shape: int, dtype: str = "float32") -> Array:
    return random.standard_normal(shape).astype(dtype)


def quantized(random: np.random.Generator) -> Iterator[Case]:
    """Products with quantised matrices, of one token and of several."""
    for bits in BITS:
        for scales in SCALE_DTYPES:
            layout = MatrixLayout(bits, 224, 72, 96, scales)
            left, right = matrix(random, layout), matrix(random, layout)
            spans = {f"gate_{name}": array for name, array in left.items()}
            spans |= {f"up_{name}": array for name, array in right.items()}
            yield Case(kernel("dequantize", bits=bits, scales=scales), layout.numbers, left)
            for at_once, tokens in ((1, 1), (8, 11)):
                sized, x = {"tokens": tokens, **layout.numbers}, {"x": normal(random, tokens, layout.rows)}
                choice = {"bits": bits, "scales": scales, "tokens": at_once}
                yield Case(kernel("gemm", **choice), sized, left | x)
                yield Case(kernel("expert_in", **choice), sized, spans | x)


def matrix(random: np.random.Generator, layout: MatrixLayout) -> Arrays:
    """Words, scales and zeros of some matrix."""
    return {
        "words": random.integers(0, 2**32, layout.words, np.uint32),
        "scales": (0.5 + random.random(layout.scales)).astype(layout.scale_dtype),
        "zeros": normal(random, layout.scales, dtype=layout.scale_dtype),
    }


def between(random: np.random.Generator) -> Iterator[Case]:
    """What lies between products, and dense products."""
    tokens, rows, columns, count = 3, 136, 72, 1111
    sized = {"tokens": tokens, "columns": columns}
    x, y = normal(random, tokens, columns), normal(random, tokens, columns)
    for weights in FLOAT_NAMES:
        given = {"x": normal(random, tokens, rows), "weights": normal(random, columns, rows, dtype=weights)}
        yield Case(kernel("dense", weights=weights), sized | {"rows": rows}, given)
        index = random.integers(-1, rows, 5).astype(np.int32)
        picked = {"x": normal(random, rows, columns, dtype=weights), "index": index}
        yield Case(kernel("gather", table=weights), {"count": 5, "rows": rows, "columns": columns}, picked)
    placed = {"x": normal(random, 5, columns), "index": random.permutation(5).astype(np.int32)}
    yield Case(kernel("scatter"), {"count": 5, "rows": 5, "columns": columns}, placed)
    yield Case(kernel("rms_norm"), sized | {"epsilon": 1e-5}, {"x": x, "gain": normal(random, columns)})
    flat = {name: normal(random, count) for name in ("gate", "up", "x", "y")}
    yield Case(kernel("swiglu"), {"count": count}, {"gate": flat["gate"], "up": flat["up"]})
    yield Case(kernel("add"), {"count": count}, {"x": flat["x"], "y": flat["y"]})
    answers = {"answers": normal(random, tokens, 2, columns), "weights": normal(random, tokens, 2), "y": y}
    yield Case(kernel("combine"), sized | {"experts": 2}, answers)


def attention(random: np.random.Generator) -> Iterator[Case]:
    """Rotations, the cache in each of its kinds, and reading it."""
    tokens, heads, kv_heads, head_dim, capacity = 3, 4, 2, 64, 40
    sized = {"tokens": tokens, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
    position = np.array([capacity - tokens], np.int32)
    turned = {"x": normal(random, tokens, heads, head_dim), "table": normal(random, capacity, head_dim)}
    numbers = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "context": capacity}
    yield Case(kernel("rope"), numbers, turned | {"position": position})
    whole = sized | {"tokens": capacity}  # so that all of the cache is written
    rows, start = normal(random, capacity, kv_heads, head_dim), np.zeros(1, np.int32)
    for keys in ("float32", "float16", "bfp12"):
        yield Case(kernel("append", keys=keys), whole, {"x": rows, "position": start})
        plain = "float32" if keys == "float32" else "float16"
        given = {"queries": normal(random, tokens, heads, head_dim), "position": position}
        given |= cached(random, keys, kv_heads * capacity * head_dim)
        given |= {"values": normal(random, kv_heads * capacity * head_dim, dtype=plain)}
        for window in (0, 7):
            yield Case(kernel("attend", keys=keys, values=plain), sized | {"heads": heads, "window": window}, given)


def cached(random: np.random.Generator, keys: str, elements: int) -> Arrays:
    """Some keys as a cache has them; BFP12's by its own kernel's meaning."""
    if keys != "bfp12":
        return {"keys": normal(random, elements, dtype=keys)}
    append = kernel("append", keys="bfp12")
    made = {"cache": np.zeros(elements // 2, np.uint8), "exponents": np.zeros(elements // 32, np.uint8)}
    numbers = {"tokens": elements // 64, "kv_heads": 1, "head_dim": 64, "capacity": elements // 64}
    append.meaning(**made, x=normal(random, elements).ravel(), position=np.zeros(1, np.int32), **numbers)
    return {"keys": made["cache"], "exponents": made["exponents"]}
