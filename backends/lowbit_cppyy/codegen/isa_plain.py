"""The instruction table for any processor: C++ in the vector types that g++ and clang share.

The compiler maps them to the vectors that the processor has. Loops over small arrays mean the same, but the compiler
vectorises them badly: they were measured to be eight times slower.
"""

PLAIN_TYPES = """\
typedef std::uint32_t vint __attribute__((vector_size(32)));
typedef std::int32_t vsigned __attribute__((vector_size(32)));
typedef float vfloat __attribute__((vector_size(32)));
typedef std::uint16_t vpairs __attribute__((vector_size(32)));
typedef std::uint16_t vhalves __attribute__((vector_size(16)));
typedef std::uint8_t vbytes __attribute__((vector_size(8)));"""

_SIGNED_BYTE = "(vint)((vsigned)({0} << {1}) >> 24)"
"""A sign-extended byte: shifted to the top, then down again; `>>` of a signed vector keeps the sign."""

_SIGNED_HALF = "(vint)((vsigned)({0} << {1}) >> 16)"


def _byte_products(a: str, b: str, numbers: tuple[int, ...]) -> str:
    """The sum of the products of these bytes, unsigned in `a` and signed in `b`."""
    return " + ".join(f"({a} >> {8 * n} & 255u) * {_SIGNED_BYTE.format(b, 24 - 8 * n)}" for n in numbers)


_EVEN, _ODD = "0, 2, 4, 6, 8, 10, 12, 14", "1, 3, 5, 7, 9, 11, 13, 15"
_NEIGHBOURS = f"__builtin_shufflevector(a, b, {_EVEN}) + __builtin_shufflevector(a, b, {_ODD})"

PLAIN_WORDS = {
    "load_int": "vint d; std::memcpy(&d, a, sizeof d); return d;",
    "load_float": "vfloat d; std::memcpy(&d, a, sizeof d); return d;",
    # The bias of exponents changes from 15 to 127. The largest exponent, that of infinities and NaN, changes by as much
    # again. Subnormal numbers are multiples of 2^-24.
    "load_half": "vhalves d; std::memcpy(&d, a, sizeof d); const vint h = __builtin_convertvector(d, vint); "
    "const vint e = h & 0x7FFFu; const vint sign = (h & 0x8000u) << 16; "
    "const vint large = (vint)((vsigned)e > 0x7BFF) & (112u << 23); const vint small = (vint)((vsigned)e < 0x400); "
    "const vint tiny = (vint)(__builtin_convertvector((vsigned)e, vfloat) * 0x1p-24f); "
    "return (vfloat)(sign | (tiny & small) | (((e << 13) + (112u << 23) + large) & ~small));",
    "load_byte": "vbytes d; std::memcpy(&d, a, sizeof d); return __builtin_convertvector(d, vint);",
    "store": "std::memcpy(a, &b, sizeof b);",
    "broadcast_int": "return vint{a, a, a, a, a, a, a, a};",
    "broadcast_float": "return vfloat{a, a, a, a, a, a, a, a};",
    "fmadd": "LOWBIT_ROUND_TWICE return a * b + c;",
    "add": "return a + b;",
    "multiply": "return a * b;",
    "divide": "return a / b;",
    "maximum": "return a > b ? a : b;",
    "add_neighbours": f"return {_NEIGHBOURS};",
    "permute": "vfloat d; for (int n = 0; n < 8; ++n) d[n] = a[b[n] & 7u]; return d;",
    "permute_pair": "vfloat d; for (int n = 0; n < 8; ++n) d[n] = b[n] & 8u ? c[b[n] & 7u] : a[b[n] & 7u]; return d;",
    "srli": "return a >> i;",
    "slli": "return a << i;",
    "and": "return a & b;",
    "or": "return a | b;",
    "and_or": "return (a & b) | c;",
    "select": "return (a & b) | (~a & c);",
    "add_int": "return a + b;",
    "subtract_int": "return a - b;",
    "add_neighbours_int": f"return {_NEIGHBOURS};",
    "dot4": f"return a + {_byte_products('b', 'c', (0, 1, 2, 3))};",
    "dot4_pairs": f"vsigned low = (vsigned)({_byte_products('a', 'b', (0, 1))}); "
    f"vsigned high = (vsigned)({_byte_products('a', 'b', (2, 3))}); "
    "low = low > 32767 ? low * 0 + 32767 : low; low = low < -32768 ? low * 0 - 32768 : low; "
    "high = high > 32767 ? high * 0 + 32767 : high; high = high < -32768 ? high * 0 - 32768 : high; "
    "return ((vint)low & 0xFFFFu) | ((vint)high << 16);",
    "add_pairs": "return (vint)((vpairs)a + (vpairs)b);",
    "dot2": f"return a + {_SIGNED_HALF.format('b', 16)} * {_SIGNED_HALF.format('c', 16)}"
    " + (vint)((vsigned)b >> 16) * (vint)((vsigned)c >> 16);",
    "srai": "return (vint)((vsigned)a >> i);",
    "lookup_bytes": "std::uint8_t d[32], t[32], n[32]; std::memcpy(t, &a, 32); std::memcpy(n, &b, 32); "
    "for (int k = 0; k < 32; ++k) d[k] = n[k] < 128 ? t[(k & 16) | (n[k] & 15)] : 0; "
    "vint r; std::memcpy(&r, d, 32); return r;",
    "as_int": "return (vint)a;",
    "as_float": "return (vfloat)a;",
    "cvt_int_float": "return __builtin_convertvector((vsigned)a, vfloat);",
    "cvt_int_subnormal": "return (vfloat)a;",
    "cvt_signed_float": "return __builtin_convertvector((vsigned)a, vfloat);",
    "prefetch": "__builtin_prefetch(a);",
    "prefetch_once": "__builtin_prefetch(a, 0, 0);",
}
