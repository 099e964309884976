"""The instruction tables: what each word of the vocabulary is on one kind of processor.

Adding an instruction set is adding a table here. A kernel's own text is the same for all of them; only the small
functions that it calls differ, and these are made from the table. In a table, ``a``, ``b`` and ``c`` are the operands
of a word in order, and ``i`` is a count of bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class InstructionSet:
    """One table.

    Attributes:
        name: as it stands in the names of kernels, and in ``LOWBIT_CPPYY_ISA``.
        lanes: 32-bit numbers in a register.
        fused: whether `fmadd` rounds once; if not, it rounds twice, the product and the sum.
        requires: what the processor must have, in archspec's names.
        headers: C++ headers to include.
        types: C++ for the register types `vint` (unsigned) and `vfloat`.
        attribute: what stands before each function, so that a compiler told nothing of this processor accepts it.
        words: word of `lowbit.vector.VOCABULARY` to the body of the C++ function for it.
    """

    name: str
    lanes: int
    fused: bool
    requires: tuple[str, ...]
    headers: tuple[str, ...]
    types: str
    attribute: str
    words: Mapping[str, str]


AVX2 = InstructionSet(
    name="avx2",
    lanes=8,
    fused=True,
    requires=("avx2", "fma"),
    headers=("immintrin.h",),
    types="using vint = __m256i;\nusing vfloat = __m256;",
    attribute='__attribute__((target("avx2,fma")))',
    words={
        "load_int": "return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));",
        "load_float": "return _mm256_loadu_ps(reinterpret_cast<const float*>(a));",
        "store": "_mm256_storeu_ps(a, b);",
        "broadcast_int": "return _mm256_set1_epi32(static_cast<int>(a));",
        "broadcast_float": "return _mm256_set1_ps(a);",
        "fmadd": "return _mm256_fmadd_ps(a, b, c);",
        "srli": "return _mm256_srli_epi32(a, i);",
        "slli": "return _mm256_slli_epi32(a, i);",
        "and": "return _mm256_and_si256(a, b);",
        "or": "return _mm256_or_si256(a, b);",
        "cvt_int_float": "return _mm256_cvtepi32_ps(a);",
        "prefetch": "_mm_prefetch(reinterpret_cast<const char*>(a), _MM_HINT_T0);",
    },
)

# C++ for any processor, in the vector types that g++ and clang share: the compiler makes of them whatever vectors the
# processor has. Loops over small arrays say the same and were measured eight times slower, being vectorised badly.
PLAIN = InstructionSet(
    name="plain",
    lanes=8,
    fused=False,  # where a processor has no such instruction, a fused multiply-add is a slow library call
    requires=(),
    headers=(),
    types="""\
typedef std::uint32_t vint __attribute__((vector_size(32)));
typedef std::int32_t vsigned __attribute__((vector_size(32)));
typedef float vfloat __attribute__((vector_size(32)));""",
    attribute="",
    words={
        "load_int": "vint d; std::memcpy(&d, a, sizeof d); return d;",
        "load_float": "vfloat d; std::memcpy(&d, a, sizeof d); return d;",
        "store": "std::memcpy(a, &b, sizeof b);",
        "broadcast_int": "return vint{a, a, a, a, a, a, a, a};",
        "broadcast_float": "return vfloat{a, a, a, a, a, a, a, a};",
        "fmadd": "LOWBIT_ROUND_TWICE return a * b + c;",
        "srli": "return a >> i;",
        "slli": "return a << i;",
        "and": "return a & b;",
        "or": "return a | b;",
        "cvt_int_float": "return __builtin_convertvector((vsigned)a, vfloat);",
        "prefetch": "__builtin_prefetch(a);",
    },
)

TABLES: Mapping[str, InstructionSet] = MappingProxyType({table.name: table for table in (AVX2, PLAIN)})
"""Every table by its name, the fastest first."""
