"""The kernels of stored products: programs mean what compiled kernels do, on every instruction set of this machine."""

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_runs import HERE, assert_same_bits
from stored_runs import CASES, CASTS, interpreted, kernel_for, some_activations, some_cast, some_stored

from lowbit.arrays import F32, Array
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.errors import NotDeclaredError
from lowbit.numbers.floats import rounded
from lowbit.tensor_formats.stored import Result, Stored, quantize, stored
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.recipe import Purpose
from lowbit_cppyy.stored import linear
from lowbit_cppyy.stored.formats import GGUF, PARTS, structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.linear import PANEL, bytes_of
from lowbit_cppyy.stored.parts import Parts, Structure
from lowbit_cppyy.stored.recipe import TABULAR, Method, StoredRecipe, default_recipe


def rows_of(x: Array | Stored, kernel: StoredKernel, parts: Parts) -> list[tuple[Array, Array]]:
    """Each row of activations in the order of the matrix, as integers with a scale for each of them or as floats."""
    scales = values = x if isinstance(x, np.ndarray) else bytes_of(x)[0]
    if isinstance(x, Stored):
        _, own, each = bytes_of(x)
        scales = np.repeat(own.reshape(len(values), -1), each, axis=1)
        values = values if kernel.recipe.integer else values * scales
    order = slice(None) if parts.order is None else parts.order
    return [(row[order], own[order]) for row, own in zip(values, scales, strict=True)]


def purpose_of(count: int, cast: bool) -> Purpose:
    """The purpose for one row of x, for 4 and for 16."""
    if cast:
        return "integer vector" if count == 1 else "integer rows"
    of_floats: dict[int, Purpose] = {1: "vector", 4: "rows", 16: "many rows"}
    return of_floats[count]


@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_are_their_programs(case: str) -> None:
    """One row, and four or sixteen, interpreted on numpy and compiled, the same bits; instruction sets take turns."""
    name, cast = case.split()[0], case.endswith("cast")
    weights, turn = some_stored(name), CASES.index(case)
    parts = PARTS[name](weights)
    for place, count in enumerate((1, (4, 16)[turn // 2 % 2])):
        table = HERE[(turn + place * (1 + turn // len(HERE))) % len(HERE)]
        x = some_cast(count, 256) if cast else some_activations(count, 256)
        kernel = kernel_for(parts, table, purpose_of(count, cast), x)
        with CppyyBackend(isa=table.name, threads=1) as backend:
            given = product(backend.prepare_stored(weights), x)
        rows, step = rows_of(x, kernel, parts), kernel.recipe.rows
        tiles = [interpreted(kernel, parts, rows[n : n + step], table.fused) for n in range(0, count, step)]
        assert_same_bits(given, np.concatenate(tiles))


METHODS: tuple[Method, ...] = ("shift", "fold", "subnormal")


def methods_of(structure: Structure, lanes: int) -> tuple[Method, ...]:
    """The methods for codes of floats with registers of this many lanes."""
    return (*METHODS, "table") if structure.bits in TABULAR["vector"] and lanes == 16 else METHODS


def with_method(
    method: Method, structure: Structure, table: InstructionSet, purpose: Purpose, panel: int
) -> StoredRecipe:
    """The default recipe for one row of float32, with another method."""
    recipe = default_recipe(structure, table, purpose, panel)
    return replace(recipe, method=method) if purpose == "vector" else recipe


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
@pytest.mark.parametrize(
    "name", ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "gptq-v2")
)
def test_methods_change_no_bit(name: str, table: InstructionSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits by each method for one row, whether or not this processor uses it; also with an activation that
    powers of two would round, or would make infinite, which `fold` and `subnormal` leave to `shift`."""
    weights, x = some_stored(name), some_activations(1, 256)[0]
    given = dict[Method, list[F32]]()
    methods = methods_of(structure_of(name, 4), table.lanes)
    for method in methods:
        monkeypatch.setattr(linear, "default_recipe", partial(with_method, method))
        with CppyyBackend(isa=table.name, threads=1) as backend:
            prepared = backend.prepare_stored(weights)
            given[method] = []
            for extreme in (1.0, 2.0**-110, 2.0**-77, 2.0**29):
                x[7] = extreme
                given[method].append(prepared.gemv(x))
    for other in methods[1:]:
        for first, second in zip(given[methods[0]], given[other], strict=True):
            assert_same_bits(first, second)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_halves_of_a_table_survive_the_least_exponent(table: InstructionSet) -> None:
    """MXFP4 with one scale of 2^-127, whose scales become float32: its 0.5 and 1.5 are numbers of the table still."""
    blocks = some_stored("gguf-mxfp4").tensors[0].reshape(77, -1, 17).copy()
    blocks[..., 0], blocks[3, 1, 0] = 127, 0  # scales of 1, and one that leaves nothing in a sum of the others
    weights = Stored("gguf-mxfp4", 256, 77, (blocks.reshape(77, -1),))
    x = np.where(np.arange(256) % 3, 127, -127).astype(np.float32)[np.newaxis]
    with CppyyBackend(isa=table.name, threads=1) as backend:
        prepared = backend.prepare_stored(weights)
        for given in (x, quantize(x, "q8_0")):
            np.testing.assert_array_equal(product(prepared, given), (x @ weights.values).astype(np.float32))


def product(prepared: PreparedStored, x: Array | Stored) -> Array:
    """By the operation that is meant for such activations."""
    if isinstance(x, Stored):
        return prepared.gemm_cast(x)
    return prepared.gemv(x[0])[np.newaxis] if len(x) == 1 else prepared.gemm(x)


@pytest.mark.parametrize("case", CASES)
def test_rows_and_threads_change_no_bit(case: str) -> None:
    """Each of thirty rows alone, beside the others, and with three threads."""
    name, cast = case.split()[0], case.endswith("cast")
    weights, x = some_stored(name, 512, 300), some_activations(30, 512)
    with CppyyBackend(threads=1) as one, CppyyBackend(threads=3) as three:
        prepared = [backend.prepare_stored(weights) for backend in (one, three)]
        products: list[Any] = [each.gemm_cast if cast else each.gemm for each in prepared]
        rows = [x, *x[:, np.newaxis]]
        given = [quantize(row, "q8_0") for row in rows] if cast else rows
        together = [multiply(given[0]) for multiply in products]
        alone = np.concatenate([products[0](row) for row in given[1:]])
    assert_same_bits(together[0], together[1])
    assert_same_bits(together[0], alone)


@pytest.mark.parametrize("name", CASTS)
def test_scales_of_activations_may_span_any_rows(name: str) -> None:
    """32 rows, 256 or all of them, with weights of 32 and of 256, and of 64 in any order: within a few roundings."""
    with CppyyBackend(threads=1) as backend:
        for format in ("q4_0", "q6_k", "iq4_nl", "gptq-v2", "awq-gemm"):
            weights = some_stored(format, 512)
            x = some_cast(3, 512, name)
            given = backend.prepare_stored(weights).gemm_cast(x).astype(np.float64)
            sizes = np.abs(x.values.T) @ weights.terms.magnitudes
            assert (np.abs(given - x.values.T @ weights.values) <= 2.0**-20 * sizes).all()


# **Types.** A matrix with a single 1 gives each activation back, and an activation of 1 each weight.


def with_each_upper_half() -> F32:
    """Float32 numbers: each upper half beside a lower half of its own."""
    upper = np.arange(65536, dtype=np.uint32)
    return (upper << np.uint32(16) | upper * np.uint32(40503) % np.uint32(65536)).view(np.float32)


def one_of_each(format: str = "q8_0") -> Stored:
    scale, code = {"q8_0": ([0, 60], 1), "gguf-mxfp4": ([127], 2)}[format]  # 1 in float16, and in E8M0
    blocks = np.zeros_like(quantize(np.zeros((1, 32), np.float32), format).tensors[0])
    blocks[0, : len(scale)], blocks[0, len(scale)] = scale, code
    return stored(format, 32, 1, {"blocks": blocks})


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_every_weight_is_read(name: str, table: InstructionSet) -> None:
    """All finite numbers of a type, subnormal ones included, by the kernels for one row and for several, and for
    activations of 8 bits; of float32 those with each upper half, and lower halves of all kinds."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    numbers = np.arange(65536, dtype=np.uint16).view(dtype) if dtype.itemsize == 2 else with_each_upper_half()
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    x, wanted = np.zeros((5, 2), np.float32), numbers.astype(np.float32)
    x[:, 1] = 1
    weights = Stored(name, 2, len(numbers), (np.tile(numbers[:, np.newaxis], 2),))
    with CppyyBackend(isa=table.name, threads=1) as backend:
        prepared = backend.prepare_stored(weights)
        for given in (x[:1], x, quantize(x, "int8-token")):
            for row in product(prepared, given):
                np.testing.assert_array_equal(row, wanted)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_read(name: str) -> None:
    """All 65536 of a type, NaN and infinities included, become the float32 that they are."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.zeros((65536, 32), dtype)
    x[:, 0] = np.arange(65536, dtype=np.uint16).view(dtype)
    with CppyyBackend(threads=1) as backend:
        given = backend.prepare_stored(one_of_each()).gemm(x)[:, 0]
    expected = x[:, 0].astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(given[finite], expected[finite])
    assert not np.isfinite(given[~finite]).any()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_results_are_rounded_once_to_nearest(name: Result) -> None:
    """Every finite number of a type, the midpoints between them, and what lies a bit beside these."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    exact = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    beyond = np.array([65519.9, 65520, 65536, 1e38, 3.4e38, -3.4e38], np.float32)
    values = np.concatenate([exact, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), beyond])
    x = np.zeros((len(values), 32), np.float32)
    x[:, 0] = values
    with CppyyBackend(threads=1) as backend, np.errstate(over="ignore"):
        given = backend.prepare_stored(one_of_each()).gemm(x, name)[:, 0]
        expected = rounded(values.astype(np.float64), name)
    np.testing.assert_array_equal(given.astype(np.float32), expected.astype(np.float32))


# **What is not declared, and what is too small.**


@pytest.mark.parametrize("format", ["q8_0", "gguf-mxfp4"])
@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_activations_too_small_for_powers_of_two_are_not_rounded(table: InstructionSet, format: str) -> None:
    """Subnormal ones are multiplied as they are, by a kernel that shifts; one row and several."""
    with CppyyBackend(isa=table.name, threads=1) as backend:
        prepared = backend.prepare_stored(one_of_each(format))
        x = np.zeros((1, 32), np.float32)
        x[0, 0] = 3 * 2.0**-149
        assert prepared.gemm(x)[0, 0] == x[0, 0]
        assert prepared.gemv(x[0])[0] == x[0, 0]


def test_other_formats_are_refused_by_name() -> None:
    """One without a kernel, and activations that are not bytes with scales."""
    with CppyyBackend(threads=1) as backend:
        with pytest.raises(NotDeclaredError, match=r"does not declare linear\.gemv for format nvfp4"):
            backend.prepare_stored(some_stored("nvfp4"))
        prepared = backend.prepare_stored(some_stored("q4_0"))
        with pytest.raises(NotDeclaredError, match=r"linear\.gemm_cast for activations mxint8"):
            prepared.gemm_cast(some_cast(1, 256, "mxint8"))


def test_what_was_prepared_keeps_its_own_copy() -> None:
    """The arrays of the matrix may be written to afterwards."""
    weights = some_stored("q4_k")
    with CppyyBackend(threads=1) as backend:
        prepared, x = backend.prepare_stored(weights), some_activations(1, 256)[0]
        before = prepared.gemv(x)
        weights.tensors[0][:] = 0
        assert_same_bits(prepared.gemv(x), before)


def test_every_structure_has_a_kernel_of_each_method() -> None:
    """The slower methods are kernels too: `shift`, `fold`, `subnormal` and `table`; `high` and `bytes` on wide
    registers."""
    table = HERE[0]
    for name in GGUF:
        structure = GGUF[name].structure
        recipe = default_recipe(structure, table, "vector", PANEL)
        methods: tuple[Method, ...] = (
            ("high", "bytes") if structure.values == "table" else methods_of(structure, table.lanes)
        )
        for method in methods:
            assert StoredKernel(replace(recipe, method=method), table).program.lanes == table.lanes
