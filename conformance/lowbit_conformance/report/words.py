"""What verdicts, clauses and places mean, in words that all forms of the report share."""

from collections.abc import Mapping

from lowbit.contract import operation as contract
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.cases import LOADING

VERDICTS: Mapping[str, str] = {
    "WRONG": "The result has other bits than the specification's, or lies outside the error bound. The first wrong "
    "element says where. Whole rows, columns or groups suggest a wrong index; single elements a rounding or a race.",
    "CRASHED": "The process that ran the backend ended during the call, by the signal in parentheses.",
    "HUNG": "The call did not return within its deadline and was ended.",
    "OOB_READ": "The call read memory outside its arguments: a guard page stopped it, or other bytes there changed the "
    "result.",
    "OOB_WRITE": "The call wrote memory outside its result: into a guard page, or over the bytes around it.",
    "UNDECLARED_OVERREAD": "The result depends on bytes past the end of an argument, or the call read more of them "
    "than the backend declares.",
    "INPUT_MUTATED": "The call changed an argument.",
    "STALE_OUTPUT": "The call did not write some elements of the result: they hold what was there before.",
    "NONDETERMINISTIC": "The same arguments gave other bits: after other calls, at another address, next to other "
    "bytes, or from another thread.",
    "SILENT_FALLBACK": "The backend called a function of the specification that computes, ran a copy of one, or "
    "imported another backend, instead of computing the result itself. A copy that was rewritten, compiled or "
    "moved to another process is not noticed.",
    "STATE_CHANGED": "The call changed the process: environment, folder, locale, floating-point mode, signal handlers, "
    "open files or threads.",
    "LEAKED": "Memory grows with the number of calls.",
    "WROTE_TO_STDOUT": "The call wrote to standard output.",
    "FORKED": "The call started a process of its own.",
    "RAISED": "The call raised an exception where the specification has a result.",
    "DECLARATION_REFUSED": "The declaration of the backend is not valid, and no case was run; or its arithmetic allows "
    "errors so large that a bound is meaningless.",
    "FORGED": "The process that judges did not write an event of the run, or files of the suite changed.",
    "UNDECIDED": "Cases have no verdict: the run ended early, or the process that judges was stopped.",
    "NOT_RUN": "The case was not run, because other cases of the same operation had hung or crashed too often.",
    "NOT_ISOLATED": "The process of the backend could not be separated from the one that judges.",
    "FAILED": "The case failed without a verdict of its own; the message says how.",
}
"""What each verdict says was seen."""


def verdict_meaning(verdict: str) -> str:
    """What was seen, for the word before the parentheses.

    >>> verdict_meaning("HUNG")
    'The call did not return within its deadline and was ended.'
    """
    return VERDICTS.get(verdict.partition("(")[0], "")


def meaning(clause: str) -> str:
    """What a clause or a habit says; empty for anything else, such as a run that ended before any case."""
    if clause == LOADING:
        return "The declaration of the backend is valid."
    try:
        return contract.sentence(clause)
    except KeyError:
        return ""


def title(operation: str) -> str:
    """The title of an operation; empty if there is no such operation."""
    return OPERATIONS[operation].title if operation in OPERATIONS else ""


def place(where: Mapping[str, object]) -> str:
    """Where the first wrong element is.

    >>> place({"row": 3, "bit": 12})
    'where: row 3, bit 12'
    """
    return "where: " + ", ".join(f"{name} {value}" for name, value in where.items()) if where else ""
