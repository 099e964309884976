"""The theorems of casts: for samples of float32 with all ties among them, and with mistakes planted in the C++."""

import re
from importlib.resources import files

import numpy as np
import pytest

from lowbit.arrays import F64, Array
from lowbit.numbers import floats
from lowbit.numbers.floats import FLOATS
from lowbit_prove import casts
from lowbit_prove.theorem import Proof, Refutation, Undecided

TIES, OTHERS = 4096, 65537
"""One float32 in so many: those whose last 12 bits are 0, among them every tie between short numbers; and others."""


@pytest.mark.parametrize("step", (TIES, OTHERS))
@pytest.mark.parametrize("name", casts.COMPILED)
def test_casts_are_exact_roundings(name: str, step: int) -> None:
    assert casts.decide(name, step) == Proof(-(-casts.PATTERNS // step), "enumeration")


@pytest.mark.parametrize("kind", casts.NUMPY)
def test_casts_to_fp8_are_exact_roundings(kind: floats.Name) -> None:
    assert isinstance(casts.fp8(kind, 2 * TIES), Proof) and isinstance(casts.fp8(kind, OTHERS), Proof)


def test_every_exponent_of_a_block_is_compared() -> None:
    assert isinstance(casts.scaled(2**20), Proof)


def test_the_middles_of_a_type_lie_between_its_values() -> None:
    """The last lies between 65504 and the number that would follow; from there on a number is infinite."""
    found = casts.middles("float16")
    assert found[0] == 2.0**-25 and found[-1] == 65520 and len(found) == 0x7C00
    assert (np.diff(found) > 0).all()


# Mistakes.


def planted(header: str, function: str, old: str, new: str, text: str) -> str:
    """The comparisons, with a copy of a function that has a mistake in the place of the header's own."""
    own = (files("lowbit_cppyy") / "cpp" / header).read_text()
    found = re.search(rf"^inline [^\n]* {function}\(.*?^}}\n", own, re.MULTILINE | re.DOTALL)
    assert found is not None and old in found[0]
    copy = found[0].replace(old, new).replace(f" {function}(", f" wrong_{function}(")
    text = text.replace(f"lowbit::{function}", f"lowbit::wrong_{function}")
    return text.replace("namespace {\n", f"namespace lowbit {{\n{copy}}}\nnamespace {{\n", 1)


FIRST = (
    ("float16", "stored.h", "narrow_half", "0xFFFu + (e >> 13 & 1u)", "0x1000u"),  # ties go away from zero
    ("bfloat16", "stored.h", "narrow_brain", "0x7FFFu", "0u"),  # truncated
    ("bfp16-activations", "activations.h", "cast_blocks", "-127), 127)", "-128), 127)"),
    ("products-to-8-bits", "casts.h", "round_products", "nearest > top ? top : nearest", "nearest"),
)
SECOND = (
    ("float16", "stored.h", "narrow_half", "0x38800000u", "0x38000000u"),  # the last subnormal numbers
    ("bfloat16", "stored.h", "narrow_brain", "+ (a >> 16 & 1u)", ""),  # ties go down
    ("bfp16-activations", "activations.h", "cast_blocks", "- 133", "- 132"),  # another exponent
    ("products-to-8-bits", "casts.h", "round_products", "product + rounder", "product + 0.25f + rounder"),
)


@pytest.mark.parametrize("mistakes", (FIRST, SECOND), ids=("first", "second"))
def test_mistakes_are_refuted(mistakes: tuple[tuple[str, str, str, str, str], ...]) -> None:
    text = casts.source()
    for _, header, function, old, new in mistakes:
        text = planted(header, function, old, new, text)
    for name, *_ in mistakes:
        found = casts.decide(name, TIES, text)
        assert isinstance(found, Refutation) and 0 <= int(found.numbers["bits"]) < 2**32, name


def test_a_cast_to_fp8_that_truncates_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = floats.round_to

    def truncated(numbers: F64, kind: floats.Name, overflow: floats.Overflow) -> Array:
        return own(numbers, kind, overflow, "down")

    monkeypatch.setattr(floats, "round_to", truncated)
    found = casts.fp8("float8_e4m3fn", OTHERS)
    assert isinstance(found, Refutation) and FLOATS["float8_e4m3fn"].largest > 0


def test_without_a_compiler_casts_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "compiler", lambda: None)
    found = casts.decide("float16", OTHERS, "// no text that was compiled before")
    assert isinstance(found, Undecided) and "compiler" in found.reason
