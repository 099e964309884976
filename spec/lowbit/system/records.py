"""Records: which parts of a long job are finished, in a JSON file from which the same job resumes.

A record holds the *call*, which is everything that determines the results, and notes on each finished part. The file is
rewritten whole each time, so a killed process leaves the record from before its last part.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.system.json_files import parsed, read_bytes
from lowbit.system.storage import write_whole
from lowbit.text import quoted

MOST_BYTES = 2**26
RESUME = "run the same command again to resume"
ALLOWED = "a free name, or the file that the same command has kept"

Parts = dict[str, Any]
"""The note of each finished part, by its name; JSON."""


def write_record(file: Path, call: Mapping[str, Any], parts: Parts) -> None:
    """Write a record, completely or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(file, json.dumps({"call": call, "parts": parts}).encode())


def read_record(file: Path, call: Mapping[str, Any]) -> Parts | None:
    """The finished parts of a job; None if the record is of another job.

    Raises:
        ArgumentError: there is no readable file.
        FormatError: it is not a record.
    """
    record = parsed(file.name, read_bytes(file, MOST_BYTES))
    found: Parts = record.value("parts", dict)
    return found if record.value("call", dict) == json.loads(json.dumps(call)) else None


class Kept:
    """The results of a job's parts, in memory and in a file that the user names.

    Attributes:
        results: by the names of the parts; JSON.
    """

    def __init__(self, file: Path | None, call: Mapping[str, Any]) -> None:
        """Load the results that the same job left in the file.

        Args:
            file: given as ``--keep``; None to keep results in memory alone.
            call: everything that determines the results; JSON.

        Raises:
            ArgumentError: the file's folder does not exist, or the file is not a record of this job.
        """
        self._file, self._call = file, call
        self.results = Parts() if file is None else _earlier(file, call)

    def add(self, part: str, result: Any) -> None:
        """Keep the result of a part.

        Raises:
            UnavailableError: the file cannot be written.
        """
        self.results[part] = result
        if self._file is None:
            return
        try:
            write_record(self._file, self._call, self.results)
        except OSError as error:
            reason = f"it cannot be written: {error.strerror or error}"
            remedy = f"free disk space or make the folder writeable, and {RESUME}"
            raise UnavailableError(quoted(str(self._file)), reason, remedy) from error


def _earlier(file: Path, call: Mapping[str, Any]) -> Parts:
    if not file.absolute().parent.is_dir():
        raise ArgumentError("--keep", quoted(str(file)), "a name in a folder that exists")
    if not (file.is_symlink() or file.exists()):
        return {}
    try:
        found = read_record(file, call)
    except (ArgumentError, FormatError) as error:
        raise ArgumentError("--keep", f"{quoted(str(file))}, which is no record", ALLOWED) from error
    if found is None:
        raise ArgumentError("--keep", f"{quoted(str(file))}, the record of another command", ALLOWED)
    return found
