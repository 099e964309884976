"""Stored products of `lowbit_cppyy`: matrices of every format, and kernels run by the interpreter.

The stream of activations is laid out here a second time, by the docstrings of `lowbit_cppyy.stored`, and not by the
lists that the C++ uses.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.kernels import interpreter
from lowbit.tensor_formats.stored import FORMATS, Stored, quantize
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.stored.formats import PARTS
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.layout import StoredLayout, layout_of
from lowbit_cppyy.stored.linear import PANEL, bytes_of, has_integers
from lowbit_cppyy.stored.parts import UNIT, Parts
from lowbit_cppyy.stored.recipe import StoredRecipe, default_recipe, separate_recipe

OPTIONS = {"bits": 4, "group_size": 64}
CASTS = ("q8_0", "q8_k", "int8-token")
BYTE = 128


def some_stored(name: str, rows: int = 256, columns: int = 77, **options: int) -> Stored:
    """A matrix of a format with contents of the suite's own drawing."""
    chosen = OPTIONS | options
    own = tuple((option, chosen[option]) for option in FORMATS[name].options)
    if name.startswith(("awq", "gptq")):
        columns = -(-columns // 32) * 32  # whole words of zeros
    return drawn(FormatCase("linear.gemv/C2", "random", "", name, rows, columns, options=own), powers=False)


def some_activations(rows: int, columns: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(rows).normal(size=(rows, columns)).astype(dtype)


def some_cast(rows: int, columns: int, name: str = "q8_0") -> Stored:
    return quantize(some_activations(rows, columns), name)


CASES = [*PARTS, *(f"{name} cast" for name in PARTS)]
"""Every format with float activations, and with activations of 8 bits."""


def kernel_for(parts: Parts, table: InstructionSet, purpose: Purpose, x: Array | Stored) -> StoredKernel:
    """The kernel that multiplies these activations, by the rows that share a scale."""
    if isinstance(x, Stored) and not has_integers(parts, layout_of(parts, PANEL), bytes_of(x)[2]):
        return StoredKernel(separate_recipe(parts.structure, PANEL), table)
    return StoredKernel(default_recipe(parts.structure, table, purpose, PANEL), table)


# **What kernels answer**, by the interpreter alone.


def group_sum(x: F32) -> np.float32:
    """The sum of float32 numbers as the specification of `activations.h` has it: eight running sums, then a tree."""
    sums = np.zeros(8, np.float32)
    whole = len(x) // 8 * 8
    for row in x[:whole].reshape(-1, 8):
        sums += row
    sums[: len(x) - whole] += x[whole:]
    low = (sums[0] + sums[4]) + (sums[2] + sums[6])
    return np.float32(low + ((sums[1] + sums[5]) + (sums[3] + sums[7])))


def floats_of(recipe: StoredRecipe, parts: Parts, x: F32, length: int, first: int) -> Iterator[np.float32]:
    """The elements of one group for one row of float32 activations."""
    run = recipe.run or -(-length // UNIT) * UNIT
    sign = np.float32(-1 if recipe.structure.offset in ("minimum", "zero") else 1)
    for start in range(0, length, run):
        own = x[first + start : first + min(start + run, length)]
        if recipe.centered:
            lowered = np.float32(2.0**-50 if recipe.method == "subnormal" else 1.0)
            yield np.float32(-parts.center) * group_sum(own) * lowered
        for place in range(run):
            factor = np.float32(2.0 ** -(0 if recipe.integer else recipe.power(place % UNIT)))
            yield own[place] * factor if place < len(own) else np.float32(0)
        if recipe.sums:
            yield sign * group_sum(own)


def bytes_in(recipe: StoredRecipe, parts: Parts, x: Array, scales: Array, length: int, first: int) -> Iterator[Any]:
    """The elements of one group for one row of 8-bit activations; `scales` has one for each activation."""
    center = parts.center if recipe.structure.offset == "center" else BYTE
    sign = np.float32(-1 if recipe.structure.offset in ("minimum", "zero") else 1)
    total = np.float32(0)
    for start in range(0, length, recipe.run):
        own = x[first + start : first + start + recipe.run]
        whole, scale = int(own.astype(np.int64).sum()), np.float32(scales[first + start])
        if recipe.centered:
            yield np.int32(-center * whole).view(np.float32)
        yield from own.view(np.float32)
        yield scale
        part = sign * scale * np.float32(whole)
        if recipe.structure.offset == "minimum":
            yield part
        total += part
    if recipe.structure.offset in ("number", "zero"):
        yield total


Rows = list[tuple[Array, Array]]
"""Rows of activations, each with a scale for every one of them."""


def laid_out(recipe: StoredRecipe, parts: Parts, layout: StoredLayout, rows: Rows) -> Iterator[Any]:
    """Block by block the stream of x, and the sizes that the kernel is given."""
    ends = np.cumsum([0, *layout.lengths])
    for start, stop in pairwise(layout.firsts):
        stream = [recipe.head(parts.table)] if recipe.headed else []
        for group in range(start, stop):
            sizes = layout.lengths[group], int(ends[group])
            own = [bytes_in(recipe, parts, *row, *sizes) for row in rows]
            if not recipe.integer:
                own = [floats_of(recipe, parts, x, *sizes) for x, _ in rows]
            stream.append(np.array([[*row] for row in own], np.float32).T.reshape(-1))
        yield np.concatenate(stream), {"groups": stop - start, "turns": layout.units[start:stop]}


def interpreted(kernel: StoredKernel, parts: Parts, x: list[tuple[Array, Array]], fused: bool) -> F32:
    """``Y = X W`` for as many rows of x as the kernel takes at once."""
    recipe, layout = kernel.recipe, layout_of(parts, kernel.recipe.panel)
    stream, starts = layout.apply(parts), layout.starts
    y = np.zeros((layout.panels, recipe.rows, recipe.panel), np.float32)
    with np.errstate(all="ignore"):
        blocks = list(laid_out(recipe, parts, layout, x))
    for panel, tile in enumerate(y):
        for block, (values, sizes) in enumerate(blocks):
            w = stream[starts[panel, block] :]
            for j in range(0, min(recipe.panel, layout.columns - panel * recipe.panel), kernel.columns):
                memory = {"w": w[j:], "s": w[j // 2 :], "z": w[j // 4 :], "x": values, "y": tile.reshape(-1)[j:]}
                interpreter.run(kernel.program, memory, sizes, fused=fused)
    return y.swapaxes(0, 1).reshape(recipe.rows, -1)[:, : layout.columns]
