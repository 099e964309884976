"""What the models ask of this machine: γ, the first cache; and what tells it from other machines.

QIGen's Algorithm 4 begins with γ, the size of the first data cache in bits, and η, the number of vector registers. η
belongs to the instruction set and stands in its table (`lowbit_cppyy.codegen.isa`). γ is asked of the system, and where
it was found is told with it.
"""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowbit_cppyy.codegen.isa import TABLES

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SYSTEM_NAME = "SC_LEVEL1_DCACHE_SIZE"
USUAL_BYTES: Mapping[int, int] = {1: 32 * 1024, 2: 512 * 1024, 3: 32 * 1024 * 1024}
"""What is taken for the cache of a level where the system does not say."""

_UNITS = {"": 1, "K": 1024, "M": 1024**2}


@dataclass(frozen=True)
class Cache:
    """A data cache.

    Attributes:
        bytes: its size.
        source: who says so.
    """

    bytes: int
    source: str

    @property
    def bits(self) -> int:
        """γ, if it is the first."""
        return 8 * self.bytes


def cache_of_level(level: int, folder: Path | None = None) -> Cache:
    """The data cache of a level of the first processor.

    Args:
        level: 1, 2 or 3.
        folder: where the system describes its caches; by default where Linux does.
    """
    for index in sorted((folder or CACHES).glob("index*")):
        if _text(index / "level") == str(level) and _text(index / "type") in ("Data", "Unified"):
            size = re.fullmatch(r"([1-9][0-9]{0,8})([KM]?)", _text(index / "size"))
            if size:
                return Cache(int(size[1]) * _UNITS[size[2]], str(index / "size"))
    if level == 1 and SYSTEM_NAME in os.sysconf_names and (size_1 := os.sysconf(SYSTEM_NAME)) > 0:
        return Cache(size_1, f"sysconf {SYSTEM_NAME}")
    return Cache(USUAL_BYTES[level], "not known: a usual size")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


@cache
def processor_name() -> str:
    """The processor by its maker's name for it."""
    import archspec.cpu

    return str(archspec.cpu.brand_string() or platform.processor() or platform.machine())


@cache
def processor_key() -> str:
    """What a measurement is good for: the processor's name, the features that the tables ask for, and γ.

    Features that the tables do not name are left out, since an update of microcode or kernel may change them.
    """
    from lowbit_cppyy.runtime.processor import has

    features = sorted({feature for table in TABLES.values() for feature in table.requires})
    return "; ".join((processor_name(), " ".join(filter(has, features)), f"L1 {cache_of_level(1).bytes}"))
