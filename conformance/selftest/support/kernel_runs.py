"""What kernels answer: interpreted on numpy, and compiled in this process; with matrices and activations for them.

The streams of activations that the interpreter reads are laid out here a second time, by the docstrings of
`lowbit_cppyy.codegen.microkernel`, `integers` and `interleaving`, and not by the lists that the C++ uses. So where a
compiled kernel and an interpreted program agree, both ways of laying out agree as well.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.kernels import interpreter
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES, Convention, QuantizedMatrix, ScaleDtype
from lowbit.quantization.bfp import Blocks
from lowbit.quantization.packing import BITS
from lowbit_cppyy.codegen.isa import AVX2, AVX512, NEON, TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.layout.panels import BLOCK_ROWS, PanelLayout
from lowbit_cppyy.recipe import METHODS, PURPOSES, Purpose, Recipe
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.runtime.compiler import Linear, Pool, Route, runtime

HERE = [table for table in TABLES.values() if all(map(processor.has, table.requires))]
"""The instruction sets of this processor."""

Activations = F32 | Blocks
Kind = tuple[ScaleDtype, Convention]
KINDS: list[Kind] = [(scales, convention) for scales in SCALE_DTYPES for convention in CONVENTIONS]


ADDS_TO = {"avxvnni": AVX2, "avx512vnni": AVX512, "neondot": NEON}
"""Tables that are another one with an instruction for `dot4`; what does not multiply integers is the same there."""


def kind_of(purpose: Purpose, bits: int) -> Kind:
    """The kinds of scales and zeros go round, so that no test needs a kernel for each of them."""
    number = ("vector", "rows", "integer vector", "integer rows").index(purpose.removeprefix("many "))
    return KINDS[(number + BITS.index(bits)) % len(KINDS)]


def purposes_of(table: InstructionSet) -> list[Purpose]:
    """The purposes whose kernels are this table's own."""
    return [purpose for purpose in PURPOSES if table.name not in ADDS_TO or purpose.startswith("integer")]


# Matrices and activations.


def some_matrix(
    bits: int,
    rows: int,
    columns: int,
    group_size: int,
    convention: Convention = "minimum",
    scales: ScaleDtype = "float32",
    *,
    lattice: bool = False,
) -> QuantizedMatrix:
    """Random words, scales and zeros; on the lattice, numbers whose sums stay exact."""
    random = np.random.default_rng(rows * columns + group_size)
    words = random.integers(0, 2**32, (rows * bits // 32, columns), np.uint32)
    shape = (-(-rows // group_size), columns)
    steps = random.choice((0.25, 0.5, 1, 2), shape) if lattice else random.uniform(0.01, 1, shape)
    zeros: Any = random.integers(0, 2**bits, shape).astype(np.uint8)
    if convention == "minimum":
        least = random.integers(-4, 5, shape) if lattice else random.standard_normal(shape)
        zeros = least.astype(scales)
    return QuantizedMatrix(words, steps.astype(scales), zeros, bits, rows, group_size, convention)


def some_rows(count: int, rows: int, *, lattice: bool = False) -> F32:
    """Rows of x."""
    random = np.random.default_rng(count + rows)
    values = random.integers(-3, 4, (count, rows)) if lattice else random.standard_normal((count, rows))
    return values.astype(np.float32)


def some_blocks(count: int, rows: int, *, lattice: bool = False) -> Blocks:
    """Rows of mantissas, some of them the largest; on the lattice small, with exponents near each other."""
    random = np.random.default_rng(count + rows)
    top, reach = (5, 1) if lattice else (127, 9)
    mantissas = random.integers(-top, top + 1, (count, rows)).astype(np.int8)
    exponents = random.integers(-reach, reach + 1, (count, -(-rows // 32))).astype(np.int16)
    return Blocks(mantissas, exponents, ACTIVATIONS)


def activations(recipe: Recipe, count: int, rows: int, *, lattice: bool = False) -> Activations:
    """Rows of what a recipe multiplies."""
    make = some_blocks if recipe.integer else some_rows
    return make(count, rows, lattice=lattice)


def recipes(lanes: int, bits: int, scales: ScaleDtype, convention: Convention) -> Iterator[Recipe]:
    """One small recipe for each method that fits: a row of x, a register of columns, two chains of sums."""
    for method in METHODS:
        recipe = Recipe(bits, scales, convention, method, registers=1, chains=2)
        if not recipe.fits(lanes):
            yield recipe


# **Streams of activations**, laid out from what is written of them.


def place_of(bits: int, code: int) -> int:
    """The lowest bit of a code in its word; of a 3-bit code, of its lower two bits."""
    width, row = (2, code % 16 // 4) if bits == 3 else (bits, code // 4)
    return 8 * (code % 4) + 4 * (row % 2) + width * (row // 2)


def power(recipe: Recipe, code: int) -> float:
    """What the activation of a code is multiplied by: `fold` masks the code where it stands, if it stays below 2^31,
    and `subnormal` if it stays below 2^24. There a code counts 2^-149 times, and its product 2^-50 times."""
    place = 8 * (code % 4) + 4 * (code // 4 % 2) if recipe.bits == 3 else place_of(recipe.bits, code)
    if recipe.method == "subnormal":
        return 2.0 ** (99 - (place if place + recipe.bits <= 24 else 0))
    return 2.0**-place if recipe.method == "fold" and place + recipe.bits <= 31 else 1.0


def term(bits: int, word: int, place: int) -> tuple[int, float]:
    """Which code of the unit a bit of a word belongs to, and what it counts."""
    byte, half, inside = place // 8, place % 8 // 4, place % 4  # a code of 8 bits is never looked up in sums
    if bits != 3:
        return 4 * (2 * (inside // bits) + half) + byte, 2.0 ** (inside % bits)
    if word == 0:
        return 4 * (2 * inside + half) + byte, 4.0
    return 16 * (word - 1) + 4 * (2 * (inside // 2) + half) + byte, 2.0 ** (inside % 2)


def group_sum(x: F32) -> np.float32:
    """The sum of a group: eight running sums, then a tree."""
    sums = np.zeros(8, np.float32)
    for start in range(0, len(x), 8):
        part = x[start : start + 8]
        sums[: len(part)] += part
    half = sums[:4] + sums[4:]
    return np.float32((half[0] + half[2]) + (half[1] + half[3]))


def values_of(recipe: Recipe, x: F32, negative: bool) -> Iterator[F32]:
    """One group of `VALUES`: for each code all rows of x side by side, then their sums."""
    unit = recipe.unit_codes
    codes = np.zeros((-(-x.shape[1] // unit) * unit, len(x)), np.float32)
    codes[: x.shape[1]] = x.T
    yield codes * np.array([power(recipe, k % unit) for k in range(len(codes))], np.float32)[:, None]
    sums = np.array([group_sum(row) for row in x], np.float32)
    yield -sums if negative else sums


def sums_of(recipe: Recipe, x: F32, negative: bool) -> Iterator[F32]:
    """One group of `SUMS`: for each four bits of its words sixteen sums, then the sum of x."""
    unit = recipe.unit_codes
    codes = np.zeros(-(-x.shape[1] // unit) * unit, np.float32)
    codes[: x.shape[1]] = x[0]
    for start in range(0, len(codes), unit):
        for word in range(recipe.unit_words):
            for nibble in range(0, 32, 4):
                terms = [term(recipe.bits, word, nibble + n) for n in range(4)]
                t = [codes[start + code] * np.float32(weight) for code, weight in terms]
                none = np.float32(0)
                low = [none, t[0], t[1], t[0] + t[1]]
                high = [none, t[2], t[3], t[2] + t[3]]
                yield np.array([low[index % 4] + high[index // 4] for index in range(16)], np.float32)
    total = group_sum(x[0])
    yield np.array([-total if negative else total], np.float32)


def mantissas_of(recipe: Recipe, x: Blocks, negative: bool, first: int, stop: int) -> Iterator[tuple[F32, int, int]]:
    """One group of `MANTISSAS`, rows `first` to `stop`: for each segment its part of the stream, its units, and
    whether the next one begins anew in its last unit; behind the last segment the sum of x."""
    unit, sums = recipe.unit_codes, np.zeros(x.rows, np.float32)
    edges = [first, *range(first // 32 * 32 + 32, stop, 32), stop]
    for start, end in pairwise(edges):
        begin, over = divmod(start - first, unit)
        units = -(-(end - first) // unit) - begin
        mantissas = np.zeros((x.rows, units * unit), np.int8)
        mantissas[:, over : over + end - start] = x.mantissas[:, start:end]
        steps = np.exp2(x.exponents[:, start // 32].astype(np.float64)).astype(np.float32)
        sums += steps * x.mantissas[:, start:end].sum(axis=1, dtype=np.int32).astype(np.float32)
        part = [mantissas.view(np.float32).T.reshape(-1), steps]
        if end == stop:
            part.append(-sums if negative else sums)
        yield np.concatenate(part), units, int(end < stop and (end - first) % unit > 0)


def laid_out(recipe: Recipe, layout: PanelLayout, x: Activations) -> Iterator[tuple[F32, interpreter.Sizes]]:
    """For each block of a panel the stream of as many rows of x as the recipe takes, and what the kernel is told."""
    negative = layout.convention == "zero_point"
    for start in range(0, layout.groups, layout.block_groups):
        groups = range(start, min(start + layout.block_groups, layout.groups))
        parts = [np.arange(16, dtype=np.float32)] if recipe.method == "table" else []
        turns, back, ends = list[int](), list[int](), list[int]()
        for group in groups:
            first, stop = group * layout.group_size, min((group + 1) * layout.group_size, layout.rows)
            if isinstance(x, Blocks):
                for part, units, again in mantissas_of(recipe, x, negative, first, stop):
                    parts.append(part)
                    turns.append(units // recipe.unroll)
                    back.append(again)
                    ends.append(0)
                ends[-1] = 1
            else:
                lay = sums_of if recipe.method == "sums" else values_of
                parts += [part.reshape(-1) for part in lay(recipe, x[:, first:stop], negative)]
                turns.append(-(-(stop - first) // recipe.unit_codes) // recipe.unroll)
        yield (
            np.concatenate(parts),
            {"groups": len(groups), "segments": len(turns), "turns": turns, "back": back, "ends": ends},
        )


# **Answers.**


def filled(recipe: Recipe, x: Activations) -> Activations:
    """As many rows as the recipe takes at once; those that do not exist are zeros."""
    if isinstance(x, Blocks):
        mantissas = np.zeros((recipe.rows, x.columns), np.int8)
        mantissas[: x.rows] = x.mantissas
        exponents = np.zeros((recipe.rows, x.exponents.shape[1]), np.int16)
        exponents[: x.rows] = x.exponents
        return Blocks(mantissas, exponents, x.format)
    rows = np.zeros((recipe.rows, x.shape[1]), np.float32)
    rows[: len(x)] = x
    return rows


def interpreted(
    matrix: QuantizedMatrix,
    x: Activations,
    recipe: Recipe,
    lanes: int,
    *,
    fused: bool = True,
    block_rows: int = BLOCK_ROWS,
) -> F32:
    """``Y = X W`` for at most as many rows of x as the kernel takes at once, by the interpreter alone."""
    layout = PanelLayout.of(matrix, recipe.panel, block_rows)
    program, stream = micro_kernel(recipe, lanes), layout.apply(matrix)
    with np.errstate(all="ignore"):  # C++ has no traps either
        blocks = list(laid_out(recipe, layout, filled(recipe, x)))
    columns = recipe.registers * lanes
    y = np.zeros((layout.panels, recipe.rows, recipe.panel), np.float32)
    for panel, tile in enumerate(y):
        for block, (values, sizes) in enumerate(blocks):
            w = stream[layout.group_start(block * layout.block_groups, panel) :]
            for j in range(0, min(recipe.panel, matrix.columns - panel * recipe.panel), columns):
                memory: dict[str, Any] = {
                    "w": w[j:],
                    "s": w[j // layout.scales_each :],
                    "z": w[j // layout.zeros_each :],
                }
                memory |= {"x": values, "y": tile.reshape(-1)[j:]}
                interpreter.run(program, memory, sizes, fused=fused)
    count = x.rows if isinstance(x, Blocks) else len(x)
    return y.swapaxes(0, 1).reshape(recipe.rows, -1)[:count, : matrix.columns]


class Compiled:
    """A matrix with one kernel, compiled in this process."""

    def __init__(
        self,
        matrix: QuantizedMatrix,
        recipe: Recipe,
        table: InstructionSet,
        *,
        block_rows: int = BLOCK_ROWS,
        threads: int = 1,
    ) -> None:
        layout = PanelLayout.of(matrix, recipe.panel, block_rows)
        self.columns, self.stream = matrix.columns, ActivationStream(recipe, layout)
        self._linear = Linear(layout, layout.apply(matrix), Pool(threads))
        self._route = Route(Kernel(recipe, table), self.stream)

    def status(self, x: Activations, out: F32) -> int:
        """Call it; 0 where all went well."""
        compiled, handles = runtime(), (self._linear.handle, self._route.handle)
        if isinstance(x, Blocks):
            return compiled.multiply_blocks(*handles, x.mantissas.view(np.uint8), x.exponents, out, x.rows)
        return compiled.multiply(*handles, x, out, len(x))

    def __call__(self, x: Activations) -> F32:
        """``Y = X W``."""
        out = np.full((x.rows if isinstance(x, Blocks) else len(x), self.columns), np.nan, np.float32)
        assert self.status(x, out) == 0
        return out


def assert_same_bits(given: F32, expected: F32) -> None:
    """Equal to the last bit, the sign of a zero included; a NaN is a NaN."""
    np.testing.assert_array_equal(np.isnan(given), np.isnan(expected))
    np.testing.assert_array_equal(np.signbit(given) & ~np.isnan(given), np.signbit(expected) & ~np.isnan(expected))
    np.testing.assert_array_equal(given, expected)
