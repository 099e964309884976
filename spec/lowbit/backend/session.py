"""Sessions: a stateful operation, opened on a backend.

Most operations are functions: their result depends on their arguments only. A cache of keys and values is not a
function, nor is an engine that decides which experts stay: the result of such a *stateful* operation depends on
everything that it has received since it was opened. So it is opened, takes steps, and is closed::

    with backend.open("offload.engine", arrangement) as engine:
        events = engine.step(request)

Every opening begins a new *session* with an empty state. Sessions are independent of each other, and a step that is
refused does not affect later steps.

The hook of a backend returns an object with a method ``step``, and with ``close`` if there is something to release; so
does the reference of the operation. It never receives wrong arguments, because the session checks them first.
"""

from collections.abc import Callable
from typing import Any, Self

from lowbit.errors import ArgumentError


class Session:
    """A stateful operation that a backend has opened; as a context manager it closes itself on exit.

    Attributes:
        operation: ``offload.engine``.
    """

    def __init__(self, operation: str, steps: Any, check: Callable[..., None]) -> None:
        """Wrap what the hook returned, with the check from `Operation.check_step`."""
        self.operation, self._check = operation, check
        self._steps: Any = steps

    def step(self, *arguments: Any) -> Any:
        """Take one step; its result depends on the earlier steps of this session.

        Raises:
            ArgumentError: an argument is wrong, and the state is unchanged; or the session is closed.
        """
        if self._steps is None:
            raise ArgumentError(f"session of {self.operation}", "closed", "an open one")
        self._check(*arguments)
        return self._steps.step(*arguments)

    def close(self) -> None:
        """Release what the session holds. Closing twice is harmless."""
        steps, self._steps = self._steps, None
        if hasattr(steps, "close"):
            steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
