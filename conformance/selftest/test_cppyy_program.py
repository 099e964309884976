"""The generated kernels: one program, which the interpreter and every compiler carry out with the same bits."""

import dataclasses
import doctest
import itertools

import numpy as np
import pytest

from lowbit import interpreter
from lowbit.affine import CONVENTIONS, Floats, QuantizedMatrix, quantize
from lowbit.errors import ArgumentError
from lowbit.linear import qgemv
from lowbit.packing import BITS, CODES_PER_UNIT
from lowbit.vector import UNUSED, VOCABULARY
from lowbit_cppyy import CppyyBackend, compiler, kernel_source, kernels, processor
from lowbit_cppyy.isa import AVX2, PLAIN, TABLES, InstructionSet
from lowbit_cppyy.kernels import OPERATIONS, PANEL, Kernel, Operation
from lowbit_cppyy.layout import PanelLayout
from lowbit_cppyy.lowering import function

HERE = [table for table in TABLES.values() if all(map(processor.has, table.requires))]
ALL = [Kernel(operation, bits, table) for table in TABLES.values() for bits in BITS for operation in OPERATIONS]


def group_sum(x: Floats) -> np.float32:
    """The sum of a group in the order of ``cpp/linear.h``: eight running sums, then a tree."""
    sums = np.zeros(8, np.float32)
    for start in range(0, len(x), 8):
        part = x[start : start + 8]
        sums[: len(part)] += part
    half = sums[:4] + sums[4:]
    return np.float32((half[0] + half[2]) + (half[1] + half[3]))


def laid_out(x: Floats, layout: PanelLayout, rows: int) -> Floats:
    """Rows of x as a kernel reads them; rows that do not exist are zeros."""
    filled = np.zeros((rows, layout.rows), np.float32)
    filled[: len(x)] = x
    parts = []
    for group, units in enumerate(layout.units):
        values = filled[:, group * layout.group_size : (group + 1) * layout.group_size]
        padded = np.zeros((units * layout.unit_codes + 1, rows), np.float32)
        padded[: values.shape[1]] = values.T
        padded[-1] = [group_sum(row) for row in values]
        parts.append(padded)
    return np.concatenate(parts)


def interpreted(matrix: QuantizedMatrix, x: Floats, operation: Operation, table: InstructionSet) -> Floats:
    """``Y = X W`` for as many rows of x as the kernel takes at once, by the interpreter alone."""
    kernel, layout = Kernel(operation, matrix.bits, table), PanelLayout.of(matrix, PANEL)
    activations = laid_out(x, layout, kernel.rows)
    sizes: interpreter.Sizes = {"groups": layout.groups, "units": layout.units}
    panels = []
    for panel in layout.apply(matrix):
        tile = np.full((kernel.rows, PANEL), np.nan, np.float32)
        for j in range(0, PANEL, kernel.columns):
            memory = {"w": panel.reshape(-1)[j:], "x": activations.reshape(-1), "y": tile.reshape(-1)[j:]}
            interpreter.run(kernel.program, memory, sizes, fused=table.fused)
        panels.append(tile)
    return np.concatenate(panels, axis=1)[: len(x), : matrix.columns]


def some_case(bits: int, rows: int, columns: int, group_size: int) -> tuple[QuantizedMatrix, Floats]:
    random = np.random.default_rng(rows * columns + group_size)
    weights = random.standard_normal((rows, columns)).astype(np.float32)
    matrix = quantize(weights, bits=bits, group_size=group_size, convention=CONVENTIONS[group_size % 2])
    return matrix, random.standard_normal((4, rows)).astype(np.float32)


# The program means what equation 2 says.


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("bits", BITS)
def test_program_computes_equation_2_exactly_on_lattice_inputs(bits: int, operation: Operation) -> None:
    """With small integers every sum is exact, so the interpreted program and the reference agree to the bit."""
    rows = 3 * CODES_PER_UNIT[bits]
    random = np.random.default_rng(bits)
    words = random.integers(0, 2**32, (rows * bits // 32, 19), np.uint32)
    scales = random.choice(np.array([0.25, 0.5, 1, 2], np.float32), (4, 19))
    zeros = random.integers(-4, 5, (4, 19)).astype(np.float32)
    matrix = QuantizedMatrix(words, scales, zeros, bits, rows, -(-rows // 4), "minimum")
    x = random.integers(-3, 4, (Kernel(operation, bits, PLAIN).rows, rows)).astype(np.float32)
    expected = np.stack([qgemv(row, matrix) for row in x])
    np.testing.assert_array_equal(interpreted(matrix, x, operation, PLAIN), expected)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
@pytest.mark.parametrize("bits", BITS)
def test_compiled_kernel_has_the_bits_of_the_interpreted_program(bits: int, table: InstructionSet) -> None:
    """Random inputs, tails in N and in groups: not one rounding differs, for one row of x and for four."""
    rows = 2 * CODES_PER_UNIT[bits]
    with CppyyBackend(table.name, threads=2) as backend:
        for columns, group_size in ((PANEL + 5, rows), (9, 3), (1, 1), (PANEL, 20)):
            matrix, x = some_case(bits, rows, columns, min(group_size, rows))
            prepared = backend.prepare(matrix)
            assert prepared.qgemv(x[0]).tobytes() == interpreted(matrix, x[:1], "qgemv", table).tobytes()
            assert prepared.qgemm(x).tobytes() == interpreted(matrix, x, "qgemm", table).tobytes()


def test_instruction_sets_differ_in_nothing_but_the_fused_multiply_add() -> None:
    """A plain table whose `fmadd` rounds once makes every AVX2 program give the plain kernel's bits, and conversely."""
    once = dataclasses.replace(PLAIN, fused=True)
    matrix, x = some_case(4, 64, 40, 24)
    np.testing.assert_array_equal(interpreted(matrix, x, "qgemm", once), interpreted(matrix, x, "qgemm", AVX2))
    assert (interpreted(matrix, x, "qgemm", PLAIN) != interpreted(matrix, x, "qgemm", AVX2)).any()


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """One row of x goes through another kernel than four, and four through the same as five."""
    matrix, _ = some_case(3, 96, 70, 40)
    x = np.random.default_rng(7).standard_normal((70, 96)).astype(np.float32)
    with CppyyBackend(threads=2) as backend:
        prepared = backend.prepare(matrix)
        alone = np.stack([prepared.qgemv(row) for row in x])
        for count in (1, 2, 3, 4, 5, 8, 63, 64, 65, 69, 70):
            np.testing.assert_array_equal(prepared.qgemm(x[:count]), alone[:count])


# The text.


def test_every_table_has_a_function_for_every_word() -> None:
    """All but `reduce_add`, which no kernel uses, because lanes are columns (errata Q5)."""
    for table in TABLES.values():
        assert set(table.words) == set(VOCABULARY) - set(UNUSED), table.name


@pytest.mark.parametrize("bits", BITS)
def test_the_body_reads_the_same_for_every_instruction_set(bits: int) -> None:
    """Only the name, the namespace and the attribute differ between two tables of equally many lanes."""
    kernel = Kernel("qgemv", bits, AVX2)
    bodies = [
        function(kernel.program, table, "name", "summary").split("{\n", 2)[2].rsplit("}", 1)[0]
        for table in TABLES.values()
    ]
    assert len(set(bodies)) == 1
    assert "fmadd(x_0, l_0, acc_0_0)" in bodies[0]


def test_emission_is_deterministic_and_names_are_unique() -> None:
    for kernel in ALL:
        again = Kernel(kernel.operation, kernel.bits, kernel.table)
        assert again.source == kernel.source and again.name in kernel.source
    assert len({kernel.name for kernel in ALL}) == len(ALL)


def test_kernel_source_shows_what_is_compiled_and_refuses_what_does_not_exist() -> None:
    assert Kernel("qgemv", 3, PLAIN).source in kernel_source(bits=3, isa="plain")
    wrong: list[dict[str, object]] = [
        {"bits": 5},
        {"bits": 4, "isa": "avx9"},
        {"bits": 4, "operation": "conv"},
    ]
    for arguments in wrong:
        with pytest.raises(ArgumentError):
            kernel_source(**arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_a_kernel_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends and two matrices of one width share the kernels, whatever their groups."""
    defined: list[str] = []
    runtime = compiler.runtime()
    original = runtime._define

    def define(source: str) -> None:
        defined.append(source)
        original(source)

    monkeypatch.setattr(runtime, "_define", define)
    for group_size, _ in itertools.product((8, 16, 5), range(2)):
        with CppyyBackend("plain", threads=1) as backend:
            backend.prepare(some_case(4, 16, 3, group_size)[0])
    assert len(defined) == len(set(defined)) <= 5  # a prelude, two kernels with a line each to find them


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(kernels, raise_on_error=False).failed == 0
