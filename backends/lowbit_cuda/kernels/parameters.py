"""Building blocks for descriptions of kernels.

An extent is a function of a launch's numbers, nearly always a product of some of them. The numbers are counts: each
must be at least 1, and their products must fit into the int32 that the sources index with. `counts` refuses others
before a kernel could access memory out of bounds.
"""

from collections.abc import Callable, Mapping

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit_cuda.kernels.layouts import MOST, PART
from lowbit_cuda.port import Numbers, Parameter

Extent = Callable[[Numbers], int]

FLOAT_NAMES = {"float32": "f32", "float16": "f16"}
MOST_TOKENS = 65535
THREADS = 256
SHARED_SUMS = 4 * THREADS // 32
"""Bytes: one float32 for each warp of a block."""


def number(numbers: Numbers, name: str) -> int:
    """A number of a launch, as an integer."""
    return int(numbers[name])


def product_of(*names: str) -> Extent:
    """The product of numbers of a launch."""

    def extent(numbers: Numbers) -> int:
        result = 1
        for name in names:
            result *= number(numbers, name)
        return result

    return extent


def integers(*names: str) -> tuple[Parameter, ...]:
    """Integer parameters."""
    return tuple(Parameter(name, "int32") for name in names)


def counts(numbers: Numbers, *names: str, most: Mapping[str, int] | None = None) -> None:
    """Refuse numbers that are not integers of at least 1, or whose product does not fit into an int32."""
    total = 1
    for name in names:
        check_integer(name, numbers[name], 1, (most or {}).get(name, MOST))
        total *= number(numbers, name)
    if total > MOST:
        raise ArgumentError(" × ".join(names), total, f"at most {MOST}")


def over(extent: Extent) -> Callable[[Numbers], tuple[int, int, int]]:
    """A grid with one thread for every four elements."""
    return lambda numbers: (-(-extent(numbers) // (4 * THREADS)), 1, 1)


RESULT = Parameter("y", "float32", "write", product_of("tokens", "columns"))
ACTIVATIONS = Parameter("x", "float32", "read", product_of("tokens", "rows"), alignment=PART)
