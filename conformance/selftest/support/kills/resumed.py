"""The file of a long run that can be resumed: read with suspicion, and never overwritten if it is somebody else's."""

import json
import os
from pathlib import Path
from typing import Any

from lowbit.errors import ArgumentError

MOST_BYTES = 2**28


def earlier(file: Path, schema: str) -> dict[str, Any] | None:
    """What an earlier run has written to a file; None where there is no file yet.

    Args:
        file: given as ``--out``.
        schema: the value of ``schema`` in the files of this command.

    Raises:
        ArgumentError: there is something else under this name, or the file cannot be read or written.
    """
    folder = next(place for place in (file.parent, *file.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError("--out", file, "a file in a folder that can be written to")
    if not os.path.lexists(file):
        return None
    if not file.is_file():
        raise ArgumentError("--out", file, "a plain file, or a name that is free")
    try:
        with file.open("rb") as stream:
            found = json.loads(stream.read(MOST_BYTES))
    except OSError as error:
        raise ArgumentError("--out", f"{file} ({error.strerror})", "a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise not_ours(file, "not JSON") from error
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise not_ours(file, f"not of schema {schema}")
    return found


def not_ours(file: Path, why: str) -> ArgumentError:
    """The error about a file that this command has not written, or that was changed since."""
    return ArgumentError("--out", f"{file}, {why}", "a file that this command has written, or a name that is free")
