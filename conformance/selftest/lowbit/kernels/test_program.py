"""Programs: what is refused, and how many registers are live, by a second way of counting."""

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from lowbit.errors import ArgumentError
from lowbit.kernels.interpreter import run
from lowbit.kernels.program import Address, Advance, Element, Instruction, Loop, Program, Step, live_registers
from lowbit.kernels.vector import VOCABULARY


def executed(steps: tuple[Step, ...], repeats: int) -> Iterator[Instruction]:
    """The instructions as they are carried out, every loop taken `repeats` times."""
    for step in steps:
        if isinstance(step, Instruction):
            yield step
        elif isinstance(step, Loop):
            for _ in range(repeats):
                yield from executed(step.body, repeats)


def live_by_trace(program: Program, repeats: int = 2) -> int:
    """The most values alive at once: each from where it was made to where it was last read, all else forgotten.

    The values of a list of instructions are intervals; the target may take the place of an operand that ends there.
    """
    born: dict[str, int] = {}
    spans: dict[tuple[str, int], int] = {}
    for time, step in enumerate(executed(program.body, repeats)):
        for register in step.reads():
            spans[register, born[register]] = time
        if step.target:
            born[step.target] = time
            spans[step.target, time] = time + 1  # needs a place even if nobody reads it
    length = max(spans.values(), default=0) + 1
    alive = np.zeros(length + 1, np.int64)
    for (_, first), last in spans.items():
        alive[first + 1 : last + 1] += 1  # alive between instruction `first` and instruction `last`
    return int(alive.max())


NAMES = ("p", "q", "r", "s")


@st.composite
def bodies(draw: st.DrawFn, depth: int = 0) -> tuple[Step, ...]:
    """Instructions on four registers, and loops of loops of them."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 4))):
        if depth < 2 and draw(st.integers(0, 3)) == 0:
            steps.append(Loop(f"i{depth}", 2, draw(bodies(depth + 1))))
        else:
            target, *operands = (draw(st.sampled_from(NAMES)) for _ in range(4))
            steps.append(Instruction("fmadd", target, tuple(operands)))
    return tuple(steps)


@given(bodies())
def test_live_registers_equal_those_of_the_trace(body: tuple[Step, ...]) -> None:
    """Backwards over the program text, loops and all, or forwards over what is carried out: the same number."""
    begin = tuple(Instruction("broadcast_float", name, (float(i),)) for i, name in enumerate(NAMES))
    end = tuple(Instruction("store", "", (Address("y", i), name)) for i, name in enumerate(NAMES))
    program = Program(1, (*begin, *body, *end))
    assert live_registers(program) == live_by_trace(program)


LOAD = Instruction("load_float", "a", (Address("x"),))
INTEGER = Instruction("load_int", "a", (Address("x"),))
MISTAKES: dict[str, tuple[Any, str]] = {
    "word": (lambda: Instruction("jump", "a", ()), "word is 'jump'; allowed: load_int"),
    "no-target": (lambda: Instruction("srli", "", ("a", 1)), "target of srli is ''"),
    "target": (lambda: Instruction("store", "a", (Address("y"), "a")), "target of store is 'a'"),
    "arguments": (lambda: Instruction("fmadd", "a", ("a", "b")), "arguments of fmadd is 2; allowed: 3"),
    "unwritten": (
        lambda: Program(4, (Instruction("fmadd", "a", ("a", "a", "a")),)),
        "register a in fmadd is not written yet; allowed: a register of kind float",
    ),
    "kind": (
        lambda: Program(4, (INTEGER, Instruction("store", "", (Address("y"), "a")))),
        "register a in store is int; allowed: a register of kind float",
    ),
    "two-kinds": (lambda: Program(4, (LOAD, INTEGER)), "register a is float and int; allowed: one kind"),
    "lanes": (lambda: Program(0, ()), "lanes is 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_program_is_refused_when_it_is_made(mistake: str) -> None:
    """No word, no register and no kind is taken on trust."""
    make, message = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_run_without_what_the_program_needs_is_refused() -> None:
    """Memories, sizes and dtypes that are missing or wrong, and addresses beyond either end, each in one line."""
    program = Program(2, (Loop("i", "iterations", (LOAD, Advance("x", -1))),))
    listed = Program(2, (Loop("g", 2, (Loop("u", Element("units", "g"), (LOAD,)),)),))
    x = np.zeros(3, np.float32)
    for given_program, memory, sizes, message in (
        (program, {"z": x}, {"iterations": 1}, "memory is missing for x"),
        (program, {"x": x}, {}, "sizes is without iterations"),
        (program, {"x": x}, {"iterations": -1}, "size iterations is -1"),
        (program, {"x": x}, {"iterations": 2}, "load_float at x \\+ 0 is elements -1 to 0; allowed: elements 0 to 2"),
        (program, {"x": x.astype(np.float64)}, {"iterations": 1}, "dtype of memory of x is float64"),
        (listed, {"x": x}, {"units": 3}, "size units is 3; allowed: a list"),
    ):
        with pytest.raises(ArgumentError, match=message):
            run(given_program, memory, sizes)
    assert run(listed, {"x": x}, {"units": (3, 1)}).instructions["load_float"] == 4


def test_too_many_registers_are_refused_before_anything_is_written() -> None:
    """The limit is checked on the program, not when the run comes to it."""
    stores = [Instruction("store", "", (Address("y"), name)) for name in NAMES]
    loads = [Instruction("load_float", name, (Address("x"),)) for name in NAMES]
    y = np.full(1, 7, np.float32)
    with pytest.raises(ArgumentError, match="registers live at once is 4; allowed: at most 3"):
        run(Program(1, (loads[0], stores[0], *loads, *stores)), {"x": y.copy(), "y": y}, registers=3)
    assert y[0] == 7
    run(
        Program(1, tuple(itertools.chain.from_iterable(zip(loads, stores, strict=True)))), {"x": y, "y": y}, registers=1
    )


def test_counts_are_of_what_was_carried_out() -> None:
    """Loops count as often as they turn; a constant is not read from memory; a prefetch reads nothing."""
    body = (LOAD, Instruction("prefetch", "", (Address("x", 999),)), Instruction("store", "", (Address("y"), "a")))
    scalar = Instruction("broadcast_float", "b", (Address("x", 1),))
    program = Program(2, (Instruction("broadcast_float", "c", (1.0,)), scalar, Loop("i", 5, body)))
    counts = run(program, {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)})
    assert counts.instructions == {"broadcast_float": 2, "load_float": 5, "prefetch": 5, "store": 5}
    assert (counts.read, counts.written) == ({"x": 11}, {"y": 10})
    assert all(word in VOCABULARY for word in counts.instructions)
