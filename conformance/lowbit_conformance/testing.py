"""For a kernel author's own tests: a decorator for pytest, and a quick check in the same process.

A test that certifies a function::

    from lowbit_conformance.testing import conforms

    @conforms("linear.gemv", format="gptq-v2", bits=4, activations="bfloat16", arrays="torch")
    def test_my_gemv():
        return my_gemv

While a kernel is being written, `check` runs some of the same cases in this process. It is quick, a debugger works, and
a crash ends the process. Its result is not a certificate: nothing is guarded, and habits such as writing beside the
result are not checked. Tests that call from several threads, or put arrays in the places of others, need the other
process and are left out.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from lowbit.arrays import F32
from lowbit.backend import Capabilities, PreparedLinear
from lowbit.backend.function import FunctionBackend
from lowbit.certification import certify
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import LowbitError
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit_conformance.cli.functions import claim_of
from lowbit_conformance.suite.cases import HABIT, Case
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.fitting import moved
from lowbit_conformance.suite.marking import MARKS, Mark, Settings
from lowbit_conformance.suite.plugin import not_declared

MOST_SHOWN = 5
Test = Callable[..., None]


def conforms(operation: str, **choices: Any) -> Callable[[Callable[..., Callable[..., Any]]], Test]:
    """Make a test from a function that returns a kernel, which is certified in a separate process.

    Args:
        operation: what the kernel computes.
        choices: as of `lowbit.certify` for a function.

    Returns:
        A decorator. The test fails with the failing cases and the lines that reproduce them.
    """

    def decorate(make: Callable[..., Callable[..., Any]]) -> Test:
        @wraps(make)
        def test(*fixtures: Any, **named: Any) -> None:
            __tracebackhide__ = True
            found = certify(make(*fixtures, **named), operation, **choices)
            failures = [f"{each['id']}: {each['message']}" for each in found.report["failures"][:MOST_SHOWN]]
            if found.verdict != "passed":
                counts = f"{found.passed} passed, {found.failed} failed, {found.not_declared} not declared"
                raise AssertionError("\n".join([f"{operation}: {found.verdict} ({counts})", *failures]))

        return test

    return decorate


@dataclass(frozen=True)
class Checked:
    """The result of a check, which is not a certificate.

    Attributes:
        passed: the number of passed cases.
        failures: case id and message of each failed case.
        not_declared: the number of cases outside the limits of the function.
    """

    passed: int
    failures: tuple[tuple[str, str], ...]
    not_declared: int

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {len(self.failures)} failed, {self.not_declared} not declared"
        lines = [f"{id}\n  {text}" for id, text in self.failures[:MOST_SHOWN]]
        return "\n".join([f"checked in this process, which is no certificate: {counts}", *lines])


def check(
    function: Callable[..., Any],
    operation: str,
    *,
    most: int = 20,
    arithmetic: Arithmetic | None = None,
    arrays: str = "numpy",
    device: str = "cpu",
    **limits: object,
) -> Checked:
    """Run some cases of an operation's clauses on a function, in this process.

    Args:
        function: the kernel.
        operation: what it computes.
        most: the largest number of cases of each test, evenly spread.
        arithmetic, arrays, device, limits: as of `lowbit.certify`.

    Raises:
        ArgumentError: the function cannot have this description.
    """
    backend = InThisProcess(FunctionBackend.of(function, claim_of(operation, arithmetic, arrays, device, limits)))
    declared = backend.capabilities().operations[operation]
    load_suite()
    outcomes: Counter[str] = Counter()
    failures = []
    for mark in MARKS:
        if not mark.clause.startswith(f"{operation}/C"):
            continue
        cases = [case for case in mark.generator(mark.clause, Settings(range(1))) if case.tier != HABIT]
        cases += moved(cases, declared)
        fitting = [case for case in cases if not not_declared(declared, case)]
        outcomes["not declared"] += len(cases) - len(fitting)
        for case in fitting[:: max(1, -(-len(fitting) // most))]:
            try:
                message = _failure(mark, case, backend)
            except NeedsHostError:
                continue
            outcomes["failed" if message else "passed"] += 1
            failures += [(case.id, message)] if message else []
    return Checked(outcomes["passed"], tuple(failures), outcomes["not declared"])


def _failure(mark: Mark, case: Case, backend: "InThisProcess") -> str:
    """The message of a test on a case; empty if it passes.

    Raises:
        NeedsHostError: the test needs the process of a `Remote`.
    """
    try:
        mark.run(backend, case)
    except NeedsHostError:
        raise
    except (AssertionError, LowbitError) as failure:
        return str(failure).splitlines()[0]
    except Exception as error:  # the kernel's own
        return f"RAISED: {type(error).__name__}: {error}"
    return ""


class NeedsHostError(Exception):
    """A test needs something that only a separate process can do."""


class InThisProcess:
    """A function in the form of a backend for tests: the part of `Remote` that needs no other process."""

    def __init__(self, backend: FunctionBackend) -> None:
        self._backend = backend

    def capabilities(self) -> Capabilities:
        return self._backend.capabilities()

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        return self._backend.run(operation, *arguments, **choices)

    def prepare(self, matrix: QuantizedMatrix) -> "PreparedHere":
        return PreparedHere(self._backend.prepare(matrix))

    def __getattr__(self, name: str) -> Any:
        raise NeedsHostError(name)


class PreparedHere:
    """A prepared matrix for tests; no array reveals unwritten elements."""

    def __init__(self, prepared: PreparedLinear) -> None:
        self.qgemv, self.qgemm, self.qgemm_bfp = prepared.qgemv, prepared.qgemm, prepared.qgemm_bfp

    def __getattr__(self, name: str) -> Any:
        raise NeedsHostError(name)

    def guarded(self, x: F32, vectors: int) -> F32:
        """The product of ``x[0]``, or of x if the case has several vectors."""
        return self.qgemm(x) if vectors else self.qgemv(x[0])

    def guarded_blocks(self, x: Blocks) -> F32:
        return self.qgemm_bfp(x)
