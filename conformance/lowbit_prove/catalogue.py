"""The catalogue: every theorem by its name."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lowbit.contract.checks import check_choice
from lowbit.quantization.affine import CONVENTIONS, SCALE_DTYPES
from lowbit.quantization.packing import BITS
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import METHODS, PURPOSES, Recipe
from lowbit_cppyy.stored.formats import PARTS, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.recipe import default_recipe as default_stored
from lowbit_cppyy.stored.recipe import purposes_of, separate_recipe
from lowbit_cppyy.tuning.choices import PANEL, default_recipe
from lowbit_prove import (
    casts,
    elements,
    encoding,
    formats,
    graphs,
    instructions,
    layouts,
    memory,
    offload,
    places,
    products,
    returning,
    roundings,
    steps,
    storage,
    stored_roundings,
)
from lowbit_prove.theorem import KINDS, Theorem

ROWS, COLUMNS, GROUP = 4096, 11008, 128
"""The size of the matrix whose default kernels are listed; a kernel serves all sizes."""


def kernels() -> Iterator[Kernel]:
    """The default kernel of every instruction set, width, type of scales and zeros, and purpose. In addition, for each
    of these except the purpose, a small kernel of every method, with two chains, or with two rows."""
    for table, bits, scales, convention in product(TABLES.values(), BITS, SCALE_DTYPES, CONVENTIONS):
        layout = PanelLayout(bits, ROWS, COLUMNS, GROUP, scales, convention, PANEL)
        for purpose in PURPOSES:
            yield Kernel(default_recipe(purpose, layout, table), table)
        for method in METHODS:
            recipe = Recipe(bits, scales, convention, method, registers=1, ahead=0)
            recipe = replace(recipe, rows=2) if recipe.integer else replace(recipe, chains=2)
            if not recipe.fits(table.lanes):
                yield Kernel(recipe, table)


def stored_kernels() -> Iterator[StoredKernel]:
    """The default kernel of every format, instruction set and purpose, and the kernel for activations with other
    scales."""
    for table, name, bits in product(TABLES.values(), PARTS, BITS):
        structure = structure_of(name, bits)
        recipes = [default_stored(structure, table, purpose, PANEL) for purpose in purposes_of(structure)]
        for recipe in (*recipes, separate_recipe(structure, PANEL)):
            yield StoredKernel(recipe, table)


def kernel(name: str) -> Kernel | StoredKernel:
    """The kernel with a name: a listed kernel of a stored matrix, or any kernel of the grammar.

    Raises:
        ArgumentError: there is none.
    """
    return next((each for each in stored_kernels() if each.name == name), None) or kernel_of(name)


def theorems() -> Iterator[Theorem]:
    """All theorems, each once."""
    stored_numbers = formats, elements, storage, encoding, returning
    for chapter in (places, layouts, *stored_numbers, memory, roundings, instructions, casts, steps, graphs, offload):
        yield from chapter.theorems()
    matrices = {kernel.name: kernel for kernel in kernels()}.values()
    yield from (products.of_kernel(kernel) for kernel in matrices)
    yield from (memory.of_kernel(kernel) for kernel in matrices)
    yield from (roundings.of_kernel(kernel) for kernel in matrices)
    stored = {kernel.name: kernel for kernel in stored_kernels()}.values()
    yield from (products.of_kernel(kernel) for kernel in stored)
    yield from (memory.of_stored(kernel) for kernel in stored)
    yield from (stored_roundings.of_kernel(kernel) for kernel in stored)


def names_of(theorem: Theorem) -> set[str]:
    """The names that find a theorem: its kind and its subject, for a format also without width and field.

    >>> sorted(names_of(next(each for each in theorems() if each.id == "formats/gptq-v2-u4/qzeros")))
    ['formats', 'formats/gptq-v2-u4/qzeros', 'gptq-v2', 'gptq-v2-u4', 'gptq-v2-u4/qzeros']
    """
    subject = theorem.name.partition("/")[0]
    width = re.fullmatch(r"(.+)-u[0-9]", subject) if theorem.kind in ("formats", "storage", "encoding") else None
    return {theorem.kind, theorem.id, theorem.name, subject, *([width[1]] if width else [])}


def chosen(names: list[str]) -> list[Theorem]:
    """The theorems with these names: names of theorems, of kernels, of formats with or without width, or of kinds.

    A kernel that is not listed is found by the grammar of its name.

    Raises:
        ArgumentError: nothing has such a name.
    """
    if not names:
        return list(theorems())
    found = dict[str, Theorem]()
    for name in names:
        matching = [each for each in theorems() if name in names_of(each)]
        if not matching:
            matching = _of_another_kernel(*name.rpartition("/")[::2])
        if not matching:
            check_choice("name", name, (*KINDS, "the name of a kernel", "the name of a format"))
        found |= {each.id: each for each in matching}
    return list(found.values())


def _of_another_kernel(kind: str, name: str) -> list[Theorem]:
    """The theorems of this kind, or of all kinds, about a kernel that is not listed."""
    if not name.startswith(("gemv_", "gemm_")):
        return []
    kernel = kernel_of(name)
    found = [products.of_kernel(kernel), memory.of_kernel(kernel), roundings.of_kernel(kernel)]
    return [each for each in found if kind in ("", each.kind)]
