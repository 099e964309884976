"""The hint by which kernels for one row of x fetch their words, each of which is read once: a choice by the processor.

A fetch that takes no place in the caches (``NTA``) leaves that place to the activations, and AMD's processors were
tuned with it. Intel's server processors are slower with it than with a fetch into all levels (``T0``), by this much
with 4 bits:

- Ice Lake, one thread, other work beside it: 2048 × 2048, called again and again, 1.8 times with float32 and 2.8 to 3
  with integers; 4096 × 11008, five copies in turn, 1.3 times with float32. A matrix does not seem to stay in the
  third-level cache either.
- Cascade Lake, nothing beside it, 4096 × 11008, six copies in turn: one thread 1.8 to 3.3 times with float32 and 1.8 to
  2 with integers, two threads 1.6 to 2.

So the hint is ``T0`` on Intel's processors, also on those that were not measured, and ``NTA`` on all others.
"""

from functools import cache

PRELUDE = "#ifndef LOWBIT_ONCE\n#define LOWBIT_ONCE {}\n#endif\n"
"""C++ that defines a hint, before the words of a table."""

KEEPING = ("GenuineIntel",)
"""Processor vendors, by archspec's names, for which ``T0`` is the hint."""


@cache
def once_hint() -> str:
    """The hint for this processor, by its name in x86 intrinsics; other processors ignore it."""
    import archspec.cpu  # takes 50 ms, so it is delayed until something is compiled

    return "_MM_HINT_T0" if archspec.cpu.host().vendor in KEEPING else "_MM_HINT_NTA"
