"""How fast PyTorch's own product with 4-bit weights reads them, against a copy in the same process.

``torch.ops.aten._weight_int4pack_mm`` takes bfloat16 activations and groups of 32 to 256 with a scale and a zero
of bfloat16 each, so it reads as many bytes as ours at the same group size. It is timed as `gemv` times ours: graphs of
several matrices, more than a cache holds, in turn with a graph of copies; the median counts.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from gpu.gemv import COPIED, COPIES, GROUP, ROTATED, ROUNDS, SHAPES
from gpu.parts import Answer, Setting, Skipped

INNER_TILES = 8


def run(setting: Setting) -> Answer:
    """All shapes."""
    if setting.simulate:
        raise Skipped("other projects' kernels are not simulated")
    try:
        import torch
    except ImportError as error:
        raise Skipped(f"torch cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU")
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm"):
        raise Skipped(f"torch {torch.__version__} has no product with 4-bit weights")
    found = [product(torch, rows, columns) for rows, columns in SHAPES]
    result = {"torch": torch.__version__, "products": found}
    first = found[0]
    return Answer("measured", f"torch: {first['gbytes_per_second']} GB/s, {first['ratio']} of a copy", result)


def product(torch: Any, rows: int, columns: int) -> dict[str, Any]:
    """One shape."""
    moved = rows * columns // 2 + 2 * 2 * (rows // GROUP) * columns + 2 * (rows + columns)
    count = max(2, -(-ROTATED // moved))
    codes = torch.randint(0, 256, (columns, rows // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, INNER_TILES)
    scales = torch.rand((rows // GROUP, columns, 2), device="cuda").to(torch.bfloat16)
    matrices = [(packed.clone(), scales.clone()) for _ in range(count)]
    x = torch.randn((1, rows), device="cuda").to(torch.bfloat16)
    source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))

    def products() -> None:
        for words, numbers in matrices:
            torch.ops.aten._weight_int4pack_mm(x, words, GROUP, numbers)

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    rounds = in_turn(torch, {"products": products, "copies": copies})
    seconds, copy_seconds = median(rounds["products"]) / count, median(rounds["copies"]) / COPIES
    return {
        **{"bits": 4, "rows": rows, "columns": columns, "group_size": GROUP, "bytes": moved, "matrices": count},
        "microseconds": round(seconds * 1e6, 2),
        "gbytes_per_second": round(moved / seconds / 1e9, 1),
        "copy_gbytes_per_second": round(2 * COPIED / copy_seconds / 1e9, 1),
        "ratio": round(moved / seconds / (2 * COPIED / copy_seconds), 4),
        "rounds": {name: [round(one * 1e6, 2) for one in values] for name, values in rounds.items()},
    }


def in_turn(torch: Any, functions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of a graph of each function in each round, the first round left out."""
    graphs = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(ROUNDS + 1):
        for name, graph in graphs.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            if number:
                found[name].append(first.elapsed_time(last) / 1000)
    return found
