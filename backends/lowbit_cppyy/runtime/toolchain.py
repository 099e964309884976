"""Checking that kernels can be compiled, without compiling anything.

cppyy has its own compiler, but not the headers of the C++ standard library. It uses those of the system's g++ or
clang++: it asks the command ``c++`` for their folder, or looks in the usual places. If there are none, importing cppyy
ends the process; so this module looks first.
"""

import glob
import os
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec

from lowbit.errors import UnavailableError

USUAL_HEADERS = "/usr/include/c++/*/new"


def check_toolchain() -> None:
    """Check that cppyy can be imported and can find its headers.

    Raises:
        UnavailableError: something is missing; the message says what to install.
    """
    for module in ("cppyy", "archspec"):
        if find_spec(module) is None:
            reason = f"the Python package {module} is not installed"
            raise UnavailableError("backend cppyy", reason, "install lowbit with the extra cppyy: 'lowbit[cppyy]'")
    if not has_headers(os.environ.get("PATH", "")):
        reason = "the headers of the C++ standard library were not found"
        raise UnavailableError("backend cppyy", reason, "install a C++ compiler with its headers (g++)")


@cache
def has_headers(path: str) -> bool:
    """Whether cppyy's method finds the system's C++ headers with this PATH."""
    compiler = shutil.which("c++", path=path)
    if compiler is None:
        return bool(glob.glob(USUAL_HEADERS))
    command = [compiler, "-xc++", "-E", "-v", os.devnull]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ, "LC_ALL": "C"}
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return False
    folders = [line.strip() for line in listing.splitlines() if line.startswith(" /")]
    return any(os.path.isfile(os.path.join(folder, "new")) for folder in folders)
