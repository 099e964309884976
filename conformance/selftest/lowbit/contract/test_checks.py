"""The checks at the door: what is decided quickly is decided as one by one."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from lowbit.contract import checks
from lowbit.errors import ArgumentError

READ_ONLY = np.ones((2, 3), np.float32)
READ_ONLY.flags.writeable = False

ARRAYS: list[Any] = [
    np.ones((2, 3), np.float32),
    np.ones((2, 3), ">f4"),
    np.ones((0, 3), np.float32),
    np.ones((3, 2), np.float32).T,
    np.ones((2, 6), np.float32)[:, ::2],
    np.ones(3, np.float32),
    np.ones((), np.float32),
    np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float32).reshape(2, 3),  # not aligned
    np.ones((2, 3)),
    np.ones((2, 3), np.float32).view(np.matrix),
    READ_ONLY,
    [[1.0] * 3] * 2,
]
SHAPES: list[tuple[int | None, ...]] = [(2, 3), (None, 3), (3,), (None,), (None, None), (2, None), ()]


def test_the_quick_check_accepts_nothing_that_the_slow_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array against every shape; and the common ones are accepted quickly, or it would be of no use."""
    quick = checks._is_plain
    cases = [(array, shape, writeable) for array, shape, writeable in product(ARRAYS, SHAPES, (False, True))]
    accepted = [quick(array, np.float32, shape, writeable) for array, shape, writeable in cases]
    monkeypatch.setattr(checks, "_is_plain", lambda *arguments: False)
    for (array, shape, writeable), yes in zip(cases, accepted, strict=True):
        if yes:
            checks.check_array("a", array, np.float32, shape, writeable=writeable)
        elif array is ARRAYS[0] and shape in ((2, 3), (None, 3)):
            pytest.fail("an ordinary array is not accepted quickly")
    with pytest.raises(ArgumentError, match="a is read-only"):
        checks.check_array("a", READ_ONLY, np.float32, (2, 3), writeable=True)


@pytest.mark.parametrize("check", [checks.check_integer, checks.check_number])
def test_an_integer_with_too_many_digits_is_refused_in_words(check: Any) -> None:
    """Python refuses to print an integer of more than 4300 digits, so an error about one must not print it."""
    with pytest.raises(ArgumentError, match="bits is an integer of 16610 bits; allowed: "):
        check("bits", 10**5000, 0, 8)
