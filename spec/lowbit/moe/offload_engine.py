"""The offload engine: the state machine of `offload`, in use.

A trace describes a finished run. During a run, a program must know after each layer which experts are on the device,
which must be copied, and where. So the same state machine is an operation that is opened with an arrangement and
answers one request at a time (`lowbit.backend.session`). Nothing else is new: the events of all steps together are the
trace.

A wrong request does not end a program's run. `offload.trace` refuses a whole run for one request out of order; the
engine refuses that request, keeps its state, and takes the next one.

Source: MoE offloading §3; errata M1 to M5, M9.
"""

from collections.abc import Callable

from lowbit.contract.operation import EXACT, operation
from lowbit.contract.signature import checked
from lowbit.moe.offload import Arrangement, Offload, Request, check_request


@checked
def engine(arrangement: Arrangement) -> Offload:
    """An engine with only the experts that its arrangement places at first; its `step` takes a request.

    A pass over two layers, with a correct guess for the second:

    >>> machine = engine(Arrangement(layers=2, experts=4, slots=2))
    >>> [(event.kind, event.expert) for event in machine.step(Request(0, (1,), guesses=(3,)))]
    [('load', 1), ('promote', 1), ('stage', 3)]
    >>> [(event.kind, event.expert) for event in machine.step(Request(1, (3,)))]
    [('promote', 3)]

    Raises:
        ArgumentError: not an `Arrangement`.

    Source: MoE offloading §3; errata M1 to M5.
    """
    return Offload(arrangement)


# **Which layer may be next** depends on the previous request, so the check of a session's steps keeps it.


def check_requests(arrangement: Arrangement) -> Callable[[Request], None]:
    """The check of the steps of one engine: each request, given the last accepted one."""
    last = -1

    def check(request: Request) -> None:
        nonlocal last
        check_request(request, arrangement, last)
        last = request.layer

    return check


# **What a backend promises.**

operation(
    "offload.engine",
    "The same, request by request",
    engine,
    promise=EXACT,
    source="MoE offloading §3; errata M1 to M5, M9",
    check_step=check_requests,
    clauses={
        "C1": "Each step answers with the events of its request, and the events of all steps since the engine was "
        "opened are those of `offload.trace` for the requests that were not refused, however many there are.",
        "C2": "What `offload.trace` refuses is refused with an ArgumentError when it comes: an arrangement when the "
        "engine is opened, a request at its step; the next layer is counted from the last request that was not "
        "refused.",
        "C3": "A request that is refused changes nothing: the steps after it answer as if it had not been made.",
        "C4": "Engines that are open at once do not disturb each other, in whatever order their steps come.",
        "C5": "An engine begins afresh, whatever engines before it did, closed or not.",
    },
)
