"""What verdicts, clauses and places mean, in words that all forms of the report share."""

from collections.abc import Mapping

from lowbit.contract import operation as contract
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.cases import LOADING

VERDICTS: Mapping[str, str] = {
    "WRONG": "The result has other bits than the specification's, or lies outside the error bound. The first wrong "
    "element says where; whole rows, columns or groups point at an index, single elements at a rounding or a race.",
    "CRASHED": "The process that ran the backend ended during the call, by the signal in parentheses.",
    "HUNG": "The call did not come back within its deadline and was ended.",
    "OOB_READ": "The call read memory outside its arguments, and so ran into a guard page.",
    "OOB_WRITE": "The call wrote memory outside its result: into a guard page, or over the canaries beside it.",
    "UNDECLARED_OVERREAD": "The result depends on bytes past the end of an argument, or the call read more of them "
    "than the backend declares.",
    "INPUT_MUTATED": "An argument is not what it was before the call.",
    "STALE_OUTPUT": "Elements of the result still hold what was there before the call: nobody wrote them.",
    "NONDETERMINISTIC": "The same arguments gave other bits: after other calls, at another address, beside other "
    "bytes, or from another thread.",
    "SILENT_FALLBACK": "The backend called a function of the specification that computes, ran a copy of one, or "
    "imported another backend, instead of computing the result itself. What was rewritten, compiled or moved to "
    "another process is not noticed.",
    "STATE_CHANGED": "The process is not as it was: environment, folder, locale, floating-point mode, signal handlers, "
    "open files or threads.",
    "LEAKED": "Memory grows with the number of calls.",
    "WROTE_TO_STDOUT": "The call wrote to standard output.",
    "FORKED": "The call started a process of its own.",
    "RAISED": "The call raised an exception where the specification has a result.",
    "DECLARATION_REFUSED": "What the backend declares cannot be understood, so that nothing was run; or its arithmetic "
    "allows errors so wide that a bound means nothing.",
    "FORGED": "An event of the run is not one that the process that judges wrote, or files of the suite changed.",
    "UNDECIDED": "Cases have no verdict: the run ended early, or the process that judges was stopped.",
    "NOT_ISOLATED": "The process of the backend could not be separated from the one that judges.",
    "FAILED": "The case failed without a verdict of its own; the message says how.",
}
"""What each verdict says was seen."""


def verdict_meaning(verdict: str) -> str:
    """What was seen, for the word before the parentheses.

    >>> verdict_meaning("HUNG")
    'The call did not come back within its deadline and was ended.'
    """
    return VERDICTS.get(verdict.partition("(")[0], "")


def meaning(clause: str) -> str:
    """What a clause or a habit says; empty for what is none, such as a run that ended before any case."""
    if clause == LOADING:
        return "What the backend declares can be understood."
    try:
        return contract.sentence(clause)
    except KeyError:
        return ""


def title(operation: str) -> str:
    """An operation in a few words; empty for what is none."""
    return OPERATIONS[operation].title if operation in OPERATIONS else ""


def place(where: Mapping[str, object]) -> str:
    """Where the first wrong element is.

    >>> place({"row": 3, "bit": 12})
    'where: row 3, bit 12'
    """
    return "where: " + ", ".join(f"{name} {value}" for name, value in where.items()) if where else ""
