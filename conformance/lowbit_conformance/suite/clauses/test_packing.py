"""Checks of `packing.pack` and `packing.unpack`, all of them exact."""

from collections.abc import Iterator

import numpy as np

from lowbit.quantization import packing
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORDS_PER_UNIT, Codes
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_reference
from lowbit_conformance.suite.cases import COLUMNS, LARGE, UNITS, MatrixCase
from lowbit_conformance.suite.compare import assert_exact, refuses
from lowbit_conformance.suite.marking import Settings, chained, checks, grid


def shapes(clause: str, settings: Settings) -> Iterator[MatrixCase]:
    """Every K of a few units with every N, then large shapes, then shapes from the seeds."""
    for bits in BITS:
        for turn, columns in enumerate(COLUMNS):
            rows = UNITS[turn % len(UNITS)] * CODES_PER_UNIT[bits]
            yield MatrixCase(clause, "lattice", "", bits, rows, columns)
        for rows, columns, _ in LARGE[:3]:
            yield MatrixCase(clause, "lattice", "large", bits, rows, columns)
        yield MatrixCase(clause, "lattice", "large", bits, 2 * CODES_PER_UNIT[bits], 1100)
        for seed in settings.seeds:
            rng = np.random.Generator(np.random.PCG64([seed, bits]))
            rows = CODES_PER_UNIT[bits] * int(rng.integers(1, 40))
            yield MatrixCase(clause, "random", "drawn", bits, rows, int(rng.integers(1, 101)), seed=seed)
        yield MatrixCase(clause, "lattice", "large-model", bits, CODES_PER_UNIT[bits], 131072)
        yield MatrixCase(clause, "lattice", "large-model", bits, 28672, 3)
        yield MatrixCase(clause, "lattice", "large-model", bits, 2**16 + 32, 2)


UNITS_OF_ONE = [(bits, unit, unit * (2**bits - 1)) for bits, unit in CODES_PER_UNIT.items()]
"""For each width a unit in which one code at a time is nonzero."""
single_units = grid(MatrixCase, "lattice", ["one-code"], *UNITS_OF_ONE)


def one_code_a_column(bits: int) -> Codes:
    """A unit of codes for each position and each nonzero value: column ``position * (2**bits - 1) + value - 1``."""
    unit, top = CODES_PER_UNIT[bits], 2**bits - 1
    codes = np.zeros((unit, unit * top), np.uint8)
    for position in range(unit):
        codes[position, position * top : (position + 1) * top] = np.arange(1, top + 1)
    return codes


def random_codes(case: MatrixCase) -> Codes:
    return case.generator().integers(0, 2**case.bits, (case.rows, case.columns)).astype(np.uint8)


@checks("packing.pack/C1", single_units)
def test_one_code_sets_its_own_bits(backend: Remote, case: MatrixCase) -> None:
    """A single code k sets bits b·k … b·k + b − 1 of its column and no other bit, by big-integer arithmetic."""
    words = backend.run("packing.pack", one_code_a_column(case.bits), case.bits)
    top = 2**case.bits - 1
    streams = [(column % top + 1) << (case.bits * (column // top)) for column in range(CODES_PER_UNIT[case.bits] * top)]
    expected = [[stream >> (32 * word) & 0xFFFFFFFF for stream in streams] for word in range(WORDS_PER_UNIT[case.bits])]
    assert_exact("words", words, np.array(expected, np.uint32))


@checks("packing.pack/C2", shapes)
def test_pack_equals_the_reference(backend: Remote, case: MatrixCase) -> None:
    """Random codes of every shape give the reference's words and are unchanged."""
    assert_reference(backend, case, "words", random_codes(case), case.bits)


@checks("packing.unpack/C1", shapes)
def test_unpack_equals_the_reference(backend: Remote, case: MatrixCase) -> None:
    """Random words with every bit in use give the reference's codes."""
    word_rows = case.rows * case.bits // 32
    words = case.generator().integers(0, 2**32, (word_rows, case.columns), dtype=np.uint32)
    assert_reference(backend, case, "codes", words, case.bits)


@checks("packing.unpack/C2", single_units)
def test_unpack_finds_each_code_alone(backend: Remote, case: MatrixCase) -> None:
    """A single nonzero code in a unit is unpacked at its own place."""
    given = backend.run("packing.unpack", packing.pack(one_code_a_column(case.bits), case.bits), case.bits)
    assert_exact("codes", given, one_code_a_column(case.bits))


SMALL = [(bits, 2 * unit, 3) for bits, unit in CODES_PER_UNIT.items()]
TOO_LARGE = grid(MatrixCase, "edge", ["large-code"], *SMALL[:-1])  # every uint8 fits 8 bits


@checks("packing.pack/H8", chained(grid(MatrixCase, "edge", ["rows"], *SMALL), TOO_LARGE))
def test_pack_refuses(backend: Remote, case: MatrixCase) -> None:
    """Rows that are not whole units, and a code that does not fit, raise ArgumentError."""
    codes = random_codes(case)
    if case.variant == "large-code":
        codes[-1, -1] = 2**case.bits
    else:
        codes = codes[:-1].copy()
    with refuses():
        backend.run("packing.pack", codes, case.bits)


@checks("packing.unpack/H8", grid(MatrixCase, "edge", ["rows"], (3, 64, 3)))  # only 3 bits can end inside a unit
def test_unpack_refuses(backend: Remote, case: MatrixCase) -> None:
    """Rows of words that end inside a unit raise ArgumentError."""
    words = packing.pack(random_codes(case), case.bits)
    with refuses():
        backend.run("packing.unpack", words[:-1].copy(), case.bits)
