"""Certifying a backend or a function: the entry to the conformance suite, which is a separate package.

The specification never imports the suite: it finds the suite by an entry point.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from lowbit.contract.checks import check_integer, check_number
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.entries import entries, loaded, single
from lowbit.text import kind_of

CERTIFY = "lowbit.certify"
"""The group of the entry point by which a package offers the conformance suite: a function of a `Request`."""

LEAST_DEADLINE = 0.1
"""Seconds."""


@dataclass(frozen=True)
class Certification:
    """What the conformance suite found about a backend.

    Attributes:
        verdict: ``passed``, ``failed`` or ``nothing executed``.
        passed: how many cases passed.
        failed: how many failed.
        not_declared: how many were not run, because the backend does not declare them.
        report: the whole report, as ``lowbit conformance --json`` prints it.
    """

    verdict: str
    passed: int
    failed: int
    not_declared: int
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """The arguments of `certify`, as the suite gets them; their meaning is said there."""

    backend: str | Callable[..., Any]
    operations: tuple[str, ...]
    profiles: tuple[str, ...]
    seeds: int
    quick: bool
    model: str | None
    deadline: float | None
    arithmetic: Arithmetic | None
    arrays: str
    device: str
    limits: Mapping[str, object]


def certify(
    backend: str | Callable[..., Any],
    operations: str | Sequence[str] = (),
    *,
    profiles: str | Sequence[str] = (),
    seeds: int = 5,
    quick: bool = False,
    model: str | PathLike[str] | None = None,
    deadline: float | None = None,
    arithmetic: Arithmetic | None = None,
    arrays: str = "numpy",
    device: str = "cpu",
    **limits: object,
) -> Certification:
    """Test a backend, or a plain function, against the specification with the conformance suite.

    A function is tested in a process of its own, as a backend of one operation (`lowbit.backend.function`)::

        lowbit.certify(my_gemv, "linear.gemv", format="gptq-v2", bits=4, activations="bfloat16", arrays="torch")
        lowbit.certify(my_gemv, profiles="lowbit-1.1/gptq-gemv-bf16", arrays="torch")

    Args:
        backend: a name that `lowbit backends` lists, or ``module:Class``; or a function.
        operations: only these operations or clauses, such as ``linear.qgemv``; all by default. For a function the
            operation that it computes, which a profile says too.
        profiles: only the cases of these profiles, which are certified. For a function one of one operation; it says
            what the function handles.
        seeds: how many seeds of the random tier.
        quick: only a few cases of each clause.
        model: the path of a GGUF file whose shapes and weights are tested too.
        deadline: seconds that one call may take, and that loading the backend may take, at least 0.1; None for the
            suite's own.
        arithmetic: of a function; None for the usual one (`lowbit.backend.function.Claim`).
        arrays: whose arrays a function takes: numpy, torch or jax.
        device: where they lie.
        limits: what a function handles of each parameter: ``format="gptq-v2"``, ``bits=4``, ``columns=Range(64)`` with
            a `lowbit.backend.Range`.

    Raises:
        ArgumentError: an argument of another type, or out of range.
        UnavailableError: the suite is not installed, or several packages offer one.
        LowbitError: the suite refuses an argument, the backend or the function.
    """
    if not (isinstance(backend, str) or callable(backend)):
        raise ArgumentError("backend", kind_of(backend), "a name, module:Class, or a function")
    if not (model is None or isinstance(model, str | PathLike)):
        raise ArgumentError("model", kind_of(model), "the path of a GGUF file")
    check_integer("seeds", seeds, 0)
    if deadline is not None:
        check_number("deadline", deadline, LEAST_DEADLINE)
    chosen, certified = _names("operations", operations), _names("profiles", profiles)
    path = None if model is None else fspath(model)
    request = Request(backend, chosen, certified, seeds, quick, path, deadline, arithmetic, arrays, device, limits)
    found, what = entries(CERTIFY), "the conformance suite"
    if not found:
        raise UnavailableError(what, "no installed package offers it", "install lowbit[conformance]")
    suite: Any = loaded(single(found, what), what)
    answer: Certification = suite(request)
    return answer


def _names(argument: str, given: object) -> tuple[str, ...]:
    """One name, or several."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(argument, kind_of(given), "a name, or a sequence of names")
    return tuple(names)
