"""Arguments by name: other languages have no order of arguments and no defaults."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowbit.contract.operation import OPERATIONS


def named(operation: str, arguments: Sequence[Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by the names of its parameters; those left out have their defaults.

    >>> from lowbit.operations import OPERATIONS
    >>> named("routing.top_k", ["scores", 2], {})
    {'scores': 'scores', 'k': 2}
    """
    return _bound(OPERATIONS[operation].check, arguments, choices)


def named_step(check: Callable[..., None], arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments of one step of a stateful operation, given the check that `Operation.check_step` made."""
    return _bound(check, arguments, {})


def _bound(function: Callable[..., None], arguments: Sequence[Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    # The check, not the reference: it takes the same arguments, and nothing here ever touches a reference.
    bound = inspect.signature(function).bind(*arguments, **choices)
    bound.apply_defaults()
    return dict(bound.arguments)
