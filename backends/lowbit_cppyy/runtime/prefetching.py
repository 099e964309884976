"""How kernels for one row of x fetch their words, each of which is read once: a choice by the processor.

A fetch that takes no place in the caches (``NTA``) leaves that place to the activations, and AMD's processors were
tuned with it. Intel's server processors are slower with it than with a fetch into all levels (``T0``), by this much
with 4 bits:

- Ice Lake, one thread, other work beside it: 2048 × 2048, called again and again, 1.8 times with float32 and 2.8 to 3
  with integers; 4096 × 11008, five copies in turn, 1.3 times with float32. A matrix does not seem to stay in the
  third-level cache either.
- Cascade Lake, nothing beside it, 4096 × 11008, six copies in turn: one thread 1.8 to 3.3 times with float32 and 1.8 to
  2 with integers, two threads 1.6 to 2.
- Emerald Rapids, a virtual machine: tokens of SmolLM2, one thread and two, 1.4 and 1.5 times with float32, 1.7 times
  with integers.

Each line is then fetched twice: 24 KiB earlier into the second-level cache too, which can wait for more lines than the
first-level cache. On Emerald Rapids 4096 × 11008 is 1.03 to 1.13 times as fast with both fetches as with ``T0`` alone,
except with AVX2 and 4 bits, where instructions are the limit; tokens of SmolLM2 are 1.02 to 1.14 times as fast.
Distances of 8 and 56 KiB made little difference.

So each line is fetched twice on Intel's processors, also on those that were not measured, and with ``NTA`` on all
others.
"""

from lowbit_cppyy.runtime.vendor import made_by_intel

PRELUDE = "#ifndef LOWBIT_ONCE\n#define LOWBIT_ONCE(a) {}\n#endif\n"
"""C++ that defines how words are fetched, before the words of a table."""


def fetch_once() -> str:
    """The C++ expression that fetches the line at ``a`` on this processor; it is used on x86 only."""
    if made_by_intel():
        return "(_mm_prefetch(a, _MM_HINT_T0), _mm_prefetch((a) + 24576, _MM_HINT_T1))"
    return "_mm_prefetch(a, _MM_HINT_NTA)"
