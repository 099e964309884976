"""Backends in any language: a shared library behind `lowbit.h`, or a program that answers line by line.

A `LibraryBackend` is a shared library that exports the functions of ``include/lowbit.h``; a `CommandBackend` is a
program that reads one JSON object per line from standard input and writes one per line to standard output. Either is a
`lowbit.backend.Backend` like any other: arguments are checked by the specification before they are passed on, and every
result is checked before it is used.

``python -m lowbit_foreign`` prints the folder of the header, for a compiler's ``-I``.
"""

from pathlib import Path

from lowbit_foreign.command import CommandBackend
from lowbit_foreign.library import LibraryBackend

__all__ = ["INCLUDE", "CommandBackend", "LibraryBackend"]

INCLUDE = Path(__file__).parent / "include"
"""The folder of ``lowbit.h``."""
