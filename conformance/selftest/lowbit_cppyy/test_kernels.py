"""The text of kernels: deterministic, one for each name, the same for every instruction set."""

import doctest
import importlib
import pkgutil
from dataclasses import replace

import pytest
from kernel_runs import Compiled, recipes, some_matrix

import lowbit_cppyy
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import BITS
from lowbit_cppyy.codegen.isa import PLAIN, TABLES
from lowbit_cppyy.codegen.kernels import Kernel, kernel_source
from lowbit_cppyy.codegen.lowering import function
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.runtime import compiler

BASE = Recipe(3, "float16", "zero_point", "shift", registers=1)
OTHERS = [
    *(replace(BASE, bits=bits) for bits in BITS if bits != 3),
    replace(BASE, scales="float32"),
    replace(BASE, convention="minimum"),
    *(replace(BASE, method=method) for method in ("fold", "sums", "dot4", "pairs")),
    *(replace(BASE, rows=2), replace(BASE, registers=2), replace(BASE, chains=2), replace(BASE, unroll=2)),
    *(replace(BASE, panel=128, ahead=ahead) for ahead in (0, 64)),
]
KERNELS = [
    Kernel(recipe, table) for recipe in (BASE, *OTHERS) for table in TABLES.values() if not recipe.fits(table.lanes)
]


def test_names_tell_kernels_apart() -> None:
    """Any other recipe has another name, and the name gives the kernel back."""
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS) > 70
    assert all(kernel_of(kernel.name) == kernel for kernel in KERNELS)


def test_emission_is_deterministic() -> None:
    """The same recipe gives the same text, with the kernel's name in it; an impossible recipe is refused."""
    for kernel in KERNELS[:: len(KERNELS) // 12]:
        assert Kernel(replace(kernel.recipe), kernel.table).source == kernel.source
        assert f"void {kernel.name}(" in kernel.source and kernel.source in kernel_source(kernel)
    with pytest.raises(ArgumentError, match="recipe"):
        Kernel(replace(BASE, method="sums"), PLAIN)


@pytest.mark.parametrize("bits", BITS)
def test_the_body_reads_the_same_for_every_instruction_set(bits: int) -> None:
    """Only name, namespace and attribute differ between tables of equally many lanes."""
    for lanes in (8, 16):
        tables = [table for table in TABLES.values() if table.lanes == lanes]
        for recipe in recipes(lanes, bits, "float32", "minimum"):
            program = Kernel(recipe, tables[0]).program
            texts = [function(program, table, "name", "summary") for table in tables]
            assert len({text.split("{\n", 2)[2].rsplit("}", 1)[0] for text in texts}) == 1


def test_a_kernel_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of one width and kind share the kernel, whatever their groups and sizes."""
    defined: list[str] = []
    runtime = compiler.runtime()
    original = runtime.define

    def define(source: str) -> None:
        defined.append(source)
        original(source)

    monkeypatch.setattr(runtime, "define", define)
    recipe = Recipe(4, "float32", "minimum", "shift", registers=1, ahead=48)
    for rows, columns, group_size in ((16, 3, 8), (32, 70, 32), (16, 1, 5), (16, 3, 8)):
        Compiled(some_matrix(4, rows, columns, group_size), recipe, PLAIN)
    assert sum(f"void {Kernel(recipe, PLAIN).name}(" in source for source in defined) == 1
    assert len(defined) <= 2  # the kernel, and the prelude if it is the first of its table


def modules() -> list[str]:
    return sorted(module.name for module in pkgutil.walk_packages(lowbit_cppyy.__path__, "lowbit_cppyy."))


@pytest.mark.parametrize("module", modules())
def test_examples_in_docstrings_hold(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0
