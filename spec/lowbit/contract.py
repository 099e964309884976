r"""Contracts: what an operation promises, clause by clause.

A specification that only shows how *it* computes leaves a kernel author guessing which of its habits are law. So
each chapter ends by declaring its operations: an id that never changes (`linear.qgemv`), the kind of promise, and
numbered *clauses*, each one sentence that can be broken. The docs show the clauses, the conformance suite tests them
by number, and a failing report names the clause.

There are three kinds of promise.

**Exact**: equal bits. Packing, layouts and casts are integers and single roundings; there is nothing to tolerate.

**Bounded**: for each element of the result

.. math:: |\hat y - y| \le \mathrm{bound}(\text{inputs},\ \text{declared arithmetic}),

where *y* is the value in real arithmetic. The bound is derived in `bounds` from the way in which a backend declares
that it computes; it is never tuned to what a kernel happens to return.

**Either**: where a standard leaves a choice, one of the named alternatives, and the same one all through a run.

An operation ends where arithmetic turns discontinuous (a cast, a choice of the largest): beyond that point one
rounding more or less gives quite another result, so what lies beyond is another operation with inputs of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any


class Promise(Enum):
    """The kind of agreement between a backend and the specification."""

    EXACT = "exact"
    BOUNDED = "bounded"
    EITHER = "either"


EXACT, BOUNDED, EITHER = Promise.EXACT, Promise.BOUNDED, Promise.EITHER

Parameters = Mapping[str, object]
"""The choices that a call makes (bits, convention, layout …), by name: what a backend may declare only some of."""


@dataclass(frozen=True)
class Operation:
    """One operation of the specification.

    Attributes:
        id: chapter and name, stable for ever: ``packing.pack``.
        title: a few words for a table.
        promise: exact, bounded or either.
        source: where in the papers, and which errata rule on it.
        reference: the function that computes it; a bounded one answers in float64.
        check: takes the same arguments, raises `ArgumentError` where they are wrong, reads nothing else.
        parameters: takes the same arguments and names the choices that they make.
        clauses: clause id (``packing.pack/C1``) to one sentence.
    """

    id: str
    title: str
    promise: Promise
    source: str
    reference: Callable[..., Any]
    check: Callable[..., None]
    parameters: Callable[..., Parameters]
    clauses: Mapping[str, str]


_operations: dict[str, Operation] = {}

OPERATIONS: Mapping[str, Operation] = MappingProxyType(_operations)
"""The operations of the chapters imported so far, by id; `lowbit.operations` imports them all."""


def operation(
    id: str,
    title: str,
    *,
    promise: Promise,
    source: str,
    reference: Callable[..., Any],
    check: Callable[..., None],
    parameters: Callable[..., Parameters],
    clauses: Mapping[str, str],
) -> Operation:
    """Declare an operation; a chapter calls this once for each of its own.

    Args:
        id: chapter and name with a dot between.
        title: a few words for a table.
        promise: `EXACT`, `BOUNDED` or `EITHER`.
        source: the paper's section, equation or algorithm.
        reference: see `Operation`.
        check: see `Operation`.
        parameters: see `Operation`.
        clauses: short number (``C1``) to one sentence.

    Returns:
        The operation, now also in `OPERATIONS`.

    Raises:
        ValueError: the id is taken; two chapters would give one name to two things.
    """
    if id in _operations:
        raise ValueError(f"operation {id} is declared twice")
    full = {f"{id}/{number}": sentence for number, sentence in clauses.items()}
    _operations[id] = Operation(id, title, promise, source, reference, check, parameters, MappingProxyType(full))
    return _operations[id]
