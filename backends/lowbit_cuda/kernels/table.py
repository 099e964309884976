"""The table of kernels: for each, its arguments, which of them are read and written, and how the launch is divided.

A kernel's name states its choices: ``gemm_b4_f16_t1`` multiplies by a matrix of 4-bit codes with float16 scales, one
token at a time. `kernel` returns the kernel for given choices. `lowbit_cuda.port.Kernel` is what a port needs to know
of it. The extents there are exact: a simulated device derives from them which operations must not overlap, and tests
run each kernel on arrays of exactly these extents.

**Products** (`gemm`, `expert_in`) exist for one token and for eight at once (``tokens`` 1 and 8). The choice changes no
bit: a token's sums have the same order in both. A grid has one row of blocks for every 8 tokens.

**Limits.** Groups are multiples of the codes in a unit (`layouts.check_group_size`). The inputs of dense products are
multiples of 8. Cached heads have a multiple of 4 channels, up to 256, and with BFP12 a multiple of 32. A launch takes
at most 65535 tokens.

**Positions** of tokens are read from device memory, as int32, so that a graph can be replayed for the next token. They
are bounded by the capacity that the launch is given, and nothing beyond it is accessed.
"""

from collections.abc import Callable
from functools import cache

from lowbit.contract.checks import check_choice
from lowbit.quantization.packing import BITS
from lowbit_cuda.kernels.attention import KEYS, append, attend, rope
from lowbit_cuda.kernels.elementwise import add, combine, gather, rms_norm, scatter, swiglu
from lowbit_cuda.kernels.parameters import FLOAT_NAMES
from lowbit_cuda.kernels.products import TOKENS_AT_ONCE, dense, dequantize, expert_in, gemm
from lowbit_cuda.port import Kernel

MAKERS: dict[str, tuple[Callable[..., Kernel], dict[str, tuple[object, ...]]]] = {
    "gemm": (gemm, {"bits": BITS, "scales": tuple(FLOAT_NAMES), "tokens": TOKENS_AT_ONCE}),
    "expert_in": (expert_in, {"bits": BITS, "scales": tuple(FLOAT_NAMES), "tokens": TOKENS_AT_ONCE}),
    "dequantize": (dequantize, {"bits": BITS, "scales": tuple(FLOAT_NAMES)}),
    "dense": (dense, {"weights": tuple(FLOAT_NAMES)}),
    "rms_norm": (rms_norm, {}),
    "swiglu": (swiglu, {}),
    "add": (add, {}),
    "combine": (combine, {}),
    "gather": (gather, {"table": tuple(FLOAT_NAMES)}),
    "scatter": (scatter, {}),
    "rope": (rope, {}),
    "append": (append, {"keys": tuple(KEYS)}),
    "attend": (attend, {"keys": tuple(KEYS), "values": tuple(FLOAT_NAMES)}),
}
"""The function that makes each kernel, and its choices."""


@cache
def kernel(name: str, **choices: object) -> Kernel:
    """The kernel with this name and these choices; choices that are not given have the defaults of its function.

    >>> kernel("gemm", bits=4, tokens=8).name, kernel("attend", keys="bfp12", values="float16").name
    ('gemm_b4_f16_t8', 'attend_bfp12_f16')
    >>> kernel("add") is kernel("add")
    True

    Raises:
        ArgumentError: there is no such kernel or choice.
    """
    check_choice("kernel", name, tuple(MAKERS))
    make, allowed = MAKERS[name]
    for choice, given in choices.items():
        check_choice("choice", choice, tuple(allowed))
        check_choice(choice, given, allowed[choice])
    return make(**choices)
