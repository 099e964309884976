"""Putting the arguments of a call into the shared memory, each array where its placement says.

Arrays that share memory in the caller's hands share it there too, so a view stays a view; and an argument travels as a
tree (`lowbit.backend.wire`) in which an array is the place where it lies.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import Array
from lowbit.backend.wire import Tree, encode
from lowbit_conformance.isolation.arena import Placement, Segment
from lowbit_conformance.isolation.process import Message

MOST_OFFSET = 1 << 10  # elements


class Places(Protocol):
    """What hands out places for arrays: an `Arena`, or places that are taken already."""

    def place(self, name: str, array: Array, how: Placement, writeable: bool) -> Segment: ...


class Placer:
    """Puts the arrays of one attempt into the arena."""

    def __init__(self, arena: Places, how: Placement, stride: int = 0) -> None:
        """Each array lies at an offset larger by `stride` than that of the array before."""
        self._arena, self._how, self._stride = arena, how, stride
        self.segments: list[Segment] = []
        self._roots: dict[int, Segment] = {}

    def tree(self, name: str, value: Any, writeable: bool) -> Tree:
        """The tree of an argument, its arrays placed."""
        names = {}
        if dataclasses.is_dataclass(value):
            names = {id(getattr(value, part.name)): f"{name}.{part.name}" for part in dataclasses.fields(value)}
        return encode(value, lambda array: self._put(names.get(id(array), name), array, writeable))

    def _put(self, name: str, array: Array, writeable: bool) -> Message:
        writeable = writeable and array.flags.writeable
        if array.size == 0:
            return {"writeable": writeable}
        root = _root(array)
        if root is array or (array.flags.c_contiguous and not (writeable or id(root) in self._roots)):
            segment = self._segment(name, array, writeable, array)
            self._roots.setdefault(id(root), segment)
            return {"at": segment.start, "writeable": writeable, "strides": list(array.strides)}
        segment = self._roots.get(id(root)) or self._segment(name, root, writeable, root)
        offset = array.__array_interface__["data"][0] - np.lib.array_utils.byte_bounds(root)[0]
        return {"at": segment.start + offset, "writeable": writeable, "strides": list(array.strides)}

    def _segment(self, name: str, array: Array, writeable: bool, root: Array) -> Segment:
        offset = (self._how.offset + self._stride * len(self.segments)) % MOST_OFFSET
        segment = self._arena.place(name, array, dataclasses.replace(self._how, offset=offset), writeable)
        self.segments.append(segment)
        return segment


def _root(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
