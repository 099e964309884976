"""HQQ: its PyTorch code, which runs where no other kernel does. ``compute_dtype`` is the type of the result.

Source: ``hqq/core/quantize.py`` (Quantizer.dequantize, HQQLinear.forward_pytorch) and ``bitpack.py``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import Entry, Project, library

torch = library("torch")
quantize = library("hqq.core.quantize")

FORMATS = {
    "hqq-axis0": ("axis0", (8, 4, 2, 1)),
    "hqq-axis0-3bit": ("axis0_3bit", ()),
    "hqq-axis1": ("axis1", (8, 4, 2, 1)),
    "hqq-axis1-3bit": ("axis1_3bit", ()),
}


def dequantized(axis: int, bits: int, result: str, tensors: tuple[Any, Any, Any], group_size: int, shape: Any) -> Any:
    words, scale, zero = tensors
    meta = {"nbits": bits, "group_size": group_size, "shape": shape, "axis": axis, "scale": scale, "zero": zero}
    meta |= {"packing": quantize.Quantizer.bit_to_packing[bits], "view_as_float": False}
    meta["compute_dtype"] = getattr(torch, result)
    return quantize.Quantizer.dequantize(words, meta).T.contiguous()


def axis0(W_q: Any, scale: Any, zero: Any, bits: int, group_size: int, rows: int, columns: int, result: str) -> Any:
    return dequantized(0, bits, result, (W_q, scale, zero), group_size, (columns, rows))


def axis1(W_q: Any, scale: Any, zero: Any, bits: int, group_size: int, rows: int, columns: int, result: str) -> Any:
    return dequantized(1, bits, result, (W_q, scale, zero), group_size, (columns, rows))


def axis0_3bit(W_q: Any, scale: Any, zero: Any, group_size: int, rows: int, columns: int, result: str) -> Any:
    return dequantized(0, 3, result, (W_q, scale, zero), group_size, (columns, rows))


def axis1_3bit(W_q: Any, scale: Any, zero: Any, group_size: int, rows: int, columns: int, result: str) -> Any:
    return dequantized(1, 3, result, (W_q, scale, zero), group_size, (columns, rows))


def entries() -> Iterator[Entry]:
    """float32 first, then float16, in which HQQ computes by default."""
    for format, (function, bits) in FORMATS.items():
        for result in ("float32", "float16"):
            limits = {"format": format, "result": result} | ({"bits": bits} if bits else {})
            yield Entry(f"Quantizer.dequantize, {result}", function, "formats.dequantize", limits)


PROJECT = Project("HQQ", ("hqq", "torch"), tuple(entries()))
