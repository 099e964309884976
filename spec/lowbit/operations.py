"""All operations of the specification: importing this imports every chapter that declares one.

>>> sorted(OPERATIONS)[:2]
['affine.dequantize', 'affine.quantize']
"""

from lowbit.attention import attention, kivi_cache, ksort, kvcache, pooling, residual, rope, shaped
from lowbit.attention import stored as stored_attention
from lowbit.contract.operation import OPERATIONS
from lowbit.kernels import layouts
from lowbit.linear import integer, linear, stored
from lowbit.model import layers
from lowbit.moe import offload, offload_engine, routing
from lowbit.numbers import floats
from lowbit.quantization import affine, bfp, bfp_dot, bfp_storage, gptq, hqq, hqq_solver, packing

__all__ = ["CHAPTERS", "OPERATIONS"]

CHAPTERS = (
    *(packing, affine, bfp, bfp_dot, bfp_storage, gptq, hqq, hqq_solver, floats, linear, integer),
    *(stored, layouts, rope, attention, shaped, stored_attention, residual, kvcache, kivi_cache, pooling, ksort),
    *(routing, offload, offload_engine, layers),
)
"""The modules that declare operations."""
