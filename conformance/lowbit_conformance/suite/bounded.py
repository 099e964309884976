"""One call of an operation, and three ways to judge its result: by its bits, by a lattice, and by a bound."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit_conformance.bounds import bound_of
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import (
    assert_array,
    assert_equal_values,
    assert_exact,
    assert_kind,
    assert_same_bits,
    assert_within,
)
from lowbit_conformance.suite.marking import Record


def arithmetic(backend: Remote, case: Case) -> Arithmetic:
    """The arithmetic that the backend declares for the operation of a case."""
    declared = backend.capabilities().operations[case.operation].arithmetic
    if declared is None:
        raise AssertionError(f"WRONG: {case.operation} is bounded, and the backend declares no arithmetic for it")
    return declared


def limit_of(bound: Callable[[], Bound]) -> Bound:
    """The bound; fails the case if the declared arithmetic is too loose for a meaningful bound."""
    __tracebackhide__ = True
    try:
        return bound()
    except ArgumentError as refusal:
        raise AssertionError(f"DECLARATION_REFUSED: {refusal}") from None


def run(backend: Remote, case: Case, *arguments: Any) -> Array:
    """One call on read-only copies of the arrays, which must come back unchanged."""
    __tracebackhide__ = True
    given = [np.array(part) if isinstance(part, np.ndarray) else part for part in arguments]
    for part in given:
        if isinstance(part, np.ndarray):
            part.setflags(write=False)
    result = backend.run(case.operation, *given)
    for before, after in zip(arguments, given, strict=True):
        if isinstance(before, np.ndarray) and not np.array_equal(before, after, equal_nan=True):
            raise BrokenPromiseError("INPUT_MUTATED: an argument was changed by the call")
    return assert_kind("the result", result, np.ndarray)


def run_bounded(backend: Remote, case: Case, shape: tuple[int, ...], *arguments: Any) -> F32:
    """As `run`, for a bounded operation, whose result is float32 of this shape."""
    __tracebackhide__ = True
    return assert_array("the result", run(backend, case, *arguments), np.float32, shape)


def assert_reference(backend: Remote, case: Case, name: str, *arguments: Any, **choices: Any) -> None:
    """Call the backend, then the reference: the bits must be equal. `name` is what a message calls the result."""
    __tracebackhide__ = True
    given = backend.run(case.operation, *arguments, **choices)
    assert_exact(name, given, OPERATIONS[case.operation].compute(*arguments, **choices))


def assert_on_lattice(backend: Remote, case: Case, *arguments: Any) -> None:
    """Call the backend, then the reference: the numbers, which are exact in float32, must be equal."""
    __tracebackhide__ = True
    given = run(backend, case, *arguments)
    assert_equal_values(given, OPERATIONS[case.operation].compute(*arguments))


def assert_by_elements(backend: Remote, case: Case, arrays: Sequence[F32], *limit: float) -> None:
    """The same call gives the same bits, and no element depends on another; all arrays have one shape."""
    __tracebackhide__ = True
    shape = arrays[0].shape
    first = run_bounded(backend, case, shape, *arrays, *limit)
    assert_same_bits(first, run_bounded(backend, case, shape, *arrays, *limit), "the same call again")
    kept = case.generator().random(shape) < 0.3
    others = (np.where(kept, part, part * np.float32(-9) + 1) for part in arrays)
    again = run_bounded(backend, case, shape, *others, *limit)
    assert_same_bits(first[kept], again[kept], "unchanged elements, when others changed")


def share_used(backend: Remote, case: Case, given: object, *arguments: Any, **options: Any) -> float:
    """The largest fraction of its bound that the result for these arguments uses; the bound may have options."""
    __tracebackhide__ = True
    declared, exact = arithmetic(backend, case), OPERATIONS[case.operation].compute(*arguments)
    limit = limit_of(lambda: bound_of(case.operation, arguments, declared, exact, **options))
    return assert_within(given, exact, limit)


def assert_bounded(backend: Remote, case: Case, record_property: Record, *arguments: Any, **options: Any) -> None:
    """Call the backend, then compute the exact result and from it the bound, which may have options."""
    __tracebackhide__ = True
    given = run(backend, case, *arguments)
    record_property("share", share_used(backend, case, given, *arguments, **options))
