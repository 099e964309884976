"""Elementwise kernels and reductions: norms, softmax, gated units and rotations, generated like those of products.

An operation between two linear layers is a few passes over a row of numbers: summing squares, taking the exponential of
each, multiplying by a gain. Each pass is a program that processes `CHUNK` elements in an iteration. ``cpp/decode.h``
composes operations of them. It passes the rest of a row in a buffer of `CHUNK` elements, so that no program has a tail.

**The grammar of a name**: ``<pass>[_<numbers>]_<instruction set>``, as ``squares_avx2``, ``scores_d64_avx512``.

**Sums do not depend on the instruction set.** A sum along a row is kept in `CHUNK` running sums, whatever the length of
a register, and these are added in one order. So all tables whose `fmadd` rounds once give equal bits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit.model.layers import SLOPE
from lowbit_cppyy.codegen.exponential import CONSTANTS, constant, exponential, exponential_less_1
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import function

CHUNK = 64
"""Elements per iteration; `lowbit::chunk` in C++."""


@dataclass(frozen=True)
class ProgramKernel:
    """A kernel defined by its program.

    Attributes:
        title: its name without the instruction set.
        summary: what it computes, by the pointers of every kernel: `w`, `s`, `z` and `x` are read, `y` is written.
        program: for registers with as many lanes as the table's.
        table: the instruction set.
    """

    title: str
    summary: str
    program: Program
    table: InstructionSet

    @property
    def name(self) -> str:
        """The name, by the grammar above."""
        return f"{self.title}_{self.table.name}"

    @property
    def source(self) -> str:
        """Its C++, which follows the prelude of its instruction set."""
        return function(self.program, self.table, self.name, f"{self.name}: {self.summary}")


Body = Callable[[int], Iterator[Step]]
"""The steps for the register of elements that begins at this offset in a chunk."""


def elementwise(lanes: int, before: tuple[Step, ...], body: Body, moved: Mapping[str, int]) -> Program:
    """For every element: ``y = f(w, s, …)``.

    Args:
        lanes: L.
        before: steps that run once, such as loading constants.
        body: see `Body`.
        moved: how far each pointer moves in an iteration.
    """
    steps = [step for offset in range(0, CHUNK, lanes) for step in body(offset)]
    return Program(lanes, (*before, Loop("i", "groups", (*steps, *(Advance(*move) for move in moved.items())))))


def reduced(lanes: int, word: str, operands: Callable[[str], tuple[str, ...]]) -> Program:
    """Fold all elements into the `CHUNK` numbers at y by one word: into sums or maxima.

    Args:
        lanes: L.
        word: the word that folds.
        operands: its operands, given the name of the register that it folds into; the element is ``a``.
    """
    offsets = range(0, CHUNK, lanes)
    names = {offset: f"acc_{offset // lanes}" for offset in offsets}
    steps: list[Step] = []
    for offset in offsets:
        steps.append(Instruction("load_float", "a", (Address("w", offset),)))
        steps.append(Instruction(word, names[offset], operands(names[offset])))
    return Program(
        lanes,
        (
            *(Instruction("load_float", names[offset], (Address("y", offset),)) for offset in offsets),
            Loop("i", "groups", (*steps, Advance("w", CHUNK))),
            *(Instruction("store", "", (Address("y", offset), names[offset])) for offset in offsets),
        ),
    )


def scalar(register: str, offset: int = 0) -> Instruction:
    """Broadcast a number of ``x``."""
    return Instruction("broadcast_float", register, (Address("x", offset),))


def load(register: str, pointer: str, offset: int) -> Instruction:
    """Load a register of elements."""
    return Instruction("load_float", register, (Address(pointer, offset),))


def store(offset: int, register: str) -> Instruction:
    """Store a register of elements of the result."""
    return Instruction("store", "", (Address("y", offset), register))


# **The passes.**


def _exponentials(offset: int) -> Iterator[Step]:
    yield load("a", "w", offset)
    yield Instruction("add", "a", ("a", "minus"))
    yield from exponential("a", "a")
    yield store(offset, "a")


def _scaled(offset: int) -> Iterator[Step]:
    yield load("a", "w", offset)
    yield Instruction("multiply", "a", ("a", "factor"))
    yield store(offset, "a")


def _widened(offset: int) -> Iterator[Step]:
    yield Instruction("load_half", "a", (Address("w", offset // 2),))
    yield store(offset, "a")


def _normed(offset: int) -> Iterator[Step]:
    yield load("a", "w", offset)
    yield load("b", "s", offset)
    yield Instruction("multiply", "a", ("a", "factor"))
    yield Instruction("multiply", "a", ("a", "b"))
    yield store(offset, "a")


def _gated(offset: int) -> Iterator[Step]:
    yield load("a", "w", offset)
    yield load("b", "s", offset)
    yield from _activated("a", offset)


def _gelu_gated(offset: int) -> Iterator[Step]:
    """gelu(a) is a σ(w) with w = a (c₁ + c₃ a²). Where a² overflows, w is infinite, which gives the same σ(w)."""
    yield load("a", "w", offset)
    yield load("b", "s", offset)
    yield Instruction("multiply", "v", ("a", "a"))
    yield Instruction("fmadd", "v", ("v", "gelu_3", "gelu_1"))
    yield Instruction("multiply", "v", ("v", "a"))
    yield from _activated("v", offset)


def _clamped_gated(offset: int) -> Iterator[Step]:
    """Clamp a to at most the limit, and b to the limit on both sides. The minimum of two numbers is minus the maximum
    of their negatives. The number is the second operand, so the maximum of a limit and a NaN is the NaN."""
    yield load("a", "w", offset)
    yield from _at_most("a")
    yield load("b", "s", offset)
    yield from _at_most("b")
    yield Instruction("maximum", "b", ("minus_limit", "b"))
    yield Instruction("add", "b", ("b", "one"))
    yield Instruction("multiply", "v", ("a", "slope"))
    yield from _activated("v", offset)


def _at_most(register: str) -> Iterator[Step]:
    yield Instruction("multiply", register, (register, "minus_one"))
    yield Instruction("maximum", register, ("minus_limit", register))
    yield Instruction("multiply", register, (register, "minus_one"))


def _capped(offset: int) -> Iterator[Step]:
    """c tanh(a / c) with the sign of a, where tanh(z) is −t / (t + 2) for t = e^−2z − 1 and z ≥ 0. The relative error
    of t is small for small z too."""
    yield load("a", "w", offset)
    yield Instruction("as_int", "n", ("a",))
    yield Instruction("and", "a_sign", ("n", "sign"))
    yield Instruction("or", "n", ("n", "sign"))
    yield Instruction("as_float", "t", ("n",))
    yield Instruction("multiply", "t", ("t", "two_over_cap"))
    yield from exponential_less_1("t", "t")
    yield Instruction("add", "v", ("t", "two"))
    yield Instruction("divide", "t", ("t", "v"))
    yield Instruction("as_int", "n", ("t",))
    yield Instruction("and_or", "n", ("n", "magnitude", "a_sign"))
    yield Instruction("as_float", "t", ("n",))
    yield Instruction("multiply", "t", ("t", "cap"))
    yield store(offset, "t")


def _activated(logit: str, offset: int) -> Iterator[Step]:
    """a σ(w) b, for w in a register; w has the sign of a. With t = e^−|w|, a σ(w) is a / (1 + t) for a ≥ 0, and below
    a·t / (1 + t). As t is at most 1, the numerator is the maximum of a and a·t. For a NaN the maximum takes the second,
    which is a NaN too; for −∞ that is ∞·0."""
    yield Instruction("as_int", "n", (logit,))
    yield Instruction("or", "n", ("n", "sign"))
    yield Instruction("as_float", "t", ("n",))
    yield from exponential("t", "t")
    yield Instruction("multiply", "n_t", ("a", "t"))
    yield Instruction("maximum", "a", ("a", "n_t"))
    yield Instruction("add", "t", ("t", "one"))
    yield Instruction("divide", "a", ("a", "t"))
    yield Instruction("multiply", "a", ("a", "b"))
    yield store(offset, "a")


def _rotated(offset: int) -> Iterator[Step]:
    yield load("a", "w", offset)
    yield load("b", "s", offset)
    yield load("c", "z", offset)
    yield load("d", "z", CHUNK + offset)
    yield Instruction("multiply", "b", ("b", "d"))
    yield Instruction("fmadd", "a", ("a", "c", "b"))
    yield store(offset, "a")


GELU = constant("gelu_1", 1.5957691216057308), constant("gelu_3", 0.07135481627260025)
"""2√(2/π), and 0.044715 times that."""
SIGN = Instruction("broadcast_int", "sign", (0x80000000,))
LIMITED = constant("slope", SLOPE), constant("minus_one", -1.0), SIGN, scalar("minus_limit")
CAPPING = (
    *(constant("two", 2.0), constant("minus_one", -1.0), SIGN),
    Instruction("broadcast_int", "magnitude", (0x7FFFFFFF,)),
    *(scalar("two_over_cap"), scalar("cap", 1)),
)
_ONE_ROW, _TWO_ROWS = {"w": CHUNK, "y": CHUNK}, {"w": CHUNK, "s": CHUNK, "y": CHUNK}

PASSES: Mapping[str, tuple[str, Callable[[int], Program]]] = MappingProxyType(
    {
        "squares": (
            "y += w * w, in running sums",
            lambda lanes: reduced(lanes, "fmadd", lambda acc: ("a", "a", acc)),
        ),
        "sums": ("y += w, in running sums", lambda lanes: reduced(lanes, "add", lambda acc: (acc, "a"))),
        "largest": (
            "y = max(w, y), in running maxima",
            lambda lanes: reduced(lanes, "maximum", lambda acc: ("a", acc)),
        ),
        "exponentials": (
            "y = exp(w + x[0]), for w + x[0] of at most 0",
            lambda lanes: elementwise(lanes, (*CONSTANTS, scalar("minus")), _exponentials, _ONE_ROW),
        ),
        "scaled": ("y = w * x[0]", lambda lanes: elementwise(lanes, (scalar("factor"),), _scaled, _ONE_ROW)),
        "widened": (
            "y = w, float16 as float32",
            lambda lanes: elementwise(lanes, (), _widened, {"w": CHUNK // 2, "y": CHUNK}),
        ),
        "normed": ("y = w * x[0] * s", lambda lanes: elementwise(lanes, (scalar("factor"),), _normed, _TWO_ROWS)),
        "gated": (
            "y = silu(w) * s",
            lambda lanes: elementwise(lanes, (*CONSTANTS, SIGN), _gated, _TWO_ROWS),
        ),
        "gelu_gated": (
            "y = gelu(w) * s",
            lambda lanes: elementwise(lanes, (*CONSTANTS, *GELU, SIGN), _gelu_gated, _TWO_ROWS),
        ),
        "clamped_gated": (
            "y = a sigmoid(1.702 a) * (b + 1), for a = min(w, -x[0]) and b = s clamped to x[0] … -x[0]",
            lambda lanes: elementwise(lanes, (*CONSTANTS, *LIMITED), _clamped_gated, _TWO_ROWS),
        ),
        "capped": (
            "y = x[1] * tanh(w * x[0] / 2)",
            lambda lanes: elementwise(lanes, (*CONSTANTS, *CAPPING), _capped, _ONE_ROW),
        ),
        "rotated": (
            f"y = w * z + s * z[{CHUNK}], cosines and sines in alternate chunks",
            lambda lanes: elementwise(lanes, (), _rotated, {**_TWO_ROWS, "z": 2 * CHUNK}),
        ),
    }
)
"""What each pass computes, and its program for registers of L lanes."""


def pass_kernel(name: str, table: InstructionSet) -> ProgramKernel:
    """The kernel of a pass.

    >>> from lowbit_cppyy.codegen.isa import TABLES
    >>> pass_kernel("scaled", TABLES["avx2"]).name
    'scaled_avx2'
    """
    summary, program = PASSES[name]
    return ProgramKernel(name, summary, program(table.lanes), table)
