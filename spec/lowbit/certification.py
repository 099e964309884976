"""Certifying a backend or a function: the door to the conformance suite, which is a package of its own.

The specification never imports the suite: it finds the suite by an entry point.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.errors import UnavailableError
from lowbit.system.entries import entries, loaded

CERTIFY = "lowbit.certify"
"""The group of the entry point by which a package offers the conformance suite."""


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


def certify(
    backend: str | Callable[..., Any],
    operations: str | Sequence[str] = (),
    *,
    profiles: str | Sequence[str] = (),
    seeds: int = 5,
    quick: bool = False,
    model: str | None = None,
    **function: Any,
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
        function: what a function handles: ``format``, ``activations``, ``result``, the options of the format, a
            `lowbit.backend.Range` of ``rows``, ``columns`` or ``batch``; its ``arithmetic``; ``arrays`` and ``device``.

    Raises:
        UnavailableError: the suite is not installed, or several packages offer one.
        LowbitError: the suite refuses an argument or the backend.
    """
    found, what = entries(CERTIFY), "the conformance suite"
    if not found:
        raise UnavailableError(what, "no installed package offers it", "install lowbit[conformance]")
    if len(found) > 1:
        reason = f"several packages offer it: {', '.join(entry.value for entry in found)}"
        raise UnavailableError(what, reason, "uninstall all of them but one")
    suite: Any = loaded(found[0], what)
    choices = {"profiles": profiles, "seeds": seeds, "quick": quick, "model": model}
    answer: Certification = suite(backend, operations, **choices, **function)
    return answer
