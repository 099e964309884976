r"""Plain numbers: float16, bfloat16 and float32.

Most key-value caches are stored in the type in which the model computes, and so are the layers that a quantised model
does not quantise. A row holds the K numbers of a token, or of an output, and nothing else:

.. math:: w_{kn} = P_{nk}.

A cast rounds each number once, to nearest, ties to even; a number beyond the largest is refused.

Source: IEEE 754-2019 §3.4 (float16 and float32); the bfloat16 of PyTorch and JAX.
"""

from functools import partial

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, Name, rounded
from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms


def _decode(tensors: Tensors, at: Sizes) -> Terms:
    return Terms(exact(tensors["numbers"]).T)


def _encode(name: Name, numbers: F64, at: Sizes) -> dict[str, Array]:
    found = rounded(numbers.T, name)
    if not np.isfinite(exact(found)).all():
        raise ArgumentError("x", f"a number of {np.abs(numbers).max():.6g}", f"at most {FLOATS[name].largest:.6g}")
    return {"numbers": found}


def of_type(name: Name) -> Format:
    """The format that stores numbers of a type."""
    return Format(
        name=name,
        title=f"{name} as it is",
        fields=(Field("numbers", name, ("N", "K"), "codes", "one row for each token or output"),),
        decode=_decode,
        encode={"nearest": partial(_encode, name)},
        source="IEEE 754-2019 for float16 and float32; PyTorch for bfloat16",
    )


NAMES: tuple[Name, ...] = ("float16", "bfloat16", "float32")
"""The names of the formats of this chapter."""

FLOAT16 = of_type("float16")
BFLOAT16 = of_type("bfloat16")
FLOAT32 = of_type("float32")
