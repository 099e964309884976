"""What verdicts, clauses and places mean, in words that all forms of the report share."""

from collections.abc import Mapping

from lowbit.contract import operation as contract
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.cases import LOADING

VERDICTS: Mapping[str, str] = {
    "WRONG": "The result differs in its bits from the specification's, or lies outside the error bound. The message "
    "gives the first wrong element. Whole wrong rows, columns or groups suggest a wrong index; single wrong elements "
    "suggest a rounding or a race.",
    "CRASHED": "The process that ran the backend ended during the call; a signal is named in parentheses.",
    "HUNG": "The call did not return within its deadline and was ended.",
    "OOB_READ": "The call read memory outside its arguments: a guard page stopped it, or the result depends on "
    "bytes there.",
    "OOB_WRITE": "The call wrote memory outside its result: into a guard page, or to the bytes around it.",
    "UNDECLARED_OVERREAD": "The result depends on bytes past the end of an argument, or the call read more of them "
    "than the backend declares.",
    "INPUT_MUTATED": "The call changed an argument.",
    "STALE_OUTPUT": "The call did not write some elements of the result; they still hold earlier bytes.",
    "NONDETERMINISTIC": "The same arguments gave different bits: after other calls, at another address, next to other "
    "bytes, or from another thread.",
    "SILENT_FALLBACK": "The backend did not compute the result itself: it called a computing function of the "
    "specification, ran a copy of one, or imported another backend. A copy that was rewritten, compiled or moved to "
    "another process is not noticed.",
    "STATE_CHANGED": "The call changed the state of the process: environment, folder, locale, floating-point mode, "
    "signal handlers, open files or threads.",
    "LEAKED": "Memory or another resource grows with the number of calls.",
    "WROTE_TO_STDOUT": "The call wrote to standard output.",
    "FORKED": "The call started another process.",
    "RAISED": "The call raised an exception where the specification defines a result.",
    "DECLARATION_REFUSED": "The declaration of the backend is not valid, and no case was run; or its arithmetic allows "
    "errors so large that a bound is meaningless.",
    "FORGED": "An event of the run did not come from the judging process, or files of the suite changed.",
    "UNDECIDED": "Cases have no verdict: the run ended early, or the judging process was stopped.",
    "NOT_RUN": "The case was not run, because other cases of the operation hung or crashed too often.",
    "NOT_ISOLATED": "The backend's process could not be isolated from the judging process.",
    "FAILED": "The case failed without a more specific verdict; the message says how.",
}
"""What each verdict means."""


def verdict_meaning(verdict: str) -> str:
    """The meaning of a verdict, by the word before the parentheses.

    >>> verdict_meaning("HUNG")
    'The call did not return within its deadline and was ended.'
    """
    return VERDICTS.get(verdict.partition("(")[0], "")


def meaning(clause: str) -> str:
    """The text of a clause or a habit; empty for anything else, such as a run that ended before any case."""
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
    """The place of the first wrong element, in words.

    >>> place({"row": 3, "bit": 12})
    'where: row 3, bit 12'
    """
    return "where: " + ", ".join(f"{name} {value}" for name, value in where.items()) if where else ""
