"""The operations `offload.trace` and `offload.engine`, answered by this engine's placement.

They let the suite hold the decisions to the specification without a device.
"""

from collections.abc import Sequence

from lowbit.moe.offload import Arrangement, Request, Trace
from lowbit_cuda.engine.placement import Placement


def engine(arrangement: Arrangement) -> Placement:
    """The hook of `offload.engine`: an object whose `step` answers a request with its events."""
    return Placement(arrangement)


def trace(arrangement: Arrangement, requests: Sequence[Request]) -> Trace:
    """The hook of `offload.trace`: all events of a run."""
    placement = Placement(arrangement)
    return tuple(event for request in requests for event in placement.step(request))
