"""A property that is computed once, without a lock.

Before Python 3.12 `functools.cached_property` holds a lock while it computes, one for all objects of a class. A child
process that is forked at that moment inherits the locked lock but not the thread that holds it, and waits for ever.
Without a lock two threads may compute the value at once; both get the same, and the first one is kept.
"""

import sys
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")

if sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(Generic[T]):  # noqa: N801 - it replaces the one of functools
        """A method as an attribute: computed at the first access, then stored in the object."""

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
            found: T = one.__dict__.setdefault(self._name, self._work(one))  # later accesses find this entry first
            return found
