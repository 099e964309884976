"""The backends of a comparison: by name, as a library, as a program, or as a plain function."""

from dataclasses import dataclass
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
        shown: what tables call it.
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
