"""Judging the result of a bounded operation by what the backend declares of its arithmetic."""

from collections.abc import Callable

from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.errors import ArgumentError
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case

Record = Callable[[str, object], None]
"""pytest's ``record_property``, which takes the share of the bound that was used to the report."""


def arithmetic(backend: Remote, case: Case) -> Arithmetic:
    """What the backend declares of its arithmetic for the operation of a case."""
    declared = backend.capabilities().operations[case.operation].arithmetic
    if declared is None:
        raise AssertionError(f"WRONG: {case.operation} is bounded, and the backend declares no arithmetic for it")
    return declared


def limit_of(bound: Callable[[], Bound]) -> Bound:
    """The bound, or the verdict that the declaration is too wide to mean anything."""
    __tracebackhide__ = True
    try:
        return bound()
    except ArgumentError as refusal:
        raise AssertionError(f"DECLARATION_REFUSED: {refusal}") from None
