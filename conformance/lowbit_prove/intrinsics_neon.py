"""Intrinsics of ARM: what the instructions of NEON do to the lanes of registers.

As in `lowbit_prove.intrinsics`, a meaning is a function of registers in numpy's functions. Here a register has the type
that its C++ says: ``int16x8_t`` is an array with eight lanes of int16 along the last axis, and ``uint8x16x2_t``, two
registers, has 32 lanes of uint8.

Source: Arm Architecture Reference Manual for A-profile; Arm C Language Extensions, Advanced SIMD.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowbit.kernels import vector
from lowbit_prove.intrinsics import Intrinsic

FULL = {
    **{
        f"{letter}{bits}": f"{name}{bits}x{128 // bits}_t"
        for letter, name in (("u", "uint"), ("s", "int"))
        for bits in (8, 16, 32)
    },
    "f16": "float16x8_t",
    "f32": "float32x4_t",
}
"""The 128-bit registers, by the suffixes of intrinsics."""
HALF = {"u8": "uint8x8_t", "s8": "int8x8_t", "u16": "uint16x4_t", "s16": "int16x4_t", "f16": "float16x4_t"}
"""The 64-bit registers."""


def _same(ending: str, count: int, meaning: Callable[..., Any]) -> Intrinsic:
    """An intrinsic whose operands and result have the same type, lane by lane."""
    bits = 8 if meaning in BITWISE else int(ending[1:])
    return Intrinsic((FULL[ending],) * count, FULL[ending], bits, lambda L, *given: meaning(*given))


def _and(a: Any, b: Any) -> Any:
    return a & b


def _or(a: Any, b: Any) -> Any:
    return a | b


def _xor(a: Any, b: Any) -> Any:
    return a ^ b


BITWISE = (_and, _or, _xor)


def _pairs(a: Any, b: Any) -> Any:
    """Sums of neighbours of a, followed by those of b; integers wrap."""
    both = np.concatenate([a, b], axis=-1)
    return both[..., ::2] + both[..., 1::2]


def _long_pairs(L: int, a: Any) -> Any:
    """Sums of neighbours in twice as many bits."""
    wide = a.astype(np.int32)
    return wide[..., ::2] + wide[..., 1::2]


def _narrowed(a: Any) -> Any:
    """Numbers in half as many bits, saturated."""
    return np.clip(a, -(2**15), 2**15 - 1).astype(np.int16)


def _long_products(a: Any, b: Any) -> Any:
    """Products in twice as many bits."""
    return a.astype(np.int32) * b.astype(np.int32)


def _low(a: Any) -> Any:
    """The lower half of the lanes."""
    return a[..., : a.shape[-1] // 2]


def _high(a: Any) -> Any:
    return a[..., a.shape[-1] // 2 :]


def _shifted(a: Any, count: Any) -> Any:
    """Shift left by the lowest byte of a lane's count, which is signed; shift right if it is negative."""
    by = count.view(np.int8)[..., ::4].astype(np.int32)
    left, right = by.astype(np.uint32).view(a.dtype), (-by).astype(np.uint32).view(a.dtype)
    return np.where(by >= np.int32(0), a << left, a >> right)


def _looked_up(L: int, table: Any, index: Any) -> Any:
    """Bytes of a table by index; 0 for an index past its end."""
    most = np.uint8(table.shape[-1] - 1)
    return np.where(index <= most, np.take_along_axis(table, index & most, axis=-1), np.uint8(0))


def _selected(L: int, mask: Any, a: Any, b: Any) -> Any:
    """Bits of a where the mask is 1, else of b."""
    bits = mask & a.view(np.uint32) | (mask ^ np.uint32(2**32 - 1)) & b.view(np.uint32)
    return bits.view(np.float32)


def _greater(L: int, a: Any, b: Any) -> Any:
    return np.where(a > b, np.uint32(2**32 - 1), np.uint32(0))


def _dot(L: int, total: Any, a: Any, b: Any) -> Any:
    """Four products of signed bytes, added to 32 bits, which wrap."""
    products = _long_products(a, b)
    return total + products[..., ::4] + products[..., 1::4] + products[..., 2::4] + products[..., 3::4]


def _duplicated(ending: str) -> Intrinsic:
    """One number in every lane."""
    name = FULL[ending]
    lanes = 128 // int(ending[1:])
    kind = f"{name.partition('x')[0]}_t"
    return Intrinsic((kind,), name, int(ending[1:]), lambda L, a: np.repeat(a[..., None], lanes, axis=-1))


def _reinterpreted(to: str, of: str) -> Intrinsic:
    dtype = np.dtype(FULL[to].partition("x")[0])
    return Intrinsic((FULL[of],), FULL[to], 0, lambda L, a: a.view(dtype))


def _widened(of: str, to: str, dtype: Any, *, high: bool = False) -> Intrinsic:
    """Numbers in twice as many bits: of a 64-bit register, or of the upper half of a 128-bit one."""
    takes, bits = (FULL if high else HALF)[of], int(of[1:])
    return Intrinsic((takes,), FULL[to], bits, lambda L, a: (_high(a) if high else a).astype(dtype))


def _lower(ending: str) -> Intrinsic:
    return Intrinsic((FULL[ending],), HALF[ending], 0, lambda L, a: _low(a))


S16, S32, U32, F32 = FULL["s16"], FULL["s32"], FULL["u32"], FULL["f32"]

NEON_MEANINGS: Mapping[str, Intrinsic] = {
    **{f"vdupq_n_{each}": _duplicated(each) for each in ("u8", "s8", "u32", "s32", "f32")},
    **{f"vget_low_{each}": _lower(each) for each in ("u8", "s8", "u16", "s16", "f16")},
    **{
        f"vreinterpretq_{to}_{of}": _reinterpreted(to, of)
        for to, of in (
            *(("u8", "u32"), ("s8", "u32"), ("u16", "u32"), ("s16", "u32"), ("s32", "u32"), ("f32", "u32")),
            *(("u32", "u8"), ("u32", "u16"), ("u32", "s16"), ("u32", "s32"), ("u32", "f32")),
            *(("s16", "u16"), ("u8", "f32"), ("f32", "u8")),
        )
    },
    "vmovl_u8": _widened("u8", "u16", np.uint16),
    "vmovl_s8": _widened("s8", "s16", np.int16),
    "vmovl_u16": _widened("u16", "u32", np.uint32),
    "vmovl_high_u8": _widened("u8", "u16", np.uint16, high=True),
    "vmovl_high_s8": _widened("s8", "s16", np.int16, high=True),
    "vmovl_high_u16": _widened("u16", "u32", np.uint32, high=True),
    "vcvt_f32_f16": _widened("f16", "f32", np.float32),
    "vcvt_high_f32_f16": _widened("f16", "f32", np.float32, high=True),
    "vcvtq_f32_s32": Intrinsic((S32,), F32, 32, lambda L, a: a.astype(np.float32)),
    "vandq_u8": _same("u8", 2, _and),
    "vandq_u32": _same("u32", 2, _and),
    "vorrq_u32": _same("u32", 2, _or),
    "veorq_u32": _same("u32", 2, _xor),
    "vbslq_f32": Intrinsic((U32, F32, F32), F32, 32, _selected),
    "vbslq_u32": _same("u32", 3, lambda mask, a, b: b ^ mask & (a ^ b)),
    "vtstq_u32": _same("u32", 2, lambda a, b: np.where(a & b != np.uint32(0), np.uint32(2**32 - 1), np.uint32(0))),
    "vcgtq_f32": Intrinsic((F32, F32), U32, 32, _greater),
    **{f"vaddq_{each}": _same(each, 2, lambda a, b: a + b) for each in ("u16", "u32", "s32", "f32")},
    "vsubq_u32": _same("u32", 2, lambda a, b: a - b),
    **{f"vmulq_{each}": _same(each, 2, lambda a, b: a * b) for each in ("s16", "u32", "f32")},
    "vdivq_f32": _same("f32", 2, lambda a, b: a / b),
    "vfmaq_f32": _same("f32", 3, lambda c, a, b: vector.fmadd(a, b, c)),
    **{f"vpaddq_{each}": _same(each, 2, _pairs) for each in ("u32", "s32", "f32")},
    "vpaddlq_s16": Intrinsic((S16,), S32, 16, _long_pairs),
    "vqmovn_s32": Intrinsic((S32,), HALF["s16"], 32, lambda L, a: _narrowed(a)),
    "vqmovn_high_s32": Intrinsic(
        (HALF["s16"], S32), S16, 32, lambda L, low, a: np.concatenate([low, _narrowed(a)], axis=-1)
    ),
    "vmull_s16": Intrinsic((HALF["s16"],) * 2, S32, 16, lambda L, a, b: _long_products(a, b)),
    "vmull_high_s16": Intrinsic((S16, S16), S32, 16, lambda L, a, b: _long_products(_high(a), _high(b))),
    "vdotq_s32": Intrinsic((S32, FULL["s8"], FULL["s8"]), S32, 8, _dot),
    "vshlq_u32": Intrinsic((U32, S32), U32, 32, lambda L, a, count: _shifted(a, count)),
    "vshlq_s32": Intrinsic((S32, S32), S32, 32, lambda L, a, count: _shifted(a, count)),
    "vshlq_n_s32": Intrinsic((S32, "constant"), S32, 32, lambda L, a, i: a << np.int32(i)),
    "vqtbl1q_u8": Intrinsic((FULL["u8"], FULL["u8"]), FULL["u8"], 8, _looked_up),
    "vqtbl2q_u8": Intrinsic(("uint8x16x2_t", FULL["u8"]), FULL["u8"], 8, _looked_up),
}
"""The intrinsics by their names."""
