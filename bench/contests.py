"""What is compared: which contestants meet at which shape, and how many copies of their weights there are."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peers import ours, registry
from peers.base import Contestant
from peers.qigen import CLONE
from peers.registry import Entry

SHAPES = ((2048, 2048), (4096, 4096), (4096, 11008), (11008, 4096), (576, 1536), (1536, 576), (576, 576))
"""K × N, y = x W: two squares, two layers of Llama-7B, three of SmolLM2-135M."""
HEADLINE = (4096, 11008)
QUICK = (2048, 2048)
BATCHES = (1, 4, 16, 128)
GROUPS = (16, 32, 64, 128)
LARGE = 2048 * 2048
"""Weights from which on a shape is large: a gigabyte of weights is in rotation for each contestant."""

ROTATION = 2**30
SMALL_ROTATION = 5 * 2**25  # 160 MB, five times a cache of 32 MiB
QUICK_ROTATION = 2**28
FEW = 1  # bytes: as few copies as can be, where so many contestants meet that a round reads more than a gigabyte
BURST = 2**22
"""Bytes that one measurement moves at least."""


@dataclass(frozen=True)
class Contest:
    """One meeting: contestants with the same weights at one shape, for some batches.

    Attributes:
        family: ``4 bits``, ``other widths``, ``groups of N bits``, ``QIGen, N bits``, or ``stored KIND`` with a type of
            ggml, ``gptq`` or ``awq``.
    """

    rows: int
    columns: int
    family: str
    batches: tuple[int, ...]

    @property
    def large(self) -> bool:
        return self.rows * self.columns >= LARGE

    @property
    def headline(self) -> bool:
        """Whether it is at the headline, groups apart, which are compared on most threads only."""
        return (self.rows, self.columns) == HEADLINE and not self.family.startswith("groups")

    @property
    def group_size(self) -> int:
        """128, or 64 where 128 does not divide the rows."""
        return 128 if self.rows % 128 == 0 else 64

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.columns} {self.family}"

    def entries(self) -> list[Entry]:
        """Who takes part."""
        brief = (self.rows, self.columns) != HEADLINE
        if self.family == "4 bits":
            return [*registry.ours_of(4, brief), *registry.PEERS]
        if self.family == "other widths":
            return [*(entry for bits in (2, 3, 8) for entry in registry.ours_of(bits, brief)), *registry.OTHER_WIDTHS]
        if self.family.startswith("stored"):
            return registry.stored_of(self.family.split()[1])
        if self.family.startswith("QIGen"):
            bits = int(self.family.split()[1])
            return [entry for size in (self.group_size, self.rows) for entry in registry.qigen_of(bits, size)]
        bits, isas = int(self.family.split()[2]), ours.instruction_sets()
        return [
            registry.our(isa, contract, bits, size)
            for size in (*GROUPS, self.rows)
            for isa, contract in ours.ways(isas, brief=size != self.group_size)
        ]

    def rotation(self, available: int, entries: Sequence[Entry], most: int = ROTATION) -> int:
        """Bytes of weights in rotation for each contestant, at most, of what memory there is for all of them."""
        if self.family.startswith("groups"):
            return FEW
        stores = len({entry.store for entry in entries})
        return min(most if self.large else SMALL_ROTATION, int(0.85 * available) // max(stores, 1))


def contests(quick: bool, problems: tuple[str, ...], batches: tuple[int, ...]) -> list[Contest]:
    """The contests of a run.

    >>> [contest.id for contest in contests(False, ("576x576",), BATCHES)]
    ['576x576 4 bits', '576x576 other widths']

    Args:
        quick: one shape, one family.
        problems: parts of ids, of which each contest must have one; all where none is given.
        batches: those wanted.

    Contests that compare widths and groups are of one vector.
    """
    if quick:
        found = [Contest(*QUICK, "4 bits", batches[:1])]
    else:
        found = [
            contest
            for shape in SHAPES
            for contest in (Contest(*shape, "4 bits", batches), Contest(*shape, "other widths", batches[:1]))
        ]
        found += [Contest(*HEADLINE, f"groups of {bits} bits", batches[:1]) for bits in (4, 3, 2, 8)]
        found += [
            Contest(*HEADLINE, f"stored {kind}", batches[:1]) for kind in (*registry.STORED, *registry.CHECKPOINTS)
        ]
        if os.environ.get(CLONE):
            found += [Contest(*HEADLINE, f"QIGen, {bits} bits", batches[:1]) for bits in (4, 3, 2)]
    return [contest for contest in found if not problems or any(part in contest.id for part in problems)]


def between(contestants: Sequence[Contestant], warm: Sequence[bool]) -> list[int]:
    """Bytes that are read, by all together, between two uses of the same weights, for each contestant.

    Args:
        contestants: of one contest; some may share their weights.
        warm: whether each runs once untimed before it is timed.
    """
    runs = [1 + untimed for untimed in warm]
    bytes_of_round = sum((1 + n) * each.nbytes * each.products for each, n in zip(contestants, runs, strict=True))
    used = Counter[int]()
    for each, n in zip(contestants, runs, strict=True):
        used[id(each.store)] += n
    return [each.bursts // used[id(each.store)] * bytes_of_round for each in contestants]
