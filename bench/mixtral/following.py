"""Following a recorded routing on an engine, row by row of the paper's Table 2: what is asked, and what is counted.

Nothing here knows what the model is: `mixtral.table2` follows it in virtual time, `gpu.table2` on a device.

Source: MoE offloading §4.3, Table 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from lowbit.moe.offload import Memory, Request
from lowbit_cuda.engine.engine import Engine
from mixtral.paper import EXPERTS, TOP_K
from mixtral.recordings import Recordings, requests


@dataclass(frozen=True)
class Plan:
    """How much is read.

    Attributes:
        tokens: of each pair of passages that are timed.
        warm: before them, that are not.
        pairs: of passages.
    """

    tokens: int = 48
    warm: int = 16
    pairs: int = 3


@dataclass(frozen=True)
class Row:
    """One way to run the model.

    Attributes:
        name: as in the paper, with the number of guesses.
        paper: the row of the paper that it stands beside.
        guesses: for the next layer.
        cached: False where no expert that is needed is ever there.
        memory: where experts lie.
        whole: whether the engine is asked for every expert of a layer.
    """

    name: str
    paper: str
    guesses: int = 0
    cached: bool = True
    whole: bool = False
    memory: Memory = "swap"


SIMULATED = (
    Row("full, one guess", "full", guesses=1),
    Row("full, two guesses", "full", guesses=2),
    Row("without pre-loading", "without pre-loading"),
    Row("without LRU and pre-loading", "without LRU and pre-loading", cached=False),
    Row("naive", "naive", cached=False, whole=True, memory="mirror"),
    Row("full, one guess, mirror", "full", guesses=1, memory="mirror"),
    Row("full, two guesses, mirror", "full", guesses=2, memory="mirror"),
    Row("without pre-loading, mirror", "without pre-loading", memory="mirror"),
    Row("without LRU and pre-loading, mirror", "without LRU and pre-loading", cached=False, memory="mirror"),
)


def passes(recordings: Recordings, pair: tuple[int, int], guesses: int) -> list[list[Request]]:
    """For each token of two passages, one above the other, what 32 layers are asked for."""
    chosen = np.concatenate([recordings.chosen[passage] for passage in pair])
    lower, upper = (recordings.guesses[1][passage] for passage in pair)
    layers = recordings.layers
    listed = []
    for number, request in enumerate(requests(chosen, np.concatenate([lower, lower[-1:], upper]), guesses)):
        if number % len(chosen) == 0:
            listed.append(list[Request]())
        seam = request.layer == layers - 1  # nothing was guessed from one passage for the other
        listed[-1].append(Request(request.layer, request.needed) if seam else request)
    return listed


def pairs(recordings: Recordings) -> list[tuple[int, int]]:
    """The first half of the passages above the second: two texts."""
    half = len(recordings.chosen) // 2
    return [(place, place + half) for place in range(half)]


def changed(asked: Sequence[Request], row: Row, position: int) -> list[Request]:
    """The requests of one token as the row has them.

    Without a cache a token's experts go by other names, those that were used longest ago: of eight experts, asked for
    two by two in turn, the last four or fewer that ran are never the next. Time depends on sizes, not on names.
    """
    if row.whole:
        return [replace(one, needed=tuple(range(EXPERTS))) for one in asked]
    if not row.cached:
        names = TOP_K * position % EXPERTS
        return [replace(one, needed=(names, names + 1)) for one in asked]
    return list(asked)


class Model(Protocol):
    """What a routing is followed on."""

    @property
    def engine(self) -> Engine:
        """What has its experts."""

    def token(self, position: int, requests: Sequence[Request], chosen: Sequence[Sequence[int]]) -> float:
        """One token; answers with its seconds.

        Args:
            position: of the token, from 0.
            requests: of its layers: what the engine is asked for.
            chosen: of its layers: the experts that really run, of those asked for.
        """


@dataclass(frozen=True)
class Followed:
    """What was counted.

    Attributes:
        seconds: of each token.
        copied_bytes: of experts that were copied to the device for them all.
        missed: experts that ran and were not in a slot, those that had been guessed included.
    """

    seconds: tuple[float, ...]
    copied_bytes: int
    missed: int

    @property
    def mean(self) -> float:
        """Seconds of a token."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def copied_a_token(self) -> int:
        """Bytes."""
        return self.copied_bytes // len(self.seconds)


def follow(model: Model, row: Row, recordings: Recordings, plan: Plan) -> Followed:
    """Ask a model for what the recording says, as the row has it."""
    seconds, copied, missed = list[float](), 0, 0
    for pair in pairs(recordings)[: plan.pairs]:
        model.engine.reset()
        for position, asked in enumerate(passes(recordings, pair, row.guesses)[: plan.warm + plan.tokens]):
            account = model.engine.account
            if position == plan.warm:
                copied -= account.bytes_to_device
                missed -= account.loads + account.promoted
            if row.whole:
                model.engine.reset()
            given = changed(asked, row, position)
            took = model.token(position, given, [one.needed for one in (asked if row.whole else given)])
            if position >= plan.warm:
                seconds.append(took)
        copied += model.engine.account.bytes_to_device
        missed += model.engine.account.loads + model.engine.account.promoted
    return Followed(tuple(seconds), copied, missed)
