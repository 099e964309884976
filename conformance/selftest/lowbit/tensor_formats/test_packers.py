"""Files that the owners of formats wrote, number by number.

``data/write.py`` made them: it drew weights that each format holds exactly, and kept them as ``values``.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lowbit.arrays import Array
from lowbit.tensor_formats.bitsandbytes import dynamic_map
from lowbit.tensor_formats.stored import dequantize, stored

DATA = Path(__file__).parent / "data"


def written(name: str) -> dict[str, Array]:
    with np.load(DATA / f"{name}.npz") as found:
        return dict(found)


def read(name: str, values: Array, tensors: dict[str, Array], **options: int) -> Array:
    """The numbers of a matrix as large as these values."""
    rows, columns = values.shape
    return stored(name, rows, columns, tensors, **options).values


@pytest.mark.parametrize("name", ["awq-gemm-32", "awq-gemv-32", "awq-gemv-64"])
def test_autoawq(name: str) -> None:
    """AutoAWQ's `from_linear`, both layouts; the arrays of gemv are padded."""
    tensors = written(name)
    values = tensors.pop("values")
    layout, group = name.rsplit("-", 1)
    assert np.array_equal(read(layout, values, tensors, group_size=int(group)), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gptq-v1", "gptq-v1-wrapped"])
def test_autogptq(name: str, bits: int) -> None:
    """AutoGPTQ's `pack`, with rows of groups scattered."""
    tensors = written(f"gptq-v1-{bits}")
    values = tensors.pop("values")
    assert np.array_equal(read(name, values, tensors, bits=bits, group_size=32), values)


@pytest.mark.parametrize(("name", "zero"), [("gptq-v1", 16), ("gptq-v1-wrapped", 0), ("gptq-v2", 15)])
def test_a_stored_zero_of_15(name: str, zero: int) -> None:
    """What kernels of the field do not agree about; the neighbouring columns are not touched."""
    tensors = written("gptq-v1-4")
    del tensors["values"]
    tensors["scales"] = np.ones_like(tensors["scales"])
    tensors["qweight"] = np.zeros_like(tensors["qweight"])
    tensors["qzeros"] = np.full_like(tensors["qzeros"], 0x07F7F7F7)
    values = stored(name, 64, 32, tensors, bits=4, group_size=32).values
    seven = 7 if name == "gptq-v2" else 8
    assert (values == np.tile([-seven, -zero, -seven, -zero, -seven, -zero, -seven, -(seven - 7)], 4)).all()


@pytest.mark.parametrize(("name", "blocksize"), [("nf4", 64), ("fp4", 32), ("nf4-double", 64), ("fp4-double", 32)])
def test_bitsandbytes(name: str, blocksize: int) -> None:
    """Its `dequantize_4bit` rounds each weight to float32 once; the last blocks are short, and blocks cross rows.

    Of matrices with more than 256 blocks every fifth column is kept.
    """
    tensors = written(name)
    values = tensors.pop("values")
    rows = tensors["weight"].size * 2 // 29
    given = stored(name, rows, 29, tensors, blocksize=blocksize)
    assert np.array_equal(dequantize(given)[:, :: 5 if "double" in name else 1], values)


def test_the_dynamic_map() -> None:
    """`create_dynamic_map`, to the bit."""
    assert np.array_equal(dynamic_map(), written("nf4-double")["nested_quant_map"])


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq(axis: int, bits: int) -> None:
    """`BitPack` at every width along either axis; with 3 bits the last slabs are padding."""
    tensors = written(f"hqq-axis{axis}-{bits}")
    values = tensors.pop("values")
    name = f"hqq-axis{axis}" + "-3bit" * (bits == 3)
    options = {} if bits == 3 else {"bits": bits}
    assert np.array_equal(read(name, values, tensors, group_size=32, **options), values)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_with_quantised_scales(axis: int, bits: int) -> None:
    """`Quantizer.quantize` of weights, of their scales and of their zeros."""
    tensors = written(f"hqq-axis{axis}-{bits}-meta")
    values = tensors.pop("values")
    name, options = f"hqq-axis{axis}-meta", {"bits": bits}
    if bits == 3:
        name, options = f"hqq-axis{axis}-3bit-meta", {}
    given = read(name, values, tensors, group_size=16, scale_group=32, **options)
    assert np.array_equal(given.astype(np.float32), values)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", ["matmulnbits", "matmulnbits-symmetric"])
def test_onnx_runtime(name: str, bits: int) -> None:
    """The operator's product with the identity; the last block is short."""
    tensors = written(f"{name}-{bits}")
    values = tensors.pop("values")
    assert np.array_equal(read(name, values, tensors, bits=bits, block_size=32), values)


def test_marlin() -> None:
    """`Layer.pack`, with several groups and with one."""
    tensors = written("marlin-grouped")
    values = tensors.pop("values")
    assert np.array_equal(read("marlin", values, tensors, group_size=32), values)
    tensors = written("marlin-channel")
    values = tensors.pop("values")
    assert np.array_equal(read("marlin", values, tensors, group_size=32), values)
    assert np.array_equal(read("marlin-channel", values, tensors), values)


@pytest.mark.parametrize("name", ["int4-opaque-avx512", "int4-opaque-avx2"])
def test_int4_on_cpus(name: str) -> None:
    """PyTorch's packer and its product with the identity; 80 columns leave the last block short."""
    tensors = written(name)
    values = tensors.pop("values")
    tensors["scale_and_zero"] = tensors["scale_and_zero"].view(ml_dtypes.bfloat16)
    assert np.array_equal(read(name, values, tensors, group_size=32), values)


def test_int4_on_cuda() -> None:
    """Words packed thread by thread, as PyTorch's kernel for CUDA does, for a matrix of 200 × 13 with padding."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (16, 1024))
    words = np.zeros((2, 8, 32, 4), np.uint32)
    for tile, outer, thread, inner in np.ndindex(words.shape):
        for pair in range(4):
            first = outer * 128 + inner * 32 + 2 * (thread % 4) + 8 * pair
            even, odd = codes[8 * tile + thread // 4, first : first + 2]
            words[tile, outer, thread, inner] |= even << 4 * pair | odd << 4 * (pair + 4)
    numbers = rng.integers(-64, 64, (8, 16, 2)).astype(ml_dtypes.bfloat16)
    tensors = {"qdata": words.view(np.int32), "scale_and_zero": numbers}
    given = stored("int4-tile-packed", 200, 13, tensors, group_size=128).values
    wide = np.repeat(numbers.astype(np.float64), 128, axis=0)[:200, :13]
    assert np.array_equal(given, (codes[:13, :200].T - 8) * wide[..., 0] + wide[..., 1])


def test_rows_of_groups_must_be_whole() -> None:
    """AWQ has no short group."""
    tensors = written("awq-gemm-32")
    del tensors["values"]
    with pytest.raises(ValueError, match="qzeros is K = 64; allowed: a multiple of 128"):
        stored("awq-gemm", 64, 32, tensors, group_size=128)
