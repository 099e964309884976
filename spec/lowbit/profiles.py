r"""Profiles: what a kernel can be certified for, by name.

A report says of every clause whether it was kept. A user who chooses a kernel wants one line: *certified for
lowbit-1.1/qgemv-4*. A *profile* defines what that line means: a named set of clauses, and the parameters for which they
must be kept. A backend claims profiles in its `Capabilities`; the conformance suite certifies them or says what is
missing. A claim that the suite cannot certify is a failure, like a declaration that is not kept.

**All of it, or not certified.** Each case of each clause, for each of the profile's parameters, must have run and
passed, and so must the eight habits of the operations concerned (`lowbit.contract.operation.HABITS`). A case that
failed, one that the backend does not declare, and one that was not run all count alike.

**Frozen.** The content of a profile never changes under its name: not the clauses, not a sentence of them, not the
parameters. A kernel certified last year has kept the same promises as one certified today. A changed profile gets a new
name; an error about the old name states the new one (`SUCCESSORS`). A later suite may test the same promises with more
cases, so a certificate also names the version of the suite. From 1.0 to 1.1 the refusal of wrong arguments, until then
a clause of most operations, became habit H8 of every operation.

**The parameters** are those that weights and caches in use have; a kernel that handles more loses nothing.

``packing``
    All four widths. A backend that packs 4 bits only can say so in its declaration, and needs no profile for it.

``qgemv-4``
    The product that a model is run with, token by token. 4 bits in groups of 32, 64 and 128, since these are the sizes
    of published 4-bit weights; with a short last group too, since it is the suite that says where a kernel may stop,
    not the model. Scales are float16, as files store them; a kernel that works from float32 widens them exactly when
    it prepares the matrix, whereas the way back would round. Both conventions: GGUF's Q4_1 has minima, GPTQ and AWQ
    have integer zero-points, and from float16 a zero-point becomes a minimum exactly, :math:`-s \cdot z` in float32,
    so a kernel needs one inner loop for both. A group as long as the column is not asked for: with its scale repeated
    it is the same matrix in groups of 128.

``bfp``
    Mantissas of 4 and 8 bits, the K-sort paper's BFP12 and BFP16, with exponents of 8 bits in blocks of 32, 64 and
    128. How formats with wider exponents are refused (`bfp.store`, C3) lies outside.

``kv-cache``
    Keys and values in the same formats, any number of heads and channels. What attention makes of them is another
    matter.

``moe-offload``
    The trace of a whole run and the same request by request. Any arrangement, with both kinds of memory: whether the
    host has room for a second copy of the experts is for the machine to say, and the engine must work on either.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lowbit.contract.checks import check_choice
from lowbit.contract.operation import HABITS, Parameters, sentence
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS


@dataclass(frozen=True)
class Profile:
    """A named and frozen set of promises.

    Attributes:
        id: version and name, ``lowbit-1.1/packing``.
        title: a few words for a table.
        clauses: the clauses that must be kept, by id.
        parameters: for each parameter that is not asked for in full, the values that are; it limits every operation
            of the profile that has a parameter of this name.
    """

    id: str
    title: str
    clauses: tuple[str, ...]
    parameters: Mapping[str, tuple[object, ...]]

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations concerned, in the order of their clauses.

        >>> profile("lowbit-1.1/packing").operations
        ('packing.pack', 'packing.unpack')
        """
        return tuple(dict.fromkeys(clause.rpartition("/")[0] for clause in self.clauses))

    @property
    def habits(self) -> tuple[str, ...]:
        """The habits that must be kept, by id: eight for each operation.

        >>> profile("lowbit-1.1/packing").habits[:2]
        ('packing.pack/H1', 'packing.pack/H2')
        """
        return tuple(f"{operation}/{habit}" for operation in self.operations for habit in HABITS)

    def selects(self, clause: str, parameters: Parameters) -> bool:
        """Whether a call with these parameters, made to check this clause or habit, belongs to the profile.

        >>> profile("lowbit-1.1/qgemv-4").selects("linear.qgemv/C1", {"bits": 4, "group_size": 64})
        True
        >>> profile("lowbit-1.1/qgemv-4").selects("linear.qgemv/C1", {"bits": 4, "group_size": 3})
        False
        """
        if clause not in self.clauses and clause not in self.habits:
            return False
        return all(parameters[name] in asked for name, asked in self.parameters.items() if name in parameters)

    @property
    def digest(self) -> str:
        """sha256 of everything that the profile promises, the sentences of its clauses and habits included."""
        promises = {clause: sentence(clause) for clause in (*self.clauses, *self.habits)}
        content = [self.id, promises, dict(self.parameters)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def profile(id: str) -> Profile:
    """The profile of this name.

    Raises:
        ArgumentError: there is none, or another has taken its place.
    """
    if id in SUCCESSORS:
        raise ArgumentError("profile", f"{id}, which this version does not certify", f"its successor {SUCCESSORS[id]}")
    check_choice("profile", id, list(PROFILES))
    return PROFILES[id]


# **The profiles lowbit-1.1.** Clauses are listed one by one: one that a chapter adds later is not part of them.


def clauses(operation: str, *numbers: int) -> tuple[str, ...]:
    """Clauses of one operation by their numbers.

    >>> clauses("packing.pack", 1, 3)
    ('packing.pack/C1', 'packing.pack/C3')
    """
    return tuple(f"{operation}/C{number}" for number in numbers)


def _by_id(profiles: Iterable[Profile]) -> Mapping[str, Profile]:
    """The profiles by their names; each clause must exist."""
    known = {clause for operation in OPERATIONS.values() for clause in operation.clauses}
    found = {each.id: each for each in profiles}
    for each in found.values():
        if unknown := set(each.clauses) - known:
            raise ValueError(f"profile {each.id} names clauses that do not exist: {sorted(unknown)}")
    return MappingProxyType(found)


BLOCKS, MANTISSAS, EXPONENTS = (32, 64, 128), (4, 8), (8,)
"""K-sort's formats: BFP12 and BFP16."""

PROFILES = _by_id(
    (
        Profile(
            "lowbit-1.1/packing",
            "Codes of 2, 3, 4 and 8 bits in words",
            clauses("packing.pack", 1, 2) + clauses("packing.unpack", 1, 2),
            {},
        ),
        Profile(
            "lowbit-1.1/qgemv-4",
            "Vector times 4-bit matrix as published",
            clauses("linear.qgemv", 1, 2, 3, 4, 5),
            {"bits": (4,), "group_size": (32, 64, 128), "scale_dtype": ("float16",)},
        ),
        Profile(
            "lowbit-1.1/bfp",
            "Block Floating Point: cast, integer dot product, storage",
            clauses("bfp.cast", 1, 2, 3, 4, 5)
            + clauses("bfp.decode", 1, 2)
            + clauses("bfp.dot", 1, 2, 3)
            + clauses("bfp.total", 1, 2)
            + clauses("bfp.store", 1, 2)
            + clauses("bfp.load", 1),
            {
                "block": BLOCKS,
                "mantissa": MANTISSAS,
                "exponent": EXPONENTS,
                "mantissa_a": MANTISSAS,
                "mantissa_b": MANTISSAS,
            },
        ),
        Profile(
            "lowbit-1.1/kv-cache",
            "Keys and values in Block Floating Point, token by token",
            clauses("kvcache.bfp", 1, 2, 3, 4, 5),
            {
                f"{part}_{choice}": asked
                for part in ("key", "value")
                for choice, asked in (("block", BLOCKS), ("mantissa", MANTISSAS), ("exponent", EXPONENTS))
            },
        ),
        Profile(
            "lowbit-1.1/moe-offload",
            "Which expert lies where, event by event",
            clauses("offload.trace", 1, 2, 3, 4, 5, 6) + clauses("offload.engine", 1, 2, 3, 4, 5),
            {},
        ),
    )
)
"""The profiles by their names."""

SUCCESSORS: Mapping[str, str] = MappingProxyType(
    {f"lowbit-1.0/{name}": f"lowbit-1.1/{name}" for name in ("packing", "qgemv-4", "bfp", "kv-cache", "moe-offload")}
)
"""Profiles of earlier versions, by name, and those that took their place."""
