"""The hint by which kernels for one row of x fetch their words, each of which is read once: a choice by the processor.

A fetch that takes no place in the caches (``NTA``) leaves that place to the activations. On Ice Lake servers a matrix
that is fetched so does not seem to stay in the third-level cache either, and every call reads it from memory. Measured
there with 4 bits, one thread and other work beside it, ``NTA`` took this many times as long as a fetch into all levels
(``T0``): 2048 × 2048, called again and again, 1.8 with float32 and 2.8 to 3 with integers; 4096 × 11008, five copies in
turn, 1.3 with float32. So ``T0`` is the hint there. Other processors keep ``NTA``, with which they were tuned.
"""

from functools import cache

PRELUDE = "#ifndef LOWBIT_ONCE\n#define LOWBIT_ONCE {}\n#endif\n"
"""C++ that comes before the words of a table, for a hint."""

KEEPING = ("icelake",)
"""Processors on which ``T0`` was measured to be faster, by archspec's names."""


@cache
def once_hint() -> str:
    """The hint for this processor, as x86's intrinsics name it; other processors ignore it."""
    import archspec.cpu  # takes 50 ms, so it waits until something is compiled

    return "_MM_HINT_T0" if archspec.cpu.host().name in KEEPING else "_MM_HINT_NTA"
