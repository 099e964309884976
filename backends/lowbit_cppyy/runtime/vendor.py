"""The kinds of processors that need different kernels; no one feature tells.

They differ in prefetches (`lowbit_cppyy.runtime.prefetching`), in what a subnormal float costs, in tiles, and in
whether codes are converted or looked up.
"""

import warnings
from functools import cache
from typing import Literal

Kind = Literal["icelake", "intel", "zen4", "other"]


@cache
def kind() -> Kind:
    """The kind of this processor; "other", if archspec is missing. Kernels are printed without it, but never run.

    A virtual machine may hide what archspec tells a processor by. So an Ice Lake and a Zen 4 are told by what they have
    and the generation after them has in addition: an Ice Lake permutes bytes, and has no products of bfloat16; a Zen 4
    has products of bytes with 512 bits, but not with shorter instructions.
    """
    try:
        from archspec.cpu.detect import detected_info  # takes 50 ms, so it is delayed until something is compiled
    except ImportError:
        return "other"
    with warnings.catch_warnings(action="ignore"):  # without /proc/cpuinfo nothing is known
        detected = detected_info()
    features = detected.features
    if detected.vendor == "GenuineIntel":
        return "icelake" if "avx512vbmi" in features and "avx512_bf16" not in features else "intel"
    amd = detected.vendor == "AuthenticAMD"
    return "zen4" if amd and "avx512_vnni" in features and "avx_vnni" not in features else "other"


def made_by_intel() -> bool:
    """Whether this is a processor of Intel's."""
    return kind() in ("icelake", "intel")


def operands_in_memory() -> bool:
    """Whether multiply-adds should broadcast numbers in memory rather than share a register.

    A Zen 4 broadcasts to registers on a port of the multiply-adds. An Ice Lake begins one broadcast from memory in a
    cycle, and two multiply-adds (*measured*): 49 billion multiply-adds a second with an operand in memory each, 90
    without. Other processors of Intel's were measured with registers only.
    """
    return not made_by_intel()


def fast_lookups() -> bool:
    """Whether this processor is known to look floats up in a register of sixteen faster than it masks and converts
    codes: an Ice Lake does (*measured*)."""
    return kind() == "icelake"


def fast_subnormals() -> bool:
    """Whether this processor is known to multiply subnormal floats as fast as others.

    A Zen 4 does (*measured*). Others may leave them to microcode, hundreds of instructions for each, and were not
    measured.

    Source: Intel VTune's guide, floating-point assists.
    """
    return kind() == "zen4"
