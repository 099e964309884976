"""Macros by which the same kernels are compiled for different processors."""

from lowbit_cppyy.runtime.prefetching import fetch_once
from lowbit_cppyy.runtime.vendor import operands_in_memory


def definitions() -> dict[str, str]:
    """The macros of `lowbit_cppyy.codegen.lowering` and their values on this processor."""
    return {"LOWBIT_ONCE(a)": fetch_once(), "LOWBIT_OPERANDS": str(int(operands_in_memory()))}


def as_text() -> str:
    """The macros as C++, which precedes a prelude. A process compiles it once for each table."""
    lines = (f"#ifndef {name.split('(')[0]}\n#define {name} {value}\n#endif\n" for name, value in definitions().items())
    return "".join(lines)


def as_options() -> tuple[str, ...]:
    """The macros as options of a compiler."""
    return tuple(f"-D{name}={value}" for name, value in definitions().items())
