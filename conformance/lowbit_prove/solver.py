"""The solver: whether a condition can hold, and for which numbers.

Conditions of one shape come by the thousand, one for each column and row. Their variables are renamed in order of
occurrence, and a condition whose shape was found impossible is not searched again.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import z3

from lowbit_prove.terms import UndecidedError

MOST_SECONDS = 120

_impossible: dict[int, Any] = {}
"""Renamed conditions that no numbers satisfy, by z3's id; storing the expression here keeps its id in use."""


def satisfied(condition: Any, logic: str = "QF_BV", byte: str = "") -> Mapping[str, int] | None:
    """Numbers for which a condition holds, by the names of its variables; None if there are none.

    Args:
        condition: over bit vectors.
        logic: z3's name of the theory; ``QF_FPBV`` if the condition also has floats.
        byte: a variable that the condition restricts to below 256. The solver is called for each of its values, which
            takes less time if products are compared.

    Raises:
        UndecidedError: the solver gives up.
    """
    names = list(variables(condition))
    renamed = z3.simplify(z3.substitute(condition, *_renaming(names)))
    if renamed.get_id() in _impossible or z3.is_false(renamed):
        return None
    cases = [z3.BoolVal(True)]
    if byte:
        (number,) = (new for name, new in _renaming(names) if str(name) == byte)
        cases = [number == value for value in range(256)]
    for case in cases:
        if (model := _model(z3.And(renamed, case), logic)) is not None:
            values = (model.eval(new, model_completion=True) for _, new in _renaming(names))
            return {str(name): value.as_long() for name, value in zip(names, values, strict=True)}
    _impossible[renamed.get_id()] = renamed
    return None


def _model(condition: Any, logic: str) -> Any:
    solver = z3.SolverFor(logic)
    solver.set("timeout", 1000 * MOST_SECONDS)
    solver.add(condition)
    answer = solver.check()
    if answer == z3.unknown:
        raise UndecidedError(f"the solver gave up: {solver.reason_unknown()}")
    return solver.model() if answer == z3.sat else None


def _renaming(names: list[Any]) -> list[tuple[Any, Any]]:
    return [(name, z3.BitVec(f"v{place}", name.size())) for place, name in enumerate(names)]


def variables(expression: Any) -> Iterator[Any]:
    """The variables of an expression, each once, in order of occurrence."""
    seen, pending = set[int](), [expression]
    while pending:
        node = pending.pop()
        if node.get_id() in seen:
            continue
        seen.add(node.get_id())
        if z3.is_const(node) and node.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            yield node
        pending.extend(reversed(node.children()))


def with_numbers(expression: Any, bits: Mapping[str, int]) -> Any:
    """An expression with numbers in place of its variables, simplified; missing numbers are 0."""
    chosen = [(each, z3.BitVecVal(bits.get(str(each), 0), each.size())) for each in variables(expression)]
    return z3.simplify(z3.substitute(expression, *chosen))
