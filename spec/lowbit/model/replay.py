r"""Replaying: how often a needed expert is already in memory, under different rules of caching.

The experts that a model asks for can be recorded once and replayed many times, for any number of slots and any caching
rule. The measure is *recall*: the number of experts in a slot when their layer requested them, divided by the number
requested (errata M9; MoE offloading, figure 2).

**Rules.** After a layer has run, there are more candidates for its :math:`k` slots than slots: the residents and the
newcomers. Each rule gives an expert a *value*, and the :math:`k` most valuable stay.

========== ========================================================================= =========================
rule       worth of an expert                                                        candidates
========== ========================================================================= =========================
LRU        when it last ran                                                          newcomers first
LFU        how often it ran; then when it last did                                   newcomers first
LFRU       :math:`\sum_i \rho^{\,t - t_i}` over its uses :math:`t_i` so far            newcomers first
static     how often it runs in the whole recording, known beforehand                all alike
Belady     how soon it runs again, known beforehand                                  all alike
========== ========================================================================= =========================

*Newcomers first*: the experts that just ran are preferred to those that did not, as in an engine that runs experts
from its slots. *All alike*: a newcomer may be dropped at once, which an engine can do from a staging buffer. LFRU
combines recency and frequency as Lee et al. do: with :math:`\rho = 1` it counts uses, and with :math:`\rho \le 1/2`
the last use outweighs all before it, so LFU and LRU are its extremes (among experts of one pass, where LRU keeps those
that ran last, LFRU keeps those that ran more often before).

**Belady is the bound.** Keeping an expert from one use to the next gives one hit and occupies one slot in the meantime.
So the task is to choose as many such intervals as possible of which at most :math:`k` overlap, and it is optimal to
drop the interval that ends last whenever :math:`k + 1` overlap (Faigle and Nawijn, 1995). So no rule that keeps
:math:`k` of residents and newcomers has more hits, whatever it knows; `replay` asserts this.

.. plot:: figures/offload_recall.py

The routing in these figures is *synthetic* (`residual_walk`): a stream with the two properties that the paper reports,
locality in time and slow change from layer to layer. The shapes of the curves can be compared with the paper's
figure 2, their heights cannot.

Source: MoE offloading §3.1, §3.2, §4.1, figure 2; errata M5, M9; L. Belady, IBM Systems Journal 5 (1966); D. Lee et
al., IEEE Transactions on Computers 50 (2001); U. Faigle and W. Nawijn, Discrete Applied Mathematics 58 (1995).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lowbit.arrays import F32, F64, I64
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.model.layers import rms_norm
from lowbit.moe.offload import Event
from lowbit.moe.routing import gate, top_k

Rule = Literal["lru", "lfu", "lfru", "static", "belady"]
RULES: tuple[Rule, ...] = get_args(Rule)

Recording = Sequence[Sequence[int]]
"""The experts that one layer needed, pass after pass."""

RHO = 0.75
"""LFRU's ρ for one pass: the worth of a use halves in two to three passes, about the time that experts stay in use in
the paper."""


# **Recall**, counted in a trace.


@dataclass(frozen=True)
class Recall:
    """Where needed experts were found (errata M9).

    Attributes:
        needed: how many experts were needed, over all layers and tokens.
        resident: of these, in a slot when their layer began.
        staged: of the others, in a buffer, because of a guess.
    """

    needed: int
    resident: int
    staged: int = 0

    @property
    def value(self) -> float:
        """The paper's "expert recall" of the cache: resident / needed; NaN if nothing was needed."""
        return self.resident / self.needed if self.needed else math.nan


def recall(events: Sequence[Event]) -> Recall:
    """Count the trace: each needed expert has one hit or one promotion.

    >>> from lowbit.moe.offload import Arrangement, Request, trace
    >>> requests = [Request(0, (0, 1)), Request(0, (1, 2))]
    >>> recall(trace(Arrangement(layers=1, experts=4, slots=2), requests))
    Recall(needed=4, resident=1, staged=0)

    Source: MoE offloading §4.1; errata M9.
    """
    hits = sum(event.kind == "hit" for event in events)
    promoted = [event.cause for event in events if event.kind == "promote"]
    return Recall(hits + len(promoted), hits, promoted.count("guess"))


# **The rules**, each as a function from a recording to the worth of an expert after a pass. Worths are tuples, compared
# from the left. Among equals, the expert that ran last is kept.

Worth = Callable[[int, int], tuple[float, ...]]


def worth(rule: Rule, recording: Recording, rho: float = RHO) -> Worth:
    """The worth of keeping an expert after a pass: a function of (expert, number of the pass)."""
    uses: dict[int, list[int]] = {}  # of each expert, ascending
    for number, needed in enumerate(recording):
        for expert in needed:
            uses.setdefault(expert, []).append(number)

    def count(expert: int, now: int) -> int:
        return bisect_right(uses[expert], now)

    def last(expert: int, now: int) -> int:
        return uses[expert][count(expert, now) - 1]

    def following(expert: int, now: int) -> int:
        return next(iter(uses[expert][count(expert, now) :]), len(recording))

    faded = fading(recording, rho) if rule == "lfru" else {}
    rules: dict[Rule, Worth] = {
        "lru": lambda expert, now: (last(expert, now),),
        "lfu": lambda expert, now: (count(expert, now), last(expert, now)),
        "lfru": lambda expert, now: (faded[expert][now], last(expert, now)),
        "static": lambda expert, now: (len(uses[expert]), -expert),
        "belady": lambda expert, now: (-following(expert, now),),
    }
    return rules[rule]


def fading(recording: Recording, rho: float) -> dict[int, list[float]]:
    """For each expert its LFRU worth after each pass: one for every use, times ρ for every pass since.

    >>> fading([(0,), (1,), (0,)], rho=0.5)[0]
    [1.0, 0.5, 1.25]
    """
    worths: dict[int, list[float]] = {expert: [] for needed in recording for expert in needed}
    for needed in recording:
        for expert, values in worths.items():
            values.append((values[-1] if values else 0.0) * rho + (expert in needed))
    return worths


# **Replay** one layer's recording.


def replay(recording: Recording, slots: int, rule: Rule, rho: float = RHO) -> Recall:
    """Recall of one layer that keeps `slots` experts by a rule, starting from an empty cache.

    Two slots and three experts in rotation: the most recently used one is always the wrong one to keep.

    >>> rotating = [(0,), (1,), (2,)] * 4
    >>> [replay(rotating, slots=2, rule=rule).resident for rule in ("lru", "static", "belady")]
    [0, 6, 6]

    Args:
        recording: for each pass the experts that were needed, distinct.
        slots: k, at least 1.
        rule: one of `RULES`.
        rho: ρ of LFRU, above 0, at most 1.

    Raises:
        ArgumentError: an empty recording or pass, a repeated expert in a pass, wrong slots, rule or rho.

    Source: MoE offloading §3.1, §4.1; errata M1, M3, M9.
    """
    _check(recording, slots, rule, rho)
    result = Recall(sum(map(len, recording)), _hits(recording, slots, rule, rho))
    if rule != "belady":
        assert result.resident <= _hits(recording, slots, "belady", rho), "no rule beats Belady's"
    return result


def _hits(recording: Recording, slots: int, rule: Rule, rho: float) -> int:
    value, newcomers_first = worth(rule, recording, rho), rule in ("lru", "lfu", "lfru")
    resident: list[int] = []  # in the order in which they ran
    hits = 0
    for now, needed in enumerate(recording):
        found = sorted(expert for expert in needed if expert in resident)
        hits += len(found)
        ran = found + sorted(expert for expert in needed if expert not in resident)  # the order of errata M3
        candidates = [expert for expert in resident if expert not in needed] + ran
        ranked = sorted(
            range(len(candidates)),
            key=lambda place: (newcomers_first and candidates[place] in ran, *value(candidates[place], now), place),
        )
        resident = [candidates[place] for place in sorted(ranked[-slots:])]
    return hits


def replay_layers(recordings: Sequence[Recording], slots: int, rule: Rule, rho: float = RHO) -> Recall:
    """The total over all layers, each with its own slots."""
    counted = [replay(recording, slots, rule, rho) for recording in recordings]
    return Recall(sum(layer.needed for layer in counted), sum(layer.resident for layer in counted))


def _check(recording: Recording, slots: int, rule: Rule, rho: float) -> None:
    check_integer("slots", slots, least=1)
    check_choice("rule", rule, RULES)
    if not 0 < rho <= 1:
        raise ArgumentError("rho", rho, "above 0, at most 1")
    if not recording:
        raise ArgumentError("recording", "empty", "at least one pass")
    for number, needed in enumerate(recording):
        if not needed or len(set(needed)) < len(needed):
            raise ArgumentError(f"recording[{number}]", needed, "distinct experts, at least one")


# **Guesses.** The next layer's gate, applied to the input of this layer's gate.


@dataclass(frozen=True, eq=False)
class Norm:
    """A layer's RMSNorm before its gate: gain (float64, hidden) and ε."""

    gain: F64
    epsilon: float


def guess(gate_input: F32, later_router: F32, count: int, norm: Norm | None = None) -> I64:
    """The experts that a later layer will probably need, likeliest first.

    Args:
        gate_input: float32, T × hidden: the input of this layer's gate, after this layer's norm.
        later_router: float32, hidden × E: the gate of the layer to guess for, in the paper the next one.
        count: how many to guess, 1 to E; the paper's engine takes 1 or 2.
        norm: the later layer's norm, to be applied to the gate input first; None, the default, applies none.

    Returns:
        int64, T × count.

    Raises:
        ArgumentError: wrong dtype, shape or layout; count out of range.

    Source: MoE offloading §3.2; errata M5.
    """
    if norm is not None:
        gate_input = rms_norm(gate_input.astype(np.float64), norm.gain, norm.epsilon).astype(np.float32)
    return top_k(gate(gate_input, later_router).astype(np.float32), count)


def guess_recall(needed: I64, guessed: I64) -> Recall:
    """How many needed experts were guessed, in isolation from any cache: the right half of the paper's figure 2.

    >>> guess_recall(needed=np.array([[0, 3], [1, 2]]), guessed=np.array([[3], [0]]))
    Recall(needed=4, resident=1, staged=0)

    Args:
        needed: int64, T × top_k.
        guessed: int64, T × count.

    Source: MoE offloading §4.1.
    """
    return Recall(needed.size, int((needed[:, :, np.newaxis] == guessed[:, np.newaxis, :]).any(axis=2).sum()))


# **A synthetic recording.** A drifting residual stream. From token to token it keeps a fraction of its value, so
# experts stay in use for a few tokens; each layer adds a small part, so guesses work.


@dataclass(frozen=True, eq=False)
class Walk:
    """A synthetic stream with its gates.

    Attributes:
        inputs: float32, layers × T × width: the input of each gate.
        routers: float32, layers × width × E.
    """

    inputs: F32
    routers: F32

    def needed(self, layer: int, k: int) -> I64:
        """The k experts of each token, T × k."""
        return top_k(gate(self.inputs[layer], self.routers[layer]).astype(np.float32), k)

    def guessed(self, layer: int, ahead: int, count: int) -> I64:
        """The guesses for `layer` from `ahead` layers before it, T × count."""
        return guess(self.inputs[layer - ahead], self.routers[layer], count)


def residual_walk(
    seed: int, *, tokens: int, layers: int, experts: int, width: int = 24, memory: float = 0.8, step: float = 0.4
) -> Walk:
    """Draw a synthetic stream with these parameters.

    Args:
        seed: of everything random.
        tokens: T.
        layers: how many.
        experts: E.
        width: of the stream.
        memory: the correlation of a token with the one before it, 0 to 1.
        step: how much each layer adds, relative to its input.
    """
    rng = np.random.default_rng(seed)

    def drifting() -> F64:
        noise = rng.standard_normal((tokens, width))
        for t in range(1, tokens):
            noise[t] = memory * noise[t - 1] + np.sqrt(1 - memory**2) * noise[t]
        return noise

    stream = drifting()
    inputs = []
    for _ in range(layers):
        inputs.append(rms_norm(stream, np.ones(width), 1e-6).astype(np.float32))
        stream = stream + step * drifting()
    return Walk(np.stack(inputs), rng.standard_normal((layers, width, experts)).astype(np.float32))
