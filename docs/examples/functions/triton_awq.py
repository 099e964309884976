"""AWQ of 4 bits in Triton. Its interpreter runs without a GPU, if TRITON_INTERPRET is 1 when the module is imported.

``TRITON_INTERPRET=1 lowbit conformance --function triton_awq:gemm --profile lowbit-1.1/awq-gemm-fp16 --arrays torch``
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, qweight, qzeros, scales, y, rows, columns, group_size, STEP: tl.constexpr, WIDE: tl.constexpr):
    t = tl.program_id(0)
    n = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    shift = 4 * (n % 8 // 2 + n % 2 * 4)  # columns 0, 2, 4, 6, 1, 3, 5, 7 of a word, from its lowest nibble
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
        weights = scale.to(tl.float32) * ((codes >> shift[None, :] & 15) - (zeros >> shift[None, :] & 15)).to(
            tl.float32
        )
        total += tl.sum(tl.where(mask, numbers[:, None] * weights, 0.0), axis=0)
    tl.store(y + t * columns + n, total.to(tl.float16))


def gemm(x, qweight, qzeros, scales, group_size, rows, columns):
    y = torch.empty((len(x), columns), dtype=x.dtype)
    kernel[(len(x), columns // 64)](x, qweight, qzeros, scales, y, rows, columns, group_size, STEP=512, WIDE=64)
    return y
