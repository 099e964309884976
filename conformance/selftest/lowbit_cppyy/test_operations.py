"""The operations between two linear layers in the cppyy backend: their kernels, errors, threads and memory.

The suite (`lowbit conformance cppyy`) judges results; here are the programs behind them, on every instruction set of
this processor.
"""

import ctypes
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sanitized_programs
from kernel_runs import HERE

from lowbit.arrays import F32, Array
from lowbit.attention import rope
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.kernels import interpreter
from lowbit.quantization import bfp, bfp_dot
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen import attention
from lowbit_cppyy.codegen.block_products import block_products, fits
from lowbit_cppyy.codegen.elementwise import CHUNK, PASSES, ProgramKernel, pass_kernel
from lowbit_cppyy.codegen.isa import PLAIN, InstructionSet
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.runtime.compiler import runtime

KINDS = list({table.types: table for table in reversed(HERE)}.values())
"""One for each kind of registers; tables of one kind differ in one word."""

by_table = pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)


# **Every pass** has the bits of its program, as the interpreter runs it.


class Sizes(ctypes.Structure):
    """`lowbit::Sizes`."""

    _fields_ = (("groups", ctypes.c_int64), ("segments", ctypes.c_int64), *((n, ctypes.c_void_p) for n in "tbe"))


def run_compiled(one: ProgramKernel, memory: dict[str, Array], groups: int) -> None:
    """Call a kernel as C++ does."""
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.POINTER(Sizes))(runtime().kernel(one))
    pointers = [memory[name].ctypes.data if name in memory else None for name in "wszxy"]
    call(*pointers, Sizes(groups, groups, None, None, None))


def assert_same_bits(one: ProgramKernel, memory: dict[str, Array], groups: int) -> None:
    other = {name: array.copy() for name, array in memory.items()}
    run_compiled(one, memory, groups)
    interpreter.run(one.program, other, {"groups": groups}, fused=one.table.fused)
    assert memory["y"].tobytes() == other["y"].tobytes(), one.name


def numbers(*shape: int, seed: int = 0) -> F32:
    """Of very different sizes, either sign and a few zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp2(random.integers(-8, 6, shape))
    return np.asarray(values * (random.random(shape) > 0.05), np.float32)


@by_table
@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_pass_has_the_bits_of_its_program(name: str, table: InstructionSet) -> None:
    """In three iterations; not one rounding differs."""
    memory = {pointer: numbers(6 * CHUNK, seed=ord(pointer)) for pointer in "wszxy"}
    if name == "exponentials":
        memory["w"] = -np.abs(memory["w"])
        memory["w"][::7] = -np.inf
        memory["x"][0] = -0.75
    if name == "clamped_gated":
        memory["x"][0] = -3.5
    if name == "capped":
        memory["x"][:2] = 0.5, 4
    if name == "widened":
        memory["w"] = numbers(12 * CHUNK, seed=1).astype(np.float16).view(np.float32)
    assert_same_bits(pass_kernel(name, table), memory, 3)


@pytest.mark.parametrize("table", {PLAIN.name: PLAIN, HERE[0].name: HERE[0]}.values(), ids=lambda table: table.name)
def test_a_capped_number_keeps_its_relative_error(table: InstructionSet) -> None:
    """Numbers from far below the cap to far beyond it, and those next to halves of ln 2: at most 8 u, of the 21 that
    the bound allows; the cap itself beyond 10 caps, and NaN for NaN."""
    halves = np.float32(np.log(2) / 4) * np.arange(1, 251, 2, dtype=np.float32)
    bits = halves.view(np.uint32)[:, np.newaxis] + np.arange(-65, 66, dtype=np.int64).astype(np.uint32)
    octaves = np.exp2(np.linspace(-100, 6, 2**16)).astype(np.float32)
    x = np.concatenate([octaves, bits.view(np.float32).reshape(-1), [10, 1e30, np.inf, np.nan]]).astype(np.float32)
    x = np.concatenate([x, -x])
    memory = {"w": np.resize(x, -(-len(x) // CHUNK) * CHUNK), "x": np.array([2.0, 1.0], np.float32)}
    memory["y"] = np.empty_like(memory["w"])
    run_compiled(pass_kernel("capped", table), memory, len(memory["w"]) // CHUNK)
    finite = np.isfinite(memory["w"])
    exact = np.tanh(memory["w"][finite].astype(np.float64))
    assert np.max(np.abs(memory["y"][finite] - exact) / np.abs(exact)) <= 8 * 2.0**-24
    beyond = np.abs(memory["w"]) >= 10
    np.testing.assert_array_equal(memory["y"][beyond], np.sign(memory["w"][beyond]))
    assert np.isnan(memory["y"][np.isnan(memory["w"])]).all()


@by_table
@pytest.mark.parametrize("head_dim", (2, 20, 64, 300))
def test_heads_have_the_bits_of_their_programs(head_dim: int, table: InstructionSet) -> None:
    """Numbers of channels that are not multiples of 16, or too large for the loop to be unrolled."""
    channels = 16 * attention.sixteens(head_dim)
    rows = numbers(2 * table.lanes * head_dim + 16, seed=head_dim)
    query = np.concatenate([numbers(head_dim), np.zeros(channels - head_dim), [0.125]]).astype(np.float32)
    scores = {"w": rows, "x": query, "y": np.empty(2 * table.lanes, np.float32)}
    assert_same_bits(attention.scores(head_dim, table), scores, 2)
    np.testing.assert_allclose(
        scores["y"], rows[:-16].reshape(-1, head_dim) @ query[:head_dim] / 8, rtol=1e-4, atol=1e-3
    )
    mixed = {"w": rows, "x": numbers(2 * table.lanes), "y": numbers(channels, seed=1)}
    assert_same_bits(attention.mixed(head_dim, table), mixed, table.lanes)


@by_table
@pytest.mark.parametrize("head_dim", (2, 20, 64, 300))
def test_queries_that_share_rows_have_the_bits_of_each_alone(head_dim: int, table: InstructionSet) -> None:
    """Scores and mixes of several queries by one kernel, and by its program; the others' numbers change nothing."""
    queries, channels, tokens = 3, 16 * attention.sixteens(head_dim), CHUNK
    rows, each, groups = (
        numbers(tokens * head_dim + 16, seed=head_dim),
        channels + attention.CHANNELS,
        tokens // table.lanes,
    )
    x = numbers(queries * each, seed=1)
    scores = {"w": rows, "x": x, "y": np.empty(queries * tokens, np.float32)}
    assert_same_bits(attention.scores(head_dim, table, queries), scores, groups)
    shares = numbers(queries * tokens, seed=2)
    mixed = {"w": rows, "x": shares, "y": numbers(queries * channels, seed=3)}
    before = mixed["y"].reshape(queries, -1).copy()
    assert_same_bits(attention.mixed(head_dim, table, queries), mixed, tokens // 2)
    width = attention.tile_channels(head_dim, table.lanes)
    for q in range(queries):
        alone = {"w": rows, "x": x[q * each :].copy(), "y": np.empty(tokens, np.float32)}
        run_compiled(attention.scores(head_dim, table), alone, groups)
        assert alone["y"].tobytes() == scores["y"][q * tokens : (q + 1) * tokens].tobytes()
        one = {"w": rows, "x": shares[q * tokens :].copy(), "y": before[q].copy()}
        run_compiled(attention.mixed(head_dim, table), one, tokens // 2)
        assert one["y"][:width].tobytes() == mixed["y"].reshape(queries, -1)[q, :width].tobytes()


@by_table
@pytest.mark.parametrize("head_dim", (20, 64, 300))
def test_fetching_rows_changes_no_bit(head_dim: int, table: InstructionSet) -> None:
    """Kernels that prefetch keys and values have the bits of those that do not, and fetch what they will read."""
    channels, ahead = 16 * attention.sixteens(head_dim), 512
    rows = numbers(2 * table.lanes * head_dim + 16, seed=head_dim)
    for queries in attention.query_counts(table):
        x = numbers(queries * max(channels + 16, CHUNK), seed=1)
        kernels = (
            (attention.scores, 2, np.empty(queries * CHUNK, np.float32)),
            (attention.mixed, table.lanes, numbers(queries * channels, seed=3)),
        )
        for make, groups, y in kernels:
            plain, fetching = ({"w": rows, "x": x, "y": y.copy()} for _ in range(2))
            run_compiled(make(head_dim, table, queries), plain, groups)
            assert_same_bits(make(head_dim, table, queries, ahead), fetching, groups)
            assert plain["y"].tobytes() == fetching["y"].tobytes()
            text = make(head_dim, table, queries, ahead).source
            fetched = {int(place) for place in re.findall(r"prefetch_once\(w \+ (\d+)\)", text)}
            assert fetched and min(fetched) == ahead


@pytest.mark.parametrize("table", KINDS, ids=lambda table: table.name)
def test_a_head_has_the_same_bits_beside_any_number_of_others(table: InstructionSet) -> None:
    """Whether its query shares rows with others or not, in prompts and after them."""
    with CppyyBackend(table.name, threads=1) as backend:
        for heads, tokens, length in itertools.product((1, 2, 3, 4, 7), (1, 3), (5, 64, 130)):
            q = numbers(tokens, heads, 20)
            k, v = numbers(1, length, 20, seed=1), numbers(1, length, 20, seed=2)
            found = backend.run("attention.attend", q, k, v, None)
            for head in range(heads):
                alone = backend.run("attention.attend", q[:, head : head + 1].copy(), k, v, None)
                np.testing.assert_array_equal(found[:, head], alone[:, 0])


@by_table
@pytest.mark.parametrize(("columns", "block"), ((64, 64), (64, 32), (128, 16), (128, 128), (1024, 1024)))
def test_block_products_are_those_of_integers(columns: int, block: int, table: InstructionSet) -> None:
    """Interpreted, compiled, and by numpy; the largest mantissas of either sign among them."""
    if not fits(columns, block, table.lanes):
        pytest.skip("not made for registers of this length")
    random = np.random.default_rng(block)
    rows = 2 * table.lanes * block // columns
    a, b = random.integers(-127, 128, (1, columns)), random.integers(-127, 128, (rows, columns))
    a[0, ::3], b[0, ::3], b[1, ::3] = 127, 127, -127
    words = (b.astype(np.int8).view(np.uint32).reshape(-1), (a + 128).astype(np.uint8).view(np.uint32).reshape(-1))
    memory = {"w": words[0], "s": words[1], "y": np.empty(2 * table.lanes, np.float32)}
    assert_same_bits(block_products(columns, block, table), memory, 2)
    expected = (a * b).reshape(-1, block).sum(axis=1)
    assert memory["y"].view(np.int32).tolist() == expected.tolist()


@pytest.mark.parametrize("table", {PLAIN.name: PLAIN, HERE[0].name: HERE[0]}.values(), ids=lambda table: table.name)
def test_the_exponential_is_off_by_no_more_than_was_derived(table: InstructionSet) -> None:
    """A quarter of a million numbers down to where it becomes 0, and those next to halves of ln 2: at most 2.2 u."""
    even = np.linspace(-87.3, 0, 2**18 - 2**14, dtype=np.float32)
    halves = np.float32(np.log(2) / 2) * -np.arange(1, 251, 2, dtype=np.float32)
    bits = halves.view(np.uint32)[:, np.newaxis] + np.arange(-65, 66, dtype=np.int64).astype(np.uint32)
    x = np.concatenate([even, bits.view(np.float32).reshape(-1)])
    x = np.concatenate([x, np.zeros(-len(x) % CHUNK, np.float32)])
    memory = {"w": x, "x": np.zeros(1, np.float32), "y": np.empty_like(x)}
    run_compiled(pass_kernel("exponentials", table), memory, len(x) // CHUNK)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(memory["y"] - exact) / exact
    assert error[exact > 2.0**-126].max() <= 2.2 * 2.0**-24
    below = {"w": np.full(CHUNK, -87.7, np.float32), "x": memory["x"], "y": np.ones(CHUNK, np.float32)}
    below["w"][1:5] = -88, -1000, -3e38, -np.inf
    run_compiled(pass_kernel("exponentials", table), below, 1)
    assert not below["y"].any()


# **Every operation**, called with inputs large enough to be split between threads.

Run = Callable[[CppyyBackend], Any]


def calls(scale: int) -> dict[str, Run]:
    """Calls of every operation with tails of all kinds; with 1 small, with more larger ones."""
    x, gain = numbers(5 * scale, 100 * scale + 3), numbers(100 * scale + 3, seed=1)
    gates, ups = numbers(3, 1000 * scale + 1, seed=2), numbers(3, 1000 * scale + 1, seed=3)
    queries, keys, values = numbers(3, 8, 20), numbers(2, 70 * scale, 20, seed=1), numbers(2, 70 * scale, 20, seed=2)
    one, many = numbers(1, 6, 64), numbers(2, 33 * scale + 1, 64, seed=1)
    turned, turn = numbers(3, 2 * scale, 70), rope.rotation(rope.interleaved(70), 10000.0, 5, 3)
    few, rows = bfp.cast(numbers(3, 64), bfp.bfp16(32)), bfp.cast(numbers(41 * scale, 64), bfp.bfp12(32))
    odd = [bfp.cast(numbers(4, 50), bfp.Format(20, bits)) for bits in (5, 12)]
    sums = bfp_dot.dot(few, rows)
    return {
        "blocks.rms_norm": lambda b: b.run("blocks.rms_norm", x, gain, 1e-5),
        "blocks.swiglu": lambda b: b.run("blocks.swiglu", gates, ups),
        "blocks.geglu": lambda b: b.run("blocks.geglu", gates, ups),
        "blocks.clamped_swiglu": lambda b: b.run("blocks.clamped_swiglu", gates, ups, 1.5),
        "blocks.soft_cap": lambda b: b.run("blocks.soft_cap", gates, 1.5),
        "attention.softmax": lambda b: b.run("attention.softmax", gates),
        "attention.attend": lambda b: b.run("attention.attend", queries, keys, values, 68 * scale),
        "attention.attend_shaped": lambda b: b.run(
            "attention.attend_shaped", queries, keys, values, 68 * scale, 0.5, 2.0, numbers(8)
        ),
        "attention.attend, one token": lambda b: b.run("attention.attend", one, many, many),
        "rope.rotate": lambda b: b.run("rope.rotate", turned, turn),
        "bfp.cast": lambda b: b.run("bfp.cast", x, bfp.bfp12(32)).mantissas,
        "bfp.cast, wide": lambda b: b.run("bfp.cast", x, bfp.Format(7, 20, 9)).mantissas,
        "bfp.decode": lambda b: b.run("bfp.decode", rows),
        "bfp.dot": lambda b: b.run("bfp.dot", few, rows).sums,
        "bfp.dot, odd": lambda b: b.run("bfp.dot", *odd).sums,
        "bfp.total": lambda b: b.run("bfp.total", sums),
    }


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """One, two and three threads, with more work than one thread is given."""
    found = []
    for threads in (1, 2, 3):
        with CppyyBackend(threads=threads) as backend:
            found.append({name: call(backend).tobytes() for name, call in calls(20).items()})
    assert found[0] == found[1] == found[2]


def test_instruction_sets_that_round_once_agree_to_the_bit() -> None:
    """Sums do not depend on lanes, so registers of eight and of sixteen lanes give the same bits."""
    fused = [table for table in HERE if table.fused]
    found = []
    for table in fused:
        with CppyyBackend(table.name, threads=1) as backend:
            found.append({name: call(backend).tobytes() for name, call in calls(1).items()})
    assert all(one == found[0] for one in found)


def test_keys_may_lie_anywhere_behind_each_other() -> None:
    """Heads of a cache with room for more tokens lie farther apart than their tokens need. Nothing is copied, and the
    memory between them is not read."""
    rng = np.random.default_rng(0)
    room = np.full((2, 3, 90, 20), np.nan, np.float32)
    room[:, :, :75] = rng.standard_normal((2, 3, 75, 20))
    keys, values = room[0, :, :75], room[1, :, :75]
    queries = numbers(1, 6, 20)
    with CppyyBackend(threads=1) as backend:
        strided = backend._attention_attend(queries, keys, values)
        packed = backend.run("attention.attend", queries, keys.copy(), values.copy())
    assert strided.tobytes() == packed.tobytes()


def test_a_rotation_with_strange_partners_is_refused() -> None:
    """Anyone can make a layout, so its partners are checked before they are used."""
    turn = rope.rotation(rope.half_split(8), 10000.0, 0, 1)
    turn.layout.partner[3] = 8
    with CppyyBackend(threads=1) as backend:
        with pytest.raises(ArgumentError, match="partner"):
            backend.run("rope.rotate", numbers(1, 1, 8), turn)
        short = rope.Rotation(rope.half_split(8), turn.cos, turn.sin[:, :4])
        with pytest.raises(ArgumentError, match="shape of sin"):
            backend.run("rope.rotate", numbers(1, 1, 8), short)


def test_a_closed_backend_says_so() -> None:
    """As with products of matrices."""
    with CppyyBackend(threads=2) as backend:
        backend.run("blocks.swiglu", numbers(1, 8), numbers(1, 8))
    for call in calls(1).values():
        with pytest.raises(UnavailableError, match="closed"):
            call(backend)


def test_attention_of_many_tokens_is_that_of_each() -> None:
    """The last token among many has the bits that it has alone: how work is split changes nothing."""
    queries, keys, values = numbers(130, 4, 32), numbers(2, 130, 32, seed=1), numbers(2, 130, 32, seed=2)
    with CppyyBackend(threads=2) as backend:
        many = backend.run("attention.attend", queries, keys, values)
        alone = backend.run("attention.attend", queries[-1:].copy(), keys, values)
    assert many[-1].tobytes() == alone[0].tobytes()


def test_wide_rows_of_the_norm_are_right() -> None:
    """The sum of squares overflows float32: the row is right, and not zeros."""
    x = np.array([[1e30, -2e30, 3e38, 0, 1e25]], np.float32)
    with CppyyBackend(threads=1) as backend:
        given = backend.run("blocks.rms_norm", x, np.ones(5, np.float32), 1e-5)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(given, wide / np.sqrt(np.mean(wide * wide)), rtol=1e-6)


# **Under sanitizers**: the same headers and kernels in a program whose arrays have exactly their size.

COMPILER = shutil.which("g++")

# A case: its function, then arrays, each after its bytes: numbers, inputs, and results, of which zeros are given.
DRIVER = """
#include <cstdio>
struct Array {
  std::int64_t size;
  std::unique_ptr<char[]> bytes;
  Array() : size(0) {
    if (std::fread(&size, sizeof size, 1, stdin) != 1) std::abort();
    bytes.reset(new char[size]);
    if (std::fread(bytes.get(), 1, size, stdin) != std::size_t(size)) std::abort();
  }
  template <class T> T* as() const { return reinterpret_cast<T*>(bytes.get()); }
  const float* f() const { return as<float>(); }
};

int main() {
  using namespace lowbit::bridge;
  const std::uintptr_t pool = create_pool(2);
  const auto passes = [&](std::initializer_list<lowbit::MicroKernel> list, std::int64_t channels = 0) {
    std::vector<std::uint64_t> kernels;
    for (lowbit::MicroKernel one : list) kernels.push_back(reinterpret_cast<std::uintptr_t>(one));
    return create_kernel_set(pool, kernels.data(), int(kernels.size()), LANES, channels);
  };
  using namespace lowbit::TABLE;
  const std::uintptr_t norm = passes({squares_TABLE, normed_TABLE});
  const std::uintptr_t gates[] = {passes({gated_TABLE}), passes({gelu_gated_TABLE})};
  const std::uintptr_t clamped = passes({clamped_gated_TABLE}), caps = passes({capped_TABLE});
  const std::uintptr_t shares = passes({largest_TABLE, exponentials_TABLE, sums_TABLE, scaled_TABLE});
  const std::uintptr_t turns = passes({rotated_TABLE}), products = passes({block_products_n64b32_TABLE});
  const std::uintptr_t heads = passes({scores_d20_TABLE, largest_TABLE, exponentials_TABLE, sums_TABLE,
                                       weighted_d20cCHANNELS_TABLE, scaled_TABLE, widened_TABLE, capped_TABLE SHARED},
                                      CHANNELS);
  std::int64_t which;
  while (std::fread(&which, sizeof which, 1, stdin) == 1) {
    const Array sizes, a, b, c, d, out, second;
    const std::int64_t* const n = sizes.as<std::int64_t>();
    float* const y = out.as<float>();
    const auto exponents = [](const Array& array) { return array.as<std::int16_t>(); };
    int status = 9;
    if (which == 0) status = rms_norm(norm, a.f(), b.f(), 1e-5f, n[0], n[1], y);
    if (which == 1) status = gated_unit(gates[n[1]], a.f(), b.f(), n[0], y);
    if (which == 2) status = softmax(shares, a.f(), n[0], n[1], y);
    if (which == 3) status = rotate(turns, a.f(), b.as<double>(), c.as<double>(), d.as<std::int64_t>(), n[0], n[1],
                                    n[2], y);
    if (which == 4) status = attend(heads, a.f(), b.f(), c.f(), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], y);
    if (which == 5) status = cast(pool, a.f(), n[0], n[1], n[2], n[3], n[4], int(n[5]), y, exponents(second));
    if (which == 6) status = decode(pool, a.f(), exponents(b), n[0], n[1], n[2], int(n[3]), y);
    if (which == 7) status = dot_bytes(products, a.f(), exponents(b), n[0], c.f(), exponents(d), n[1], 64, 2,
                                       out.as<std::int64_t>(), second.as<std::int32_t>());
    if (which == 8) status = dot(pool, a.f(), exponents(b), n[0], c.f(), exponents(d), n[1], n[2], n[3],
                                 out.as<std::int64_t>(), second.as<std::int32_t>());
    if (which == 9) status = total(pool, a.as<std::int64_t>(), b.as<std::int32_t>(), n[0], n[1], y);
    if (which == 10) status = clamped_unit(clamped, a.f(), b.f(), 1.5f, n[0], y);
    if (which == 11) status = soft_cap(caps, a.f(), 1.5f, n[0], y);
    if (which == 12) status = attend_shaped(heads, a.f(), b.f(), c.f(), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7],
                                            0.5f, 2.0f, d.f(), true, y);
    if (status != lowbit::OK) return 3;
    std::fwrite(out.bytes.get(), 1, out.size, stdout);
    std::fwrite(second.bytes.get(), 1, second.size, stdout);
  }
  for (const std::uintptr_t one : {norm, gates[0], gates[1], clamped, caps, shares, turns, products, heads})
    destroy_kernel_set(one);
  destroy_pool(pool);
}
"""


def driver_of(table: InstructionSet) -> Path:
    """The driver for an instruction set."""
    channels = attention.tile_channels(20, table.lanes)
    kernels: list[ProgramKernel] = [pass_kernel(name, table) for name in PASSES]
    kernels += [attention.scores(20, table), attention.mixed(20, table), block_products(64, 32, table)]
    shared: list[ProgramKernel] = [attention.scores(20, table, 1, 512), attention.mixed(20, table, 1, 512)]
    for queries, ahead in itertools.product(attention.query_counts(table)[1:], (0, 512)):
        shared += [attention.scores(20, table, queries, ahead), attention.mixed(20, table, queries, ahead)]
    source = '#include "blocks.h"\n' + prelude(table) + "".join(kernel.source for kernel in (*kernels, *shared))
    names = "".join(f", {kernel.name}" for kernel in shared)
    source += (
        DRIVER.replace(" SHARED", names)
        .replace("TABLE", table.name)
        .replace("LANES", str(table.lanes))
        .replace("CHANNELS", str(channels))
    )
    return sanitized_programs.compiled(source, str(COMPILER))


def request(which: int, sizes: list[int], inputs: list[Array], results: list[Array]) -> bytes:
    """A case as the driver reads it."""
    none = np.zeros(0, np.float32)
    filled = [*inputs, *[none] * (4 - len(inputs)), *results, *[none] * (2 - len(results))]
    arrays = [np.array(sizes, np.int64), *(np.ascontiguousarray(array) for array in filled)]
    return np.int64(which).tobytes() + b"".join(np.int64(array.nbytes).tobytes() + array.tobytes() for array in arrays)


def requests(backend: CppyyBackend) -> list[tuple[bytes, bytes]]:
    """Cases with tails, and what the backend answers."""
    found: list[tuple[bytes, bytes]] = []

    def add(which: int, sizes: list[int], inputs: list[Array], *results: Array) -> None:
        empty = [np.zeros_like(result) for result in results]
        found.append((request(which, sizes, inputs, empty), b"".join(result.tobytes() for result in results)))

    for n in (1, 63, 64, 65, 200):
        x, y = numbers(3, n), numbers(3, n, seed=1)
        add(0, [3, n], [x, y[0]], backend.run("blocks.rms_norm", x, y[0].copy(), float(np.float32(1e-5))))
        add(1, [3 * n, 0], [x, y], backend.run("blocks.swiglu", x, y))
        add(1, [3 * n, 1], [x, y], backend.run("blocks.geglu", x, y))
        add(10, [3 * n], [x, y], backend.run("blocks.clamped_swiglu", x, y, 1.5))
        add(11, [3 * n], [x], backend.run("blocks.soft_cap", x, 1.5))
        add(2, [3, n], [x], backend.run("attention.softmax", x))
        for format in (bfp.bfp12(32), bfp.Format(7, 12), bfp.Format(20, 25, 10)):
            blocks = backend.run("bfp.cast", x, format)
            width = [blocks.mantissas.itemsize]
            sizes = [3, n, format.block, format.mantissa, format.reach, *width]
            add(5, sizes, [x], blocks.mantissas, blocks.exponents)
            decoded = backend.run("bfp.decode", blocks)
            add(6, [3, n, format.block, *width], [blocks.mantissas, blocks.exponents], decoded)
            wide, dotted = blocks.mantissas.astype(np.int32), backend.run("bfp.dot", blocks, blocks)
            add(8, [3, 3, n, min(n, format.block)], [wide, blocks.exponents] * 2, dotted.sums, dotted.exponents)
            totals = [dotted.sums, dotted.exponents], backend.run("bfp.total", dotted)
            add(9, [9, dotted.sums.shape[2]], *totals)
    for d in (2, 64, 70):
        x, turn = numbers(2, 3, d), rope.rotation(rope.interleaved(d), 10000.0, 3, 2)
        add(3, [2, 3, d], [x, turn.cos, turn.sin, turn.layout.partner], backend.run("rope.rotate", x, turn))
    for tokens, length, window in ((1, 1, 0), (1, 64, 0), (2, 65, 0), (3, 130, 66)):
        q, k, v = numbers(tokens, 8, 20), numbers(2, length, 20, seed=1), numbers(2, length, 20, seed=2)
        sizes = [tokens, 8, 2, length, 20, window, length * 20, length * 20]
        add(4, sizes, [q, k, v], backend.run("attention.attend", q, k, v, window or None))
        sinks = numbers(8, seed=3)
        shaped = backend.run("attention.attend_shaped", q, k, v, window or None, 0.5, 2.0, sinks)
        add(12, sizes, [q, k, v, sinks], shaped)
    a = bfp.cast(numbers(3, 64), bfp.bfp16(32))
    for rows in (1, 8, 30):
        b = bfp.cast(numbers(rows, 64), bfp.bfp12(32))
        dotted = backend.run("bfp.dot", a, b)
        add(7, [3, rows], [a.mantissas, a.exponents, b.mantissas, b.exponents], dotted.sums, dotted.exponents)
    return found


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("table", KINDS, ids=lambda table: table.name)
def test_every_access_is_inside_its_array(table: InstructionSet) -> None:
    """Nothing is read or written outside, nothing is undefined, and the bits are those of cppyy's compiler. An argument
    with one float less than stated is detected."""
    driver = driver_of(table)
    with CppyyBackend(table.name, threads=1) as backend:
        cases = requests(backend)
    result = sanitized_programs.answer(driver, b"".join(case for case, _ in cases))
    assert result.returncode == 0, result.stderr.decode()[:2000]
    assert result.stdout == b"".join(expected for _, expected in cases)
    x = numbers(3, 65)
    short = sanitized_programs.answer(driver, request(2, [3, 65], [x.reshape(-1)[:-1]], [x]))
    assert short.returncode != 0 and b"AddressSanitizer" in short.stderr
