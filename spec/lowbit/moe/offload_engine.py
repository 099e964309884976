"""The offload engine: the state machine of `offload`, in use.

A trace is asked for when a run is over. While it lasts, a program asks after each layer: which experts are here, which
must be copied, and where to? So the same machine is an operation that is opened with an arrangement and answers one
request at a time (`lowbit.backend.session`). Nothing else is new: the events of the steps, put together, are the trace.

What a program gains is that a wrong request costs it nothing. `offload.trace` refuses a whole run for one request out
of turn; the engine refuses that request, is as it was before, and the run goes on.

Source: MoE offloading §3; errata M1 to M5, M9.
"""

from collections.abc import Callable

from lowbit.contract.operation import EXACT, operation
from lowbit.errors import ArgumentError
from lowbit.moe.offload import Arrangement, Offload, Request, check_request


def engine(arrangement: Arrangement) -> Offload:
    """An engine with nothing cached that its arrangement does not put there; its `step` takes a request.

    A pass over two layers, of which the second is guessed right:

    >>> machine = engine(Arrangement(layers=2, experts=4, slots=2))
    >>> [(event.kind, event.expert) for event in machine.step(Request(0, (1,), guesses=(3,)))]
    [('load', 1), ('promote', 1), ('stage', 3)]
    >>> [(event.kind, event.expert) for event in machine.step(Request(1, (3,)))]
    [('promote', 3)]

    Raises:
        ArgumentError: not an `Arrangement`.

    Source: MoE offloading §3; errata M1 to M5.
    """
    check_engine(arrangement)
    return Offload(arrangement)


# **Checks.** Whether a layer is in turn depends on the request before, so the check of a session's steps remembers it.


def check_engine(arrangement: Arrangement) -> None:
    """The check of `engine`."""
    if not isinstance(arrangement, Arrangement):
        raise ArgumentError("arrangement", f"a {type(arrangement).__name__}", "an Arrangement")


def check_requests(arrangement: Arrangement) -> Callable[[Request], None]:
    """The check of the steps of one engine: each request, given the last one that was not refused."""
    last = -1

    def check(request: Request) -> None:
        nonlocal last
        check_request(request, arrangement, last)
        last = request.layer

    return check


# **What a backend promises.**

ENGINE = operation(
    "offload.engine",
    "The same, request by request",
    promise=EXACT,
    source="MoE offloading §3; errata M1 to M5, M9",
    reference=engine,
    check=check_engine,
    check_step=check_requests,
    parameters=lambda arrangement: vars(arrangement),
    clauses={
        "C1": "Each step answers with the events of its request, and the events of all steps since the engine was "
        "opened are those of `offload.trace` for the requests that were not refused, however many there are.",
        "C2": "What `offload.trace` refuses is refused with an ArgumentError when it comes: an arrangement when the "
        "engine is opened, a request at its step; a layer is in turn or not by the last request that was not refused.",
        "C3": "A request that is refused changes nothing: the steps after it answer as if it had not been made.",
        "C4": "Engines that are open at once do not disturb each other, in whatever order their steps come.",
        "C5": "An engine begins afresh, whatever engines before it did, closed or not.",
    },
)
