"""Whose fault a fault is: from the address that could not be touched to a verdict."""

import signal

from lowbit_conformance.isolation.arena import ARGUMENTS, CONTROL, GUARD, PAGE, Arena, Segment
from lowbit_conformance.isolation.faults import ACCESS, ADDRESS, READ, SIGNAL, WRITE

VECTOR = 64
"""Bytes: a read this close after an array is the rest of a register, the most common over-read."""


def blame(death: str, arena: Arena, base: int, live: list[Segment]) -> str:
    """The verdict on a host that ended as `death` says, while the arrays of `live` were accessible."""
    number, address, access = (int(arena.control()[word]) for word in (SIGNAL, ADDRESS, ACCESS))
    if not death.startswith("CRASHED(") or number not in (signal.SIGSEGV, signal.SIGBUS):
        return death
    name, at = signal.Signals(number).name, address - base
    if not 0 <= at < CONTROL + ARGUMENTS:
        return f"CRASHED({name}): {_verb(access)} of address {address:#x}, which is no argument"
    nearest = min(live, key=lambda segment: _distance(segment, at), default=None)
    if nearest is None or _distance(nearest, at) >= GUARD * PAGE:
        word = "OOB_WRITE" if access == WRITE else "OOB_READ"
        return f"{word}: {_verb(access)} of memory that held the arrays of an earlier call ({name})"
    return f"{_beside(nearest, at, access)} ({name})"


def _distance(segment: Segment, at: int) -> int:
    return max(segment.start - at, at - segment.end + 1, 0)


def _verb(access: int) -> str:
    return {READ: "a read", WRITE: "a write"}.get(access, "a touch")


def _beside(segment: Segment, at: int, access: int) -> str:
    """A fault at or near an array."""
    if segment.start <= at < segment.end:
        place = f"element {(at - segment.start) // segment.itemsize} of {segment.name}"
        if access == WRITE and segment.writeable:
            return f"OOB_WRITE: a write to {place} after the call had returned"
        if access == WRITE:
            return f"INPUT_MUTATED: a write to {place}"
        return f"OOB_READ: {_verb(access)} of {place} after the call that it was given to"
    after = at - segment.end
    place = f"{segment.start - at} bytes before the start of {segment.name}"
    if after >= 0:
        place = f"{after} bytes past the end of {segment.name}"
    if access == WRITE:
        return f"OOB_WRITE: a write {place}"
    if 0 <= after < VECTOR:
        return f"UNDECLARED_OVERREAD: a read {place}"
    return f"OOB_READ: {_verb(access)} {place}"
