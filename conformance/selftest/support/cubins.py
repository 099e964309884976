"""What a cubin says of its kernels: the size and place of each argument, as NVRTC wrote them.

A cubin is an ELF file. For each kernel it has a section ``.nv.info.NAME`` of records, of which those of kind 0x17
describe one argument each (``fake_cuda/cubin.h`` reads the same).
"""

import struct
from dataclasses import dataclass

import numpy as np

from lowbit_cuda.port import Kernel

INFO, ARGUMENT = ".nv.info.", 0x17


@dataclass(frozen=True)
class Argument:
    """Bytes from the beginning of all arguments, and its own."""

    offset: int
    nbytes: int


def arguments(code: bytes) -> dict[str, list[Argument]]:
    """The arguments of each kernel of a cubin, in order."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<II16xQQ", code, table + number * size) for number in range(count)]
    names = sections[names_at][2]
    found = {}
    for name, _, start, length in sections:
        text = code[names + name : code.index(b"\0", names + name)].decode()
        if text.startswith(INFO):
            found[text.removeprefix(INFO)] = _arguments(code[start : start + length])
    return found


def _arguments(records: bytes) -> list[Argument]:
    found, at = dict[int, Argument](), 0
    while at + 4 <= len(records):
        form, kind, size = struct.unpack_from("<BBH", records, at)
        size = size if form == 4 else 0  # otherwise the value is in the record's head
        if (form, kind, size) == (4, ARGUMENT, 12):
            number, offset, packed = struct.unpack_from("<4xHHI", records, at + 4)
            found[number] = Argument(offset, packed >> 18)
        at += 4 + size
    return [found[number] for number in sorted(found)]


def described(kernel: Kernel) -> list[Argument]:
    """The arguments that its description says it has, each at a multiple of its size."""
    listed, offset = [], 0
    for parameter in kernel.parameters:
        nbytes = 8 if parameter.access else np.dtype(parameter.kind).itemsize
        offset = -(-offset // nbytes) * nbytes
        listed.append(Argument(offset, nbytes))
        offset += nbytes
    return listed
