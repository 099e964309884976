r"""Activations of ggml: Q8_1 and Q8_K, blocks of signed 8-bit codes with sums.

A weight with a minimum, :math:`w = s q + m`, makes a dot product of two sums: one of the products of codes, and
:math:`m` times the sum of the activations. Both types carry sums, so that no kernel adds activations up.

====== ======= ============= =============================================================================
type   block   scale         sums
====== ======= ============= =============================================================================
Q8_1   32      float16 *d*   float16 *s*: the sum of the block, rounded
Q8_K   256     float32 *d*   int16 ``bsums``: of each 16 codes, exact
====== ======= ============= =============================================================================

**The sum of Q8_1** need not be the sum of what is stored. It is rounded to float16, and ggml's CUDA kernel sums the
activations before it casts them. A product may use *s* or the codes, and its bound allows both (`stored_bounds`).

**Unwritten sums.** In a block of zeros ggml leaves ``bsums`` as they were. They have no effect, since *d* is 0. So
lowbit refuses wrong sums only where *d* is not 0.

No file holds these types, and the Python package ``gguf`` does not read them.

Source: ggml, ``ggml-common.h`` (``block_q8_1``, ``block_q8_K``) and ``ggml-quants.c``.
"""

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.casts import TIES, choices
from lowbit.tensor_formats.gguf import D, gguf
from lowbit.tensor_formats.gguf_encode import QUOTIENTS, SUMS, q8_1, q8_k, sums_of_16
from lowbit.tensor_formats.table import Field, Sizes, Tensors, Terms


def _decode(tensors: Tensors, at: Sizes) -> Terms:
    return Terms(exact(tensors["d"])[..., None] * tensors["qs"])


def _with_sum(tensors: Tensors, at: Sizes) -> dict[str, Array]:
    total = exact(tensors["d"]) * tensors["qs"].sum(axis=-1, dtype=np.int64)
    return {**tensors, "s": total.astype(np.float16)}


def _sums(tensors: Tensors) -> F64:
    return exact(tensors["s"])


def _with_sums(tensors: Tensors, at: Sizes) -> dict[str, Array]:
    return {**tensors, "bsums": sums_of_16(tensors["qs"])}


def _check_sums(tensors: Tensors, at: Sizes) -> None:
    wrong = (tensors["bsums"] != sums_of_16(tensors["qs"])).any(axis=-1) & (tensors["d"] != 0)
    if wrong.any():
        place = [int(i) for i in np.argwhere(wrong)[0]]
        raise ArgumentError(f"bsums{place}", "other numbers", "the sum of each 16 codes of the block")


Q8_1 = gguf(
    "Q8_1",
    block=32,
    fields=(
        D,
        Field("s", "float16", (), "other", "the sum of the block"),
        Field("qs", "int8", (32,), "codes", "the codes in order, two's complement"),
    ),
    decode=_decode,
    encode=choices(q8_1, QUOTIENTS, TIES, SUMS),
    complete=_with_sum,
    sums=_sums,
    traps=("s is the sum of the numbers, and not of the codes.", "s is computed from the float32 scale."),
)
Q8_K = gguf(
    "Q8_K",
    block=256,
    fields=(
        Field("d", "float32", (), "scale", "the scale of the block", signed=True),
        Field("qs", "int8", (256,), "codes", "the codes in order, two's complement"),
        Field("bsums", "int16", (16,), "sum", "the sum of each 16 codes"),
    ),
    decode=_decode,
    encode={"reference": q8_k},
    complete=_with_sums,
    check=_check_sums,
    traps=(
        "The scale is float32, and has the sign that gives the number of largest magnitude the code -127.",
        "bsums of a block of zeros may hold anything.",
    ),
)
