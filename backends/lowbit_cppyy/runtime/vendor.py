"""The kinds of processors that need different kernels; no one feature tells.

They differ in prefetches (`lowbit_cppyy.runtime.prefetching`) and in what a subnormal float costs.
"""

import warnings
from functools import cache
from typing import Literal

Kind = Literal["intel", "zen4", "other"]


@cache
def kind() -> Kind:
    """The kind of this processor; "other", if archspec is missing. Kernels are printed without it, but never run.

    A virtual machine may hide what archspec tells a Zen 4 by. So it is told by the features that it has before the next
    generation: products of bytes with 512 bits, but not with shorter instructions.
    """
    try:
        from archspec.cpu.detect import detected_info  # takes 50 ms, so it is delayed until something is compiled
    except ImportError:
        return "other"
    with warnings.catch_warnings(action="ignore"):  # without /proc/cpuinfo nothing is known
        detected = detected_info()
    if detected.vendor == "GenuineIntel":
        return "intel"
    amd, features = detected.vendor == "AuthenticAMD", detected.features
    return "zen4" if amd and "avx512_vnni" in features and "avx_vnni" not in features else "other"


def fast_subnormals() -> bool:
    """Whether this processor is known to multiply subnormal floats as fast as others.

    A Zen 4 does (*measured*). Others may leave them to microcode, hundreds of instructions for each, and were not
    measured.

    Source: Intel VTune's guide, floating-point assists.
    """
    return kind() == "zen4"
