"""`ForeignBackend`: what a library and a program have in common as backends.

Other languages have no order of arguments and no defaults, so arguments are passed by the names of their parameters.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowbit.backend import PRODUCTS, Availability, Backend
from lowbit.contract.operation import OPERATIONS
from lowbit.errors import ArgumentError, UnavailableError


def named(check: Callable[..., None], arguments: Sequence[Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its parameters, with defaults for those left out.

    >>> from lowbit.operations import OPERATIONS
    >>> named(OPERATIONS["routing.top_k"].check, ["scores", 2], {})
    {'scores': 'scores', 'k': 2}

    Args:
        check: takes the same arguments. It is not the reference, which is not used here.
        arguments, choices: of the call.
    """
    bound = inspect.signature(check).bind(*arguments, **choices)
    bound.apply_defaults()
    return dict(bound.arguments)


class ForeignBackend(Backend):
    """A backend outside Python; a derived class implements the calls."""

    def availability(self) -> Availability:
        try:
            self.capabilities()
        except UnavailableError as error:
            return Availability(False, error.reason, error.remedy)
        except ArgumentError:  # it can run; `capabilities` reports errors in its declaration
            return Availability(True)
        return Availability(True)

    @abstractmethod
    def answer(self, do: str, operation: str, arguments: dict[str, Any], handle: Any = None) -> Any:
        """The result of one call: ``run``, or ``step`` with the handle of what was opened."""

    @abstractmethod
    def opened(self, operation: str, arguments: dict[str, Any]) -> Any:
        """The handle of a stateful operation that has been opened."""

    @abstractmethod
    def end(self, handle: Any) -> None:
        """Close what was opened."""

    def _hook(self, operation: str) -> Callable[..., Any]:
        """One call, or for a stateful operation its opening; products go through `prepare`."""
        if operation in PRODUCTS:
            return super()._hook(operation)
        specified = OPERATIONS[operation]

        def call(*arguments: Any, **choices: Any) -> Any:
            given = named(specified.check, arguments, choices)
            if specified.check_step is None:
                return self.answer("run", operation, given)
            return _Steps(self, operation, self.opened(operation, given), specified.check_step(*arguments, **choices))

        return call


class _Steps:
    """A stateful operation that has been opened."""

    def __init__(self, backend: ForeignBackend, operation: str, handle: Any, check: Callable[..., None]) -> None:
        self._backend, self._operation, self._handle, self._check = backend, operation, handle, check

    def step(self, *arguments: Any) -> Any:
        return self._backend.answer("step", self._operation, named(self._check, arguments, {}), self._handle)

    def close(self) -> None:
        self._backend.end(self._handle)
