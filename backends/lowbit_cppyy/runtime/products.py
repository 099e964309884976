"""Products in a compiled step: a matrix and the kernel that multiplies by it, as numbers for ``cpp/step.h``."""

from dataclasses import dataclass
from typing import Protocol


class AnyRoute(Protocol):
    """A kernel with its stream of activations, of a matrix of either kind."""

    handle: int
    laid_out: bytes


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        linear: the address of the matrix.
        route: the kernel.
        stored: whether the matrix is in the bytes of a format.
        cast: the cast of its activations, as ``cpp/casts.h`` numbers them; -1 for none.
        nbytes: what a call reads.
        panel: columns of a panel.
    """

    linear: int
    route: AnyRoute
    stored: bool
    cast: int
    nbytes: int
    panel: int
