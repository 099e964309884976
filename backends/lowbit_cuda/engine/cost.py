r"""Copy or compute: which of the missing experts are run where they lie, on the host.

An expert that is not on the device can be brought there, or run by the host's processor, which is slower at computing
but has nothing to copy. While it computes, the link brings the others: the layer is done when both are, so the time to
make small is the later of the two ends, the *makespan*. This is the paper's idea of overlap taken one step further; it
is not in the paper.

**The model.** The missing experts :math:`1, 2, \dots` are taken in the order in which the engine copies them. The link
has :math:`q` seconds of copies ahead of it; then the chosen ones follow, :math:`c_i` seconds each (0 for one that a
guess has put on its way already). The device is busy for :math:`F_0` seconds with what it has, and runs each expert,
:math:`d_i` seconds, when it has come and the one before it has run:

.. math:: A_i = A_{i-1} + c_i, \qquad F_i = \max(F_{i-1}, A_i) + d_i, \qquad A_0 = q,

over the experts on the device. The host runs the others one after another, :math:`H = \sum h_i`. The makespan is
:math:`\max(F, H)`.

**Choosing.** Expert by expert, each partial choice is a triple :math:`(A, F, H)`. One that is nowhere smaller than
another cannot end better and is forgotten; so is one whose :math:`H` alone is more than all experts on the device would
take. What is left is few, and the best end is the best of all choices.

**It is off by default**: the host's kernels add in another order than the device's, so the same expert run on the host
gives answers that differ in their last bits, and then a text may depend on what the cache held.

Source: lowbit's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowbit.errors import ArgumentError

Seconds = Callable[[int], float]
"""How long one expert takes for so many tokens."""


@dataclass(frozen=True)
class Rates:
    """What a machine can do, measured on it or declared.

    Attributes:
        bandwidth: bytes a second from host to device, with copies waiting in the queue.
        device: seconds that the device takes for an expert that it has.
        host: seconds that the host takes for one, and for bringing its answer to the device.

    Raises:
        ArgumentError: a bandwidth that is not above 0.
    """

    bandwidth: float
    device: Seconds
    host: Seconds

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf"):
            raise ArgumentError("bandwidth", self.bandwidth, "bytes a second, above 0")


def measured(points: Mapping[int, float]) -> Seconds:
    """Seconds for any number of tokens, from those measured for some: straight lines between them.

    Below the first point its value holds, because an expert is read whole even for one token; beyond the last point the
    last line goes on, or the time per token where there is only one point.

    >>> seconds = measured({1: 2.0, 4: 3.5})
    >>> seconds(1), seconds(2), seconds(8)
    (2.0, 2.5, 5.5)

    Raises:
        ArgumentError: no points, or times that are not above 0.
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
    """An expert that a layer needs and that is in no slot.

    Attributes:
        expert: which.
        copy: seconds of copying that it costs from now on.
        device: seconds on the device.
        host: seconds on the host, or None where it must run on the device.
    """

    expert: int
    copy: float
    device: float
    host: float | None = None


@dataclass(frozen=True)
class Choice:
    """The experts to be run on the host, ascending, and when both sides are done."""

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
"""Up to how many experts all partial choices are kept that can matter; and how many of them where there are more
experts, so that deciding over a prompt takes milliseconds. Then the choice is a good one and may not be the best."""


def choose(jobs: Sequence[Job], queued: float = 0.0, busy: float = 0.0) -> Choice:
    """The choice with the least makespan; of equals one with few experts on the host. Exact up to `EXACT` experts.

    The link brings an expert in 4 s, the host runs one in 5: one here, one there takes 5 s and not 8.

    >>> choose([Job(2, copy=4.0, device=0.5, host=5.0), Job(6, copy=4.0, device=0.5, host=5.0)])
    Choice(on_host=(2,), makespan=5.0)

    Args:
        jobs: in the order in which they would be copied, which is by ascending expert.
        queued: q, seconds of copies that are ahead of the first.
        busy: F_0, seconds for which the device is busy.

    Raises:
        ArgumentError: a time below 0 or not finite.
    """
    for job in jobs:
        if not all(0 <= seconds < float("inf") for seconds in (job.copy, job.device, job.host or 0.0)):
            raise ArgumentError("job", job, "times of at least 0 seconds")
    if not 0 <= queued < float("inf") or not 0 <= busy < float("inf"):
        raise ArgumentError("queued and busy", (queued, busy), "times of at least 0 seconds")
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
    """Without those that another beats, and not more than the `most` best."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.arrived, p.finished, p.host, len(p.on_host), p.on_host)):
        if not any(other.beats(partial) for other in kept):
            kept.append(partial)
    return sorted(kept, key=_rank)[:most]
