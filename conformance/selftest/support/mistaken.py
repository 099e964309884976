"""What the suite's diagnosis makes of three lists of mistakes, in this process."""

import re
from dataclasses import dataclass
from typing import Any

from in_process import Prepared
from kills.trial import cases_of, run
from mistakes_layers import MISTAKES as LAYERS
from mistakes_products import MISTAKES as PRODUCTS
from mistakes_products import Mistake
from mistakes_storage import MISTAKES as STORAGE

from lowbit.backend import Capabilities
from lowbit.operations import OPERATIONS
from lowbit_conformance.defects.bank import backend
from lowbit_conformance.suite.cases import CONCURRENT, HABIT, Case
from lowbit_conformance.suite.explaining import Asked, Explainer

MISTAKES = [*PRODUCTS, *LAYERS, *STORAGE]
CASES = 14  # of each clause


class Mistaken:
    """A backend of one broken operation, which remembers its calls."""

    def __init__(self, mistake: Mistake) -> None:
        self._mistake, self._right, self.calls = mistake, backend("none"), list[Asked]()

    def capabilities(self) -> Capabilities:
        return self._right.capabilities()

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        OPERATIONS[operation].check(*arguments, **choices)
        if operation == self._mistake.operation:
            given = self._mistake.function(*arguments, **choices)
        else:
            given = self._right.run(operation, *arguments, **choices)
        self.calls.append(Asked(operation, arguments, choices, given))
        return given

    def prepare(self, matrix: Any) -> Prepared:
        return Prepared(self, matrix)


@dataclass(frozen=True)
class Outcome:
    """What was said of a mistake: in how many cases it was found, and the names it was given in any of them."""

    failed: int
    names: tuple[str, ...]
    text: str


def judged(mistake: Mistake) -> Outcome:
    """Run the cases of a mistake's operation, and let the suite explain what failed."""
    explainer, failed = Explainer(), 0
    by_clause: dict[str, list[tuple[Any, Case]]] = {}
    for mark, case in cases_of((), (mistake.operation,), 1):
        if (
            case.tier not in (HABIT, "exhaustive", "model")
            and case.variant != CONCURRENT
            and "large" not in case.variant
        ):
            by_clause.setdefault(f"{case.clause} {mark.test.__name__} {case.tier}", []).append((mark, case))
    for pairs in by_clause.values():
        for mark, case in pairs[:: -(-len(pairs) // CASES)]:
            owner: Any = Mistaken(mistake)
            message = run(mark, case, owner)
            failed += bool(message)
            explainer.note(case.id, owner.calls, re.split("[^A-Z_]", message)[0])
    told = dict(explainer.explanations())
    names = tuple(sorted({name for each in told.values() for name in each.defects}))
    texts = [each.diagnosis for each in told.values() if each.diagnosis]
    return Outcome(failed, names, texts[0] if texts else "")


def verdict(mistake: Mistake, outcome: Outcome) -> str:
    """``right``, ``wrong`` or ``described``; ``survived`` if no case failed."""
    if not outcome.failed:
        return "survived"
    if not outcome.names:
        return "described" if mistake.right else "right"
    return "right" if set(outcome.names) & set(mistake.right) else "wrong"
