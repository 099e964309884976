"""Random walks through the offload engine's states: the requests of a program, the odd mistake among them.

A walk is drawn from a case alone and never looks at what a backend answers, so it is the same for every backend. It
has what real routing has: experts that come again, guesses that are right and guesses that are wrong, passes that are
abandoned, and prompts, which need nearly every expert and stream through the slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.moe.offload import Arrangement, Memory, Request
from lowbit_conformance.suite.cases import Case

Experts = tuple[int, ...]


@dataclass(frozen=True)
class ArrangedCase(Case):
    """A case with experts in slots.

    Attributes:
        layers, experts, slots, buffers, memory: of the `lowbit.moe.offload.Arrangement`.
        needed: the largest number of experts that a request needs, except for prompts.
        guesses: the largest number that it guesses.
    """

    layers: int
    experts: int
    slots: int
    buffers: int
    memory: Memory
    needed: int
    guesses: int

    @property
    def label(self) -> str:
        places = f"l{self.layers}-e{self.experts}-k{self.slots}-b{self.buffers}-{self.memory}"
        return f"{places}-n{self.needed}-g{self.guesses}"

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(self.layers, self.experts, self.slots, self.buffers, self.memory)


class Walk:
    """A sequence of requests for one engine.

    Attributes:
        arrangement: of the engine.
        layer: of the last request that was not refused; −1 before the first.
    """

    def __init__(self, arrangement: Arrangement, needed: int, guesses: int, rng: np.random.Generator) -> None:
        """`needed` and `guesses` are the largest numbers of experts in a request, except for prompts."""
        self.arrangement, self.layer = arrangement, -1
        self._most_needed, self._most_guesses, self._rng = needed, guesses, rng
        self._before = [self._some(needed) for _ in range(arrangement.layers)]
        self._plan: Experts = ()
        self._taken = 0

    def next(self) -> Request:
        """The next request: usually for the next layer, sometimes for a new pass before the old one has ended."""
        last = self.arrangement.layers - 1
        abandoned = self._rng.random() < 0.08
        self.layer = 0 if abandoned or self.layer == last else self.layer + 1
        needed = self._plan if self.layer and self._plan else self._wanted(self.layer)
        self._before[self.layer] = needed
        self._taken += 1
        if self._taken % IDLE_EVERY == 0:
            needed = ()
        self._plan = self._wanted(self.layer + 1) if self.layer < last else ()
        return Request(self.layer, needed, self._guessed(self._plan) if self.layer < last else ())

    def wrong(self) -> Any:
        """A request that must be refused now; the walk continues as if it had not been made."""
        return self.mistakes()[int(self._rng.integers(len(self.mistakes())))]

    def mistakes(self) -> list[Any]:
        """One request of each kind that must be refused now."""
        layers, experts = self.arrangement.layers, self.arrangement.experts
        due = (self.layer + 1) % layers
        right = Request(due, (experts - 1,))
        wrong: list[Any] = [
            replace(right, needed=(0, experts)),
            replace(right, needed=(-1,)),
            replace(right, needed=(0, 0)),
            replace(right, needed=(1.0,)),  # type: ignore[arg-type]  # wrong on purpose
            replace(right, layer=layers),
            replace(right, layer=-1),
            replace(right, guesses=(experts,)) if due < layers - 1 else replace(right, guesses=(0,)),
            (due, (0,), ()),
        ]
        out_of_turn = [layer for layer in range(1, layers) if layer != self.layer + 1]
        return wrong + [replace(right, layer=layer) for layer in out_of_turn[:1] + out_of_turn[-1:]]

    def _wanted(self, layer: int) -> Experts:
        """The experts that the layer needs: some that it needed last and some others; for a prompt, all but one."""
        if self._rng.random() < 0.06:
            return self._some(max(1, self.arrangement.experts - 1))
        kept = [expert for expert in self._before[layer] if self._rng.random() < 0.6]
        fresh = self._some(int(self._rng.integers(1, self._most_needed + 1)))
        mixed = self._rng.permutation(sorted({*kept, *fresh}))[: self._most_needed]
        return tuple(int(expert) for expert in mixed)

    def _guessed(self, needed: Experts) -> Experts:
        """Guesses: some experts that will be needed, one of them twice, and others that will not."""
        right = [expert for expert in needed if self._rng.random() < 0.7]
        others = [expert for expert in self._some(self.arrangement.experts) if expert not in needed]
        mixed = self._rng.permutation([*right, *right[:1], *others[:2]])[: self._most_guesses]
        return tuple(int(expert) for expert in mixed)

    def _some(self, count: int) -> Experts:
        return tuple(int(expert) for expert in self._rng.permutation(self.arrangement.experts)[:count])


IDLE_EVERY = 17
"""The interval at which a request needs nothing; a prime number, so that this occurs in all layers."""

Spoil = Callable[[Arrangement], Any]
WRONG_ARRANGEMENTS: dict[str, Spoil] = {
    "tuple": lambda right: (right.layers, right.experts, right.slots, right.buffers, right.memory),
    "request": lambda right: Request(0, (0,)),
    "none": lambda right: None,
}
