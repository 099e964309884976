"""Checks of `bfp.cast`, `bfp.decode`, `bfp.store`, `bfp.load`, `bfp.dot` and `bfp.total`, all of them exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.quantization import bfp, bfp_dot, bfp_storage
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit.quantization.bfp_storage import StoredBlocks
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_exact, assert_kind, refuses
from lowbit_conformance.suite.marking import Settings, checks, grid


@dataclass(frozen=True)
class BfpCase(Case):
    """A case with blocks.

    Attributes:
        rows: R.
        columns: n.
        block: elements of a block.
        mantissa: bits of a mantissa.
        exponent: bits of an exponent.
    """

    rows: int
    columns: int
    block: int
    mantissa: int
    exponent: int = 8

    @property
    def format(self) -> Format:
        return Format(self.block, self.mantissa, self.exponent)

    @property
    def format_b(self) -> Format:
        """The format of the second operand of a product."""
        return self.format

    def parameters(self) -> dict[str, object]:
        own: dict[str, object] = {"block": self.block, "mantissa": self.mantissa, "exponent": self.exponent}
        return own | {"mantissa_a": self.mantissa, "mantissa_b": self.format_b.mantissa}


@dataclass(frozen=True)
class MixedCase(BfpCase):
    """A case whose second operand has mantissas and exponents of other widths: keys in 4 bits, queries in 8.

    Attributes:
        mantissa_b, exponent_b: those widths.
    """

    mantissa_b: int = field(kw_only=True)
    exponent_b: int = field(kw_only=True)

    @property
    def format_b(self) -> Format:
        return Format(self.block, self.mantissa_b, self.exponent_b)


FORMATS = ((32, 4, 8), (64, 4, 8), (32, 8, 8), (128, 8, 8), (1, 4, 8), (3, 5, 6), (16, 2, 3), (7, 12, 8), (20, 25, 10))
COLUMNS = (1, 3, 31, 32, 33, 64, 100, 128)
LARGE = ((40, 33), (3, 300))  # more rows, and more columns, than a kernel processes at once
STORABLE = tuple(choice for choice in FORMATS if choice[2] <= 8)


def shapes(formats: tuple[tuple[int, int, int], ...] = FORMATS) -> Callable[[str, Settings], Iterator[BfpCase]]:
    """Every format with every width, then shapes from the seeds."""

    def generator(clause: str, settings: Settings) -> Iterator[BfpCase]:
        for turn, choice in enumerate(formats):
            for columns in COLUMNS:
                yield BfpCase(clause, "lattice", "", 1 + turn % 4, columns, *choice)
            for rows, columns in LARGE:
                yield BfpCase(clause, "lattice", "large", rows, columns, *choice)
        for seed in settings.seeds:
            for choice in formats:
                yield BfpCase(clause, "random", "", 3, 1 + (37 * seed + choice[0]) % 150, *choice, seed=seed)
        yield BfpCase(clause, "lattice", "large-model", 2, 28672, *formats[0])

    return generator


def values(case: BfpCase) -> F32:
    """Numbers of very different magnitudes, and some zeros."""
    rng = case.generator()
    shape = (case.rows, case.columns)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, shape)) * rng.integers(0, 5, shape).clip(0, 1)
    return np.ascontiguousarray(x, np.float32)


def blocks(case: BfpCase) -> Blocks:
    """Any mantissas and any exponents that the format allows."""
    rng, format = case.generator(), case.format
    mantissas = rng.integers(-format.top, format.top + 1, (case.rows, case.columns)).astype(format.dtype)
    reach = format.reach if case.variant == "far" else min(format.reach, 30)  # sums of products do not overflow float32
    exponents = rng.integers(-reach, reach + 1, (case.rows, format.blocks(case.columns))).astype(np.int16)
    return Blocks(mantissas, exponents, format)


def assert_blocks(given: object, wanted: Blocks) -> None:
    """Compare exponents first, since a wrong exponent explains wrong mantissas."""
    __tracebackhide__ = True
    mine = assert_kind("the result", given, Blocks)
    assert mine.format == wanted.format, f"WRONG: format is {mine.format}, the specification says {wanted.format}"
    assert_exact("exponents", mine.exponents, wanted.exponents)
    assert_exact("mantissas", mine.mantissas, wanted.mantissas)


def assert_casts(backend: Remote, x: F32, format: Format) -> None:
    __tracebackhide__ = True
    given = backend.run("bfp.cast", x, format)
    assert_blocks(given, bfp.cast(x, format))


# Cast.


@checks("bfp.cast/C1", shapes())
def test_cast_equals_the_reference(backend: Remote, case: BfpCase) -> None:
    """Random rows of every width give the reference's blocks."""
    assert_casts(backend, values(case), case.format)


def by_format(*variants: str) -> Callable[[str, Settings], Iterator[BfpCase]]:
    """Each variant at one width with a short last block, for each format."""

    def generator(clause: str, settings: Settings) -> Iterator[BfpCase]:
        for variant in variants:
            for choice in FORMATS:
                yield BfpCase(clause, "edge", variant, 2, 2 * choice[0] + 1, *choice)

    return generator


@checks("bfp.cast/C2", by_format("power", "below-power", "above-power"))
def test_exponent_at_powers_of_two(backend: Remote, case: BfpCase) -> None:
    """The largest magnitude of a block is a power of two or the float next to one, where logarithms are inexact."""
    power = np.exp2(np.arange(-20, 20, dtype=np.float32))
    step = {"power": power, "below-power": np.nextafter(power, 0), "above-power": np.nextafter(power, np.inf)}
    x = np.zeros((len(power), case.columns), np.float32)
    x[:, 0], x[:, -1] = step[case.variant], -step[case.variant]
    assert_casts(backend, x.astype(np.float32), case.format)


def narrow(clause: str, settings: Settings) -> Iterator[BfpCase]:
    for choice in FORMATS:
        if choice[1] <= 8 and choice[0] > 1:
            yield BfpCase(clause, "lattice", "every-tie", 1, choice[0], *choice)


@checks("bfp.cast/C3", narrow)
def test_every_mantissa_and_every_tie(backend: Remote, case: BfpCase) -> None:
    """Beside an element that fixes the exponent, every quarter of a step of both signs: ties round to even, and the top
    saturates. The expected mantissas come from rational arithmetic."""
    top, block = case.format.top, case.block
    quarters = np.arange(-4 * top - 3, 4 * top + 4)
    per_row = block - 1
    padded = np.resize(quarters, (-(-len(quarters) // per_row), per_row))
    largest = 2 ** (case.mantissa - 2) if case.mantissa > 2 else 1
    x = np.hstack([np.full((len(padded), 1), 4.0 * largest), padded]).astype(np.float32) / 4
    given = assert_kind("the result", backend.run("bfp.cast", x, case.format), Blocks)
    assert_array("mantissas", given.mantissas, case.format.dtype, x.shape)
    assert_array("exponents", given.exponents, np.int16, (len(x), 1))
    for row, (numbers, mantissas) in enumerate(zip(x, given.mantissas, strict=True)):
        step = Fraction(2) ** int(given.exponents[row, 0])
        expected = [max(-top, min(top, round(Fraction(float(number)) / step))) for number in numbers]
        assert mantissas.tolist() == expected, f"WRONG: mantissas of row {row}: {mantissas.tolist()} for {expected}"
    assert_blocks(given, bfp.cast(np.ascontiguousarray(x, np.float32), case.format))


@checks("bfp.cast/C4", by_format("huge", "subnormal"))
def test_exponents_are_clamped(backend: Remote, case: BfpCase) -> None:
    """Magnitudes outside the range of the exponent, at both ends."""
    scale = 2.0**126 if case.variant == "huge" else 2.0**-149
    x = (case.generator().integers(-3, 4, (case.rows, case.columns)) * scale).astype(np.float32)
    assert_casts(backend, x, case.format)


@checks("bfp.cast/C5", by_format("zeros"))
def test_blocks_of_zeros(backend: Remote, case: BfpCase) -> None:
    """Zeros of both signs in one block, beside nonzero blocks."""
    x = values(case)
    x[0, : case.block] = 0.0
    x[1, : case.block] = -0.0
    assert_casts(backend, x, case.format)


# Decode.


@checks("bfp.decode/C1", shapes())
def test_decode_equals_the_reference(backend: Remote, case: BfpCase) -> None:
    """Any mantissas and exponents give the reference's values."""
    assert_reference(backend, case, "values", blocks(case))


@checks("bfp.decode/C2", by_format("ends"))
def test_decode_at_the_ends_of_float32(backend: Remote, case: BfpCase) -> None:
    """The largest and the least exponents: overflow, subnormals and zeros are those of a single rounding."""
    any_blocks, reach = blocks(case), case.format.reach
    for e in (reach, -reach, max(-reach, -140), max(-reach, -160), min(reach, 120)):  # 2^−160 itself is no float32
        some = Blocks(any_blocks.mantissas, np.full_like(any_blocks.exponents, e), case.format)
        assert_reference(backend, case, "values", some)


# Storage.


def stored(backend: Remote, some: Blocks) -> StoredBlocks:
    """The stored blocks from the backend, in the form of these blocks."""
    __tracebackhide__ = True
    given = assert_kind("the result", backend.run("bfp.store", some), StoredBlocks)
    rows, columns = some.mantissas.shape
    assert given.columns == columns, f"WRONG: columns is {given.columns!r}, the specification says {columns}"
    assert given.format == some.format, f"WRONG: format is {given.format}, the specification says {some.format}"
    assert_array("mantissas", given.mantissas, np.uint8, (rows, -(-columns * some.format.mantissa // 8)))
    assert_array("exponents", given.exponents, np.uint8, some.exponents.shape)
    return given


@checks("bfp.store/C1", shapes(STORABLE))
def test_store_equals_the_reference(backend: Remote, case: BfpCase) -> None:
    """The mantissas of a row are one little-endian number: Σ (M_i mod 2^p)·2^(p·i), by Python's integers."""
    some = blocks(case)
    given = stored(backend, some)
    for row, mantissas in enumerate(some.mantissas):
        number = sum((int(m) % 2**case.mantissa) << (case.mantissa * i) for i, m in enumerate(mantissas))
        found = int.from_bytes(given.mantissas[row].tobytes(), "little")
        assert found == number, f"WRONG: row {row} is {found:#x}, the specification says {number:#x}"
    assert_exact("mantissas", given.mantissas, bfp_storage.store(some).mantissas)


@checks("bfp.store/C2", shapes(STORABLE))
def test_store_biases_exponents(backend: Remote, case: BfpCase) -> None:
    """The byte of an exponent is e + 127."""
    some = blocks(case)
    given = stored(backend, some)
    assert_exact("exponents", given.exponents, (some.exponents + 127).astype(np.uint8))


@checks("bfp.store/H8", grid(BfpCase, "edge", ["wide-exponent"], (2, 20, 20, 25, 10)))
def test_store_refuses(backend: Remote, case: BfpCase) -> None:
    """Exponents of ten bits do not fit a byte."""
    with refuses():
        backend.run("bfp.store", blocks(case))


@checks("bfp.load/C1", shapes(STORABLE))
def test_load_is_the_inverse(backend: Remote, case: BfpCase) -> None:
    """Blocks that the reference stored are restored."""
    given = backend.run("bfp.load", bfp_storage.store(blocks(case)))
    assert_blocks(given, blocks(case))


def unwritten(clause: str, settings: Settings) -> Iterator[BfpCase]:
    for variant in ("least-mantissa", "exponent-255", "bits-left-over"):
        yield BfpCase(clause, "edge", variant, 2, 5, 32, 5)
    for variant in ("least-mantissa", "bits-left-over"):
        yield BfpCase(clause, "edge", variant, 2, 5, 32, 4)
    yield BfpCase(clause, "edge", "exponent-255", 2, 5, 32, 8)


@checks("bfp.load/H8", unwritten)
def test_load_refuses_what_is_never_stored(backend: Remote, case: BfpCase) -> None:
    """−2^(p−1), the byte 255 and a bit after the last mantissa are refused."""
    stored = bfp_storage.store(blocks(case))
    if case.variant == "least-mantissa":
        least = 1 << (case.mantissa - 1)
        stored.mantissas[1, 0] = stored.mantissas[1, 0] & (0x100 - 2 * least) | least
    elif case.variant == "exponent-255":
        stored.exponents[1, 0] = 255
    else:
        stored.mantissas[1, -1] |= 0b10000000
    with refuses():
        backend.run("bfp.load", stored)


# Dot products.


def two(case: BfpCase) -> tuple[Blocks, Blocks]:
    """Rows of a and of b, with one more row of b."""
    format, variant = case.format_b, "far" if case.variant == "far" else "b"
    sizes = (case.columns, format.block, format.mantissa, format.exponent)
    return blocks(case), blocks(BfpCase(case.clause, case.tier, variant, case.rows + 1, *sizes, seed=case.seed))


# Blocks, and the widths of mantissas and exponents of both operands.
MIXED = ((32, (8, 8), (4, 8)), (128, (8, 8), (5, 6)), (7, (12, 8), (2, 10)), (1, (25, 10), (3, 8)))


def products(*variants: str) -> Callable[[str, Settings], Iterator[BfpCase]]:
    """All shapes and variants, and operands of different widths, the narrower one first or second."""

    def generator(clause: str, settings: Settings) -> Iterator[BfpCase]:
        yield from shapes()(clause, settings)
        yield from by_format(*variants)(clause, settings)
        for block, *widths in MIXED:
            for (mantissa, exponent), (mantissa_b, exponent_b) in (widths, widths[::-1]):
                sizes = (3, 2 * block + 3, block, mantissa, exponent)
                yield MixedCase(clause, "lattice", "mixed", *sizes, mantissa_b=mantissa_b, exponent_b=exponent_b)

    return generator


def dotted(backend: Remote, a: Blocks, b: Blocks) -> BlockSums:
    """The sums of the backend."""
    __tracebackhide__ = True
    return assert_kind("the result", backend.run("bfp.dot", a, b), BlockSums)


@checks("bfp.dot/C1", products())
def test_dot_sums_are_exact(backend: Remote, case: BfpCase) -> None:
    """Sums of products of mantissas, by Python's integers."""
    a, b = two(case)
    given = dotted(backend, a, b)
    spans = list(case.format.spans(case.columns))
    expected = [
        [[sum(int(m) * int(n) for m, n in zip(x[span], y[span], strict=True)) for span in spans] for y in b.mantissas]
        for x in a.mantissas
    ]
    assert_exact("sums", given.sums, np.array(expected, np.int64))


@checks("bfp.dot/C2", products("far"))
def test_dot_adds_exponents(backend: Remote, case: BfpCase) -> None:
    """The exponent of a block is the sum of both."""
    a, b = two(case)
    given = dotted(backend, a, b)
    assert_exact("exponents", given.exponents, a.exponents[:, None].astype(np.int32) + b.exponents[None])


@checks("bfp.dot/C3", by_format("one-place"))
def test_dot_keeps_rows_and_blocks_apart(backend: Remote, case: BfpCase) -> None:
    """One mantissa of a and all of b: only the results of its row and its block are nonzero."""
    a, b = two(case)
    b.mantissas.setflags(write=True)
    b.mantissas[...] = 1
    places, given = (0, case.block - 1, case.block, case.columns - 1), []
    for place in places:
        mantissas = np.zeros_like(a.mantissas)
        mantissas[-1, place] = 1
        given.append(dotted(backend, Blocks(mantissas, a.exponents, a.format), b))
    for place, found in zip(places, given, strict=True):
        expected = np.zeros((len(a.mantissas), len(b.mantissas), a.exponents.shape[1]), np.int64)
        expected[-1, :, place // case.block] = 1
        assert_exact("sums", found.sums, expected)


@checks("bfp.dot/H8", grid(BfpCase, "edge", ("columns", "block", "too-wide"), (2, 64, 64, 4)))
def test_dot_refuses(backend: Remote, case: BfpCase) -> None:
    """Each mistake raises ArgumentError."""
    x = values(case)
    a = bfp.cast(x, case.format)
    wrong: dict[str, tuple[Any, Any]] = {
        "columns": (a, bfp.cast(np.ascontiguousarray(x[:, :63]), case.format)),
        "block": (a, bfp.cast(x, Format(32, 4))),
        "too-wide": (bfp.cast(x, Format(64, 25)), bfp.cast(x, Format(64, 25))),
    }
    with refuses():
        backend.run("bfp.dot", *wrong[case.variant])


@checks("bfp.total/C1", products("between"))
def test_total_rounds_once_a_block(backend: Remote, case: BfpCase) -> None:
    """The sums of blocks in order, each rounded once to float32; the expected ones come from rational arithmetic."""
    sums = between(case) if case.variant == "between" else bfp_dot.dot(*two(case))
    given = assert_array("totals", backend.run("bfp.total", sums), np.float32, sums.sums.shape[:2])
    y = Fraction(0)
    for s, e in zip(sums.sums[-1, -1], sums.exponents[-1, -1], strict=True):
        y = Fraction(float(rounded(y + int(s) * Fraction(2) ** int(e))))
    assert Fraction(float(given[-1, -1])) == y, f"WRONG: {given[-1, -1]!s}, the specification says {float(y)!s}"
    assert_exact("totals", given, bfp_dot.total(sums))


def between(case: BfpCase) -> BlockSums:
    """Two blocks whose sum is so near the midpoint of two float32 numbers that float64 rounds it to the midpoint."""
    rng, size = case.generator(), (5, 7)
    first, far = rng.integers(2**23, 2**24, size), rng.integers(30, 50, size)
    second = (2**far + rng.choice((-1, 1), size)) * rng.choice((-1, 1), size)  # slightly more or less than half a step
    exponents = np.stack([np.zeros(size, np.int64), -1 - far], axis=-1)
    return BlockSums(np.stack([first, second], axis=-1), exponents.astype(np.int32))


def rounded(number: Fraction) -> np.float32:
    """A rational number rounded to the nearest float32, ties to even, without rounding to float64 first."""
    guess = np.float32(float(number))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - number), int(f.view(np.uint32)) & 1))


@checks("bfp.total/C2", by_format("overflow", "underflow"))
def test_total_at_the_ends(backend: Remote, case: BfpCase) -> None:
    """Sums beyond the range of float32 become infinite; sums below it become subnormal or zero."""
    some = bfp_dot.dot(*two(case))
    exponents = np.full_like(some.exponents, 120 if case.variant == "overflow" else -150)
    sums = BlockSums(some.sums, exponents)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        assert_reference(backend, case, "totals", sums)
