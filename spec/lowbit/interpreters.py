"""Starting Python as a child process without importing from the folder in which the user stands.

``python -m`` and ``python -c`` put the current folder first on the path of imports, so that a file ``pip.py`` or
``ctypes.py`` lying there would run in place of the real module. Python's flag ``-P`` turns that off, and the
environment variable ``PYTHONSAFEPATH`` does the same for the interpreters that the child starts. ``-I`` would also drop
``PYTHONPATH`` and the user's own site-packages, in which backends may be installed.
"""

import os
import sys
from collections.abc import Mapping

SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python_command(*words: str) -> list[str]:
    """The command that runs this Python with the arguments `words`.

    >>> python_command("-m", "pip")[1:]
    ['-P', '-m', 'pip']
    """
    return [sys.executable, "-P", *words]


def python_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for such a child: `base` (this process's own by default), and what keeps its children safe too."""
    return dict(os.environ if base is None else base) | SAFE_PATH
