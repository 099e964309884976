"""bitsandbytes: its kernels for the CPU, NF4 and FP4 in blocks, and 8 bits with a scale for each row.

``matmul_4bit`` dequantises to the type of the activations and multiplies. Where the processor has AVX512_BF16,
``Linear4bit`` packs its weights for another kernel, which rounds absmax, weights and activations to bfloat16. The
products of 8 bits are sums of integers that are scaled in float32; its scales are the largest magnitudes of rows, which
are 127 times ours.

Source: ``bitsandbytes/functional.py``, the ``ops.py`` of its backends cpu and default, and ``csrc/cpu_ops.cpp``.
"""

from collections.abc import Iterator
from typing import Any

from atlas.entry import RESULTS, Entry, Project, library
from lowbit.backend import Range
from lowbit.tensor_formats.stored import Stored, stored

torch = library("torch")
package = library("bitsandbytes")
functional = library("bitsandbytes.functional")

LEVELS = 127.0
PRODUCTS = ("linear.gemv", "linear.gemm")


def state(kind: str, absmax: Any, blocksize: int, shape: tuple[int, int], result: str) -> Any:
    """How bitsandbytes describes a matrix N × K."""
    code = functional.get_4bit_type(kind, device="cpu")
    dtype = getattr(torch, result)
    return functional.QuantState(absmax, shape, code=code, blocksize=blocksize, quant_type=kind, dtype=dtype)


def dequantize(kind: str, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int, result: str) -> Any:
    described = state(kind, absmax, blocksize, (columns, rows), result)
    return functional.dequantize_4bit(weight, described).T.contiguous()


def nf4(weight: Any, absmax: Any, blocksize: int, rows: int, columns: int, result: str) -> Any:
    return dequantize("nf4", weight, absmax, blocksize, rows, columns, result)


def fp4(weight: Any, absmax: Any, blocksize: int, rows: int, columns: int, result: str) -> Any:
    return dequantize("fp4", weight, absmax, blocksize, rows, columns, result)


def multiplied(kind: str, x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    described = state(kind, absmax, blocksize, (columns, rows), str(x.dtype).removeprefix("torch."))
    return package.matmul_4bit(x, weight, described)


def nf4_product(x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    return multiplied("nf4", x, weight, absmax, blocksize, rows, columns)


def fp4_product(x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    return multiplied("fp4", x, weight, absmax, blocksize, rows, columns)


def packed(kind: str, x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    """What ``Linear4bit`` calls at inference where the processor has AVX512_BF16."""
    described = state(kind, absmax, blocksize, (columns, rows), "bfloat16")
    return package.matmul_4bit(x, *functional._convert_weight_packed_for_cpu(weight, described))


def nf4_packed(x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    return packed("nf4", x, weight, absmax, blocksize, rows, columns)


def fp4_packed(x: Any, weight: Any, absmax: Any, blocksize: int, rows: int, columns: int) -> Any:
    return packed("fp4", x, weight, absmax, blocksize, rows, columns)


def blocks(kind: str, x: Any, blocksize: int) -> Stored:
    weight, described = functional.quantize_4bit(x, blocksize=blocksize, quant_type=kind)
    tensors = {"weight": weight.numpy(), "absmax": described.absmax.numpy()}
    return stored(kind, x.shape[1], x.shape[0], tensors, blocksize=blocksize)


def nf4_blocks(x: Any, options: tuple[tuple[str, int], ...]) -> Stored:
    return blocks("nf4", x, dict(options)["blocksize"])


def fp4_blocks(x: Any, options: tuple[tuple[str, int], ...]) -> Stored:
    return blocks("fp4", x, dict(options)["blocksize"])


def tokens(x: Any) -> Stored:
    codes, largest, _ = functional.int8_vectorwise_quant(x)
    tensors = {"codes": codes.numpy(), "scale": (largest / LEVELS)[:, None].numpy()}
    return stored("int8-token", x.shape[1], x.shape[0], tensors)


def scaled(x_codes: Any, x_scale: Any, codes: Any, scale: Any, result: str) -> Any:
    """What ``Linear8bitLt`` calls."""
    rows, columns = x_scale[:, 0] * LEVELS, scale[:, 0] * LEVELS
    dtype = getattr(torch, result)
    return torch.ops.bitsandbytes.int8_scaled_mm(x_codes, codes, rows, columns, dtype=dtype).contiguous()


def entries() -> Iterator[Entry]:
    """Both tables in the same kernels, then 8 bits."""
    for kind in ("nf4", "fp4"):
        yield Entry("dequantize_4bit", kind, "formats.dequantize", {"format": kind, "result": RESULTS})
        yield Entry("quantize_4bit", f"{kind}_blocks", "formats.quantize", {"format": kind, "inputs": RESULTS})
        for activations in RESULTS:
            for operation in PRODUCTS:
                types = {"format": kind, "activations": activations, "result": activations}
                yield Entry("matmul_4bit", f"{kind}_product", operation, types)
        types = {"format": kind, "activations": "bfloat16", "result": "bfloat16"}
        sizes = {"rows": Range(64), "columns": Range(32), "blocksize": (32, 64)}
        for operation in PRODUCTS:
            yield Entry("matmul_4bit, packed for AVX512_BF16", f"{kind}_packed", operation, types | sizes)
    yield Entry("int8_vectorwise_quant", "tokens", "formats.quantize", {"format": "int8-token", "inputs": RESULTS})
    types = {"format": "int8-token", "activations": "int8-token", "result": "float32"}
    yield Entry("int8_scaled_mm", "scaled", "linear.gemm_cast", types)


PROJECT = Project("bitsandbytes", ("bitsandbytes", "torch"), tuple(entries()))
