"""The instruction tables for ARM's 64-bit processors: NEON, and NEON with dot products of bytes.

NEON's registers have 128 bits. A register of these tables is two of them, `lo` and `hi`, so that programs for 8 lanes
run as they are; loads of 16 bytes each follow each other in memory. Every word is written for one half and holds for
both.

Source: Arm C Language Extensions, Advanced SIMD; x86's meaning of the words is that of `isa`.
"""

NEON_TYPES = """\
struct vint { uint32x4_t lo, hi; };
struct vfloat { float32x4_t lo, hi; };
// Products of 16 bytes, unsigned in b and signed in c, as two registers of 16 bits: at most 255 * 128 in magnitude.
struct Products { int16x8_t lo, hi; };
inline __attribute__((always_inline)) Products products(uint32x4_t b, uint32x4_t c) {
  const uint8x16_t u = vreinterpretq_u8_u32(b);
  const int8x16_t s = vreinterpretq_s8_u32(c);
  return {vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u))), vmovl_s8(vget_low_s8(s))),
          vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(u)), vmovl_high_s8(s))};
}
// 32-bit sums of each four products.
inline __attribute__((always_inline)) uint32x4_t sums_of_4(Products p) {
  return vreinterpretq_u32_s32(vpaddq_s32(vpaddlq_s16(p.lo), vpaddlq_s16(p.hi)));
}
// 16-bit sums of each two products, which saturate.
inline __attribute__((always_inline)) uint32x4_t sums_of_2(Products p) {
  const int16x4_t low = vqmovn_s32(vpaddlq_s16(p.lo));
  return vreinterpretq_u32_s16(vqmovn_high_s32(low, vpaddlq_s16(p.hi)));
}
// 32-bit sums of each two products of 16 bits, signed.
inline __attribute__((always_inline)) uint32x4_t products_of_16(uint32x4_t b, uint32x4_t c) {
  const int16x8_t p = vreinterpretq_s16_u32(b), q = vreinterpretq_s16_u32(c);
  return vreinterpretq_u32_s32(vpaddq_s32(vmull_s16(vget_low_s16(p), vget_low_s16(q)), vmull_high_s16(p, q)));
}
// Four of the eight numbers of a, by their lane numbers.
inline __attribute__((always_inline)) float32x4_t chosen(vfloat a, uint32x4_t lanes) {
  const uint32x4_t first = vmulq_u32(vandq_u32(lanes, vdupq_n_u32(7)), vdupq_n_u32(0x04040404));
  const uint8x16_t bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x03020100)));
  const uint8x16x2_t table = {{vreinterpretq_u8_f32(a.lo), vreinterpretq_u8_f32(a.hi)}};
  return vreinterpretq_f32_u8(vqtbl2q_u8(table, bytes));
}
// Four of the sixteen numbers of a and c.
inline __attribute__((always_inline)) float32x4_t one_of(vfloat a, uint32x4_t lanes, vfloat c) {
  return vbslq_f32(vtstq_u32(lanes, vdupq_n_u32(8)), chosen(c, lanes), chosen(a, lanes));
}"""


def _halves(expression: str) -> str:
    """A word for both halves, from its text for one half: ``a``, ``b`` and ``c`` become ``a.lo`` and so on."""
    made = []
    for half in ("lo", "hi"):
        text = expression
        for name in "abc":
            text = text.replace(f"{{{name}}}", f"{name}.{half}")
        made.append(text)
    return f"return {{{made[0]}, {made[1]}}};"


_BROADCAST = "const auto d = {0}; return {{d, d}};"
_SIGNED = "vreinterpretq_s32_u32({a})"

NEON_WORDS = {
    "load_int": "vint d; std::memcpy(&d, a, sizeof d); return d;",
    "load_float": "vfloat d; std::memcpy(&d, a, sizeof d); return d;",
    "load_half": "float16x8_t h; std::memcpy(&h, a, sizeof h); "
    "return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};",
    "load_byte": "uint8x8_t d; std::memcpy(&d, a, sizeof d); const uint16x8_t wide = vmovl_u8(d); "
    "return {vmovl_u16(vget_low_u16(wide)), vmovl_high_u16(wide)};",
    "store": "std::memcpy(a, &b, sizeof b);",
    "broadcast_int": _BROADCAST.format("vdupq_n_u32(a)"),
    "broadcast_float": _BROADCAST.format("vdupq_n_f32(a)"),
    "fmadd": _halves("vfmaq_f32({c}, {a}, {b})"),
    "add": _halves("vaddq_f32({a}, {b})"),
    "multiply": _halves("vmulq_f32({a}, {b})"),
    "divide": _halves("vdivq_f32({a}, {b})"),
    # The second operand if either is a NaN or both are zeros; NEON's own maximum differs.
    "maximum": _halves("vbslq_f32(vcgtq_f32({a}, {b}), {a}, {b})"),
    "add_neighbours": "return {vpaddq_f32(a.lo, a.hi), vpaddq_f32(b.lo, b.hi)};",
    "permute": "return {chosen(a, b.lo), chosen(a, b.hi)};",
    "permute_pair": "return {one_of(a, b.lo, c), one_of(a, b.hi, c)};",
    "srli": _halves("vshlq_u32({a}, vdupq_n_s32(-i))"),
    "slli": _halves("vshlq_u32({a}, vdupq_n_s32(i))"),
    "and": _halves("vandq_u32({a}, {b})"),
    "or": _halves("vorrq_u32({a}, {b})"),
    "and_or": _halves("vorrq_u32(vandq_u32({a}, {b}), {c})"),
    "select": _halves("vbslq_u32({a}, {b}, {c})"),
    "add_int": _halves("vaddq_u32({a}, {b})"),
    "subtract_int": _halves("vsubq_u32({a}, {b})"),
    "add_neighbours_int": "return {vpaddq_u32(a.lo, a.hi), vpaddq_u32(b.lo, b.hi)};",
    "dot4": _halves("vaddq_u32({a}, sums_of_4(products({b}, {c})))"),
    "dot4_pairs": _halves("sums_of_2(products({a}, {b}))"),
    "add_pairs": _halves("vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32({a}), vreinterpretq_u16_u32({b})))"),
    "dot2": _halves("vaddq_u32({a}, products_of_16({b}, {c}))"),
    "srai": _halves(f"vreinterpretq_u32_s32(vshlq_s32({_SIGNED}, vdupq_n_s32(-i)))"),
    # An index of 16 or more gives 0 here; in the vocabulary, one whose highest bit is set gives 0.
    "lookup_bytes": _halves(
        "vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32({a}), "
        "vandq_u8(vreinterpretq_u8_u32({b}), vdupq_n_u8(0x8F))))"
    ),
    "as_int": _halves("vreinterpretq_u32_f32({a})"),
    "as_float": _halves("vreinterpretq_f32_u32({a})"),
    "cvt_int_subnormal": _halves("vreinterpretq_f32_u32({a})"),
    "cvt_int_float": _halves(f"vcvtq_f32_s32({_SIGNED})"),
    "cvt_signed_float": _halves(f"vcvtq_f32_s32({_SIGNED})"),
    "prefetch": "__builtin_prefetch(a);",
    "prefetch_once": "__builtin_prefetch(a, 0, 0);",
}

NEON_DOT4 = _halves(
    "vreinterpretq_u32_s32(vaddq_s32("
    "vdotq_s32(vreinterpretq_s32_u32({a}), "
    "vreinterpretq_s8_u32(veorq_u32({b}, vdupq_n_u32(0x80808080))), vreinterpretq_s8_u32({c})), "
    "vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), vreinterpretq_s8_u32({c})), 1)))"
)
"""The instruction takes signed bytes, so it gets b − 128. Then 128 times the sum of c is added, as twice 64 times."""
