"""What a backend declares, as the process that judges understands it."""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any

from lowbit.backend import Capabilities, Declaration, Range
from lowbit.backend.declarations import check_capabilities
from lowbit.contract.rounding import Arithmetic, Roundings, any_order, one_loop
from lowbit_conformance.isolation.process import Message

MOST_DETAILS, MOST_DETAIL = 100, 1000  # of its details: how many, and the characters of one


def claimed(told: Message, own: Callable[[str], Roundings]) -> Capabilities:
    """The capabilities that a host reports; `own` counts the roundings of an operation if the backend does so.

    Raises:
        ArgumentError: one of them is not allowed.
    """
    operations = {}
    for name, declaration in told.pop("operations").items():
        limits = {key: _limit(values) for key, values in declaration["limits"].items()}
        arithmetic = None
        if claim := declaration["arithmetic"]:
            roundings = {"any_order": any_order, "one_loop": one_loop}.get(claim["roundings"]) or own(name)
            more = {name: claim[name] for name in ("weights", "promotion", "intermediate")}
            arithmetic = Arithmetic(claim["form"], claim["accumulator"], roundings, **more)
        operations[name] = Declaration(limits, arithmetic)
    known = {item.name for item in dataclasses.fields(Capabilities)}
    rest = {key: _plain(value) for key, value in told.items() if key in known}
    # The host did so within reach of the backend.
    capabilities = check_capabilities(Capabilities(operations, **rest))
    details = islice((capabilities.details or {}).items(), MOST_DETAILS)
    return dataclasses.replace(capabilities, details={str(key): str(value)[:MOST_DETAIL] for key, value in details})


def _limit(values: Any) -> tuple[object, ...] | Range:
    """A limit as `Declaration.told_limits` tells it."""
    if isinstance(values, dict):
        return Range(values["multiple"], values["least"], values["most"])
    return tuple(map(_plain, values))


def _plain(value: Any) -> Any:
    """Turn the lists of JSON back into tuples."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value
