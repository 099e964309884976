"""The formats with kernels: a row for each, and how its arrays become `Parts`.

The kernel of a format follows from its `Structure`, so that a format is added by a row here and never by a kernel. The
specification's `decode` is not called: a backend computes its results itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

import numpy as np

from lowbit.arrays import F32, F64, I64, Array
from lowbit.contract.checks import check_choice
from lowbit.tensor_formats.stored import Stored
from lowbit_cppyy.stored.parts import FLOATS, Parts, Structure

Tensors = Mapping[str, Array]

NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS (ggml, ``kvalues_iq4nl``)."""
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of float4 e2m1 (OCP MX 1.0, §5.3.3); the fourth bit is the sign."""
TABLES: Mapping[str, F32] = MappingProxyType(
    {
        "non-linear": np.array(NON_LINEAR, np.float32),
        "float4": np.array([*FLOAT4, *(-each for each in FLOAT4)], np.float32),
        "signed": np.arange(-8, 8, dtype=np.float32),
    }
)


# **Bits.** Codes as bytes, from the arrays of a format.


def planes(packed: Array, bits: int, run: int) -> Array:
    """Codes in planes: the lowest bits of every `run` bytes are `run` codes, the next bits are the next `run` codes."""
    runs = packed.copy().view(np.uint8).reshape(*packed.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, np.newaxis]
    codes: Array = runs >> shifts & np.uint8(2**bits - 1)
    found: Array = codes.reshape(*packed.shape[:-1], -1)
    return found


def in_words(words: Array, bits: int) -> Array:
    """Codes end to end along the last axis of 32-bit words, the first in the lowest bits; left-over bits are
    padding."""
    packed = words.copy().view(np.uint8)
    if 8 % bits == 0:
        return planes(packed, bits, 1)
    ones = np.unpackbits(packed, axis=-1, bitorder="little")
    codes = ones[..., : ones.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
    found: Array = (codes << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return found


def upright(array: Array) -> Array:
    """N × blocks × each, transposed to (blocks · each) × N."""
    return array.reshape(len(array), -1).T.copy()


# **GGUF**: records of blocks, N × blocks.


def of_32(fields: Tensors) -> Array:
    """Q4_0 to Q5_1: nibbles 16 apart, and the fifth bits in the order of the elements."""
    codes = planes(fields["qs"], 4, 16)
    if "qh" in fields:
        codes = codes | np.unpackbits(fields["qh"], axis=-1, bitorder="little") << np.uint8(4)
    return codes


def of_q8_0(fields: Tensors) -> Array:
    """Signed bytes, plus 128."""
    return fields["qs"].view(np.uint8) ^ np.uint8(128)


def _less_32(stored: Array) -> Array:
    """6-bit integers that are stored plus 32, as int8."""
    found: Array = stored.astype(np.int8) - np.int8(32)
    return found


def scales_of_q3(packed: Array) -> Array:
    """16 scales of 6 bits that are stored plus 32, as int8."""
    low, high = planes(packed[..., :8], 4, 8), planes(packed[..., 8:], 2, 4)
    return _less_32(low | high << np.uint8(4))


def scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """The 8 scales and 8 minima of Q4_K and Q5_K."""
    first, second, shared = (packed[..., at : at + 4] for at in (0, 4, 8))
    high = np.uint8(4)
    scales = np.concatenate([first & 63, shared & 15 | first >> 6 << high], axis=-1)
    return scales, np.concatenate([second & 63, shared >> 4 | second >> 6 << high], axis=-1)


def scales_of_iq4_xs(fields: Tensors) -> Array:
    """8 scales of 6 bits that are stored plus 32, as int8: low nibbles in ``scales_l``, high bits in ``scales_h``."""
    low = planes(fields["scales_l"], 4, 1)
    high = fields["scales_h"][..., np.newaxis] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    return _less_32(low | high.astype(np.uint8) << np.uint8(4))


@dataclass(frozen=True)
class Blocks:
    """A GGUF type: its structure, its codes, and its other numbers.

    Attributes:
        structure: of its kernel.
        codes: a function from the fields of the records to uint8, N × blocks × elements.
        inner: the integers of runs, and minima if there are any.
        center: c.
        table: a name of `TABLES`.
    """

    structure: Structure
    codes: Callable[[Tensors], Array]
    inner: Callable[[Tensors], tuple[Array, ...]] = lambda fields: ()
    center: int = 0
    table: str = ""

    def parts(self, stored: Stored) -> Parts:
        """The parts of a matrix of this type."""
        fields = stored.table.fields_of(stored.by_name)
        block = stored.table.block
        assert block is not None
        integers = [upright(each) for each in self.inner(fields)]
        structure, scales = scaled(self.structure, fields)
        offset = structure.offset
        second = fields["m"] if offset == "number" else fields["dmin"] if offset == "minimum" else None
        numbers = None if second is None else upright(second[..., np.newaxis]).astype(np.float32)
        return Parts(
            structure,
            upright(self.codes(fields)),
            [block] * (stored.rows // block),
            scales,
            inner=integers[0] if integers else None,
            offsets=numbers if offset == "number" else integers[1] if offset == "minimum" else None,
            offset_scales=numbers if offset == "minimum" else None,
            center=self.center,
            table=TABLES[self.table] if self.table else None,
        )


def scaled(structure: Structure, fields: Tensors) -> tuple[Structure, Array]:
    """The scales of blocks; exponents stay bytes unless one of them is the smallest, which is not a normal float32."""
    if structure.scale != "exponent":
        return structure, upright(fields["d"][..., np.newaxis]).astype(np.float32)
    bytes_ = upright(np.ascontiguousarray(fields["e"]).view(np.uint8)[..., np.newaxis])
    if bytes_.all():
        return structure, bytes_
    return replace(structure, scale="float32"), np.exp2(bytes_.astype(np.float32) - 127).astype(np.float32)


K_SCALES = Structure(4, inner="uint8", run=32, offset="minimum")


def k_scales(fields: Tensors) -> tuple[Array, ...]:
    """The scales and minima of Q4_K and Q5_K."""
    return scales_and_minima(fields["scales"])


GGUF: Mapping[str, Blocks] = MappingProxyType(
    {
        "q4_0": Blocks(Structure(4, offset="center"), of_32, center=8),
        "q4_1": Blocks(Structure(4, offset="number"), of_32),
        "q5_0": Blocks(Structure(5, offset="center"), of_32, center=16),
        "q5_1": Blocks(Structure(5, offset="number"), of_32),
        "q8_0": Blocks(Structure(8, "signed"), of_q8_0, center=128),
        "q2_k": Blocks(
            Structure(2, inner="uint8", run=16, offset="minimum"),
            lambda fields: planes(fields["qs"], 2, 32),
            lambda fields: (fields["scales"] & np.uint8(15), fields["scales"] >> np.uint8(4)),
        ),
        "q3_k": Blocks(
            Structure(3, inner="int8", run=16, offset="center"),
            lambda fields: planes(fields["qs"], 2, 32) | planes(fields["hmask"], 1, 32) << np.uint8(2),
            lambda fields: (scales_of_q3(fields["scales"]),),
            center=4,
        ),
        "q4_k": Blocks(K_SCALES, lambda fields: planes(fields["qs"], 4, 32), k_scales),
        "q5_k": Blocks(
            replace(K_SCALES, bits=5),
            lambda fields: planes(fields["qs"], 4, 32) | planes(fields["qh"], 1, 32) << np.uint8(4),
            k_scales,
        ),
        "q6_k": Blocks(
            Structure(6, inner="int8", run=16, offset="center"),
            lambda fields: planes(fields["ql"], 4, 64) | planes(fields["qh"], 2, 32) << np.uint8(4),
            lambda fields: (fields["scales"],),
            center=32,
        ),
        "iq4_nl": Blocks(Structure(4, "table"), lambda fields: planes(fields["qs"], 4, 16), table="non-linear"),
        "iq4_xs": Blocks(
            Structure(4, "table", inner="int8", run=32),
            lambda fields: planes(fields["qs"], 4, 16),
            lambda fields: (scales_of_iq4_xs(fields),),
            table="non-linear",
        ),
        "gguf-mxfp4": Blocks(
            Structure(4, "table", "exponent"), lambda fields: planes(fields["qs"], 4, 16), table="float4"
        ),
    }
)


# **GPTQ and AWQ**: codes of any group, zeros of their own.


def grouped(codes: Array, scales: Array, zeros: Array, bits: int, group_of_row: I64) -> Parts:
    """The parts of codes K × N with zeros G × N; `group_of_row` gives the group of each row, in any order."""
    order: I64 | None = None
    if (np.diff(group_of_row) < 0).any():
        order = np.argsort(group_of_row, kind="stable")
        codes, group_of_row = codes[order], group_of_row[order]
    used, lengths = np.unique(group_of_row, return_counts=True)
    structure = Structure(bits, scale="float16" if scales.dtype == np.float16 else "float32", offset="zero")
    numbers, offsets = scales[used].astype(np.float32), zeros[used]
    if zeros.max(initial=0) > 255:  # only with 8-bit codes; a product of 11 bits and 9 bits is exact in float32
        structure = replace(structure, scale="float32", offset="number")
        offsets = -numbers * offsets.astype(np.float32)
    return Parts(structure, codes.copy(), lengths.tolist(), numbers, offsets=offsets, order=order)


def gptq(stored: Stored, less: int, modulus: int = 2**31) -> Parts:
    """GPTQ with zeros that are stored minus `less`, possibly modulo `modulus`."""
    fields, bits = stored.by_name, dict(stored.options)["bits"]
    codes = in_words(fields["qweight"].T, bits).T[: stored.rows]
    zeros = in_words(fields["qzeros"], bits).astype(np.int64) + less
    groups = fields["g_idx"].astype(np.int64)
    return grouped(codes, fields["scales"], np.where(zeros < modulus, zeros, 0), bits, groups)


FROM_LOWEST = np.array([0, 2, 4, 6, 1, 3, 5, 7])
"""The columns of AWQ's words, from the lowest nibble up."""


def awq_gemm(stored: Stored) -> Parts:
    """Words of eight columns in AWQ's order."""
    fields = stored.by_name

    def columns(words: Array) -> Array:
        codes = in_words(words, 4).reshape(len(words), -1, 8)
        found = np.empty_like(codes)
        found[..., FROM_LOWEST] = codes
        return found.reshape(len(words), -1)

    groups = np.arange(stored.rows) // dict(stored.options)["group_size"]
    return grouped(columns(fields["qweight"]), fields["scales"], columns(fields["qzeros"]), 4, groups)


def awq_gemv(stored: Stored) -> Parts:
    """Words of eight rows; scales and zeros of padded groups."""
    fields = stored.by_name
    groups = np.arange(stored.rows) // dict(stored.options)["group_size"]
    codes, zeros = in_words(fields["qweight"], 4).T, in_words(fields["qzeros"], 4).T
    return grouped(codes, fields["scales"].T, zeros, 4, groups)


# **compressed-tensors and OCP MX**: N × K.


def compressed(stored: Stored) -> Parts:
    """Signed integers with a scale for each group: those of 4 bits are looked up, and all others are bytes.

    So they need no second zero: a sum of x times :math:`2^{b-1}` would be rounded. The offset of a stored zero,
    :math:`s z`, is a number that float32 holds exactly.
    """
    fields, options = stored.by_name, dict(stored.options)
    bits, scales = options.get("bits", 8), fields["weight_scale"].T.astype(np.float32)
    zeros = fields.get("weight_zero_point")
    wide = fields["weight_scale"].dtype != np.float16 or zeros is not None
    structure = signed(bits, wide=wide, zeros=zeros is not None)
    offsets: F64 | None = None
    if zeros is not None:
        stored_zeros = in_words(zeros.T, bits)[:, : stored.columns]
        offsets = -scales.astype(np.float64) * (stored_zeros.astype(np.float64) - 2.0 ** (bits - 1))
    if "weight" in fields:
        codes = fields["weight"].view(np.uint8) ^ np.uint8(128)
    else:
        codes = in_words(fields["weight_packed"], bits)[:, : stored.rows]  # stored plus 2^(bits-1)
    if structure.values == "signed" and bits < 8:
        codes = codes + np.uint8(128 - 2 ** (bits - 1))
    size = options.get("group_size", stored.rows)
    lengths = [min(size, stored.rows - first) for first in range(0, stored.rows, size)]
    table = TABLES["signed"] if structure.values == "table" else None
    center = 0 if structure.values == "table" else 128
    return Parts(structure, upright(codes), lengths, scales, offsets=offsets, center=center, table=table)


def signed(bits: int, *, wide: bool, zeros: bool) -> Structure:
    """The structure of signed integers with scales in float32 or in float16, and possibly with zeros."""
    structure = Structure(*((4, "table") if bits == 4 else (8, "signed")), scale="float32" if wide else "float16")
    return replace(structure, offset="number") if zeros else structure


def mxfp4(stored: Stored) -> Parts:
    """Adjacent codes share a byte; in GGUF's MXFP4 the codes of a byte are half a block apart."""
    fields, blocks = stored.by_name, GGUF["gguf-mxfp4"]
    structure, scales = scaled(blocks.structure, {"e": fields["scale"]})
    codes, lengths = upright(planes(fields["elements"], 4, 1)), [32] * (stored.rows // 32)
    return Parts(structure, codes, lengths, scales, table=TABLES[blocks.table])


# **HQQ** along axis 1: slabs of rows of a matrix that has a row for each group.


def hqq(stored: Stored) -> Parts:
    """Codes of 1 bit take 2 bits here; :math:`-s z` is a number that float32 holds exactly.

    A group may cross rows of N. The greatest common divisor of K and the group size divides every part of a group.
    """
    fields, options = stored.by_name, dict(stored.options)
    bits, size = options.get("bits", 3), options["group_size"]
    count = SLABS if bits == 3 else 8 // bits
    shifts = bits * np.arange(count - 1, -1, -1, dtype=np.int32)
    packed = fields["W_q"]
    codes = (packed >> shifts[:, np.newaxis, np.newaxis].astype(packed.dtype) & 2**bits - 1).astype(np.uint8)
    codes = codes.reshape(-1, size)[: stored.rows * stored.columns // size]
    run = gcd(stored.rows, size)
    scales, zeros = (fields[name].astype(np.float32).repeat(size // run) for name in ("scale", "zero"))

    def of_runs(numbers: F32) -> F32:
        return numbers.reshape(stored.columns, -1).T.copy()

    lengths = [run] * (stored.rows // run)
    upright_codes = codes.reshape(stored.columns, stored.rows).T.copy()
    return Parts(with_offsets(bits), upright_codes, lengths, of_runs(scales), offsets=of_runs(-scales * zeros))


SLABS = 10
"""The number of 3-bit codes in a word of HQQ."""


def with_offsets(bits: int) -> Structure:
    """The structure of codes with a float32 scale and a float32 offset for each group."""
    return Structure(max(bits, 2), scale="float32", offset="number")


# **Floats.**


def floats(stored: Stored) -> Parts:
    """The bit patterns of floats as codes, in one group without scales."""
    structure = OF_FLOATS[stored.format]
    codes = stored.by_name["numbers"].view(f"u{structure.bits // 8}").T.copy()
    return Parts(structure, codes, [stored.rows], np.empty((1, 0), np.float32))


OF_FLOATS: Mapping[str, Structure] = MappingProxyType(
    {name: Structure(bits, name, "one") for name, bits in FLOATS.items()}
)


COMPRESSED = ("ct-pack", "ct-pack-f16", "ct-pack-asym", "ct-pack-asym-f16", "ct-int", "ct-int-f16")
HQQ = ("hqq-axis1", "hqq-axis1-3bit")
PARTS: Mapping[str, Callable[[Stored], Parts]] = MappingProxyType(
    {
        **{name: blocks.parts for name, blocks in GGUF.items()},
        "gptq-v1": lambda stored: gptq(stored, 1),
        "gptq-v1-wrapped": lambda stored: gptq(stored, 1, 2 ** dict(stored.options)["bits"]),
        "gptq-v2": lambda stored: gptq(stored, 0),
        "gptq-v1-bf16": lambda stored: gptq(stored, 1),
        "gptq-v2-bf16": lambda stored: gptq(stored, 0),
        "awq-gemm": awq_gemm,
        "awq-gemv": awq_gemv,
        **dict.fromkeys(COMPRESSED, compressed),
        "mxfp4": mxfp4,
        **dict.fromkeys(HQQ, hqq),
        **dict.fromkeys(OF_FLOATS, floats),
    }
)
"""For each format with kernels, the function from a stored matrix to its parts."""


def structure_of(name: str, bits: int) -> Structure:
    """The structure of a format's usual matrix; `bits` is for formats of several widths.

    Raises:
        ArgumentError: a format without kernels.
    """
    check_choice("--format", name, tuple(PARTS))
    if name in OF_FLOATS:
        return OF_FLOATS[name]
    if name in COMPRESSED:
        zeros = "asym" in name
        return signed(bits if "pack" in name else 8, wide=zeros or not name.endswith("-f16"), zeros=zeros)
    if name in HQQ:
        return with_offsets(3 if name == "hqq-axis1-3bit" else 4 if bits == 3 else bits)
    if name in GGUF or name == "mxfp4":
        return GGUF[name if name in GGUF else "gguf-mxfp4"].structure
    width = bits if name.startswith("gptq") else 4
    return Structure(width, scale="float32" if name.endswith("bf16") else "float16", offset="zero")
