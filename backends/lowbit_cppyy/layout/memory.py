"""Memory for prepared matrices: aligned to cache lines, on huge pages.

A stream is read once from front to back, from memory that no cache holds. With pages of 4 KiB the processor translates
a new page every sixty cache lines, and its prefetcher stops at each page. Pages of 2 MiB are five hundred times as
long. The system provides them for memory that requests them (``madvise``) and is large enough. So matrices of a few
hundred KiB, of which a small model has two hundred, are placed side by side in *slabs* of several huge pages.

A slab is a numpy array, and matrices are views of it: it is freed with the last of them. A slab is no larger than a few
huge pages, because one remaining matrix keeps all of it.
"""

import ctypes
import mmap
import os
import threading

import numpy as np

from lowbit.arrays import U8, U32

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
HUGE_PAGE = 2**21  # bytes
SLAB = 4 * HUGE_PAGE

Words = U32


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child must not inherit the lock from a thread that it lacks
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_slab: U8 = np.empty(0, np.uint8)
"""The unused rest of the current slab."""


def aligned(elements: int) -> Words:
    """Uninitialised memory for this many uint32 elements, at an address that is a multiple of `ALIGNMENT`.

    A request larger than half a slab gets huge pages of its own.
    """
    global _slab
    size = -(-4 * elements // ALIGNMENT) * ALIGNMENT
    if size > SLAB // 2:
        return huge(size)[: 4 * elements].view(np.uint32)
    with _lock:
        if size > len(_slab):
            _slab = huge(SLAB)
        room, _slab = _slab[:size], _slab[size:]
    return room[: 4 * elements].view(np.uint32)


def huge(size: int) -> U8:
    """New memory that begins at a huge page."""
    room = np.empty(size + HUGE_PAGE, np.uint8)
    start = -room.ctypes.data % HUGE_PAGE
    _ask_for_huge_pages(room.ctypes.data + start, size // HUGE_PAGE * HUGE_PAGE)
    return room[start : start + size]


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages. Does nothing if the system has none; only speed depends on them."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and size:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
