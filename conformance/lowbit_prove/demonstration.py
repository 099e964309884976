"""Demonstrations: a refutation of the theorem of products, run on numbers.

The solver says for which words a factor is wrong. The program then runs on these words in the specification's
interpreter, with the activation of that factor 1 and the others 0, or with the mantissas that the solver found. Scales
are 2, and 1 where the factor is one of a scale. What the program gives stands beside what the weights say.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import z3

from lowbit.arrays import F32
from lowbit.kernels.interpreter import run
from lowbit_prove import terms
from lowbit_prove.reals import Polynomial
from lowbit_prove.setting import FLOAT, Setting
from lowbit_prove.solver import variables

Numbers = Mapping[str, int]
VARIABLES = ("w_", "m_")
"""How names of words and of mantissas begin."""


class Demonstration:
    """One run of a program.

    Args:
        setting: of the program.
        numbers: bits of variables of the setting; those that are missing are 0, but for scales.
        leaves: scales and activations that are 1; activations that are neither here nor in `numbers` are 0.

    Attributes:
        w: the stream of weights.
        y: the results.

    Raises:
        ArgumentError: the program leaves its memory.
    """

    def __init__(self, setting: Setting, numbers: Numbers, leaves: Iterable[str] = ()) -> None:
        self.setting, chosen = setting, list(leaves)
        self._prover, _ = setting.ready()
        for column, group in product(range(setting.recipe.panel), range(setting.layout.groups)):
            setting.weights(self._prover, group, column)  # names the scales
        scales = {name: leaf for name, leaf in self._prover.reader.leaves.items() if str(leaf).count("w_") == 1}
        self.bits = {**numbers, **_scales(setting, [scales[name] for name in chosen if name in scales])}
        self._reals = _activations(setting, self.bits, chosen)
        self.w = w = np.array([_replaced(each, self.bits).as_long() for each in setting.stream.data], np.uint32)
        x = np.array([_element(each, self.bits, self._reals) for each in setting.x_elements()], np.uint32)
        self._reals |= {name: _float(leaf, self.bits) for name, leaf in scales.items()}
        self.y = np.zeros(setting.recipe.rows * setting.recipe.panel, np.float32)
        first, layout = setting.first_column, setting.layout
        memory = {"w": w[first:], "s": w[first // layout.scales_each :], "z": w[first // layout.zeros_each :]}
        run(setting.program, {**memory, "x": x, "y": self.y[first:]}, setting.sizes)

    @property
    def x(self) -> F32:
        """The activations, rows × K; of integers their mantissas, whose exponents are 0."""
        found = np.zeros((self.setting.recipe.rows, self.setting.layout.rows), np.float32)
        for r, row in np.ndindex(found.shape):
            found[r, row] = self._reals.get(f"x_{r}_{row}", 0.0)
        return found

    def wanted(self, place: int) -> float:
        """What element `place` of y should be: the sum of activation times weight, in float64, where it is exact."""
        r, column = divmod(place, self.setting.recipe.panel)
        layout, x = self.setting.layout, self.x[r].astype(np.float64)
        total = 0.0
        for group in range(layout.groups):
            rows = range(group * layout.group_size, min((group + 1) * layout.group_size, layout.rows))
            scale, zero = self._numbers(group, column)
            for row in rows:
                code = sum(
                    (int(self.w[element]) >> field.position & (1 << field.width) - 1) << field.first
                    for element, field in layout.index(row, column)
                )
                total += x[row] * (scale * code + zero if layout.convention == "minimum" else scale * (code - zero))
        return float(total)

    def _numbers(self, group: int, column: int) -> tuple[float, float]:
        """The scale and the zero, or the minimum, of a group and column."""
        layout = self.setting.layout
        first = layout.index_scale(group, 0)
        between, end = first + layout.scale_elements, first + layout.scale_elements + layout.zero_elements
        kind = layout.scales if layout.convention == "minimum" else np.uint8
        return float(self.w[first:between].view(layout.scales)[column]), float(self.w[between:end].view(kind)[column])

    def wrong(self, places: Iterable[int]) -> dict[str, float] | None:
        """The first of these elements that is wrong: its place, what it is and what it should be."""
        for place in places:
            given, wanted = float(self.y[place]), self.wanted(place)
            if given != wanted:
                return {"place": place, "given": given, "wanted": wanted}
        return None


def read(numbers: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The bits of words and mantissas, and the scales and activations that are 1, among a refutation's numbers."""
    bits = {name: value for name, value in numbers.items() if name.startswith(VARIABLES) and type(value) is int}
    rest = numbers.keys() - bits.keys() - {"place", "given", "wanted"}
    return bits, sorted(rest)


def evaluated(polynomial: Polynomial, bits: Numbers, reals: Mapping[str, float]) -> float:
    """A polynomial for given bits of its coefficients and given leaves; a leaf that is missing is 0."""
    return sum(
        coefficient(number, bits) * float(np.prod([reals.get(leaf, 0.0) for leaf in leaves]))
        for leaves, number in polynomial.parts.items()
    )


def coefficient(number: Any, bits: Numbers) -> float:
    """A coefficient for given bits."""
    if terms.known(number):
        return float(number)
    return float(_replaced(number.integer, bits).as_signed_long() * 2.0**number.exponent)


def _replaced(expression: Any, bits: Numbers) -> Any:
    chosen = [(each, z3.BitVecVal(bits.get(str(each), 0), each.size())) for each in variables(expression)]
    return z3.simplify(z3.substitute(expression, *chosen))


def _float(leaf: Any, bits: Numbers) -> float:
    found = z3.simplify(z3.fpToIEEEBV(_replaced(leaf, bits)))
    return float(terms.from_bits(found.as_long(), FLOAT))


def _scales(setting: Setting, ones: list[Any]) -> dict[str, int]:
    """The bits of scales that are 1, where they occur in these, or else 2."""
    one, two = (int(np.array(n, setting.recipe.scales).view(f"u{4 // setting.layout.scales_each}")) for n in (1, 2))
    chosen, found = {str(each) for leaf in ones for each in variables(leaf)}, dict[str, int]()
    for group in range(setting.layout.groups):
        first = setting.layout.index_scale(group, 0)
        for element in range(first, first + setting.layout.scale_elements):
            found |= {
                str(each): one if str(each) in chosen else two for each in variables(setting.stream.data[element])
            }
    return found


def _activations(setting: Setting, bits: Numbers, leaves: list[str]) -> dict[str, float]:
    """The activations: those of the leaves are 1, mantissas those of the numbers, and powers of two 1."""
    found = dict.fromkeys(leaves, 1.0)
    for _, meanings in setting.x_elements():
        for number, meaning in meanings:
            names = [leaf for key in meaning.parts for leaf in key]
            found |= {name: 1.0 for name in names if name.startswith("e_")}
            if len(meanings) == 4 and str(number) in bits:
                value = bits[str(number)]
                found |= {name: float(value - (value >> 7 << 8)) for name in names}
    return found


def _element(element: tuple[Any, list[tuple[Any, Polynomial]]], bits: Numbers, reals: Mapping[str, float]) -> int:
    """The bits of an element of the stream of activations."""
    known, meanings = element
    values = [evaluated(meaning, bits, reals) for _, meaning in meanings]
    if not values:
        return int(known)
    if len(values) == 4:
        return int(np.array(values, np.int8).view(np.uint32)[0])
    return int(np.array(values[0], np.float32).view(np.uint32))
