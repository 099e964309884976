"""Pieces: the kernels of what stands between two linear layers, generated like those of products.

An operation there is a few passes over a row of numbers: squares summed up, an exponential of each, a product with a
gain. Each pass is a program, `TURN` elements at a time; ``cpp/decode.h`` puts passes together to operations, and gives
them what is left over of a row in a buffer of `TURN` elements, so that no program has a tail.

**The grammar of a name**: ``<pass>[_<numbers>]_<instruction set>``, as ``squares_avx2``, ``scores_d64_avx512``.

**Sums do not depend on the instruction set.** A sum along a row is kept in `TURN` running sums, whatever the length of
a register, and these are added in one order. So all tables whose `fmadd` rounds once give equal bits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step
from lowbit_cppyy.codegen.exponential import CONSTANTS, exponential
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.lowering import function

TURN = 64
"""Elements of a turn; `lowbit::turn` in C++."""


@dataclass(frozen=True)
class Piece:
    """One kernel.

    Attributes:
        title: its name without the instruction set.
        summary: what it computes, over the pointers of every kernel: `w`, `s`, `z` and `x` are read, `y` is written.
        program: for registers of as many lanes as the table's.
        table: the instruction set.
    """

    title: str
    summary: str
    program: Program
    table: InstructionSet

    @property
    def name(self) -> str:
        """By the grammar above."""
        return f"{self.title}_{self.table.name}"

    @property
    def source(self) -> str:
        """Its C++, to stand after the prelude of its instruction set."""
        return function(self.program, self.table, self.name, f"{self.name}: {self.summary}")


Body = Callable[[int], Iterator[Step]]
"""The steps for the register of elements that begins at this place of a turn."""


def each(lanes: int, before: tuple[Step, ...], body: Body, moved: Mapping[str, int]) -> Program:
    """For every element: ``y = f(w, s, …)``.

    Args:
        lanes: L.
        before: what happens once, such as constants.
        body: see `Body`.
        moved: how far pointers move in a turn.
    """
    steps = [step for place in range(0, TURN, lanes) for step in body(place)]
    return Program(lanes, (*before, Loop("i", "groups", (*steps, *(Advance(*move) for move in moved.items())))))


def fold(lanes: int, word: str, operands: Callable[[str], tuple[str, ...]]) -> Program:
    """All elements folded into the `TURN` numbers at y, each into its own by a word: sums, or the largest.

    Args:
        lanes: L.
        word: what folds.
        operands: its operands by the name of the register that is folded into; the element is ``a``.
    """
    places = range(0, TURN, lanes)
    names = {place: f"acc_{place // lanes}" for place in places}
    steps: list[Step] = []
    for place in places:
        steps.append(Instruction("load_float", "a", (Address("w", place),)))
        steps.append(Instruction(word, names[place], operands(names[place])))
    return Program(
        lanes,
        (
            *(Instruction("load_float", names[place], (Address("y", place),)) for place in places),
            Loop("i", "groups", (*steps, Advance("w", TURN))),
            *(Instruction("store", "", (Address("y", place), names[place])) for place in places),
        ),
    )


def scalar(register: str, place: int = 0) -> Instruction:
    """A number of ``x`` in every lane."""
    return Instruction("broadcast_float", register, (Address("x", place),))


def load(register: str, pointer: str, place: int) -> Instruction:
    """Some elements of a pointer."""
    return Instruction("load_float", register, (Address(pointer, place),))


def store(place: int, register: str) -> Instruction:
    """Some elements of the result."""
    return Instruction("store", "", (Address("y", place), register))


# **The passes.**


def _exponentials(place: int) -> Iterator[Step]:
    yield load("a", "w", place)
    yield Instruction("add", "a", ("a", "minus"))
    yield from exponential("a", "a")
    yield store(place, "a")


def _scaled(place: int) -> Iterator[Step]:
    yield load("a", "w", place)
    yield Instruction("multiply", "a", ("a", "factor"))
    yield store(place, "a")


def _normed(place: int) -> Iterator[Step]:
    yield load("a", "w", place)
    yield load("b", "s", place)
    yield Instruction("multiply", "a", ("a", "factor"))
    yield Instruction("multiply", "a", ("a", "b"))
    yield store(place, "a")


def _gated(place: int) -> Iterator[Step]:
    """With t = e^−|a|, silu(a) is a / (1 + t) from 0 upwards and a·t / (1 + t) below. As t is at most 1, the numerator
    is the greater of a and a·t. Where a is not a number the second is taken, and is not one either; where a is −∞ it
    is ∞·0."""
    yield load("a", "w", place)
    yield load("b", "s", place)
    yield Instruction("as_int", "n", ("a",))
    yield Instruction("or", "n", ("n", "sign"))
    yield Instruction("as_float", "t", ("n",))
    yield from exponential("t", "t")
    yield Instruction("multiply", "n_t", ("a", "t"))
    yield Instruction("maximum", "a", ("a", "n_t"))
    yield Instruction("add", "t", ("t", "one"))
    yield Instruction("divide", "a", ("a", "t"))
    yield Instruction("multiply", "a", ("a", "b"))
    yield store(place, "a")


def _turned(place: int) -> Iterator[Step]:
    yield load("a", "w", place)
    yield load("b", "s", place)
    yield load("c", "z", place)
    yield load("d", "z", TURN + place)
    yield Instruction("multiply", "b", ("b", "d"))
    yield Instruction("fmadd", "a", ("a", "c", "b"))
    yield store(place, "a")


SIGN = Instruction("broadcast_int", "sign", (0x80000000,))
_ONE_ROW, _TWO_ROWS = {"w": TURN, "y": TURN}, {"w": TURN, "s": TURN, "y": TURN}

PASSES: Mapping[str, tuple[str, Callable[[int], Program]]] = MappingProxyType(
    {
        "squares": ("y += w * w, in running sums", lambda lanes: fold(lanes, "fmadd", lambda acc: ("a", "a", acc))),
        "sums": ("y += w, in running sums", lambda lanes: fold(lanes, "add", lambda acc: (acc, "a"))),
        "largest": ("y = max(w, y), side by side", lambda lanes: fold(lanes, "maximum", lambda acc: ("a", acc))),
        "exponentials": (
            "y = exp(w + x[0]), of sums that are at most 0",
            lambda lanes: each(lanes, (*CONSTANTS, scalar("minus")), _exponentials, _ONE_ROW),
        ),
        "scaled": ("y = w * x[0]", lambda lanes: each(lanes, (scalar("factor"),), _scaled, _ONE_ROW)),
        "normed": ("y = w * x[0] * s", lambda lanes: each(lanes, (scalar("factor"),), _normed, _TWO_ROWS)),
        "gated": (
            "y = silu(w) * s",
            lambda lanes: each(lanes, (*CONSTANTS, SIGN), _gated, _TWO_ROWS),
        ),
        "turned": (
            f"y = w * z + s * z[{TURN}], cosines and sines by turns",
            lambda lanes: each(lanes, (), _turned, {**_TWO_ROWS, "z": 2 * TURN}),
        ),
    }
)
"""What each pass computes, and its program for registers of so many lanes."""


def piece(name: str, table: InstructionSet) -> Piece:
    """The kernel of a pass.

    >>> from lowbit_cppyy.codegen.isa import TABLES
    >>> piece("scaled", TABLES["avx2"]).name
    'scaled_avx2'
    """
    summary, program = PASSES[name]
    return Piece(name, summary, program(table.lanes), table)
