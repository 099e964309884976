"""Kernels that are wrong only where a size or a number is special: the suite finds each of them.

The whole list takes a minute; running this file as a program prints what each operation's cases find.
"""

import sys

import pytest
from mistakes_special import SPECIAL
from special import survivors

OPERATIONS = sorted({special.operation for special in SPECIAL})


def test_the_list_is_long_and_its_names_differ() -> None:
    """More than three hundred kernels of nearly all operations."""
    assert len(SPECIAL) >= 300
    assert len({special.name for special in SPECIAL}) == len(SPECIAL)
    assert len(OPERATIONS) >= 33


@pytest.mark.parametrize("operation", OPERATIONS)
def test_special_sizes_and_numbers_are_met(operation: str) -> None:
    """No kernel of an operation survives, and a right backend fails no case that it was tried on."""
    left, failures = survivors(operation)
    assert not left
    assert not failures


if __name__ == "__main__":
    for operation in sys.argv[1:] or OPERATIONS:
        print(operation, *survivors(operation))
