"""The host's end of what it shares with the judge: arrays in shared memory, and messages on a socket.

The judge sends this file's text to the host, in front of `host`, which uses these names as its own. The judge's ends
are `arena` and `process`.
"""

import ctypes
import json
import mmap
import os
import socket
import struct
from typing import Any

import numpy as np

from lowbit.backend.wire import Tree

LIBC: Any = ctypes.CDLL(None, use_errno=True)
NO_ACCESS, READ, WRITE = 0, 1, 2  # of mprotect

Message = dict[str, Tree]


class Memory:
    """The shared memory as this process sees it: inaccessible except for the pages of the running call."""

    def __init__(self, file: int, control: int, arguments: int) -> None:
        self.map = mmap.mmap(file, os.fstat(file).st_size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.control = np.frombuffer(self.map, np.uint64, control // 8)
        self.results = self.next = control + arguments
        LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._protect(control, arguments, NO_ACCESS)

    def _protect(self, start: int, size: int, access: int) -> None:
        if LIBC.mprotect(self.base + start, size, access):
            raise OSError(ctypes.get_errno(), "mprotect")

    def allow(self, segments: list[list[int]]) -> None:
        for start, size, writeable in segments:
            self._protect(start, size, READ | WRITE if writeable else READ)

    def forbid(self, segments: list[list[int]]) -> None:
        for start, size, _ in segments:
            self._protect(start, size, NO_ACCESS)

    def get(self, dtype: np.dtype[Any], shape: tuple[int, ...], tree: Message) -> Any:
        """An argument, at the place where the judge has put it."""
        if "at" not in tree:
            return np.empty(shape, dtype)  # an array without elements has no place
        array: Any = np.ndarray(shape, dtype, self.map, tree["at"], tree.get("strides"))
        array.setflags(write=tree["writeable"])
        return array

    def holds(self, array: Any) -> bool:
        """Whether an array is in the pages of arguments."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return bool(low < self.base + self.results and high > self.base)

    def put(self, array: Any) -> Message:
        """Copy a result to the place where the judge will read it."""
        at = -(-self.next // 64) * 64
        if at + array.nbytes > len(self.map):
            raise MemoryError(f"a result of {array.nbytes} bytes")
        self.next = at + array.nbytes
        np.ndarray(array.shape, array.dtype, self.map, at)[...] = array
        return {"at": at}


def receive(channel: socket.socket) -> Message:
    """One message; empty if the other side has gone."""
    head = read_exactly(channel, 8)
    return json.loads(read_exactly(channel, struct.unpack("<Q", head)[0])) if head else {}


def read_exactly(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return parts


def send(channel: socket.socket, message: Message) -> None:
    text = json.dumps(message).encode()
    channel.sendall(struct.pack("<Q", len(text)) + text)
