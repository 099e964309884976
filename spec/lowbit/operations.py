"""All operations of the specification: importing this imports every chapter that declares one.

>>> sorted(OPERATIONS)[:2]
['affine.dequantize', 'affine.quantize']
"""

from lowbit import (
    affine,
    attention,
    bfp,
    bfp_dot,
    bfp_storage,
    blocks,
    gptq,
    hqq,
    hqq_solver,
    integer,
    ksort,
    kvcache,
    layouts,
    linear,
    offload,
    offload_engine,
    packing,
    pooling,
    rope,
    routing,
)
from lowbit.contract import OPERATIONS

__all__ = [
    "OPERATIONS",
    "affine",
    "attention",
    "bfp",
    "bfp_dot",
    "bfp_storage",
    "blocks",
    "gptq",
    "hqq",
    "hqq_solver",
    "integer",
    "ksort",
    "kvcache",
    "layouts",
    "linear",
    "offload",
    "offload_engine",
    "packing",
    "pooling",
    "rope",
    "routing",
]
