"""Failures of the device, one at each call that a program makes, and what must hold afterwards.

The tests of the engine use this on the engine as it is, and on engines with planted mistakes.
"""

from typing import Any

import pytest
from engine_rig import Rig, room_for

from lowbit.moe.offload import Arrangement, Request
from lowbit_cuda.engine.account import EngineError, EngineLostError
from lowbit_cuda.port import DeviceError
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import Failure, Faults

LONG, SHORT = Arrangement(3, 5, 2, 2, "mirror"), Arrangement(2, 4, 1, 2, "mirror")


def swapped(arrangement: Arrangement) -> Arrangement:
    """The same in swap mode."""
    return Arrangement(arrangement.layers, arrangement.experts, arrangement.slots, arrangement.buffers, "swap")


REQUESTS = [
    Request(0, (1, 2, 3), (0,)),  # more than there are slots
    Request(1, (0, 3)),
    Request(0, (2,), (1,)),  # a pass that ends here
    Request(0, (0, 1), (2, 1)),
    Request(1, (2,)),
]


def built(arrangement: Arrangement, failure: Failure | None, schedule: str = "eager") -> tuple[SimDevice, Rig]:
    """A rig whose budget is exactly what it needs; failures are counted from the first `run` on, after filling."""
    device = SimDevice(schedule=schedule, seed=3, on_unwritten="raise", budget=room_for(arrangement))
    rig = Rig(arrangement, device=device)
    device._faults = Faults(failure)
    return device, rig


LATER = (1, 3, 50)
"""How many calls later a late failure is reported, unless something waits for it: at once, soon, or only then."""


def calls_of(arrangement: Arrangement, reset: bool) -> int:
    """The number of calls that the program below makes."""
    device, rig = built(arrangement, None)
    program(rig, reset)
    return device.calls


def program(rig: Rig, reset: bool) -> None:
    """A run and, if asked for, a `reset`."""
    for request in REQUESTS:
        rig.ask(request)
        rig.wait()
    if reset:
        rig.engine.reset()


def check_each_call(kind: str, memory: str, schedule: str, part: int) -> None:
    """Let each call of a run and of a `reset` fail once, every third call from `part` on.

    Afterwards the engine starts again and all is right. The one exception is a copy that fails after it was issued in
    swap mode: it may destroy the only copy of an expert, and then the engine must say so.
    """
    arrangement = SHORT if memory == "mirror" else swapped(SHORT)
    for at in range(1 + part, calls_of(arrangement, True) + 1, len(LATER)):
        device, rig = built(arrangement, Failure(at, kind, later=LATER[part]), schedule)
        try:
            fail_once(device, rig, kind)
            after_a_failure(rig)
        except EngineLostError as error:
            check_lost(rig, error, kind == "late" and memory == "swap")


def fail_once(device: SimDevice, rig: Rig, kind: str) -> None:
    """Run the program, in which one call fails."""
    try:
        program(rig, True)
    except EngineLostError:
        raise
    except EngineError as error:
        assert kind != "interrupt" and "failed" in str(error)
    except KeyboardInterrupt:
        assert kind == "interrupt"
    except DeviceError:  # raised where the program waits; it may concern the engine's copies
        assert kind != "interrupt"
        rig.engine.reset()
    else:
        # `reset` and the first run wait a second time where a wait fails; or it was the last call of all.
        assert device.calls_by_kind["finish"] == 3 or (kind == "late" and not device.failed)
        device._faults = Faults(None)


def check_lost(rig: Rig, error: EngineLostError, allowed: bool) -> None:
    """The engine says which expert is lost and what to do, says so at every later call, and leaks nothing."""
    assert allowed, error
    assert "a copy that failed destroyed its only copy; load the model again" in str(error)
    assert error.expert is not None
    for call in (rig.engine.reset, lambda: rig.ask(REQUESTS[0])):
        with pytest.raises(EngineLostError, match="using the engine"):
            call()
    rig.close()


def after_a_failure(rig: Rig) -> None:
    """The engine works as a new one: a whole run is right, every expert is in its place, and nothing leaks."""
    rig.forget()
    if rig.engine.requests and rig.engine._consistent:
        rig.engine.reset()
    for request in REQUESTS:
        rig.ask(request)
    rig.check(REQUESTS)
    rig.check_storage()
    rig.close()


def survive(function: Any) -> Any:
    """The result of a function, or None where the device failed."""
    try:
        return function()
    except (DeviceError, KeyboardInterrupt):
        return None
