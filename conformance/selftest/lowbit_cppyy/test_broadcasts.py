"""A broadcast for each use: the program means the same, and no register is treated that anything else needs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowbit.kernels import interpreter
from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.attention import scores, weighted
from lowbit_cppyy.codegen.broadcasts import FEWEST, MOST, separated
from lowbit_cppyy.codegen.isa import AVX512
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.codegen.lowering import function
from lowbit_cppyy.recipe import METHODS, Recipe
from lowbit_cppyy.stored.formats import GGUF
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.recipe import default_recipe, purposes_of

LANES = AVX512.lanes


def programs() -> dict[str, Program]:
    """Kernels of every method and of every structure, with their tiles, and those of attention."""
    found: dict[str, Program] = {}
    for method in METHODS:
        for rows, registers in ((1, 4), (4, 2), (1, 8)):
            recipe = Recipe(4, "float16", "minimum", method, rows=rows, registers=registers, panel=128)
            if not recipe.fits(LANES):
                kernel = Kernel(recipe, AVX512)
                found[kernel.name] = kernel.program
    for name, blocks in GGUF.items():
        for purpose in purposes_of(blocks.structure):
            stored = StoredKernel(default_recipe(blocks.structure, AVX512, purpose, 64), AVX512)
            found[f"{name} {purpose}"] = stored.program
    return found | {"scores": scores(64, AVX512).program, "weighted": weighted(64, 64, AVX512).program}


PROGRAMS = programs()
SIZES: interpreter.Sizes = {"groups": 2, "segments": 2, "turns": [2, 1], "back": [0, 0], "ends": [0, 1]}


def results(program: Program, copies: list[str]) -> Any:
    """What a program leaves at y, from memories that are drawn."""
    rng = np.random.default_rng(1)
    memory: dict[str, Any] = {name: rng.integers(0, 2**32, 2**15, np.uint32) for name in "wsz"}
    memory |= {name: rng.normal(size=2**15).astype(np.float32) for name in "xy"}
    memory |= dict.fromkeys(copies, memory["x"])
    interpreter.run(program, memory, SIZES)
    return memory["y"].view(np.uint32)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_means_the_same(name: str) -> None:
    """Every result has the same bits, whatever is in memory."""
    program = PROGRAMS[name]
    steps, copies = separated(program)
    np.testing.assert_array_equal(results(Program(LANES, steps), copies), results(program, []))


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_one_row_reads_every_number_of_x_as_an_operand(bits: int) -> None:
    """In the loop over codes each broadcast has one use, so a compiler has no reason for a register."""
    program = Kernel(Recipe(bits, "float16", "minimum", "fold", unroll=4 if bits == 2 else 1), AVX512).program
    steps, copies = separated(program)
    assert copies == ["x1", "x2", "x3"]
    readers = Counter(name for step in Program(LANES, steps).instructions() for name in step.reads())
    broadcasts = Counter(step.target for step in Program(LANES, steps).instructions() if step.target.startswith("x_"))
    assert broadcasts == {name: readers[name] for name in broadcasts}


X = [Instruction("broadcast_float", "x_0", (Address("x", n),)) for n in range(FEWEST)]


def reading(count: int) -> list[Instruction]:
    return [Instruction("fmadd", f"y_{n}", ("x_0", "x_0", f"y_{n}")) for n in range(count)]


def made(*steps: Step) -> Program:
    first = (Instruction("broadcast_float", name, (0.0,)) for name in ("x_0", *(f"y_{n}" for n in range(MOST + 1))))
    return Program(LANES, (*list(first)[1:], *steps))


def all_of(count: int) -> list[Step]:
    return [step for own in X for step in (own, *reading(count))]


UNTREATED = {
    "too few broadcasts": made(*all_of(2)[3:]),
    "too many uses": made(*all_of(MOST + 1)),
    "a use after x has moved": made(*all_of(2), Advance("x", 8), *reading(2)),
    "a use in a loop": made(*all_of(2), Loop("i", "groups", tuple(reading(2)))),
    "another word": made(*all_of(2), Instruction("add", "y_0", ("x_0", "y_0"))),
    "another value": made(*all_of(2), Instruction("broadcast_float", "x_0", (1.0,)), *reading(2)),
    "a sum that begins with it": made(*all_of(2), Instruction("fmadd", "x_0", ("y_0", "y_1", "x_0"))),
    "a number of another memory": made(*(replace(own, arguments=(Address("y"),)) for own in X), *reading(2)),
}


def test_the_same_program_is_treated_without_these() -> None:
    """Otherwise the next test proves nothing."""
    steps, copies = separated(made(*all_of(2)))
    assert copies == ["x1"]
    assert len(steps) == len(made(*all_of(2)).body) + FEWEST


@pytest.mark.parametrize("what", UNTREATED)
def test_a_register_that_anything_else_needs_is_left_alone(what: str) -> None:
    """The steps stay as they are."""
    program = UNTREATED[what]
    assert separated(program) == (program.body, [])


def test_only_tables_with_such_operands_get_them() -> None:
    """Text of the others has one broadcast for all uses."""
    kernel = Kernel(Recipe(4, "float16", "minimum", "fold"), AVX512)
    assert "broadcast_float(x3[7])" in kernel.source
    without = replace(AVX512, memory_broadcasts=False)
    assert "x1" not in function(kernel.program, without, "kernel", "")
