"""Demonstrations: a refutation of the theorem of products, run on numbers.

The solver says for which words a factor is wrong. The program then runs on these words in the specification's
interpreter, with the activation of that factor 1 and the others 0, or with the mantissas that the solver found. Scales
are 2, and 1 where the factor is one of a scale. The result of the program is shown beside that of the weights.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import z3

from lowbit.arrays import F32
from lowbit.kernels.interpreter import run
from lowbit_prove import terms
from lowbit_prove.reals import Polynomial
from lowbit_prove.setting import BYTES, Element, Scale, Setting
from lowbit_prove.solver import with_numbers

Numbers = Mapping[str, int]
VARIABLES = ("w_", "m_")
"""The prefixes of the names of words and of mantissas."""


class Demonstration:
    """One run of a program.

    Args:
        setting: of the program.
        numbers: bits of variables of the setting; missing ones are 0, except scales.
        leaves: scales and activations with value 1; activations that are neither here nor in `numbers` are 0.

    Attributes:
        w: the stream of weights.
        y: the results.

    Raises:
        ArgumentError: the program accesses an element outside its memory.
    """

    def __init__(self, setting: Setting, numbers: Numbers, leaves: Iterable[str] = ()) -> None:
        self.setting, chosen = setting, list(leaves)
        scales = {
            str(z3.simplify(each.number)): each
            for column in range(setting.recipe.panel)
            for each in setting.scales(column)
        }
        self.bits = {**numbers, **_scales(list(scales.values()), [scales[name] for name in chosen if name in scales])}
        self._reals = _activations(setting, self.bits, chosen)
        self.w = setting.words(self.bits)
        x = np.array([bits_on(each, self.bits, self._reals) for each in setting.x_elements()], np.uint32)
        self.y = np.zeros(setting.recipe.rows * setting.recipe.panel, np.float32)
        self._weights = setting.matrix(self.bits)
        run(setting.program, {**setting.pointers(self.w), "x": x, "y": self.y[setting.first_column :]}, setting.sizes)

    @property
    def x(self) -> F32:
        """The activations, rows × K; for integers the mantissas, whose exponents are 0."""
        found = np.zeros((self.setting.recipe.rows, self.setting.rows), np.float32)
        for r, row in np.ndindex(found.shape):
            found[r, row] = self._reals.get(f"x_{r}_{row}", 0.0)
        return found

    def wanted(self, place: int) -> float:
        """The correct value of element `place` of y: the sum of activation times weight, exact in float64."""
        r, column = divmod(place, self.setting.recipe.panel)
        return float(self.x[r].astype(np.float64) @ self._weights[:, column])

    def wrong(self, places: Iterable[int]) -> dict[str, float] | None:
        """The first wrong element among these: its place, its value and the correct value."""
        for place in places:
            given, wanted = float(self.y[place]), self.wanted(place)
            if given != wanted:
                return {"place": place, "given": given, "wanted": wanted}
        return None


def read(numbers: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The bits of words and mantissas, and the scales and activations with value 1, from a refutation's numbers."""
    bits = {name: value for name, value in numbers.items() if name.startswith(VARIABLES) and type(value) is int}
    rest = numbers.keys() - bits.keys() - {"place", "given", "wanted"}
    return bits, sorted(rest)


def evaluated(polynomial: Polynomial, bits: Numbers, reals: Mapping[str, float]) -> float:
    """The value of a polynomial for given bits of its coefficients and given leaves; a missing leaf is 0."""
    return sum(
        coefficient(number, bits) * float(np.prod([reals.get(leaf, 0.0) for leaf in leaves]))
        for leaves, number in polynomial.parts.items()
    )


def coefficient(number: Any, bits: Numbers) -> float:
    """The value of a coefficient for given bits."""
    if terms.known(number):
        return float(number)
    return float(with_numbers(number.integer, bits).as_signed_long() * 2.0**number.exponent)


def _scales(all_: list[Scale], ones: list[Scale]) -> dict[str, int]:
    """The bits of floats in the stream of weights: those of the number 1 for `ones`, and the usual bits for the
    others."""
    usual = {str(each.variable): each.usual for each in all_}
    return usual | {str(each.variable): each.one for each in ones}


def _activations(setting: Setting, bits: Numbers, leaves: list[str]) -> dict[str, float]:
    """The activations: 1 for the leaves, the given numbers for mantissas, and 1 for powers of two."""
    found = dict.fromkeys(leaves, 1.0)
    for element in setting.x_elements():
        found |= {name: 1.0 for name in element.leaves if name.startswith("e_")}
        for number, meaning in element.numbers if element.dtype == BYTES else ():
            if str(number) in bits:
                value = bits[str(number)]
                found |= {name: float(value - (value >> 7 << 8)) for key in meaning.parts for name in key}
    return found


def bits_on(element: Element, bits: Numbers, reals: Mapping[str, float]) -> int:
    """The bits of an element of the stream of activations."""
    values = [evaluated(meaning, bits, reals) for _, meaning in element.numbers]
    return int(np.array(values, element.dtype).view(np.uint32)[0]) if values else int(element.bits)
