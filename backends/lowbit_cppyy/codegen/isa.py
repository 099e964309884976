"""The instruction tables: what each word of the vocabulary is on one kind of processor.

To add an instruction set, add a table here. The text of a kernel is the same for all of them. Only the small functions
that it calls differ, and the table defines these. In a table, ``a``, ``b`` and ``c`` are the operands of a word in
order, and ``i`` is a number of bits. A table that extends another one states only the differences.

Source: QIGen §2, table 1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lowbit_cppyy.codegen.isa_neon import NEON_DOT4, NEON_TYPES, NEON_WORDS
from lowbit_cppyy.codegen.isa_plain import PLAIN_TYPES, PLAIN_WORDS


@dataclass(frozen=True)
class InstructionSet:
    """The table of one instruction set.

    Attributes:
        name: as used in the names of kernels and in ``LOWBIT_CPPYY_ISA``.
        lanes: L, 32-bit numbers in a register.
        registers: η, the number of vector registers.
        fused: whether `fmadd` rounds once; otherwise it rounds the product and the sum.
        byte_dots: whether `dot4` is one instruction; otherwise it takes several.
        memory_broadcasts: whether an operand can be one number in memory that is broadcast.
        requires: processor features that it needs, by archspec's names.
        headers: C++ headers to include.
        types: C++ for the register types `vint` (unsigned) and `vfloat`.
        attribute: put before each function, so that a compiler that targets another processor accepts it.
        words: the body of the C++ function of each word of `lowbit.kernels.vector.VOCABULARY` that a kernel uses.
    """

    name: str
    lanes: int
    registers: int
    fused: bool
    byte_dots: bool
    memory_broadcasts: bool
    requires: tuple[str, ...]
    headers: tuple[str, ...]
    types: str
    attribute: str
    words: Mapping[str, str]

    @property
    def options(self) -> tuple[str, ...]:
        """The options that allow a compiler to use these instructions in all functions; `attribute` allows it in one.

        >>> AVX2.options
        ('-mavx2', '-mfma', '-mf16c')
        """
        allowed = re.search(r'target\("(.+)"\)', self.attribute)
        names = allowed[1].split(",") if allowed else []
        return tuple(f"-m{name}" for name in names)

    def with_dots(self, name: str, requires: tuple[str, ...], target: str, dot4: str) -> "InstructionSet":
        """This table with an instruction for `dot4` added."""
        attribute = self.attribute.replace('"))', f',{target}"))')
        requires = self.requires + requires
        words = {**self.words, "dot4": dot4}
        return replace(self, name=name, byte_dots=True, requires=requires, attribute=attribute, words=words)


AVX2 = InstructionSet(
    name="avx2",
    lanes=8,
    registers=16,
    fused=True,
    byte_dots=False,
    memory_broadcasts=False,
    requires=("avx2", "fma", "f16c"),
    headers=("immintrin.h",),
    types="using vint = __m256i;\nusing vfloat = __m256;",
    attribute='__attribute__((target("avx2,fma,f16c")))',
    words={
        "load_int": "return _mm256_loadu_si256(static_cast<const __m256i*>(a));",
        "load_float": "return _mm256_loadu_ps(static_cast<const float*>(a));",
        "load_half": "return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(a)));",
        "load_byte": "return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(a)));",
        "store": "_mm256_storeu_ps(a, b);",
        "broadcast_int": "return _mm256_set1_epi32(static_cast<int>(a));",
        "broadcast_float": "return _mm256_set1_ps(a);",
        "fmadd": "return _mm256_fmadd_ps(a, b, c);",
        "add": "return _mm256_add_ps(a, b);",
        "multiply": "return _mm256_mul_ps(a, b);",
        "divide": "return _mm256_div_ps(a, b);",
        "maximum": "return _mm256_max_ps(a, b);",
        # Neighbours are added within each half of a register; then the middle two pairs are swapped.
        "add_neighbours": "const __m256d pairs = _mm256_castps_pd(_mm256_hadd_ps(a, b)); "
        "return _mm256_castpd_ps(_mm256_permute4x64_pd(pairs, 0xD8));",
        "permute": "return _mm256_permutevar8x32_ps(a, b);",
        "permute_pair": "return _mm256_blendv_ps(_mm256_permutevar8x32_ps(a, b), _mm256_permutevar8x32_ps(c, b), "
        "_mm256_castsi256_ps(_mm256_slli_epi32(b, 28)));",  # by the highest bit of each lane
        "srli": "return _mm256_srli_epi32(a, i);",
        "slli": "return _mm256_slli_epi32(a, i);",
        "and": "return _mm256_and_si256(a, b);",
        "or": "return _mm256_or_si256(a, b);",
        "and_or": "return _mm256_or_si256(_mm256_and_si256(a, b), c);",
        "select": "return _mm256_or_si256(_mm256_and_si256(a, b), _mm256_andnot_si256(a, c));",
        "add_int": "return _mm256_add_epi32(a, b);",
        "subtract_int": "return _mm256_sub_epi32(a, b);",
        "add_neighbours_int": "return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8);",
        # Even and odd bytes separately, as 16-bit numbers, so that nothing saturates.
        "dot4": "const vint even = _mm256_madd_epi16(_mm256_and_si256(b, _mm256_set1_epi16(255)), "
        "_mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8)); "
        "const vint odd = _mm256_madd_epi16(_mm256_srli_epi16(b, 8), _mm256_srai_epi16(c, 8)); "
        "return _mm256_add_epi32(a, _mm256_add_epi32(even, odd));",
        "dot4_pairs": "return _mm256_maddubs_epi16(a, b);",
        "add_pairs": "return _mm256_add_epi16(a, b);",
        "dot2": "return _mm256_add_epi32(a, _mm256_madd_epi16(b, c));",
        "srai": "return _mm256_srai_epi32(a, i);",
        "lookup_bytes": "return _mm256_shuffle_epi8(a, b);",
        "as_int": "return _mm256_castps_si256(a);",
        "as_float": "return _mm256_castsi256_ps(a);",
        "cvt_int_float": "return _mm256_cvtepi32_ps(a);",
        "cvt_int_subnormal": "return _mm256_castsi256_ps(a);",
        "cvt_signed_float": "return _mm256_cvtepi32_ps(a);",
        "prefetch": "_mm_prefetch(static_cast<const char*>(a), _MM_HINT_T0);",
        "prefetch_once": "LOWBIT_ONCE(static_cast<const char*>(a));",
    },
)


def _widened(body: str) -> str:
    """A word of AVX2 in 512-bit instructions, whose names differ only in the width."""
    return body.replace("256", "512")


_EVEN = "_mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0)"
_ODD = "_mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1)"
"""Lane numbers in two registers, the second after the first."""

AVX512 = InstructionSet(
    name="avx512",
    lanes=16,
    registers=32,
    fused=True,
    byte_dots=False,
    memory_broadcasts=True,
    requires=("avx512f", "avx512bw", "avx512vl"),
    headers=("immintrin.h",),
    types="using vint = __m512i;\nusing vfloat = __m512;",
    attribute='__attribute__((target("avx512f,avx512bw,avx512vl")))',
    words={
        **{word: _widened(body) for word, body in AVX2.words.items()},
        "load_half": "return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(a)));",
        "load_byte": "return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(a)));",
        "add_neighbours": f"return _mm512_add_ps(_mm512_permutex2var_ps(a, {_EVEN}, b), "
        f"_mm512_permutex2var_ps(a, {_ODD}, b));",
        "permute": "return _mm512_permutexvar_ps(b, a);",
        "permute_pair": "return _mm512_permutex2var_ps(a, b, c);",
        "select": "return _mm512_ternarylogic_epi32(a, b, c, 0xCA);",
        "and_or": "return _mm512_ternarylogic_epi32(a, b, c, 0xEA);",
        "add_neighbours_int": f"return _mm512_add_epi32(_mm512_permutex2var_epi32(a, {_EVEN}, b), "
        f"_mm512_permutex2var_epi32(a, {_ODD}, b));",
    },
)

AVXVNNI = AVX2.with_dots("avxvnni", ("avx_vnni",), "avxvnni", "return _mm256_dpbusd_avx_epi32(a, b, c);")
AVX512VNNI = AVX512.with_dots("avx512vnni", ("avx512_vnni",), "avx512vnni", "return _mm512_dpbusd_epi32(a, b, c);")

PLAIN = InstructionSet(
    name="plain",
    lanes=8,
    registers=16,
    fused=False,  # without such an instruction, a fused multiply-add is a slow library call
    byte_dots=True,
    memory_broadcasts=False,
    requires=(),
    headers=(),
    types=PLAIN_TYPES,
    attribute="",
    words=PLAIN_WORDS,
)

NEON = InstructionSet(
    name="neon",
    lanes=8,
    registers=16,
    fused=True,
    byte_dots=False,
    memory_broadcasts=False,
    requires=("asimd",),
    headers=("arm_neon.h",),
    types=NEON_TYPES,
    attribute="",
    words=NEON_WORDS,
)
NEONDOT = replace(
    NEON,
    name="neondot",
    byte_dots=True,
    requires=("asimd", "asimddp"),
    attribute='__attribute__((target("arch=armv8.2-a+dotprod")))',
    words={**NEON_WORDS, "dot4": NEON_DOT4},
)

TABLES: Mapping[str, InstructionSet] = MappingProxyType(
    {table.name: table for table in (AVX512VNNI, AVX512, AVXVNNI, AVX2, NEONDOT, NEON, PLAIN)}
)
"""Every table by its name; the fastest one of each architecture comes first."""
