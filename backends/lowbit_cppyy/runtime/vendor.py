"""The maker of the processor, by which prefetches differ (`lowbit_cppyy.runtime.prefetching`); no feature tells it."""

from functools import cache

INTEL = "GenuineIntel"
"""Archspec's name of the vendor."""


@cache
def made_by_intel() -> bool:
    """Whether Intel made this processor; no, if archspec is missing. Kernels are printed without it, but never run."""
    try:
        import archspec.cpu  # takes 50 ms, so it is delayed until something is compiled
    except ImportError:
        return False
    return bool(archspec.cpu.host().vendor == INTEL)
