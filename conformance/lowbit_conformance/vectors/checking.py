"""Checking files of vectors against this version of the specification: whether its answers are still the same."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lowbit.contract import OPERATIONS, Operation
from lowbit.errors import ArgumentError
from lowbit.session import Session
from lowbit.values import Tree, as_json, from_json
from lowbit_conformance.vectors.judging import right_answer

LIBRARY = 2.0**-10
"""By which part of the bound the exact results of two hosts may differ: their exponentials are not the same ones."""
FINE = 2.0**-40  # of the largest element, where there is no bound


def disagreements(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The id of each vector that this version answers otherwise, or cannot read, and how."""
    specified = OPERATIONS[document["operation"]]
    for vector in document["vectors"]:
        if text := _disagreement(specified, vector):
            yield vector["id"], text


def _disagreement(specified: Operation, vector: dict[str, Tree]) -> str:
    try:
        arguments = {name: from_json(tree) for name, tree in vector["arguments"].items()}
    except ArgumentError as error:
        return f"its arguments cannot be read: {error}"
    try:
        with np.errstate(all="ignore"):
            answer = specified.reference(**arguments)
    except (ArgumentError, TypeError) as error:
        return "" if "must-refuse" in vector["flags"] else f"its arguments are refused: {error}"
    if "must-refuse" in vector["flags"]:
        return "its arguments are allowed"
    if specified.stateful:
        return _of_steps(specified, answer, arguments, vector.get("steps", []))
    right = right_answer(specified.id, arguments, answer)
    return next((text for key in ("result", "exact", "bound") if (text := _differs(key, right, vector))), "")


def _of_steps(specified: Operation, opened: Any, arguments: dict[str, Any], steps: list[dict[str, Tree]]) -> str:
    assert specified.check_step is not None
    session = Session(specified.id, opened, specified.check_step(**arguments))
    for number, step in enumerate(steps):
        try:
            given = [from_json(tree) for tree in step["arguments"].values()]
            result = as_json(session.step(*given))
        except (ArgumentError, TypeError) as error:
            if not step.get("refused"):
                return f"step {number} is refused: {error}"
            continue
        if step.get("refused"):
            return f"step {number} is allowed"
        if result != step.get("result"):
            return f"step {number} answers otherwise"
    return ""


def _differs(key: str, answer: dict[str, Any], vector: dict[str, Tree]) -> str:
    """How the file's value differs from ours; empty if it does not."""
    if (key in answer) != (key in vector):
        return f"{key} is {'missing' if key in answer else 'there, and should not be'}"
    if key not in answer or answer[key] == vector[key]:
        return ""
    if key == "result":
        return "the result is another"
    try:
        mine, theirs = from_json(answer[key]), from_json(vector[key])
    except ArgumentError as error:
        return f"{key} cannot be read: {error}"
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
