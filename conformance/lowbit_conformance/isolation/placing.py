"""Putting the arguments of a call into the shared memory, each array where its placement says.

Arrays that share memory in the caller's hands share it there too, so a view stays a view; and an argument travels as a
tree (`lowbit.backend.wire`) in which an array is the place where it lies.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lowbit.arrays import Array
from lowbit.backend import Capabilities
from lowbit.backend.wire import Tree, encode
from lowbit_conformance.isolation.arena import Arena, Placement, Segment
from lowbit_conformance.isolation.calls import Call, Variant, poisoned
from lowbit_conformance.isolation.process import Message

FILLINGS = (0xA5, 0x5A)  # of memory that malloc hands out
PADDINGS = (0xFF, 0x3C)
MOST_OFFSET = 1 << 10  # elements


class Places(Protocol):
    """Allocates places for arrays: an `Arena`, or places that are in use already."""

    def place(self, name: str, array: Array, how: Placement, writeable: bool) -> Segment: ...


class Placer:
    """Puts the arrays of one attempt into the arena."""

    def __init__(self, arena: Places, how: Placement, stride: int = 0) -> None:
        """The offset of each array is larger by `stride` than that of the previous one."""
        self._arena, self._how, self._stride = arena, how, stride
        self.segments: list[Segment] = []
        self._roots: dict[int, Segment] = {}

    def tree(self, name: str, value: Any, writeable: bool) -> Tree:
        """The tree of an argument, after its arrays were placed."""
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


@dataclass(frozen=True)
class Attempt:
    """One placement of a call: the message for the host, and the places of the arrays."""

    message: Message
    segments: list[Segment]


class SameArrays:
    """The places of the arrays of calls that are repeated with other contents.

    Attributes:
        serial: its unique number.
        places: the segments of each kind of call, in the order in which the arrays are placed.
    """

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.places: dict[tuple[str, Variant], list[Segment]] = {}

    def number(self, key: tuple[str, Variant]) -> int:
        return list(self.places).index(key)


class Rewriting:
    """Replaces an arena: returns segments that are in use already, and gives them the contents of new arrays."""

    def __init__(self, arena: Arena, segments: list[Segment]) -> None:
        self._arena, self._next = arena, iter(segments)

    def place(self, name: str, array: Array, how: Placement, writeable: bool) -> Segment:
        return self._arena.rewrite(next(self._next), array)


def placed(
    call: Call, variant: Variant, arena: Arena, claimed: Capabilities, series: SameArrays | None = None
) -> Attempt:
    """One attempt at a call, with its arrays placed according to the variant and the declared capabilities."""
    key = (call.kind, variant) if series is not None else ("", variant)  # determining the kind takes time
    how = Placement(
        "left" if variant.side else "right",
        PADDINGS[variant.padding],
        claimed.alignment,
        claimed.overread,
        variant.offset,
    )
    again = series is not None and key in series.places
    where = Rewriting(arena, series.places[key]) if series is not None and again else arena
    placer = Placer(where, how, variant.stride)
    arguments = list(call.arguments)
    names = call.names
    if call.poisoned:
        arguments[call.out] = poisoned(call.arguments[call.out], variant.filling)
    message = {
        "arguments": [placer.tree(names[n], part, n == call.out) for n, part in enumerate(arguments)],
        "choices": {name: placer.tree(name, part, False) for name, part in call.choices.items()},
        "perturb": FILLINGS[variant.filling],
    }
    message["segments"] = [[seg.first, seg.last - seg.first, int(seg.writeable)] for seg in placer.segments]
    if series is not None:
        series.places.setdefault(key, placer.segments)
        message["same"] = [series.serial, series.number(key)]
    if call.owner is not None:
        message["handle"] = call.owner.handle(variant.side if variant.handle < 0 else variant.handle)
    return Attempt(message, placer.segments)
