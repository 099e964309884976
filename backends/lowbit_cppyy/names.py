"""Parsing the name of a kernel, by the grammar of `lowbit_cppyy.codegen.kernels`.

A name is parsed part by part. Then the kernel that it describes is made, and its name must be the one given: so the
grammar is written in one place. For a wrong name the error says which part is wrong and what is allowed there.
"""

import re
from typing import Any

from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import BITS
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.recipe import METHODS, Recipe

EXAMPLE = "gemv_f32_u4_s16z_fold_1x4c2t1_p64a1024_avx512"

_SCALES = {"s32": "float32", "s16": "float16"}
_ZEROS = {"m": "minimum", "z": "zero_point"}
_NUMBER = "[1-9][0-9]{0,3}"
_PARTS = (
    ("product", "gemv|gemm", "gemv or gemm"),
    ("activations", "f32|bfp16", "f32 or bfp16"),
    ("codes", "|".join(f"u{bits}" for bits in BITS), spoken([f"u{bits}" for bits in BITS])),
    ("scales", "s(16|32)[mz]", "s16m, s16z, s32m or s32z"),
    ("method", "|".join(METHODS), spoken(METHODS)),
    ("tile", f"({_NUMBER})x({_NUMBER})c({_NUMBER})t({_NUMBER})", "such as 1x4c2t1"),
    ("stream", f"p({_NUMBER})a(0|[1-9][0-9]{{0,4}})", "such as p64a1024"),
    ("instruction set", "|".join(TABLES), spoken(tuple(TABLES))),
)

MOST_WRITTEN = 1 << 14
"""The largest number of products written out in a loop iteration; more give megabytes of unreadable text."""


def kernel_of(name: str) -> Kernel:
    """The kernel with this name.

    >>> kernel_of(EXAMPLE).recipe.registers
    4
    >>> kernel_of("gemv_f32_u5_s16z_fold_1x4c2t1_p64a1024_avx512")
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: codes of the kernel's name is 'u5'; allowed: u2, u3, u4 or u8

    Args:
        name: by the grammar of `lowbit_cppyy.codegen.kernels`.

    Raises:
        ArgumentError: a part of it is wrong, or there is no such kernel.
    """
    given = name.split("_")
    if len(given) != len(_PARTS):
        raise ArgumentError("name", repr(name[:80]), f"eight parts joined by _, such as {EXAMPLE}")
    for part, (what, pattern, allowed) in zip(given, _PARTS, strict=True):
        if not re.fullmatch(pattern, part):
            raise ArgumentError(f"{what} of the kernel's name", repr(part[:40]), allowed)
    _, _, codes, scales, method, tile, stream, isa = given
    rows, registers, chains, unroll, panel, ahead = map(int, re.findall("[0-9]+", tile + stream))
    stated: dict[str, Any] = {"bits": int(codes[1:]), "scales": _SCALES[scales[:3]], "convention": _ZEROS[scales[3]]}
    stated |= {"method": method, "rows": rows, "registers": registers, "chains": chains, "unroll": unroll}
    recipe = Recipe(**stated, panel=panel, ahead=ahead)
    if rows * registers * chains * unroll * recipe.unit_codes > MOST_WRITTEN:
        raise ArgumentError("tile of the kernel's name", repr(tile), f"at most {MOST_WRITTEN} products written out")
    kernel = Kernel(recipe, TABLES[isa])
    if kernel.name != name:
        raise ArgumentError("name", repr(name), f"{kernel.name}, the name of this kernel")
    return kernel
