"""Whether a file can be written, asked before the work that fills it."""

import os
from pathlib import Path

from lowbit.errors import ArgumentError

DEVICES = Path("/dev")  # root may write there, and would replace /dev/stdout


def check_writable(argument: str, path: Path) -> None:
    """Refuse a path that cannot be written to, before the work starts.

    Raises:
        ArgumentError: its folder does not exist or is not writable, or the path is a folder, or a device or pipe that a
            file would replace.
    """
    replaceable = path.is_file() or not path.exists()
    if not path.parent.is_dir() or not replaceable or not os.access(path.parent, os.W_OK) or DEVICES in path.parents:
        raise ArgumentError(argument, path, "a plain file in a folder that exists and can be written to")
