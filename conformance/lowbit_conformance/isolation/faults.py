"""The handler that records where a fault happened, compiled once for this machine.

Without a C compiler, or without a folder for compiled code that only this user can write to, there is no handler, and
the verdict of a fault is ``CRASHED`` without a place.
"""

import hashlib
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

from lowbit.errors import UnavailableError
from lowbit.system.storage import code_folder, kept_code

FLAGS = ["-std=c11", "-O1", "-shared", "-fPIC"]
SIGNAL, ADDRESS, ACCESS = range(3)  # words of the control page, as in faults.c
READ, WRITE = 1, 2


def handler() -> str:
    """The path of the compiled handler; empty where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return ""
    source = (files("lowbit_conformance.isolation") / "faults.c").read_bytes()
    key = hashlib.sha256(b"\0".join([source, repr([compiler, FLAGS, *os.uname()]).encode()])).hexdigest()[:16]

    def compile_to(path: Path) -> None:
        command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(path)]
        # In an empty folder, because the linker prefers a libgcc_s.so.1 in the current folder to the system's.
        # Temporary files of the compiler are there too: others may be able to replace files in the folder of TMPDIR.
        folder, environment = path.parent, os.environ | {"TMPDIR": str(path.parent)}
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=60, cwd=folder, env=environment)

    try:
        return str(kept_code(code_folder("faults"), f"faults-{key}.so", compile_to))
    except (OSError, subprocess.SubprocessError, UnavailableError):
        return ""
