"""The exhaustive tier of Block Floating Point, rotation, the order of channels and attention: all there is of each.

All mantissas with all exponents, all products of two mantissas, every width of a head, all orders of a few channels,
and every token of a short text that looks back at every other.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np

from lowbit.attention.ksort import permuted_layout
from lowbit.quantization import bfp_storage
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.bounded import assert_on_lattice, assert_reference, run_bounded
from lowbit_conformance.suite.clauses.test_attention import AttendCase, seen
from lowbit_conformance.suite.clauses.test_bfp import BfpCase, assert_blocks, assert_casts, dotted, stored
from lowbit_conformance.suite.clauses.test_ksort import LAYOUTS, HeadCase, ordered
from lowbit_conformance.suite.clauses.test_rope import RopeCase, quarter_turns
from lowbit_conformance.suite.compare import assert_equal_values, assert_exact, assert_kind
from lowbit_conformance.suite.marking import Settings, checks, grid

TIER = "exhaustive"


# Blocks.


def formats(*choices: tuple[int, int, int]) -> Callable[[str, Settings], Iterator[BfpCase]]:
    """One case for each format, with a column for each mantissa and a row for each exponent."""

    def generator(clause: str, settings: Settings) -> Iterator[BfpCase]:
        for block, mantissa, exponent in choices:
            sizes = (2**exponent - 1, 2**mantissa - 1)
            yield BfpCase(clause, TIER, "all-numbers", *sizes, block, mantissa, exponent)

    return generator


SMALL = ((32, 4, 8), (32, 8, 8), (64, 8, 8), (16, 2, 3), (3, 5, 6), (32, 4, 10), (128, 9, 9))
STORABLE = ((32, 4, 8), (32, 8, 8), (64, 8, 8), (16, 2, 3), (3, 5, 6), (32, 3, 7), (20, 6, 8), (32, 7, 8))


def all_numbers(case: BfpCase) -> Blocks:
    """Row r has the exponent r − reach in all its blocks, column m the mantissa m − top."""
    format = case.format
    mantissas = np.tile(np.arange(-format.top, format.top + 1), (case.rows, 1)).astype(format.dtype)
    exponents = np.arange(-format.reach, format.reach + 1, dtype=np.int16)[:, None]
    return Blocks(mantissas, np.repeat(exponents, format.blocks(case.columns), axis=1), format)


@checks("bfp.decode/C1", formats(*SMALL))
def test_every_mantissa_with_every_exponent(backend: Remote, case: BfpCase) -> None:
    """All numbers of a format."""
    assert_reference(backend, case, "values", all_numbers(case))


def all_places(case: BfpCase) -> Blocks:
    """For each of nine mantissas all values, with −1 everywhere else."""
    format, places = case.format, 9
    values = np.arange(-format.top, format.top + 1)
    mantissas = np.full((places * len(values), places), -1, format.dtype)
    for place in range(places):
        mantissas[place * len(values) : (place + 1) * len(values), place] = values
    exponents = np.resize(np.arange(-format.reach, format.reach + 1), (len(mantissas), format.blocks(places)))
    return Blocks(mantissas, exponents.astype(np.int16), format)


@checks("bfp.store/C1", formats(*STORABLE))
def test_every_mantissa_in_every_place(backend: Remote, case: BfpCase) -> None:
    """All mantissas at all bit positions in the stream until a mantissa begins a byte again, and at one more."""
    given = stored(backend, all_places(case))
    assert_exact("mantissas", given.mantissas, bfp_storage.store(all_places(case)).mantissas)
    assert_exact("exponents", given.exponents, bfp_storage.store(all_places(case)).exponents)


@checks("bfp.load/C1", formats(*STORABLE))
def test_every_mantissa_from_every_place(backend: Remote, case: BfpCase) -> None:
    """The same bytes are decoded correctly."""
    assert_blocks(backend.run("bfp.load", bfp_storage.store(all_places(case))), all_places(case))


@checks("bfp.cast/C3", formats(*SMALL))
def test_every_quarter_of_a_step_at_every_exponent(backend: Remote, case: BfpCase) -> None:
    """Beside a power of two that fixes the exponent, all quarters of a step of both signs, for every power of two from
    the least subnormal number to the largest of float32."""
    quarters = np.arange(-4 * case.format.top - 3, 4 * case.format.top + 4) / 4.0
    if case.block == 1:
        padded = quarters[:, None]
    else:
        padded = np.resize(quarters, (-(-len(quarters) // (case.block - 1)), case.block - 1))
    padded = np.hstack([np.full((len(padded), 1), 2.0 ** (case.mantissa - 2)), padded]).reshape(1, -1)
    exponents = np.arange(-149, 128 - case.mantissa)[:, None].astype(np.float64)
    assert_casts(backend, (padded * np.exp2(exponents)).astype(np.float32), case.format)


HALF_FORMATS = ((1, 4, 8), (1, 8, 8), (32, 4, 8), (32, 8, 8), (1, 2, 3), (1, 11, 6))


@checks("bfp.cast/C2", grid(BfpCase, TIER, ["all-halves"], *((62, 1024, *choice) for choice in HALF_FORMATS)))
def test_every_half_precision_number(backend: Remote, case: BfpCase) -> None:
    """All finite float16 numbers, each in a block of its own, or in blocks in random order."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)].astype(np.float32)
    x = finite if case.block == 1 else case.generator().permutation(finite)
    assert_casts(backend, x.reshape(case.rows, case.columns), case.format)


@checks("bfp.dot/C1", formats((32, 4, 8), (32, 8, 8), (16, 2, 3), (3, 5, 6)))
def test_every_product_of_two_mantissas(backend: Remote, case: BfpCase) -> None:
    """All mantissas with all mantissas."""
    all_values = np.arange(-case.format.top, case.format.top + 1)
    column = all_values.astype(case.format.dtype)[:, None]
    some = Blocks(column, np.zeros((len(column), 1), np.int16), case.format)
    given = dotted(backend, some, some)
    assert_exact("sums", given.sums, np.multiply.outer(all_values, all_values)[:, :, None].astype(np.int64))


# Rotation.


def widths(clause: str, settings: Settings) -> Iterator[RopeCase]:
    for head_dim in range(2, 66, 2):
        for pairing in ("half-split", "interleaved"):
            yield RopeCase(clause, TIER, pairing, 4, 2, head_dim)


@checks("rope.rotate/C1", widths)
def test_every_width_of_a_head(backend: Remote, case: RopeCase) -> None:
    """Quarter turns of integers at all even widths up to 64 detect wrong partners and wrong signs."""
    assert_on_lattice(backend, case, *quarter_turns(case))


# The order of channels.


def one_head(clause: str, settings: Settings) -> Iterator[HeadCase]:
    yield HeadCase(clause, TIER, "all-orders", 5)
    yield HeadCase(clause, TIER, "all-ties", 4)


@checks("ksort.permutation/C2", one_head)
def test_every_order_and_every_tie_of_a_few(backend: Remote, case: HeadCase) -> None:
    """Five distinct sizes in all orders, or four sizes with three values in all combinations; Python's sort is
    stable."""
    channels = range(case.head_dim)
    ways = permutations(channels) if case.variant == "all-orders" else product((0, 1, 2.5), repeat=case.head_dim)
    for sizes in ways:
        given = ordered(backend, np.array(sizes, np.float64))
        assert_exact("order", given, np.array(sorted(channels, key=sizes.__getitem__), np.int64))


@checks("ksort.relabel/C1", grid(HeadCase, TIER, LAYOUTS, (4,)))
def test_every_order_of_a_layout(backend: Remote, case: HeadCase) -> None:
    """Two pairs with all orders of their channels."""
    for order in permutations(range(case.head_dim)):
        layout = LAYOUTS[case.variant](case.head_dim)
        given = backend.run("ksort.relabel", layout, np.array(order, np.int64))
        moved = assert_kind("the result", given, type(layout))
        expected = permuted_layout(layout, np.array(order, np.int64))
        for name in ("partner", "sign", "pair"):
            assert_exact(f"{name} for order {order}", getattr(moved, name), getattr(expected, name))


# Attention.


SHORT = [(length, length, 2 * length, 2, 3 * length, size) for length in (1, 2, 3, 4) for size in range(length + 1)]


@checks("attention.attend/C2", grid(AttendCase, TIER, ["all-tokens"], *SHORT))
def test_every_token_looks_back_at_every_other(backend: Remote, case: AttendCase) -> None:
    """Up to four tokens with queries from the last T, and every window: query head h of a group prefers token h, and if
    it sees that token, the result is its value, bit-identical."""
    group = case.heads // case.kv_heads
    rng = case.generator()
    for tokens in range(1, case.length + 1):
        keys = np.zeros((case.kv_heads, case.length, case.head_dim), np.float32)
        queries = np.zeros((tokens, case.heads, case.head_dim), np.float32)
        keys[:, np.arange(case.length), np.arange(case.length)] = 1000 * np.sqrt(case.head_dim)
        queries[:, np.arange(case.heads), np.arange(case.heads) % group] = 1
        values = rng.integers(-99, 100, keys.shape).astype(np.float32)
        given = run_bounded(backend, case, queries.shape, queries, keys, values, case.window)
        some = replace(case, tokens=tokens)
        for token, head in product(range(tokens), range(case.heads)):
            if head % group in seen(some, token):
                assert_equal_values(given[token, head], values[head // group, head % group].astype(np.float64))
