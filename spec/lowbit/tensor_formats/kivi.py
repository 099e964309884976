r"""KIVI: key-value caches in 2 and 4 bits, keys by channel and values by token.

Some channels of keys are large in every token, so the numbers of one channel are alike and those of one token are not.
Values have no such channels. KIVI therefore quantises keys *by channel*, in groups of successive tokens, and values *by
token*, in groups of successive channels. Both are asymmetric, with a scale and a minimum:

.. math:: s = \frac{\max x - \min x}{2^b - 1}, \qquad q = \mathrm{round}\Bigl(\frac{x - \min x}{s}\Bigr), \qquad
   x \approx s\, q + \min x .

A cache is a matrix K × N of K channels (of all heads, head after head) and N tokens.

============= ===================================== ============================================
format        one scale and minimum for             words of codes run along
============= ===================================== ============================================
kivi-keys     a channel and ``tokens`` tokens       the tokens of a channel
kivi-values   a token and ``group_size`` channels   the channels of a token
============= ===================================== ============================================

Words are int32, the first code in the lowest bits. The last group and the last word may be short. The newest tokens are
kept in full precision until a group of them is complete; they are no part of this format, but of the cache in the
chapter `lowbit.attention.kivi_cache`.

**A cast** of float16 numbers rounds each of KIVI's steps to float16. A cast of float32 numbers computes in float32, and
rounds the scale and the minimum to float16 at the end. Both are right, and a call keeps to one. A group of one number
throughout has the scale 0, by which KIVI divides; its codes are 0 here.

Source: KIVI (arXiv 2402.02750) §3.2 and its ``new_pack.py`` (``triton_quantize_and_pack_along_last_dim``).
"""

from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, join, stream
from lowbit.tensor_formats.casts import half
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms


def _along(count: int, words: Array, scale: Array, minimum: Array, size: int, bits: int) -> Terms:
    """The terms of lines of `count` numbers: codes, and for each `size` of them a scale and a minimum."""
    group = np.arange(count) // size
    codes = exact(stream(words, bits, count))
    return Terms(codes * exact(scale)[:, group], exact(minimum)[:, group])


def _keys(tensors: Tensors, at: Sizes) -> Terms:
    return _along(at.N, tensors["codes"], tensors["scale"], tensors["minimum"], at["tokens"], at["bits"])


def _values(tensors: Tensors, at: Sizes) -> Terms:
    found = _along(at.K, tensors["codes"], tensors["scale"], tensors["minimum"], at["group_size"], at["bits"])
    return Terms(found.products.T, np.asarray(found.offsets).T)


# **Casts.** Lines are channels for keys and tokens for values; a short last group repeats its last number.


def _cast(dtype: type[np.floating[Any]], lines: F64, size: int, bits: int) -> dict[str, Array]:
    """The fields of lines of numbers, all steps in one type."""
    count, missing = lines.shape[1], -lines.shape[1] % size
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.pad(lines.astype(np.float32).astype(dtype), ((0, 0), (0, missing)), "edge").reshape(len(lines), -1, size)
        least = x.min(axis=-1, keepdims=True)
        scale = (x.max(axis=-1, keepdims=True) - least) / dtype(2**bits - 1)
        kept = half(scale[..., 0])  # refuses what float16 cannot hold, before anything is divided by it
        quotients = np.where(scale == 0, dtype(0), (x - least) / np.where(scale == 0, dtype(1), scale))
    codes = np.rint(quotients.clip(0, 2**bits - 1)).astype(np.uint32).reshape(len(lines), -1)[:, :count]
    filled = np.pad(codes, ((0, 0), (0, -count % (32 // bits))))
    return {"codes": join(filled, bits, np.int32), "scale": kept, "minimum": half(least[..., 0])}


def _encode_keys(dtype: type[np.floating[Any]], numbers: F64, at: Sizes) -> dict[str, Array]:
    return _cast(dtype, numbers, at["tokens"], at["bits"])


def _encode_values(dtype: type[np.floating[Any]], numbers: F64, at: Sizes) -> dict[str, Array]:
    return _cast(dtype, numbers.T, at["group_size"], at["bits"])


STEPS: dict[str, type[np.floating[Any]]] = {"in float32": np.float32, "in float16": np.float16}
SOURCE = "KIVI, arXiv 2402.02750, and its new_pack.py"
KIVI_KEYS = Format(
    name="kivi-keys",
    title="KIVI's keys, by channel",
    fields=(
        Field("codes", "int32", ("K", "N*bits//32"), "codes", "the tokens of a channel, from the lowest bits up"),
        Field("scale", "float16", ("K", "N//tokens"), "scale", "one for each channel and group of tokens"),
        Field("minimum", "float16", ("K", "N//tokens"), "zero", "the least number of the group"),
    ),
    decode=_keys,
    encode={name: partial(_encode_keys, dtype) for name, dtype in STEPS.items()},
    options={"bits": (2, 4), "tokens": None},
    source=SOURCE,
    traps=("Keys are grouped along tokens, values along channels.",),
)
KIVI_VALUES = Format(
    name="kivi-values",
    title="KIVI's values, by token",
    fields=(
        Field("codes", "int32", ("N", "K*bits//32"), "codes", "the channels of a token, from the lowest bits up"),
        Field("scale", "float16", ("N", "G"), "scale", "one for each token and group of channels"),
        Field("minimum", "float16", ("N", "G"), "zero", "the least number of the group"),
    ),
    decode=_values,
    encode={name: partial(_encode_values, dtype) for name, dtype in STEPS.items()},
    options={"bits": (2, 4), "group_size": None},
    source=SOURCE,
)
