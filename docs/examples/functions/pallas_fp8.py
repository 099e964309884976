"""FP8 with a scale for each output in Pallas, interpreted on the CPU: one program multiplies by 64 outputs.

``lowbit conformance --function pallas_fp8:gemm --profile lowbit-1.1/fp8-channel-gemm-bf16 --arrays jax``
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

WIDE = 64


def kernel(x, weight, scale, y):
    wide = x[...].astype(jnp.float32)
    # XLA takes subnormal products for 0 on CPUs, so rows of x are first divided by a power of two.
    exponent = jnp.frexp(jnp.max(jnp.abs(wide), axis=1, keepdims=True))[1]
    sums = jnp.dot(jnp.ldexp(wide, -exponent), weight[...].astype(jnp.float32).T)
    y[...] = (sums * jnp.ldexp(scale[...].T, exponent)).astype(y.dtype)


@partial(jax.jit, static_argnames=("rows", "columns"))
def gemm(x, weight, weight_scale, rows, columns):
    vectors = len(x)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((vectors, columns), x.dtype),
        grid=(columns // WIDE,),
        in_specs=[
            pl.BlockSpec((vectors, rows), lambda j: (0, 0)),
            pl.BlockSpec((WIDE, rows), lambda j: (j, 0)),
            pl.BlockSpec((WIDE, 1), lambda j: (j, 0)),
        ],
        out_specs=pl.BlockSpec((vectors, WIDE), lambda j: (0, j)),
        interpret=True,
    )(x, weight, weight_scale)
