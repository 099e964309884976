"""Whether a file can be written, asked before the work that fills it."""

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
