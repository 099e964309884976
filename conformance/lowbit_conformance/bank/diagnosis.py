"""Which mistake was made: a wrong result is compared with the result of every defect that could explain it.

A failing case gives the arguments and what came back. Each arithmetical defect of the operation is run on the same
arguments; the one whose result is equal names the mistake. Where results are bounded and not exact, two results count
as equal if they differ by no more than rounding may explain, and the defect itself lies farther than that from what is
right. If no defect explains the result, `lowbit_conformance.bank.description` says what can be seen.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from lowbit import attention_bounds, blocks_bounds, gptq_bounds, hqq, hqq_solver, integer_bounds, rope, routing_bounds
from lowbit.bounds import Arithmetic, Bound, any_order, gamma
from lowbit.contract import Promise
from lowbit.operations import OPERATIONS
from lowbit_conformance.bank import BANK, steps
from lowbit_conformance.bank.defect import Array, Defect

DECLARED = Arithmetic("direct", "float32", any_order)
INTEGER = Arithmetic("integer", "float32", integer_bounds.integer_loop(1))
MOST_NAMED = 4
SLACK = 4.0  # of the bound of an honest float32 sum; a defect's own sums have other terms
UNIT = 2.0**-24


@dataclass(frozen=True)
class Diagnosis:
    """What explains a wrong result.

    Attributes:
        defects: the names of the defects that do, best first; nearly always one.
        text: one sentence.
        where: where the defect's result first departs from the right one: index, row, column, group, word, bit.
    """

    defects: tuple[str, ...]
    text: str
    where: Mapping[str, Any] = field(default_factory=dict)


def diagnose(
    operation: str,
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    given: Any,
    expected: Any = None,
    steps_taken: tuple[tuple[Any, ...], ...] = (),
) -> Diagnosis | None:
    """The defects that explain a result.

    Args:
        operation: its id.
        arguments: of the call; for a product x and the matrix; for a stateful operation those that open it.
        choices: those given by name.
        given: what came back; of a stateful operation the answers to all steps.
        expected: what the reference answers; computed here if it is not given.
        steps_taken: of a stateful operation, the arguments of each step.

    Returns:
        None if no defect explains it, or nothing is wrong with it.
    """
    right = _answer(OPERATIONS[operation].reference, arguments, choices, steps_taken) if expected is None else expected
    limits = _limits(operation, arguments, choices, right)
    if _identical(given, right):
        return None
    found: list[tuple[float, str, Any]] = []
    for defect in BANK.values():
        if operation in defect.wrong:
            wrong = _outcome(defect, operation, arguments, choices, steps_taken)
            distance = _distance(given, wrong, right, limits)
            if distance is not None:
                found.append((distance, defect.name, wrong))
    if not found:
        return None
    best = [name for distance, name, _ in sorted(found, key=lambda each: each[0]) if distance == min(found)[0]]
    wrong = next(wrong for _, name, wrong in found if name == best[0])
    from lowbit_conformance.bank.description import place  # description is about results, and needs no defects

    where = place(operation, arguments, wrong, right)
    return Diagnosis(tuple(best[:MOST_NAMED]), _sentence(best, where), where)


def _sentence(names: list[str], where: Mapping[str, Any]) -> str:
    shown = " or ".join(f"{name} ({BANK[name].cause})" for name in names[:MOST_NAMED])
    more = f" or {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    begins = ", ".join(f"{name} {value}" for name, value in where.items())
    return f"equals the specification with {shown}{more}" + (f"; it begins at {begins}" if begins else "")


def _outcome(
    defect: Defect,
    operation: str,
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    """What the defect answers; None if it fails."""
    try:
        return _answer(defect.wrong[operation], arguments, choices, steps_taken)
    except Exception:  # a defect may refuse what the reference takes
        return None


def _answer(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    with np.errstate(all="ignore"):
        result = function(*arguments, **choices)
        return tuple(result.step(*each) for each in steps_taken) if steps_taken else result


# **Comparing**, leaf by leaf: arrays, fields of dataclasses, elements of tuples.


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays and numbers of a value, each with its place.

    >>> [path for path, _ in leaves((1, np.zeros(2)))]
    ['[0]', '[1]']
    """
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from leaves(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, (tuple, list)):
        yield f"{path}.length", len(value)
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def _distance(given: Any, wrong: Any, right: Any, limits: Array | None) -> float | None:
    """0 for equal bits, else how much of the tolerance is used; None if the defect does not explain what was given."""
    if wrong is None or _identical(wrong, right):
        return None
    if _identical(given, wrong):
        return 0.0
    if limits is None or _close(given, right, limits, SLACK) or _close(wrong, right, limits, 2 * SLACK):
        return None
    if not _close(given, wrong, limits, SLACK):
        return None
    with np.errstate(all="ignore"):
        share = np.abs(given.astype(np.float64) - wrong) / (limits + np.finfo(np.float32).tiny)
    return float(np.nanmax(share, initial=0.0)) + 1e-9


def _identical(given: Any, other: Any) -> bool:
    """Whether two results have equal bits, the one that a reference computed in float64 rounded to float32."""
    if isinstance(given, np.ndarray) and isinstance(other, np.ndarray) and other.dtype == np.float64:
        with np.errstate(over="ignore"):
            other = other.astype(np.float32) if given.dtype == np.float32 else other
    if isinstance(other, np.ndarray) and isinstance(given, np.ndarray) and given.dtype == np.float64 != other.dtype:
        return False
    ours, theirs = list(leaves(given)), list(leaves(other))
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _same(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    (path, first), (other, second) = ours, theirs
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        bits = f"u{first.dtype.itemsize}"
        unequal = np.ascontiguousarray(first).view(bits) != np.ascontiguousarray(second).view(bits)
        return not (unequal & ~((first != first) & (second != second))).any()  # a NaN is a NaN
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return False
    return path == other and bool(first == second)


def _close(given: Any, other: Any, limits: Array, slack: float) -> bool:
    """Whether one result could be the other but for rounding."""
    if (
        not (isinstance(given, np.ndarray) and isinstance(other, np.ndarray))
        or given.shape != other.shape
        or given.dtype.kind != "f"
    ):
        return False
    with np.errstate(all="ignore"):
        near = other.astype(np.float32) if other.dtype != np.float32 else other
        finite = np.isfinite(given) & np.isfinite(near)
        odd = ~finite & ~((given == near) | (np.isnan(given) & np.isnan(near)))
        far = np.abs(given.astype(np.float64) - other) > slack * limits + 4 * UNIT * np.abs(other)
    return not (odd.any() or (far & finite).any())


# **Tolerances**: what float32 in any order may add, from the inputs, by the bounds of the specification.

Limit = Callable[..., Array]
Bounding = Callable[..., Bound]


def _of(bounding: Bounding) -> Limit:
    """A bound that takes what the operation takes, the declared arithmetic, and the right result."""
    return lambda *given: bounding(*given[:-1], DECLARED, given[-1]).limit


def _linear(x: Array, matrix: Any, right: Array) -> Array:
    codes, group = steps.unpack(matrix.words, matrix.bits).astype(np.float64), steps.groups(matrix)
    scale, zero = steps.scales(matrix).astype(np.float64)[group], steps.zeros(matrix).astype(np.float64)[group]
    offsets = zero if matrix.convention == "minimum" else scale * zero
    terms: Array = np.abs(np.atleast_2d(x).astype(np.float64)) @ (scale * codes + np.abs(offsets))
    return (gamma(matrix.rows + 8, UNIT) * terms).reshape(right.shape)


def _factor(hessian: Array, right: Array) -> Array:
    return np.full(right.shape, 1e-4 * np.abs(right).max())


LIMITS: Mapping[str, Limit] = {
    "linear.qgemv": _linear,
    "linear.qgemm": _linear,
    "linear.qgemm_bfp": lambda x, matrix, right: integer_bounds.integer_bound(x, matrix, INTEGER, right).limit,
    "hqq.qgemv": _of(hqq.qgemv_bound),
    "hqq.step": _of(hqq_solver.step_bound),
    "gptq.hessian": _of(gptq_bounds.hessian_bound),
    "gptq.factor": _factor,
    "gptq.targets": _of(gptq_bounds.targets_bound),
    "rope.rotate": _of(rope.rotate_bound),
    "attention.softmax": _of(attention_bounds.softmax_bound),
    "attention.attend": lambda q, k, v, *rest: (
        attention_bounds.attend_bound(q, k, v, DECLARED, rest[-1], *rest[:-1]).limit
    ),
    "routing.gate": lambda x, router, *rest: (
        routing_bounds.gate_bound(x, router, rest[0] if len(rest) > 1 else "logits", DECLARED, rest[-1]).limit
    ),
    "routing.weights": lambda scores, chosen, *rest: (
        routing_bounds.weights_bound(scores, chosen, rest[0] if len(rest) > 1 else "after", DECLARED, rest[-1]).limit
    ),
    "routing.expert": lambda x, gate, up, down, right: routing_bounds.expert_bound(x, gate, up, down, DECLARED).limit,
    "routing.sparse": _of(routing_bounds.sparse_bound),
    "blocks.rms_norm": _of(blocks_bounds.rms_norm_bound),
    "blocks.swiglu": _of(blocks_bounds.swiglu_bound),
}


def _limits(operation: str, arguments: tuple[Any, ...], choices: Mapping[str, Any], right: Any) -> Array | None:
    """How far a right result may lie from the exact one; None where results are exact."""
    if OPERATIONS[operation].promise is not Promise.BOUNDED:
        return None
    with np.errstate(all="ignore"):
        try:
            limit = LIMITS[operation](*arguments, *choices.values(), right)
        except Exception:  # inputs that have no bound, such as NaN: then only NaN and infinity are compared
            return np.where(np.isfinite(right), UNIT * np.abs(right), 0.0)
    return np.nan_to_num(limit, nan=0.0, posinf=0.0)
