"""Whether there is a backend to test at all, which is asked before tens of thousands of cases are made of it.

What is looked at here runs no code of a backend; loading it says the rest, in the process that owns it (`host`).
"""

import os

from lowbit.backend.registry import check_exists
from lowbit.errors import UnavailableError

BANK = "bank:"
"""The prefix of the names of backends with a defect (`lowbit_conformance.defects.bank`)."""


def check_target(kind: str, name: str) -> None:
    """Refuse a backend that does not exist.

    Args:
        kind: ``name`` or ``library``; other kinds are not checked here.
        name: of the backend, or the path of the library.

    Raises:
        ArgumentError: no installed package offers the name, or the package of a ``module:Class`` does not exist.
        UnavailableError: there is no file of the library.
    """
    if kind == "name" and not name.startswith(BANK):
        check_exists(name)
    elif kind == "library" and not os.path.isfile(name):
        raise UnavailableError(f"library {name}", "there is no such file", "build it first")
