"""How matrices lie in a device's memory: every word has its place, every byte is counted, and the way back is exact."""

import numpy as np
import pytest

from lowbit.errors import ArgumentError
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix, ScaleDtype, dequantize, quantize
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, unpack
from lowbit_cuda.kernels.layouts import DenseLayout, MatrixLayout, from_panels, to_panels
from lowbit_cuda.port import Memory
from lowbit_gpusim.meanings import codes_of


def drawn(bits: int, rows: int, columns: int, group: int, convention: Convention, dtype: ScaleDtype) -> QuantizedMatrix:
    weights = np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=group, convention=convention, scale_dtype=dtype)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 96])
def test_a_blob_has_the_matrix(bits: int, dtype: ScaleDtype, convention: Convention, columns: int) -> None:
    """Applied and restored, words, scales and zeros are what they were, also where the last group and panel are short;
    the packed has W (bK/8 + 2cG) bytes, W being whole panels, and each part begins at a multiple of 64."""
    unit = CODES_PER_UNIT[bits]
    matrix = drawn(bits, 5 * unit, columns, 2 * unit, convention, dtype)
    layout = MatrixLayout.of(matrix)
    packed = layout.apply(matrix)
    back = layout.restore(packed)
    for name in ("words", "scales", "zeros"):
        assert (getattr(back, name) == getattr(matrix, name)).all()
        assert getattr(back, name).dtype == getattr(matrix, name).dtype
    width, scale = -(-columns // 32) * 32, 2 if dtype == "float16" else 4
    assert packed.nbytes == layout.nbytes == width * (bits * 5 * unit // 8 + 2 * scale * 3)
    assert all(offset % 64 == 0 for offset in layout.offsets)


def test_where_a_word_lies() -> None:
    """Word row r of column c is at panel c/32, row r, place c mod 32; columns that fill the last panel up are zeros."""
    matrix = drawn(4, 24, 70, 24, "minimum", "float16")
    words = MatrixLayout.of(matrix).apply(matrix)[: 3 * 96 * 4].view(np.uint32).reshape(3, 3, 32)
    for row, column in ((0, 0), (2, 31), (1, 32), (2, 69)):
        assert words[column // 32, row, column % 32] == matrix.words[row, column]
    assert (words[2, :, 6:] == 0).all()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("columns", [1, 32, 45, 64])
def test_panels_are_a_permutation(rows: int, columns: int) -> None:
    """Every number is there once, and comes back to where it was."""
    matrix = np.arange(1, rows * columns + 1).reshape(rows, columns)
    panels = to_panels(matrix)
    assert sorted(panels[panels > 0]) == list(range(1, rows * columns + 1))
    assert (from_panels(panels, rows, columns) == matrix).all()


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_those_of_the_specification(bits: int) -> None:
    """For any words, the quick way to codes is `packing.unpack`."""
    words = np.random.default_rng(bits).integers(0, 2**32, (6, 5), np.uint32)
    assert (codes_of(words, bits) == unpack(words, bits)).all()


def test_spans_of_a_blob() -> None:
    """What a launch is given are the parts of the packed, and together they are all of it."""
    matrix = drawn(3, 96, 33, 32, "zero_point", "float32")
    layout = MatrixLayout.of(matrix)
    spans = layout.spans(Memory("experts", 4096 + layout.nbytes, "device").span(4096, layout.nbytes), "gate_")
    assert list(spans) == ["gate_words", "gate_scales", "gate_zeros"]
    places = [(span.offset - 4096, span.nbytes) for span in spans.values()]
    assert [start for start, _ in places] == list(layout.offsets)
    assert sum(size for _, size in places) == layout.nbytes
    assert layout.numbers == {"rows": 96, "columns": 33, "group_size": 32, "zero_point": 1}


@pytest.mark.parametrize(("bits", "group"), [(2, 8), (3, 16), (4, 12), (8, 2), (4, 0), (4, 128)])
def test_groups_that_end_inside_a_unit_are_refused(bits: int, group: int) -> None:
    """A thread's words belong to one group; the error names the argument and what is allowed."""
    with pytest.raises(ArgumentError, match="group_size"):
        MatrixLayout(bits, 96, 8, group)


def test_other_blobs_and_matrices_are_refused() -> None:
    """A packed of another length, a matrix of another shape, and a packed whose numbers are no matrix."""
    matrix = drawn(4, 64, 8, 32, "minimum", "float32")
    layout = MatrixLayout.of(matrix)
    with pytest.raises(ArgumentError, match="packed"):
        layout.restore(np.zeros(layout.nbytes - 1, np.uint8))
    with pytest.raises(ArgumentError, match="scales"):
        layout.restore(np.zeros(layout.nbytes, np.uint8))
    with pytest.raises(ArgumentError, match="matrix"):
        MatrixLayout(4, 64, 9, 32, "float32").apply(matrix)
    with pytest.raises(ArgumentError, match="rows"):
        MatrixLayout(4, 63, 8, 8)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_dense_matrix_by_columns(dtype: ScaleDtype) -> None:
    """A column is one run of memory; what comes back is the weight, rounded once if it is float16."""
    weights = np.random.default_rng(0).standard_normal((16, 5)).astype(np.float32)
    layout = DenseLayout(16, 5, dtype)
    packed = layout.apply(weights)
    assert packed.nbytes == layout.nbytes
    assert (packed.view(dtype)[16:32] == weights[:, 1].astype(dtype)).all()
    assert (layout.restore(packed) == weights.astype(dtype)).all()


def test_dense_matrices_that_are_refused() -> None:
    """Rows that no eight divide, and weights beyond float16."""
    with pytest.raises(ArgumentError, match="rows is 12; allowed: a multiple of 8"):
        DenseLayout(12, 5)
    with pytest.raises(ArgumentError, match="float16"):
        DenseLayout(8, 1, "float16").apply(np.full((8, 1), 1e6, np.float32))


def test_dequantized_after_the_way_there_and_back() -> None:
    """The weights are the same to the bit."""
    matrix = drawn(2, 64, 40, 16, "minimum", "float16")
    layout = MatrixLayout.of(matrix)
    assert (dequantize(layout.restore(layout.apply(matrix))) == dequantize(matrix)).all()
