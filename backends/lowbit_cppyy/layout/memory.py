"""Memory for prepared matrices: lines of the cache, on huge pages.

A stream is read once from front to back, from memory that no cache holds. With pages of 4 KiB the processor looks up a
new page every sixty lines, and its own prefetching ends with each of them; pages of 2 MiB are five hundred times as
long. The system gives them for memory that asks for them (``madvise``) and that is as large. So matrices of a few
hundred KiB, of which a small model has two hundred, are laid side by side in *slabs* of several huge pages.

A slab is a numpy array, and what is handed out are views of it: it is given back when the last matrix in it is. So it
is no larger than a few huge pages, since one matrix that stays keeps all of it.
"""

import ctypes
import mmap
import os
import threading

import numpy as np

from lowbit.arrays import U8, U32

ALIGNMENT = 64  # bytes: a line of the cache, and the widest vector register
HUGE_PAGE = 2**21  # bytes
SLAB = 4 * HUGE_PAGE

Words = U32


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # so that no child finds it held by a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_slab: U8 = np.empty(0, np.uint8)
"""What is left of the slab that is being filled."""


def aligned(elements: int) -> Words:
    """Room for so many uint32 elements from an address that is a multiple of `ALIGNMENT`, not written to yet.

    What is larger than half a slab has huge pages of its own.
    """
    global _slab
    size = -(-4 * elements // ALIGNMENT) * ALIGNMENT
    if size > SLAB // 2:
        return _huge(size)[: 4 * elements].view(np.uint32)
    with _lock:
        if size > len(_slab):
            _slab = _huge(SLAB)
        room, _slab = _slab[:size], _slab[size:]
    return room[: 4 * elements].view(np.uint32)


def _huge(size: int) -> U8:
    """Memory of its own that begins on a huge page."""
    room = np.empty(size + HUGE_PAGE, np.uint8)
    start = -room.ctypes.data % HUGE_PAGE
    _ask_for_huge_pages(room.ctypes.data + start, size // HUGE_PAGE * HUGE_PAGE)
    return room[start : start + size]


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Silent where the system has none; nothing but speed depends on it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and size:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
