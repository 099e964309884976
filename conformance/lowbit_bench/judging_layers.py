"""The check of results of operations other than products, as far as the suite has a judge for them.

An exact operation gives what the reference gives, or another result that the specification allows. A bounded one lies
within its bound. The reference is slow: where arguments are large, and where there is no bound, nothing is compared,
and the row says so.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.attention.residual import attend_residual_bound
from lowbit.attention.stored import attend_stored_bound
from lowbit.backend import Backend
from lowbit.backend.reference import ReferenceBackend
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.numbers.floats import FLOATS
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import dequantized
from lowbit_bench.inputs import Problem
from lowbit_bench.judging import Check, WrongResultError, arithmetic_of, assert_bounded, wrong
from lowbit_bench.layers import bytes_of, call_of_other
from lowbit_conformance.bounds import BOUNDS, bound_of
from lowbit_conformance.suite.format_inputs import FormatCase

MOST_BYTES, FEW = 2**27, 2**24
"""Largest number of argument elements that are compared, in general and for operations in `SLOW`."""
SLOW = ("gptq.", "hqq.step")
"""Operations whose reference takes a time that grows faster than their arguments."""
STORED_BOUNDS: Mapping[str, Callable[..., Bound]] = MappingProxyType(
    {"attention.attend_stored": attend_stored_bound, "attention.attend_residual": attend_residual_bound}
)


def check_of_other(problem: Problem, arguments: tuple[Any, ...]) -> Check | None:
    """The check of the result of an operation that is not a product; None if there is no judge for it."""
    operation = OPERATIONS[problem.operation]
    if bytes_of(arguments) > (FEW if operation.id.startswith(SLOW) else MOST_BYTES):
        return None
    if operation.promise is Promise.EXACT:
        return exact_check(problem, arguments)
    if operation.id in BOUNDS or operation.id in STORED_BOUNDS:
        return bounded_check(problem, arguments)
    return None


def bounded_check(problem: Problem, arguments: tuple[Any, ...]) -> Check:
    """Check that every element is within the bound of the declared arithmetic."""
    operation = OPERATIONS[problem.operation]
    exact, dtype = operation.compute(*arguments), FLOATS[operation.result_type(*arguments)].dtype

    def limit(declared: Arithmetic) -> Bound:
        if operation.id in STORED_BOUNDS:
            return STORED_BOUNDS[operation.id](*arguments, declared, exact)
        return bound_of(operation.id, arguments, declared, exact)

    def check(backend: Backend, given: object) -> None:
        try:
            assert_bounded(given, exact, limit(arithmetic_of(backend, operation.id)), dtype)
        except AssertionError as error:
            raise wrong(error) from None

    return check


def exact_check(problem: Problem, arguments: tuple[Any, ...]) -> Check:
    """Check that the result is one of those that the specification allows."""

    def check(backend: Backend, given: object) -> None:
        try:
            found = list(differences(problem, arguments, given))
        except AssertionError as error:
            raise wrong(error) from None
        if "" not in found:
            raise WrongResultError(f"wrong result: {found[0]}")

    return check


def differences(problem: Problem, arguments: tuple[Any, ...], given: object) -> Iterator[str]:
    """How a result differs from each allowed one, the reference's first; empty if it equals one of them.

    Raises:
        AssertionError: the result is of another kind.
    """
    if problem.operation == "formats.quantize":
        yield from of_casts(arguments, given)
    elif problem.operation == "formats.dequantize":
        yield from (difference(given, each) for each in dequantized(*arguments))
    else:
        yield difference(given, call_of_other(ReferenceBackend(), problem, arguments)())


def of_casts(arguments: tuple[Any, ...], given: object) -> Iterator[str]:
    """The differences for a cast, as the suite judges it."""
    x, format, options = arguments
    from lowbit_conformance.suite.clauses import test_quantize as judge

    case = FormatCase("formats.quantize/C1", "random", "", format, x.shape[1], x.shape[0], options=options)
    found = judge.stored_in(case, given)
    for choice in case.table.encode:
        if (each := judge.cast_by(choice, x, case, found)) is not None:
            yield judge.difference(found, each)


def difference(given: Any, expected: Any) -> str:
    """Where two results differ; empty if they are equal. The two zeros count as equal.

    >>> difference((np.zeros(2), 1), (np.array([0.0, 3.0]), 1))
    '1 of 2 elements differ, first at [1]: 0.0, expected 3.0'
    """
    if isinstance(expected, np.ndarray):
        return of_arrays(given, expected)
    if type(given) is not type(expected):
        return f"the result has a {type(given).__name__}, the specification says {type(expected).__name__}"
    if isinstance(expected, tuple | list):
        if len(given) != len(expected):
            return f"the result has {len(given)} parts, the specification says {len(expected)}"
        return next(filter(None, map(difference, given, expected)), "")
    if is_dataclass(expected):
        names = [each.name for each in fields(expected)]
        return next(filter(None, (difference(getattr(given, name), getattr(expected, name)) for name in names)), "")
    return "" if given == expected else f"the result has {given!r}, expected {expected!r}"


def of_arrays(given: object, expected: Array) -> str:
    """The difference of two arrays."""
    if not isinstance(given, np.ndarray) or (given.dtype, given.shape) != (expected.dtype, expected.shape):
        found = f"{given.dtype} {given.shape}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
        return f"the result is {found}, the specification says {expected.dtype} {expected.shape}"
    different = given != expected
    if expected.dtype.kind not in "iub":
        different &= ~(np.isnan(given.astype(np.float64)) & np.isnan(expected.astype(np.float64)))
    if not different.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(different)[0])
    where = f"{int(different.sum())} of {different.size} elements differ, first at {list(place)}"
    return f"{where}: {given[place]!s}, expected {expected[place]!s}"
