"""Ranges of sizes: which sizes a kernel handles, and which sizes a profile requires."""

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.contract.checks import check_integer

MOST_SIZE = 2**31


@dataclass(frozen=True)
class Range:
    """The sizes that a kernel handles: multiples of a number, between two limits.

    >>> 128 in Range(64), 96 in Range(64), 8192 in Range(64, most=4096)
    (True, False, False)

    Attributes:
        multiple: each size is a multiple of it.
        least: the smallest size.
        most: the largest size; None for no limit.

    Raises:
        ArgumentError: a number that is not a positive integer, or no multiple of `multiple` within the limits.
    """

    multiple: int = 1
    least: int = 1
    most: int | None = None

    def __post_init__(self) -> None:
        check_integer("multiple", self.multiple, 1, MOST_SIZE)
        check_integer("least", self.least, 1, MOST_SIZE)
        if self.most is not None:
            first = -(-self.least // self.multiple) * self.multiple
            check_integer("most", self.most, first, MOST_SIZE)

    def __iter__(self) -> Iterator[object]:
        """Its sizes, in order."""
        return iter(range(-(-self.least // self.multiple) * self.multiple, (self.most or MOST_SIZE) + 1, self.multiple))

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int) or size < self.least or (self.most is not None and size > self.most):
            return False
        return size % self.multiple == 0

    @property
    def told(self) -> dict[str, int | None]:
        """Its JSON form."""
        return {"multiple": self.multiple, "least": self.least, "most": self.most}

    def __str__(self) -> str:
        ends = f"from {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"multiples of {self.multiple} {ends}" if self.multiple > 1 else ends
