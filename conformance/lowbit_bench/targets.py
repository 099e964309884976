"""The backends of a comparison: by name, as a library, as a program, or as a plain function."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowbit.backend import Backend, find
from lowbit.backend.function import FunctionBackend
from lowbit.errors import UnavailableError
from lowbit_foreign import CommandBackend, LibraryBackend

Kind = Literal["backend", "library", "command", "function"]


@dataclass(frozen=True)
class Target:
    """One backend.

    Attributes:
        kind: what `name` is.
        name: a name that ``lowbit backends`` lists or ``module:Class``, a path, a command line, or the description of a
            function (`lowbit.backend.function.described`).
        shown: its name in tables.
    """

    kind: Kind
    name: str
    shown: str

    def open(self) -> Backend:
        """The backend, loaded in this process.

        Raises:
            LowbitError: it does not exist, or cannot run here.
        """
        made = self._made()
        state = made.availability()
        if not state.usable:
            raise UnavailableError(f"backend {self.shown}", state.reason, state.remedy)
        return made

    def _made(self) -> Backend:
        if self.kind == "library":
            return LibraryBackend(self.name)
        if self.kind == "command":
            return CommandBackend(self.name)
        return FunctionBackend(self.name) if self.kind == "function" else find(self.name)


def libraries(paths: Iterable[str], taken: Iterable[str] = ()) -> list[Target]:
    """Libraries by their paths, each named by the shortest unique end of its path.

    >>> [each.shown for each in libraries(["/a/one/libk.so", "/a/two/libk.so", "/a/libm.so"])]
    ['one/libk.so', 'two/libk.so', 'libm.so']

    Args:
        paths: of the libraries.
        taken: the names of other backends.
    """
    whole, others = list(dict.fromkeys(os.path.abspath(each) for each in paths)), set(taken)
    parts = [Path(each).parts for each in whole]
    return [Target("library", each, end_of(own, parts, others)) for each, own in zip(whole, parts, strict=True)]


def end_of(own: tuple[str, ...], every: Iterable[tuple[str, ...]], taken: Iterable[str]) -> str:
    """The shortest end of a path with which no other path ends, and which is not taken."""
    for count in range(1, len(own)):
        end = own[-count:]
        if sum(each[-count:] == end for each in every) == 1 and "/".join(end) not in taken:
            return "/".join(end)
    return str(Path(*own))
