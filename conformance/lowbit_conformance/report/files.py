"""Writing files that are whole or not there."""

import os
from pathlib import Path

from lowbit.errors import ArgumentError


def check_writable(argument: str, path: Path) -> None:
    """Refuse a path that cannot be written to, before the work whose result shall go there.

    Raises:
        ArgumentError: its folder does not exist or is not writable, or the path is a folder.
    """
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentError(argument, path, "a file in a folder that exists and can be written to")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path` and give it that name once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
