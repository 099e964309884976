"""The theorems of casts: for samples of float32 with all ties among them, and with mistakes planted in the C++."""

import re
from collections.abc import Callable
from importlib.resources import files

import numpy as np
import pytest

from lowbit.arrays import F64, U32, Array
from lowbit.numbers import floats
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


@pytest.mark.parametrize("name", casts.BESIDE)
def test_every_exponent_of_a_block_is_compared(name: str) -> None:
    """Each pattern of a range, and of many ranges one in a number that no power of two divides."""
    assert isinstance(casts.scaled(name, OTHERS), Proof)
    most = casts.Range(0x7F000000, 0x7F000000 + 4096, 1)
    assert casts.scaled(name, among=[most]) == Proof(4096, "enumeration")


@pytest.mark.parametrize("step", (1, TIES, OTHERS))
def test_ranges_are_all_patterns(step: int) -> None:
    """Each begins a step behind the last pattern of the one before."""
    found = casts.ranges(step)
    lengths = [len(range(each.first, each.end, step)) for each in found]
    assert found[0].first == 0 and sum(lengths) == -(-casts.PATTERNS // step) and max(lengths) <= casts.AT_ONCE
    for before, each, length in zip(found, found[1:], lengths, strict=False):
        assert each.first == before.first + length * step


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


LATE = (
    ("power_of_two(-e)", "power_of_two(e > 120 ? -120 : -e)"),
    ("largest >> 23) - 133", "largest >> 23) - (largest > 0x7F000000u ? 134 : 133)"),
)


@pytest.mark.parametrize(("old", "new"), LATE, ids=("inverse", "exponent"))
def test_a_mistake_at_one_exponent_is_refuted(old: str, new: str) -> None:
    """One that no block with another exponent shows; its number shows it alone."""
    text = planted("activations.h", "cast_blocks", old, new, casts.source())
    found = casts.scaled("bfp16-exponents", OTHERS, text)
    assert isinstance(found, Refutation)
    alone = casts.Range(int(found.numbers["bits"]), int(found.numbers["bits"]) + 1, 1)
    assert isinstance(casts.scaled("bfp16-exponents", text=text, among=[alone]), Refutation)


def test_a_cast_to_fp8_that_truncates_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = floats.round_to

    def truncated(numbers: F64, kind: floats.Name, overflow: floats.Overflow) -> Array:
        return own(numbers, kind, overflow, "down")

    monkeypatch.setattr(floats, "round_to", truncated)
    found = casts.fp8("float8_e4m3fn", OTHERS)
    assert isinstance(found, Refutation) and 0 <= int(found.numbers["bits"]) < 2**32


@pytest.mark.parametrize("kind", casts.NUMPY)
@pytest.mark.parametrize(
    "wrong",
    (lambda bits: bits == 0x7F800000, lambda bits: bits == 0xFFC00000, lambda bits: bits == 0x80000000),
    ids=("infinity", "NaN", "-0"),
)
def test_one_wrong_result_of_fp8_is_refuted(
    kind: floats.Name, wrong: Callable[[U32], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = floats.round_to

    def mistaken(numbers: F64, kind: floats.Name, overflow: floats.Overflow) -> Array:
        with np.errstate(all="ignore"):
            return own(numbers, kind, overflow) ^ wrong(numbers.astype(np.float32).view(np.uint32)).astype(np.uint8)

    monkeypatch.setattr(floats, "round_to", mistaken)
    found = casts.fp8(kind, TIES)
    assert isinstance(found, Refutation) and wrong(np.array([found.numbers["bits"]], np.uint32))[0]


def test_without_a_compiler_casts_are_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "compiler", lambda: None)
    found = casts.decide("float16", OTHERS, "// no text that was compiled before")
    assert isinstance(found, Undecided) and "compiler" in found.reason
