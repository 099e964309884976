"""Products with stored matrices in Triton; its interpreter runs them if TRITON_INTERPRET is 1."""

from typing import Any

import torch
import triton
import triton.language as tl


def awq(x: Any, qweight: Any, qzeros: Any, scales: Any, group_size: int, rows: int, columns: int) -> Any:
    """AWQ of 4 bits, layout gemm."""
    y = torch.empty((len(x), columns), dtype=x.dtype)
    grid = (len(x), columns // 64)
    awq_kernel[grid](x, qweight, qzeros, scales, y, rows, columns, group_size, STEP=512, WIDE=64)
    return y


@triton.jit
def awq_kernel(x, qweight, qzeros, scales, y, rows, columns, group_size, STEP: tl.constexpr, WIDE: tl.constexpr):
    t = tl.program_id(0)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    shift = 4 * (n % 8 // 2 + n % 2 * 4)
    total = tl.zeros((WIDE,), tl.float32)
    for start in range(0, rows, STEP):
        k = start + tl.arange(0, STEP)
        inside = k < rows
        group = k // group_size
        mask = inside[:, None]
        codes = tl.load(qweight + k[:, None] * (columns // 8) + n[None, :] // 8, mask=mask, other=0)
        zeros = tl.load(qzeros + group[:, None] * (columns // 8) + n[None, :] // 8, mask=mask, other=0)
        scale = tl.load(scales + group[:, None] * columns + n[None, :], mask=mask, other=0.0)
        numbers = tl.load(x + t * rows + k, mask=inside, other=0.0).to(tl.float32)
        difference = (codes >> shift[None, :] & 15) - (zeros >> shift[None, :] & 15)
        weights = scale.to(tl.float32) * difference.to(tl.float32)
        total += tl.sum(tl.where(mask, numbers[:, None] * weights, 0.0), axis=0)
    tl.store(y + t * columns + n, total.to(tl.float16))


def fp8_channel(x: Any, weight: Any, weight_scale: Any, rows: int, columns: int) -> Any:
    """FP8 with a scale for each output, its bits decoded in the kernel."""
    y = torch.empty((len(x), columns), dtype=x.dtype)
    octets = weight.view(torch.uint8)
    fp8_kernel[(len(x), columns // 64)](x, octets, weight_scale, y, rows, columns, STEP=512, WIDE=64)
    return y


@triton.jit
def fp8_kernel(x, weight, scale, y, rows, columns, STEP: tl.constexpr, WIDE: tl.constexpr):
    t = tl.program_id(0)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((WIDE,), tl.float32)
    for start in range(0, rows, STEP):
        k = start + tl.arange(0, STEP)
        mask = (k < rows)[:, None]
        bits = tl.load(weight + n[None, :] * rows + k[:, None], mask=mask, other=0).to(tl.int32)
        exponent, mantissa = bits >> 3 & 15, bits & 7
        normal = (8 + mantissa).to(tl.float32) * tl.exp2((exponent - 10).to(tl.float32))
        size = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
        number = tl.where(bits & 128 > 0, -size, size)
        numbers = tl.load(x + t * rows + k, mask=k < rows, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(mask, numbers[:, None] * number, 0.0), axis=0)
    total = total * tl.load(scale + n)
    tl.store(y + t * columns + n, total.to(tl.float16))
