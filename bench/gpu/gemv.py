r"""How fast products with quantised matrices read their weights, against how fast the device copies.

A product with one vector reads every weight once and does little else, so the bytes of the matrix by its time is the
bandwidth that it reaches. What could be reached is what a copy on the device reaches in the same run, which reads and
writes; of two ways to ask for it, alone and in a graph, the faster counts. Products, in a graph, and copies run in turn
and are timed by the device's own events; of the rounds, the median counts. The matrix is there several times, more than
any cache holds, and the products go round.

The result of the first and the last 32 columns is compared with the kernel's meaning in numpy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

from gpu.machine import smi
from gpu.parts import Answer, Setting
from lowbit.arrays import F32, F64, U8, Array
from lowbit_cuda.kernels.layouts import PANEL, MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.port import DevicePort, Memory, Span, Stream

SHAPES = ((8192, 28672), (28672, 8192), (4096, 14336), (14336, 4096))
"""Rows and columns: Llama-70B's feed-forward part, which is the goal's, and Mixtral-8x7B's experts."""
BITS = (4, 3, 2, 8)
GROUP = 128
GOAL = 0.85
"""Of the copy, at 4 bits and the first shape."""
ROTATED = 512 << 20
"""Bytes of matrices that the products go round."""
COPIED = 256 << 20
ROUNDS, COPIES = 15, 8
UPLOAD = 32 << 20
TOLERANCE = 1e-4
"""Of the sum of the magnitudes: float32 sums of some ten thousand terms, in whatever order."""


def run(setting: Setting) -> Answer:
    """All shapes and bits."""
    found: list[dict[str, Any]] = []
    with setting.device(bytes_there=False) as device:
        for shape in SHAPES:
            for bits in BITS:
                found.append(product(device, MatrixLayout(bits, *shape, GROUP), checked=not setting.simulate))
                setting.so_far(summed(found))
                print({name: value for name, value in found[-1].items() if name != "rounds"}, flush=True)
    first, result = found[0], summed(found) | ({} if setting.simulate else {"clocks_after": smi()})
    wrong = [one for one in found if one["error"] is not None and not one["error"] <= TOLERANCE]
    if wrong:
        return Answer("failed", f"{len(wrong)} products are wrong, the first of {wrong[0]}", result)
    why = f"{first['gbytes_per_second']} GB/s, {first['ratio']} of a copy at 4 bits, 8192 × 28672 (goal {GOAL})"
    return Answer(setting.measured, why, result)


def summed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result, of all products or the first few."""
    return {"goal": GOAL, "reached": found[0]["ratio"], "products": found}


def product(device: DevicePort, layout: MatrixLayout, *, checked: bool) -> dict[str, Any]:
    """One matrix, several times, and the copy beside it."""
    random = np.random.default_rng(1)
    stream = device.stream("products")
    with ExitStack() as stack:

        def take(nbytes: int, what: str) -> Memory:
            memory = device.allocate(nbytes, what)
            stack.callback(device.free, memory)
            return memory

        parts = random_parts(layout, random)
        matrices = [take(layout.nbytes, "matrix") for _ in range(max(2, -(-ROTATED // layout.nbytes)))]
        for data, offset in zip(parts, layout.offsets, strict=True):
            upload(device, stream, matrices[0].span(offset, data.nbytes), data)
        x, y = take(4 * layout.rows, "x"), take(4 * layout.columns, "y")
        vector = random.standard_normal(layout.rows).astype(np.float32)
        upload(device, stream, x.span(), vector)
        for packed in matrices[1:]:
            device.copy(packed.span(), matrices[0].span(), stream)
        source, target = take(COPIED, "source"), take(COPIED, "target")
        device.copy(target.span(), source.span(), stream)
        device.finish()
        multiply = kernel("gemm", bits=layout.bits, scales=layout.scale_dtype, tokens=1)

        def products() -> None:
            for packed in matrices:
                arguments = {"y": y.span(), "x": x.span(), "tokens": 1, **layout.numbers}
                device.launch(multiply, arguments | layout.spans(packed.span()), stream)

        def copies() -> None:
            for _ in range(COPIES):
                device.copy(target.span(), source.span(), stream)

        products()  # compiled and loaded before anything is captured
        error = worst_error(layout, parts, vector, fetch(device, stream, y.span())) if checked else None
        with device.capture(stream) as kept:
            products()
        with device.capture(stream) as kept_copies:
            copies()
        rounds = in_turn(
            device,
            stream,
            {
                "products": lambda: device.replay(kept(), stream),
                "copies": copies,
                "copies in a graph": lambda: device.replay(kept_copies(), stream),
            },
        )
    seconds = median(rounds["products"]) / len(matrices)
    copy_seconds = min(median(rounds[name]) for name in ("copies", "copies in a graph")) / COPIES
    moved, copied = layout.nbytes + 4 * (layout.rows + layout.columns), 2 * COPIED
    return {
        **{"bits": layout.bits, "rows": layout.rows, "columns": layout.columns, "group_size": layout.group_size},
        **{"bytes": moved, "matrices": len(matrices), "error": error},
        "microseconds": round(seconds * 1e6, 2),
        "gbytes_per_second": round(moved / seconds / 1e9, 1),
        "copy_gbytes_per_second": round(copied / copy_seconds / 1e9, 1),
        "ratio": round(moved / seconds / (copied / copy_seconds), 4),
        "rounds": {name: [round(one * 1e6, 2) for one in values] for name, values in rounds.items()},
    }


def in_turn(device: DevicePort, stream: Stream, works: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each work in each round, the first round left out; a round asks the stream for all of them."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 1):
        for name, ask in works.items():
            first = device.record(stream)
            ask()
            last = device.record(stream)
            device.synchronize(first)
            device.synchronize(last)
            if number:
                found[name].append(device.seconds(first, last))
    return found


# **Bytes.**

Parts = tuple[Array, ...]
"""Words (uint32), scales and zeros (float16) of a matrix, as its packed form has them."""


def random_parts(layout: MatrixLayout, random: np.random.Generator) -> Parts:
    """Words, scales and zeros of some matrix, as its packed form has them."""
    words = random.integers(0, 2**32, layout.words, np.uint32)
    scales = (0.5 + random.random(layout.scales, np.float32)).astype(np.float16) / np.float16(2**layout.bits)
    zeros = random.standard_normal(layout.scales, np.float32).astype(np.float16)
    return words, scales, zeros


def pieces(nbytes: int) -> Iterator[slice]:
    for start in range(0, nbytes, UPLOAD):
        yield slice(start, min(start + UPLOAD, nbytes))


def upload(device: DevicePort, stream: Stream, there: Span, data: Array) -> None:
    """Bring an array to the device."""
    host = device.pin(min(UPLOAD, data.nbytes), "upload")
    flat = data.view(np.uint8)
    for piece in pieces(flat.size):
        size = piece.stop - piece.start
        device.write(host.span(0, size), flat[piece])
        device.copy(there.part(piece.start, size), host.span(0, size), stream)
        device.synchronize(device.record(stream))
    device.free(host)


def fetch(device: DevicePort, stream: Stream, there: Span) -> F32:
    """The float32 that lie on the device."""
    host = device.pin(there.nbytes, "answer")
    device.copy(host.span(), there, stream)
    device.synchronize(device.record(stream))
    answer: F32 = device.read(host.span(), np.float32, (there.nbytes // 4,))
    device.free(host)
    return answer


def panel(layout: MatrixLayout, parts: Parts, number: int) -> Parts:
    """The words, scales and zeros of one panel."""
    sizes = layout.rows * layout.bits // 32 * PANEL, *(layout.groups * PANEL,) * 2
    return tuple(part[number * size : (number + 1) * size] for part, size in zip(parts, sizes, strict=True))


def worst_error(layout: MatrixLayout, parts: Parts, x: F32, y: F32) -> float:
    """The largest difference in the first and last panel, of the sum of the magnitudes."""
    worst = 0.0
    for number in (0, layout.columns // PANEL - 1):
        narrow = MatrixLayout(layout.bits, layout.rows, PANEL, layout.group_size)
        packed = np.concatenate([part.view(np.uint8) for part in panel(layout, parts, number)])
        weights = dense(narrow, packed)
        wanted, size = x.astype(np.float64) @ weights, np.abs(x).astype(np.float64) @ np.abs(weights)
        got = y[number * PANEL : (number + 1) * PANEL]
        worst = max(worst, float(np.max(np.abs(got - wanted) / size)))
    return worst if np.isfinite(worst) else float("1e308")


def dense(layout: MatrixLayout, packed: U8) -> F64:
    """The weights of a packed matrix: float64, K × N."""
    from lowbit.quantization.affine import dequantize

    return dequantize(layout.restore(packed)).astype(np.float64)
