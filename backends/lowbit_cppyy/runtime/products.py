"""Products: the kernels of a prepared matrix, and what a compiled step is given of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.runtime.compiler import Route, preparing


class Routes:
    """The kernels of a matrix, each compiled at the first request."""

    def __init__(self, make: Callable[[Purpose, bool], Route]) -> None:
        self._make = make
        self._made: dict[tuple[Purpose, bool], Route] = {}

    def of(self, purpose: Purpose, *, exact: bool = False) -> Route:
        """The kernel for a purpose, with the stream that it reads; `exact` selects one without powers of two."""
        route = self._made.get((purpose, exact))
        if route is None:
            with preparing:
                if (purpose, exact) not in self._made:
                    self._made[purpose, exact] = self._make(purpose, exact)
                route = self._made[purpose, exact]
        return route


def integer_purpose(rows: int) -> Purpose:
    """The purpose for this many rows of integers; the sums of all kernels are equal."""
    return "integer vector" if rows == 1 else "integer rows"


def few_are_faster(rows: int, few: int, many: int) -> bool:
    """Whether kernels for few rows of x multiply this many rows in less time than kernels for many.

    A kernel computes whole blocks of rows. Kernels for many rows take 8/9 of the time per row; measured: 0.86 to 0.89.

    >>> few_are_faster(20, 4, 8), few_are_faster(24, 4, 8)
    (True, False)

    Args:
        rows: of x.
        few: rows that a kernel for few rows computes at once.
        many: the same for many.
    """
    return 9 * -(-rows // few) * few <= 8 * -(-rows // many) * many


SEVERAL: tuple[Purpose, Purpose] = ("rows", "many rows")
"""The purposes for several rows of x: a few and many."""


def rows_purpose(rows: int, rows_of: Mapping[Purpose, int]) -> Purpose:
    """The purpose for several rows of x, or for one row whose bits must not depend on the number of rows.

    Args:
        rows: of x.
        rows_of: for each of `SEVERAL`, the rows that its kernel computes at once.
    """
    few, many = SEVERAL
    return few if few_are_faster(rows, rows_of[few], rows_of[many]) else many


@dataclass(frozen=True)
class Product:
    """One product, as numbers for ``cpp/step.h``.

    Attributes:
        linear: the address of the matrix.
        route: the kernel.
        stored: whether the matrix is stored in a format.
        cast: the cast of its activations, as ``cpp/casts.h`` numbers them; -1 for none.
        nbytes: bytes that a call reads.
        panel: columns of a panel.
    """

    linear: int
    route: Route
    stored: bool
    cast: int
    nbytes: int
    panel: int
