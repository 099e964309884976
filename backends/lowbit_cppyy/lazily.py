"""A property that is worked out once, and by no lock.

Before Python 3.12 `functools.cached_property` holds a lock while it works, one for all objects of a class. A child that
is forked at that moment has the lock and not the thread that holds it, and waits for ever. Without a lock two threads
may do the work at once; then they come to the same, and the first to be done is remembered.
"""

import sys
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")

if sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(Generic[T]):  # noqa: N801 - it stands for the one of functools
        """A method as an attribute: worked out when it is first asked for, then kept among those of the object."""

        def __init__(self, work: Callable[[Any], T]) -> None:
            self._work, self.__doc__ = work, work.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        @overload
        def __get__(self, one: None, owner: type) -> Self: ...

        @overload
        def __get__(self, one: object, owner: type) -> T: ...

        def __get__(self, one: object | None, owner: type) -> Self | T:
            if one is None:
                return self
            found: T = one.__dict__.setdefault(self._name, self._work(one))  # and from then on it hides this
            return found
