"""Habits of all operations at once, which for each of them its own case must find."""

import threading
import time
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from kills.habits import Act, Call, Habit
from lowbit.operations import OPERATIONS

LASTS = 60  # calls, fewer than the hundred others between a call and its repetition
REFUSING = (
    *(f"{operation}/H8" for operation in OPERATIONS),
    "kvcache.bfp/C4",
    "kvcache.kivi/C4",
    "offload.engine/C2",
    "offload.engine/C3",
    "gptq.factor/C4",
)
"""What a backend breaks that looks at no argument."""
STATELESS = tuple(name for name, operation in OPERATIONS.items() if not operation.stateful)


def spoilt(result: Any) -> Any:
    """A result that is a little wrong, in a copy: one bit of each of its arrays, its last event, or half a number.

    >>> from lowbit.tensor_formats.stored import Stored
    >>> spoilt(Stored("float32", 1, 1, (np.zeros((1, 1), np.float32),))).tensors[0].view(np.uint32)
    array([[1]], dtype=uint32)
    """
    if isinstance(result, np.ndarray):
        other = result.copy()
        other.reshape(-1).view(np.uint8)[:1] ^= 1
        return other
    if isinstance(result, tuple):
        return tuple(map(spoilt, result)) if _holds_arrays(result) else result[:-1]
    if is_dataclass(result) and not isinstance(result, type):
        parts = {field.name: getattr(result, field.name) for field in fields(result)}
        return replace(result, **{name: spoilt(part) for name, part in parts.items() if _holds_arrays(part)})
    return result / 2 if isinstance(result, (float, np.floating)) else result


def _holds_arrays(part: Any) -> bool:
    return isinstance(part, np.ndarray) or (isinstance(part, tuple) and any(map(_holds_arrays, part)))


def answer(call: Call, *, right: bool) -> Any:
    """The right result or a spoilt one, in the array that was given for it if one was."""
    result = call.right()
    if right:
        return result
    if call.out is None:
        return spoilt(result)
    call.out[...] = spoilt(call.out)
    return result


def worn(call: Call) -> Any:
    """Right for so many calls of the operation."""
    count = call.state[call.operation] = call.state.get(call.operation, 0) + 1
    return answer(call, right=count <= LASTS)


def beside_others(call: Call) -> Any:
    """Wrong where another thread is in a call of the same kind."""
    inside: set[int] = call.state.setdefault("inside", set())
    me = threading.get_ident()
    inside.add(me)
    time.sleep(0.0003)  # in which another may come
    alone = inside <= {me}
    inside.discard(me)
    return answer(call, right=alone)


def kept(call: Call) -> Any:
    """Something of each call stays."""
    call.state.setdefault("kept", []).append(bytearray(1 << 10))
    return call.right()


def everywhere(
    name: str, cause: str, number: str, verdicts: str, act: Act, operations: tuple[str, ...], **rest: Any
) -> Habit:
    clauses = tuple(f"{operation}/{number}" for operation in operations)
    return Habit(
        name, cause, clauses, verdicts=tuple(verdicts.split()), act=act, habitual=operations, everywhere=True, **rest
    )


CHECKS_NOTHING = Habit(
    "checks-nothing",
    "No argument is looked at.",
    REFUSING,
    verdicts=("WRONG", "RAISED", "CRASHED", "OOB_READ"),
    act=lambda call: call.right(),
    habitual=tuple(OPERATIONS),
    everywhere=True,
)

DEFECTS: tuple[Habit, ...] = (
    CHECKS_NOTHING,
    everywhere(
        "every-operation-wears-out",
        "After some calls an operation answers otherwise.",
        "H4",
        "NONDETERMINISTIC WRONG",
        worn,
        STATELESS,
    ),
    everywhere(
        "every-operation-disturbed-by-threads",
        "An operation that another thread is in, too, answers otherwise.",
        "H4",
        "NONDETERMINISTIC WRONG",
        beside_others,
        STATELESS,
        concurrent=True,
    ),
    everywhere("every-operation-leaks", "Every call keeps some memory.", "H6", "LEAKED", kept, tuple(OPERATIONS)),
)
