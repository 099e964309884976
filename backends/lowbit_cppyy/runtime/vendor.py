"""The maker of the processor, by which some choices differ that no feature of it tells.

On Intel's server processors fetches into no cache are slow (`lowbit_cppyy.runtime.prefetching`), and conversions and
masks take the ports of multiply-adds if registers have sixteen lanes (`lowbit_cppyy.tuning.choices`). No choice changes
the bits of a result.
"""

from functools import cache

from lowbit_cppyy.codegen.isa import InstructionSet

INTEL = "GenuineIntel"
"""Archspec's name of the vendor."""

TALLEST = 16
"""The most rows of x that a kernel computes at once, as ``max_rows`` of ``cpp/linear.h`` allows."""


@cache
def made_by_intel() -> bool:
    """Whether Intel made this processor; no, if archspec is missing. Kernels are printed without it, but never run."""
    try:
        import archspec.cpu  # takes 50 ms, so it is delayed until something is compiled
    except ImportError:
        return False
    return bool(archspec.cpu.host().vendor == INTEL)


def tall_tiles(table: InstructionSet) -> bool:
    """Whether `TALLEST` rows should share a code, because unpacking it takes the ports of multiply-adds."""
    return table.lanes == 16 and made_by_intel()
