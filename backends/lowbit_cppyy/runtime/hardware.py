"""This machine: the sizes of its caches, and what distinguishes it from other machines."""

import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.runtime.processor import has

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
SYSTEM_NAME = "SC_LEVEL1_DCACHE_SIZE"
USUAL_BYTES: Mapping[int, int] = {1: 32 * 1024, 2: 512 * 1024, 3: 32 * 1024 * 1024}
"""The assumed cache size of each level, if the system does not report it."""

_UNITS = {"": 1, "K": 1024, "M": 1024**2}


def cache_bytes(level: int, folder: Path = CACHES) -> int:
    """The size of the data cache of a level of the first processor.

    Args:
        level: 1, 2 or 3.
        folder: in which the system describes its caches; by default Linux's folder.
    """
    for index in sorted(folder.glob("index*")):
        if _text(index / "level") == str(level) and _text(index / "type") in ("Data", "Unified"):
            size = re.fullmatch(r"([1-9][0-9]{0,8})([KM]?)", _text(index / "size"))
            if size:
                return int(size[1]) * _UNITS[size[2]]
    if level == 1 and SYSTEM_NAME in os.sysconf_names and (size_1 := os.sysconf(SYSTEM_NAME)) > 0:
        return size_1
    return USUAL_BYTES[level]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


@cache
def processor_name() -> str:
    """The vendor's name of the processor."""
    import archspec.cpu

    return str(archspec.cpu.brand_string() or platform.processor() or platform.machine())


@cache
def processor_key() -> str:
    """The machine for which a measurement is valid: the processor's name, features that tables require, first-level
    cache. Other features are omitted, because an update of microcode or kernel may change them.
    """
    features = sorted({feature for table in TABLES.values() for feature in table.requires})
    return "; ".join((processor_name(), " ".join(filter(has, features)), f"L1 {cache_bytes(1)}"))
