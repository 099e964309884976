"""The adapters of other projects' kernels: their layouts, what they say where a library is missing, and a run of each.

Layouts and availability are tested everywhere. ``gguf`` is a dependency of lowbit and so always runs; ONNX Runtime,
llama-cpp-python and PyTorch come with the extra ``adapters``, which the environments of CI do not install, and the
tests of their results are skipped there.
"""

import subprocess
import sys

import numpy as np
import pytest

from lowbit import backend
from lowbit.contract.rounding import checked_gamma
from lowbit.errors import NotDeclaredError, UnavailableError
from lowbit.linear import linear
from lowbit.linear.bounds import linear_bound
from lowbit.quantization import affine
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix, quantize
from lowbit.quantization.packing import BITS, pack, unpack
from lowbit_adapters import blocks, ggml, layout, libraries, onnx_runtime, torch_int4

NAMES = ("ggml", "gguf", "onnxruntime", "onnxruntime-minimum", "torch")
PRODUCTS = ("onnxruntime", "onnxruntime-minimum", "torch")


def matrix_of(bits: int, rows: int, columns: int, group_size: int, convention: affine.Convention) -> QuantizedMatrix:
    """Random weights, quantised with float16 scales."""
    weights = np.random.default_rng(rows + columns).standard_normal((rows, columns)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=group_size, convention=convention, scale_dtype="float16")


def loaded(name: str) -> backend.Backend:
    """The backend, or a skip that says what is not installed."""
    state = backend.find(name).availability()
    if not state.usable:
        pytest.skip(f"{state.reason}: it comes with the extra adapters")
    return backend.load(name)


# What is installed.


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_is_named_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every adapter can be listed without its library; loading it refuses with the library's name and the remedy."""
    monkeypatch.setattr(libraries, "find_spec", lambda module: None)
    monkeypatch.setattr(ggml, "find_spec", lambda module: None)
    state = backend.find(name).availability()
    assert not state.usable and "not installed" in state.reason and "lowbit[adapters]" in state.remedy
    with pytest.raises(UnavailableError, match=f"backend {name} is unavailable: .* not installed"):
        backend.load(name)


def test_a_llama_cpp_without_the_library_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be there and bring no libggml-base, as old ones do."""
    monkeypatch.setattr(libraries, "find_spec", lambda module: object())
    monkeypatch.setattr(ggml, "library_file", lambda: None)
    state = ggml.GgmlBackend().availability()
    assert not state.usable and "libggml-base" in state.reason
    ggml.library.cache_clear()
    with pytest.raises(UnavailableError, match="libggml-base is not there"):
        ggml.library()


def test_asking_imports_no_library() -> None:
    """Availability and capabilities of every adapter leave the libraries alone."""
    script = f"""
import sys
from lowbit import backend
for name in {NAMES}:
    found = backend.find(name)
    found.availability(), found.capabilities()
print([name for name in ("onnx", "onnxruntime", "torch", "llama_cpp") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("name", PRODUCTS)
def test_declared_roundings_mean_something(name: str) -> None:
    """The bound of each declaration is far below the tenth at which it would be refused."""
    declared = backend.find(name).capabilities().operations["linear.qgemv"].arithmetic
    assert declared is not None
    for rows, group_size in ((8, 8), (4096, 128), (11008, 256)):
        assert checked_gamma(declared, rows, group_size) < 2e-3


# Layouts, against the specification's own packing and against arithmetic on single bits.


@pytest.mark.parametrize("bits", BITS)
def test_codes_as_rows_are_the_transposed_codes(bits: int) -> None:
    """Every value at every position of a unit, read back and packed again."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (96, 7)).astype(np.uint8)
    words = pack(codes, bits)
    rows = layout.code_rows(words, bits)
    assert np.array_equal(rows, codes.T)
    assert np.array_equal(layout.words_of_rows(rows, bits), words)


@pytest.mark.parametrize("bits", BITS)
def test_packed_bits_lie_where_arithmetic_puts_them(bits: int) -> None:
    """The bytes of a row, read as one big integer, are the sum of the codes shifted by their places."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 13)).astype(np.uint8)
    for row, packed in zip(codes.tolist(), layout.pack_bits(codes, bits), strict=True):
        stream = sum(code << bits * place for place, code in enumerate(row))
        assert int.from_bytes(packed.tobytes(), "little") == stream
        assert len(packed) == -(-13 * bits // 8)


@pytest.mark.parametrize(("bits", "rows"), [(2, 48), (4, 40), (8, 36)])
def test_onnx_blocks_hold_code_by_code(bits: int, rows: int) -> None:
    """Code k of a column is in block ⌊k/16⌋ of that output, at its own bits; so are the zero-points."""
    matrix = matrix_of(bits, rows, 5, 16, "zero_point")
    codes = unpack(matrix.words, bits)
    packed, zeros = onnx_runtime.blocks_of(matrix), onnx_runtime.packed_zeros(matrix)
    assert packed.shape == (5, 3, 16 * bits // 8) and zeros.shape == (5, -(-3 * bits // 8))
    mask = 2**bits - 1
    for column in range(matrix.columns):
        for row in range(matrix.rows):
            place = row % 16 * bits
            assert packed[column, row // 16, place // 8] >> place % 8 & mask == codes[row, column]
        for group in range(matrix.groups):
            place = group * bits
            assert zeros[column, place // 8] >> place % 8 & mask == matrix.zeros[group, column]


def test_float_zeros_stand_for_the_minimum() -> None:
    """scale · −z' is the minimum, within the one rounding of z'."""
    matrix = matrix_of(4, 64, 5, 32, "minimum")
    minima = -onnx_runtime.float_zeros(matrix).T.astype(np.float64) * matrix.scales
    assert np.allclose(minima, matrix.zeros, rtol=2.0**-24, atol=0)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_torch_layout_stands_for_the_weights(convention: affine.Convention) -> None:
    """scale · (code − 8) + zero is the weight, and what is filled up stands for zeros."""
    matrix = matrix_of(4, 40, 5, 32, convention)
    codes, both = torch_int4.codes_of(matrix), torch_int4.scales_and_zeros(matrix)
    assert codes.shape == (16, 64) and both.shape == (2, 16, 2) and codes.dtype == np.int32
    scales, zeros = np.repeat(both, 32, axis=0).transpose(2, 1, 0).astype(np.float64)
    weights = scales * (codes - 8) + zeros
    assert np.allclose(weights[:5, :40].T, affine.dequantize(matrix), rtol=0, atol=1e-6)
    assert not weights[5:].any()


BLOCK_CASES = [(bits, convention) for bits in (2, 3, 4) for convention in CONVENTIONS]


@pytest.mark.parametrize(("bits", "convention"), BLOCK_CASES)
def test_blocks_hold_weight_by_weight(bits: int, convention: affine.Convention) -> None:
    """Each weight, worked out from the bytes of its block in plain integers, equals the specification's."""
    matrix = matrix_of(bits, 96, 5, 64, convention)
    kind, encoded = blocks.kind_of(matrix), blocks.encode(matrix)
    assert encoded.shape == (5, 3, blocks.BLOCK_BYTES[kind])
    weights = affine.dequantize(matrix)
    for column in range(matrix.columns):
        for row in range(matrix.rows):
            block, place = encoded[column, row // 32], row % 32
            d, m = (np.frombuffer(block[start : start + 2].tobytes(), "<f2").astype(np.float32)[0] for start in (0, 2))
            if kind == "Q8_0":
                value = d * np.float32(int.from_bytes(block[2 + place : 3 + place].tobytes(), "little", signed=True))
            else:
                byte = int(block[(4 if kind == "Q4_1" else 2) + place % 16])
                code = byte >> 4 if place >= 16 else byte & 15
                value = d * np.float32(code) + m if kind == "Q4_1" else d * np.float32(code - 8)
            assert value == weights[row, column]


def test_blocks_of_q4_1_come_back() -> None:
    """Decoding what was encoded gives the same matrix; a block whose scale is 0 gets scale 1 and codes 0."""
    matrix = matrix_of(4, 72, 5, 32, "minimum")
    encoded = blocks.encode(matrix)
    given = blocks.decode_q4_1(encoded, 72)
    assert np.array_equal(given.words, matrix.words) and np.array_equal(given.scales, matrix.scales)
    assert np.array_equal(given.zeros, matrix.zeros)
    encoded[2, 1, :2] = 0
    constant = affine.dequantize(blocks.decode_q4_1(encoded, 72))[32:64, 2]
    assert (constant == np.float32(matrix.zeros[1, 2])).all()


# The libraries themselves, where they are installed. The whole suite is run on them by hand, for the page of the docs.


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_within_the_bound(name: str) -> None:
    """One vector and several, a last short group and columns that fill no register."""
    found = loaded(name)
    declared = found.capabilities().operations["linear.qgemv"]
    assert declared.arithmetic is not None
    for convention in declared.limits.get("convention", CONVENTIONS):
        matrix = matrix_of(4, 200, 19, 64, convention)  # type: ignore[arg-type]  # a limit is an object to its reader
        prepared = found.prepare(matrix)
        x = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
        x.flags.writeable = False
        exact = linear.qgemm(x, matrix)
        given = np.concatenate([prepared.qgemv(x[0])[None], prepared.qgemm(x)])
        for row, y, wanted in zip([x[0], *x], given, [exact[0], *exact], strict=True):
            bound = linear_bound(row, matrix, declared.arithmetic, wanted)
            assert (np.abs(y - wanted) <= bound.limit).all()


@pytest.mark.parametrize("name", ["ggml", "gguf"])
def test_blocks_are_dequantised_exactly(name: str) -> None:
    """All three types give the specification's weights to the bit, a last short block among them."""
    found = loaded(name)
    for bits, convention in BLOCK_CASES:
        matrix = matrix_of(bits, 160 - 16 * (bits == 4), 9, 64, convention)
        assert np.array_equal(found.run("affine.dequantize", matrix), affine.dequantize(matrix))
    with pytest.raises(NotDeclaredError, match="bits 8"):
        found.run("affine.dequantize", quantize(np.ones((32, 3), np.float32), bits=8, group_size=32))


@pytest.mark.parametrize("name", ["ggml", "gguf"])
def test_quantising_gives_the_same_scales_and_nearly_the_same_codes(name: str) -> None:
    """Scales and minima equal the specification's; codes lie at most one apart, the finding that the docs describe."""
    weights = np.random.default_rng(3).standard_normal((200, 9)).astype(np.float32)
    choices = {"bits": 4, "group_size": 32, "scale_dtype": "float16"}
    given = loaded(name).run("affine.quantize", weights, **choices)
    wanted = quantize(weights, bits=4, group_size=32, scale_dtype="float16")
    assert np.array_equal(given.scales, wanted.scales) and np.array_equal(given.zeros, wanted.zeros)
    apart = np.abs(unpack(given.words, 4).astype(int) - unpack(wanted.words, 4))
    assert apart.max() == 1 and apart.mean() < 0.02
