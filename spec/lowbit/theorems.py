"""Which theorems hold for a kernel: what a prover knows about it, found by an entry point.

The specification never imports a prover. A package offers one by an entry point of the group ``lowbit.theorems``: a
class with the functions of `Prover`. Commands that show a kernel also show what the prover knows. A theorem *holds*
here if an earlier proof has left a certificate for this kernel, this code and this solver; it is not proved again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from lowbit.errors import UnavailableError
from lowbit.system.entries import entries, loaded

THEOREMS = "lowbit.theorems"
"""The group of the entry point."""


@dataclass(frozen=True)
class Known:
    """What is known of a theorem.

    Attributes:
        theorem: its id, such as ``products/gemv_…``.
        statement: what it says.
        proof: how it was proved, in words; empty where no certificate is for what it is about today.
    """

    theorem: str
    statement: str
    proof: str

    @property
    def holds(self) -> bool:
        return bool(self.proof)


class Prover(Protocol):
    """What a package offers."""

    def of_kernel(self, name: str) -> Sequence[Known]:
        """The theorems about a kernel; none for one that no theorem is about."""
        ...

    def of_backend(self, entry: str, details: Mapping[str, object]) -> Sequence[Known]:
        """The theorems about the backend of an entry point; none where no proof has been kept.

        Args:
            entry: the value of the entry point.
            details: what the backend says of itself in a report.
        """
        ...


def prover() -> Prover | None:
    """The prover of this installation; None if there is none, or it lacks something."""
    for entry in entries(THEOREMS):
        try:
            return cast(Prover, loaded(entry, "the prover", lambda made: made()))
        except UnavailableError:
            continue
    return None


def of_kernel(name: str) -> Sequence[Known]:
    """What is known of a kernel; nothing without a prover."""
    found = prover()
    return () if found is None else found.of_kernel(name)


def of_backend(entry: str, details: Mapping[str, object]) -> Sequence[Known]:
    """What is known of the backend of an entry point; nothing without a prover."""
    found = prover()
    return () if found is None else found.of_backend(entry, details)
