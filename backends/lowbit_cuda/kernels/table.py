"""The table of kernels: for each, what a launch is given, what of it is read and written, and how it is cut.

A kernel's name says what it is: ``gemm_b4_f16_t1`` multiplies by a matrix of 4-bit codes with float16 scales, one
token at a time. `kernel` finds one by its choices. What a port needs to know of it is `lowbit_cuda.port.Kernel`; the
extents there are exact, since a simulated device concludes from them what must not run at once, and a test runs every
meaning on arrays of just these extents.

**Products** (`gemm`, `expert_in`) come for one token and for eight at once (``tokens`` 1 and 8). Which one is launched
changes no bit: a token's sums have the same order in both. A grid has a row of blocks for every 8 tokens.

**Limits.** Groups are multiples of the codes in a unit (`layouts.check_group_size`); the inputs of dense products are
multiples of 8; cached heads have a multiple of 4 channels up to 256, and with BFP12 a multiple of 32; tokens are at
most 65535 a launch.

**Positions** of tokens are read from the device's memory, an int32, so that a graph can be replayed for the next token.
What they may reach is bounded by the capacity that the launch is given, and nothing outside is touched.
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
"""How each is made, and its choices."""


@cache
def kernel(name: str, **choices: object) -> Kernel:
    """The kernel of this name and these choices; a choice that is not given is the first default of its maker.

    >>> kernel("gemm", bits=4, tokens=8).name, kernel("attend", keys="bfp12", values="float16").name
    ('gemm_b4_f16_t8', 'attend_bfp12_f16')
    >>> kernel("add") is kernel("add")
    True

    Raises:
        ArgumentError: no such kernel or choice.
    """
    check_choice("kernel", name, tuple(MAKERS))
    make, allowed = MAKERS[name]
    for choice, given in choices.items():
        check_choice("choice", choice, tuple(allowed))
        check_choice(choice, given, allowed[choice])
    return make(**choices)
