"""What the atlas holds of a project: its packages, and for each kernel what is claimed of it.

>>> Entry("torch.matmul", "product", "linear.gemm", {"format": "bfloat16"}).formats
('bfloat16',)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any

from lowbit.backend.function import Claim, Library
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import UnavailableError

RESULTS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Entry:
    """A kernel of a project and what it is tested for.

    Attributes:
        kernel: its public name.
        function: the function of the module that calls it.
        operation: an id of the specification.
        limits: what is declared, as for `lowbit.certify`: format, options, types, sizes.
        arithmetic: for a bounded operation, from the project's source; None for the usual one.
        arrays: whose arrays the function takes.
        backend: an installed backend (`lowbit_adapters`), which is run in the place of a function and declares for
            itself; `limits` then only say what the page shows.
    """

    kernel: str
    function: str
    operation: str
    limits: Mapping[str, object] = field(default_factory=dict)
    arithmetic: Arithmetic | None = None
    arrays: Library = "torch"
    backend: str = ""

    @property
    def claim(self) -> Claim:
        """What the suite is told."""
        return Claim(self.operation, self.limits, self.arithmetic, self.arrays)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that it declares."""
        return tuple(str(each) for each in self.told("format"))

    def told(self, limit: str) -> tuple[object, ...]:
        """The values of a limit; none where it is not declared."""
        given = self.limits.get(limit, ())
        return tuple(given) if isinstance(given, list | tuple) else (given,)


@dataclass(frozen=True)
class Project:
    """A project: what is installed of it, and its kernels.

    Attributes:
        name: as the page shows it.
        packages: distributions; the version of the first one is the project's.
        entries: its kernels.
    """

    name: str
    packages: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def versions(self) -> dict[str, str]:
        """The versions that are installed.

        Raises:
            PackageNotFoundError: one that is not.
        """
        return {name: version(name) for name in self.packages}


class Missing:
    """Stands for a module that is not installed: whatever is taken from it, or called, refuses."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        project = self._name.partition(".")[0]
        raise UnavailableError(self._name, self._reason, f"install {project}: nox -s atlas -- PROJECT does")


def library(name: str) -> Any:
    """A module of another project, or what refuses in its place.

    It is imported with the module of the atlas, not in the first call, since an import changes the state of a process.

    >>> library("no_such_module").function
    Traceback (most recent call last):
    lowbit.errors.UnavailableError: no_such_module is unavailable: No module named 'no_such_module'; install \
no_such_module: nox -s atlas -- PROJECT does
    """
    try:
        return import_module(name)
    except ImportError as error:
        return Missing(name, str(error))
