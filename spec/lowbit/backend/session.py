"""Sessions: an operation with a memory, opened on a backend.

Most operations are functions: their result follows from their arguments. A cache of keys and values is not one, nor
is an engine that decides which experts stay: what such a *stateful* operation answers follows from everything that it
was given since it was opened. So it is opened, takes steps, and is closed::

    with backend.open("offload.engine", arrangement) as engine:
        events = engine.step(request)

Every opening is a *session*, and begins with nothing. Two sessions know nothing of one another, and a step that is
refused leaves no trace in the steps after it.

The backend's hook answers an opening with any object that has a method ``step``, and ``close`` if there is something
to give back; the reference of the operation answers with such an object, too. It sees no wrong argument, because the
session checks first.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from lowbit.errors import ArgumentError


class Session:
    """A stateful operation that a backend has opened; leaving it as a context manager closes it.

    Attributes:
        operation: ``offload.engine``.
    """

    def __init__(self, operation: str, steps: Any, check: Callable[..., None]) -> None:
        """Over what the hook answered, and with the check that `Operation.check_step` made."""
        self.operation, self._check = operation, check
        self._steps: Any = steps

    def step(self, *arguments: Any) -> Any:
        """Take one step; what it answers depends on the steps of this session before it.

        Raises:
            ArgumentError: an argument is wrong, and nothing has changed; or the session is closed.
        """
        if self._steps is None:
            raise ArgumentError(f"session of {self.operation}", "closed", "an open one")
        self._check(*arguments)
        return self._steps.step(*arguments)

    def close(self) -> None:
        """Give back what the session holds. Closing twice is harmless."""
        steps, self._steps = self._steps, None
        if hasattr(steps, "close"):
            steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
