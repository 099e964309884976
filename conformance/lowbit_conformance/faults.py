"""The handler that records where a fault happened, compiled once for this machine.

Without a C compiler there is none, and a fault is a plain ``CRASHED``.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

import platformdirs

FLAGS = ["-std=c11", "-O1", "-shared", "-fPIC"]
SIGNAL, ADDRESS, ACCESS, CODE = range(4)  # words of the control page, as in faults.c
READ, WRITE = 1, 2


def handler() -> str:
    """The path of the compiled handler; empty where it cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return ""
    source = (files("lowbit_conformance") / "faults.c").read_bytes()
    key = hashlib.sha256(source + compiler.encode() + repr(os.uname()).encode()).hexdigest()[:16]
    library = Path(platformdirs.user_cache_dir("lowbit")) / f"faults-{key}.so"
    if not library.exists() and not _compile(compiler, source, library):
        return ""
    return str(library)


def _compile(compiler: str, source: bytes, library: Path) -> bool:
    """Compile under a temporary name, then rename; of two that do so at once, either is right."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "faults.so"
            command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(built)]
            subprocess.run(command, input=source, capture_output=True, check=True, timeout=60)
            built.replace(library)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
