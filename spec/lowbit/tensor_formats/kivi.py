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
kept in full precision until a group of them is complete; they are not part of this format, but of the cache in the
chapter `lowbit.attention.kivi_cache`.

Scales and minima have the type of the model, float16 or, in formats that end in ``-bf16``, bfloat16.

**A cast** of numbers of that type rounds each of KIVI's steps to it. A cast of float32 numbers computes in float32, and
rounds the scale and the minimum at the end. Both are right, and a call keeps to one. A group of one number
throughout has the scale 0, by which KIVI divides; its codes are 0 here.

**Computing in 16 bits**, as KIVI does, rounds twice: :math:`\mathrm{fl}(\mathrm{fl}(s\,q) + \min x)`. A kernel whose
result has the type of the scales may do the same, and so does MLX, whose affine weights are these values.

Source: KIVI (arXiv 2402.02750) §3.2 and its ``new_pack.py`` (``triton_quantize_and_pack_along_last_dim``).
"""

from functools import partial

import numpy as np

from lowbit.arrays import F32, F64, Array
from lowbit.numbers.floats import Name, rounded
from lowbit.tensor_formats.bits import exact, join, stream
from lowbit.tensor_formats.casts import in_groups, kept_in, stepped
from lowbit.tensor_formats.table import Decode, Field, Format, Sizes, Tensors, Terms


def _along(count: int, words: Array, scale: Array, minimum: Array, size: int, bits: int) -> Terms:
    """The terms of lines of `count` numbers: codes, with a scale and a minimum for every `size` of them."""
    group = np.arange(count) // size
    codes = exact(stream(words, bits, count))
    return Terms(codes * exact(scale)[:, group], exact(minimum)[:, group])


def _keys(tensors: Tensors, at: Sizes) -> Terms:
    return _along(at.N, tensors["codes"], tensors["scale"], tensors["minimum"], at["tokens"], at["bits"])


def _values(tensors: Tensors, at: Sizes) -> Terms:
    found = _along(at.K, tensors["codes"], tensors["scale"], tensors["minimum"], at["group_size"], at["bits"])
    return Terms(found.products.T, np.asarray(found.offsets).T)


def _stepwise(type: Name, decode: Decode, tensors: Tensors, at: Sizes) -> Array:
    terms = decode(tensors, at)
    return rounded(exact(rounded(terms.products, type)) + terms.offsets, type)


# **Casts.** Lines are channels for keys and tokens for values.


def _cast(type: Name, steps: Name, lines: F64, size: int, bits: int) -> dict[str, Array]:
    """The fields of lines of numbers, every step rounded to `steps`, scales and minima stored in `type`."""
    count, step = lines.shape[1], partial(stepped, steps)
    with np.errstate(over="ignore", invalid="ignore"):
        x = in_groups(step(lines.astype(np.float32)), size)
        least: F32 = x.min(axis=-1, keepdims=True)
        scale = step(step(x.max(axis=-1, keepdims=True) - least) / np.float32(2**bits - 1))
        kept = kept_in(type, scale[..., 0])  # refuses what the type cannot hold, before any division by it
        divisor: F32 = np.where(scale == 0, np.float32(1), scale)
        quotients = np.where(scale == 0, np.float32(0), step(step(x - least) / divisor))
    codes = np.rint(quotients.clip(0, 2**bits - 1)).astype(np.uint32).reshape(len(lines), -1)[:, :count]
    filled = np.pad(codes, ((0, 0), (0, -count % (32 // bits))))
    return {"codes": join(filled, bits, np.int32), "scale": kept, "minimum": kept_in(type, least[..., 0])}


def _encode_keys(type: Name, steps: Name, numbers: F64, at: Sizes) -> dict[str, Array]:
    return _cast(type, steps, numbers, at["tokens"], at["bits"])


def _encode_values(type: Name, steps: Name, numbers: F64, at: Sizes) -> dict[str, Array]:
    return _cast(type, steps, numbers.T, at["group_size"], at["bits"])


def choices_of(type: Name) -> dict[str, Name]:
    """The types in which a cast to this type of scales may compute, by the names of the choices."""
    return {"in float32": "float32", f"in {type}": type}


SOURCE = "KIVI, arXiv 2402.02750, and its new_pack.py"
SUFFIX: dict[Name, str] = {"float16": "", "bfloat16": "-bf16"}
"""The ends of format names, by the type of scales and minima."""


def keys_of(type: Name) -> Format:
    """The format of keys."""
    return Format(
        name=f"kivi-keys{SUFFIX[type]}",
        title="KIVI's keys, by channel" + (f", {type} scales" if SUFFIX[type] else ""),
        fields=(
            Field("codes", "int32", ("K", "N*bits//32"), "codes", "the tokens of a channel, from the lowest bits up"),
            Field("scale", type, ("K", "N//tokens"), "scale", "one for each channel and group of tokens"),
            Field("minimum", type, ("K", "N//tokens"), "zero", "the least number of the group"),
        ),
        decode=_keys,
        stepwise=partial(_stepwise, type, _keys),
        encode={name: partial(_encode_keys, type, steps) for name, steps in choices_of(type).items()},
        options={"bits": (2, 4), "tokens": None},
        source=SOURCE,
        traps=("Keys are grouped along tokens, values along channels.",),
    )


def values_of(type: Name) -> Format:
    """The format of values."""
    return Format(
        name=f"kivi-values{SUFFIX[type]}",
        title="KIVI's values, by token" + (f", {type} scales" if SUFFIX[type] else ""),
        fields=(
            Field("codes", "int32", ("N", "K*bits//32"), "codes", "the channels of a token, from the lowest bits up"),
            Field("scale", type, ("N", "G"), "scale", "one for each token and group of channels"),
            Field("minimum", type, ("N", "G"), "zero", "the least number of the group"),
        ),
        decode=_values,
        stepwise=partial(_stepwise, type, _values),
        encode={name: partial(_encode_values, type, steps) for name, steps in choices_of(type).items()},
        options={"bits": (2, 4), "group_size": None},
        source=SOURCE,
    )


KIVI_KEYS, KIVI_VALUES = keys_of("float16"), values_of("float16")
KIVI_KEYS_BF16, KIVI_VALUES_BF16 = keys_of("bfloat16"), values_of("bfloat16")
