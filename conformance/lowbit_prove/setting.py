"""The setting of a proof about a kernel: what its memories hold, for all matrices and activations at once.

The stream of weights is unknown, including scales and offsets. The activations are variables, and each element of their
stream is what the backend puts there: an activation times a power of two, a sum of some of them, four mantissas, or the
power of two of a run.

With these, the result of each column is known as a polynomial (`Setting.expected`): the sum, over the rows of the
matrix, of activation times weight. `lowbit_prove.prepared_setting` says what memories hold for a prepared matrix, and
`lowbit_prove.stored_setting` for a stored one.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import z3

from lowbit.arrays import F64, U32
from lowbit.kernels.program import Program
from lowbit_prove import terms
from lowbit_prove.machine import Prover, Range
from lowbit_prove.reals import Polynomial
from lowbit_prove.symbols import Symbols, unknowns
from lowbit_prove.terms import Dtype, Term

FLOAT, WHOLE, BYTES = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int8)
"""The content of an element of a stream: a float, an integer, or four mantissas."""

Meaning: TypeAlias = tuple[Dtype, list[Polynomial]]
"""The content of an element of the stream of activations, from its lowest bits up; an empty polynomial is 0."""


@dataclass(frozen=True)
class Element:
    """An element of the stream of activations.

    Attributes:
        bits: its 32 bits.
        dtype: of its numbers.
        numbers: each with its meaning; empty for a constant.
    """

    bits: Term
    dtype: Dtype = FLOAT
    numbers: tuple[tuple[Term, Polynomial], ...] = ()

    @property
    def leaves(self) -> list[str]:
        """The variables in its meanings."""
        return [leaf for _, meaning in self.numbers for key in meaning.parts for leaf in key]


@dataclass(frozen=True)
class Scale:
    """A float of the stream of weights: a scale, or a number added to a product.

    Attributes:
        variable: its bits.
        number: its value as a float32.
        one: the bits of the number 1.
        usual: its bits in demonstrations, unless it is 1: those of 2 for a scale, and of 0 otherwise.
    """

    variable: Any
    number: Any
    one: int
    usual: int


@dataclass(frozen=True)
class Setting(ABC):
    """One program with its memories.

    Attributes:
        recipe: of the kernel.
        program: the program to verify, usually that of the recipe.
        layout: of the matrix.
    """

    recipe: Any
    program: Program
    layout: Any
    mantissas: ClassVar[Range]
    """The range of mantissas."""

    @property
    @abstractmethod
    def stream(self) -> Symbols:
        """The stream of weights: one panel."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """K."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """The sizes of the matrix that are passed to the kernel."""

    @property
    @abstractmethod
    def each(self) -> tuple[int, int]:
        """The count of numbers per element for the starts of the pointers of scales and of zeros."""

    @property
    @abstractmethod
    def head(self) -> list[int]:
        """The bits of the constants before the activations."""

    @abstractmethod
    def meanings(self) -> Iterator[Meaning]:
        """The contents of the elements of the stream of activations."""

    @abstractmethod
    def variables(self, column: int) -> tuple[list[Any], Hashable]:
        """All variables of a column, in the same order for each column, and the positions of its codes in them.

        The expected result of a column depends on these alone. So the expected results of two columns whose codes lie
        at the same positions differ only in the names of their variables.
        """

    @abstractmethod
    def integers(self, column: int) -> list[Any]:
        """The variables of a column that hold integers."""

    @abstractmethod
    def scales(self, column: int) -> Iterator[Scale]:
        """The floats of a column."""

    @abstractmethod
    def expected(self, prover: Prover, r: int, column: int) -> Polynomial:
        """``Σ x w`` of a row of x and a column of the matrix."""

    @abstractmethod
    def words(self, bits: Mapping[str, int]) -> U32:
        """The stream of weights for these bits of its variables; missing bits are 0."""

    @abstractmethod
    def matrix(self, bits: Mapping[str, int]) -> F64:
        """The weights for these bits, K × panel."""

    @property
    def first_column(self) -> int:
        """The first column of the last tile of the panel, which the program computes."""
        return int(self.recipe.panel - self.recipe.registers * self.program.lanes)

    def pointers(self, stream: Any) -> dict[str, Any]:
        """A stream of weights, from the starts of its three pointers for the last tile."""
        first, (scales, zeros) = self.first_column, self.each
        return {"w": stream[first:], "s": stream[first // scales :], "z": stream[first // zeros :]}

    def ready(self) -> tuple[Prover, Symbols]:
        """The machine before the first instruction, with the meanings of its memory; and the results."""
        elements = list(self.x_elements())
        x = Symbols(np.array([*(each.bits for each in elements), None], object)[:-1], np.uint32)
        y = unknowns("y", self.recipe.rows * self.recipe.panel, FLOAT)
        prover = Prover(self.program, {**self.pointers(self.stream), "x": x, "y": y[self.first_column :]}, self.sizes)
        for element in elements:
            for number, meaning in element.numbers:
                if not terms.known(number):
                    self._say(prover, element.dtype, number, meaning)
        return prover, y

    def _say(self, prover: Prover, dtype: Dtype, number: Any, meaning: Polynomial) -> None:
        """Set the meaning and the range of a number of the stream of activations."""
        prover.reader.means(number, partial(Polynomial, meaning.parts))
        if dtype == BYTES:
            prover.declare(number, *self.mantissas)
        if dtype == WHOLE:
            most = sum(abs(int(factor)) for factor in meaning.parts.values()) * max(map(abs, self.mantissas))
            prover.declare(number, -most, most)

    def x_elements(self) -> Iterator[Element]:
        """The stream of activations: for each element its bits, and its numbers with their meanings."""
        yield from map(Element, self.head)
        for place, (dtype, meanings) in enumerate(self.meanings()):
            if dtype == FLOAT:
                bits = z3.BitVec(f"x_{place}", 32)
                yield Element(bits, dtype, ((terms.from_bits(bits, FLOAT), meanings[0]),))
                continue
            name = "m" if dtype == BYTES else "i"
            width = terms.width(dtype)
            numbers = [z3.BitVec(f"{name}_{place}_{n}", width) if p.parts else 0 for n, p in enumerate(meanings)]
            yield Element(terms.joined(numbers, width), dtype, tuple(zip(numbers, meanings, strict=True)))


def variable(name: str) -> Polynomial:
    """A real variable of this name."""
    return Polynomial({(name,): 1.0})


def activation(r: int, row: int) -> Polynomial:
    """Row `row` of row `r` of x: a float32, or the mantissa of one."""
    return variable(f"x_{r}_{row}")


def bits_of(number: float, dtype: Any) -> int:
    """The bits of a number of a type."""
    return int(terms.bits_of(float(number), np.dtype(dtype)))
