r"""Copy or compute: which missing experts the host runs where they lie.

An expert that is not on the device can be copied there, or run by the host's processor, which computes more slowly but
has nothing to copy. While the host computes, the link copies other experts. The layer is complete when both are, so the
quantity to minimise is the later of the two ends, the *makespan*. This extends the paper's idea of overlapping copies
with computation; it is not in the paper.

**The model.** The missing experts :math:`1, 2, \dots` are taken in the order in which the engine copies them. The link
has :math:`q` seconds of copies ahead of it. Then the experts chosen for the device follow, :math:`c_i` seconds each (0
for one that a guess is already copying). The device is busy for :math:`F_0` seconds with its resident experts. It runs
each other expert, in :math:`d_i` seconds, after that expert has arrived and the one before it has run:

.. math:: A_i = A_{i-1} + c_i, \qquad F_i = \max(F_{i-1}, A_i) + d_i, \qquad A_0 = q,

over the experts on the device. The host runs the others one after another, :math:`H = \sum h_i`. The makespan is
:math:`\max(F, H)`.

**Choosing.** After each expert a partial choice is a triple :math:`(A, F, H)`. A triple that is nowhere smaller than
another cannot end better and is discarded, and so is one whose :math:`H` alone exceeds the time of running all experts
on the device. Few triples remain, and the best of them at the end is the best of all choices.

**It is off by default.** The host's kernels add in another order than the device's, so an expert run on the host gives
results that differ in their last bits, and a text may then depend on what was cached.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowbit.errors import ArgumentError

Seconds = Callable[[int], float]
"""Seconds that one expert takes, as a function of the number of tokens."""


@dataclass(frozen=True)
class Rates:
    """The speed of a machine, measured or declared.

    Attributes:
        bandwidth: bytes per second from host to device while copies are queued.
        device: seconds that the device takes for a resident expert.
        host: seconds that the host takes for an expert and for copying its answer to the device.

    Raises:
        ArgumentError: the bandwidth is not above 0.
    """

    bandwidth: float
    device: Seconds
    host: Seconds

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf"):
            raise ArgumentError("bandwidth", self.bandwidth, "bytes a second, above 0")


def measured(points: Mapping[int, float]) -> Seconds:
    """Seconds for any number of tokens, interpolated linearly between measured points.

    Below the first point its value holds, because even one token reads the whole expert. Beyond the last point the last
    line is extended, or, with only one point, the time per token.

    >>> seconds = measured({1: 2.0, 4: 3.5})
    >>> seconds(1), seconds(2), seconds(8)
    (2.0, 2.5, 5.5)

    Raises:
        ArgumentError: there are no points, or a time is not above 0.
    """
    known = sorted(points.items())
    if not known or not all(tokens >= 1 and 0 < seconds < float("inf") for tokens, seconds in known):
        raise ArgumentError("points", dict(points), "seconds above 0 for numbers of tokens")

    def seconds(tokens: int) -> float:
        if tokens <= known[0][0]:
            return known[0][1]
        later = next((place for place, (count, _) in enumerate(known) if count >= tokens), len(known) - 1)
        (left, at_left), (right, at_right) = known[later - 1] if later else (0, 0.0), known[later]
        return at_left + (at_right - at_left) * (tokens - left) / (right - left)

    return seconds


@dataclass(frozen=True)
class Job:
    """A needed expert that is in no slot.

    Attributes:
        expert: its number.
        copy: seconds that copying it still takes.
        device: seconds on the device.
        host: seconds on the host, or None where it must run on the device.
    """

    expert: int
    copy: float
    device: float
    host: float | None = None


@dataclass(frozen=True)
class Choice:
    """The experts that the host runs, ascending, and the makespan in seconds."""

    on_host: tuple[int, ...]
    makespan: float


@dataclass(frozen=True)
class _Partial:
    arrived: float  # A
    finished: float  # F
    host: float  # H
    on_host: tuple[int, ...] = ()

    @property
    def makespan(self) -> float:
        return max(self.finished, self.host)

    def on_device(self, job: Job) -> "_Partial":
        arrived = self.arrived + job.copy
        return _Partial(arrived, max(self.finished, arrived) + job.device, self.host, self.on_host)

    def computed(self, job: Job) -> "_Partial":
        assert job.host is not None
        return _Partial(self.arrived, self.finished, self.host + job.host, (*self.on_host, job.expert))

    def beats(self, other: "_Partial") -> bool:
        return self.arrived <= other.arrived and self.finished <= other.finished and self.host <= other.host


EXACT, KEPT = 8, 32
"""Up to `EXACT` experts all partial choices that can matter are kept, and the choice is the best one. With more experts
the `KEPT` best are kept, so that the decision for a prompt takes milliseconds; the choice may then not be the best."""


def choose(jobs: Sequence[Job], queued: float = 0.0, busy: float = 0.0) -> Choice:
    """The choice with the least makespan; of equals, one with few experts on the host. Exact up to `EXACT` experts.

    The link copies an expert in 4 s and the host runs one in 5 s: one on each side takes 5 s instead of 8.

    >>> choose([Job(2, copy=4.0, device=0.5, host=5.0), Job(6, copy=4.0, device=0.5, host=5.0)])
    Choice(on_host=(2,), makespan=5.0)

    Args:
        jobs: in the order in which they would be copied, by ascending expert.
        queued: q, seconds of copies ahead of the first job.
        busy: F_0, seconds for which the device is busy.
    """
    nothing = partials = [_Partial(queued, busy, 0.0)]
    for job in jobs:
        nothing = [partial.on_device(job) for partial in nothing]
    worst = nothing[0].makespan
    for job in jobs:
        following = [partial.on_device(job) for partial in partials]
        if job.host is not None:
            following += [partial.computed(job) for partial in partials if partial.host + job.host <= worst]
        partials = _worthwhile(following, 2**EXACT if len(jobs) <= EXACT else KEPT)
    best = min(partials, key=_rank)
    return Choice(best.on_host, best.makespan)


def _rank(partial: _Partial) -> tuple[float, int, tuple[int, ...]]:
    return partial.makespan, len(partial.on_host), partial.on_host


def _worthwhile(partials: Sequence[_Partial], most: int) -> list[_Partial]:
    """Those that no other beats, at most the `most` best of them."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.arrived, p.finished, p.host, len(p.on_host), p.on_host)):
        if not any(other.beats(partial) for other in kept):
            kept.append(partial)
    return sorted(kept, key=_rank)[:most]
