"""Checking files of vectors against this version of the specification: whether its answers are still the same."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from lowbit.backend.session import Session
from lowbit.backend.wire import Tree, as_json, from_json
from lowbit.contract.operation import Operation
from lowbit.errors import ArgumentError, on_one_line
from lowbit.text import cleaned, quoted
from lowbit_conformance.vectors.files import Document, Step, Vector
from lowbit_conformance.vectors.judging import right_answer
from lowbit_conformance.vectors.record import MOST_BYTES, array_bytes

LIBRARY = 2.0**-10
"""The fraction of the bound by which exact results of two hosts may differ, because their exponentials differ."""
FINE = 2.0**-40  # of the largest element, if there is no bound


def disagreements(document: Document) -> Iterator[tuple[str, str]]:
    """The id of each vector for which this version has another result, or that it cannot read, with the difference."""
    for vector in document.vectors:
        if text := _disagreement(document.operation, vector):
            yield cleaned(on_one_line(vector.id)), cleaned(text)


def _disagreement(specified: Operation, vector: Vector) -> str:
    try:
        arguments = _values(specified.check, vector.arguments)
    except ArgumentError as error:
        return f"its arguments cannot be read: {error}"
    try:
        with np.errstate(all="ignore"):
            answer = specified.reference(**arguments)
    except ArgumentError as error:
        return "" if "must-refuse" in vector.flags else f"its arguments are refused: {error}"
    if "must-refuse" in vector.flags:
        return "its arguments are allowed"
    if specified.stateful:
        return _of_steps(specified, answer, arguments, vector.steps)
    right = right_answer(specified.id, arguments, answer)
    return next((text for key in ("result", "exact", "bound") if (text := _differs(key, right, vector.answer))), "")


def _values(check: Callable[..., Any], trees: dict[str, Tree]) -> dict[str, Any]:
    """The arguments of a call, by the names in its check; limited to the size of recorded ones.

    Raises:
        ArgumentError: other names, values that cannot be read, or arrays of too many bytes.
    """
    wanted = inspect.signature(check).parameters
    if set(trees) != set(wanted):
        raise ArgumentError("arguments", quoted(", ".join(sorted(trees))), ", ".join(wanted))
    values = {name: from_json(trees[name], name) for name in wanted}
    if (size := array_bytes(*values.values())) > MOST_BYTES:
        raise ArgumentError("arguments", f"arrays of {size} bytes", f"at most {MOST_BYTES}")
    return values


def _of_steps(specified: Operation, opened: Any, arguments: dict[str, Any], steps: Iterable[Step]) -> str:
    assert specified.check_step is not None
    check = specified.check_step(**arguments)
    session = Session(specified.id, opened, check)
    for number, step in enumerate(steps):
        try:
            given = _values(check, step.arguments)
        except ArgumentError as error:
            return f"the arguments of step {number} cannot be read: {error}"
        try:
            result = as_json(session.step(*given.values()))
        except ArgumentError as error:
            if not step.refused:
                return f"step {number} is refused: {error}"
            continue
        if step.refused:
            return f"step {number} is allowed"
        if result != step.result:
            return f"step {number} answers otherwise"
    return ""


def _differs(key: str, answer: dict[str, Any], given: dict[str, Tree]) -> str:
    """How the value in the file differs from ours; empty if it does not."""
    if (key in answer) != (key in given):
        return f"{key} is {'missing' if key in answer else 'there, and should not be'}"
    if key not in answer or answer[key] == given[key]:
        return ""
    if key == "result":
        return "the result is another"
    try:
        mine, theirs = from_json(answer[key]), from_json(given[key], key)
    except ArgumentError as error:
        return f"its answer cannot be read: {error}"
    if not isinstance(theirs, np.ndarray) or theirs.dtype != np.float64 or theirs.shape != mine.shape:
        return f"{key} is not float64 {mine.shape}"
    if not np.array_equal(np.isfinite(mine), np.isfinite(theirs)):
        return f"{key} is not finite elsewhere"
    finite = np.isfinite(mine)
    room = FINE * np.max(np.abs(mine[finite]), initial=0.0)
    if "bound" in answer:
        room = np.maximum(room, LIBRARY * from_json(answer["bound"]))[finite]
    away = np.abs(mine[finite] - theirs[finite]) > room
    return f"{key} differs in {int(away.sum())} elements" if away.any() else ""
