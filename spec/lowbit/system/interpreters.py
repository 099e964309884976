"""Child processes: starting Python without importing from the current folder, and how one ended.

``python -m`` and ``python -c`` put the current folder first on the path of imports, so a file ``pip.py`` or
``ctypes.py`` there would run in place of the real module. Python's flag ``-P`` turns that off, and the environment
variable ``PYTHONSAFEPATH`` does the same for the interpreters that the child starts. ``-I`` would also drop
``PYTHONPATH`` and the user's own site-packages, in which backends may be installed. So a child gets that flag, or one
of its parts, only if this process was started with it.

The variable has a side effect: ``python program.py`` no longer finds the modules beside ``program.py``. So a program
that the user names is started with `program_environment`, which removes the variable again.
"""

import os
import signal
import sys
from collections.abc import Mapping

SAFE_PATH = "PYTHONSAFEPATH"
OWN_VALUE = "yes"  # Python accepts any value; users write 1, so this one identifies lowbit


def python_command(*words: str) -> list[str]:
    """The command that runs this Python with the arguments `words`.

    >>> python_command("-m", "pip")[1:]
    ['-P', '-m', 'pip']
    """
    kept = {"-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site, "-S": sys.flags.no_site}  # -I is -EsP
    return [sys.executable, "-P", *(flag for flag, given in kept.items() if given), *words]


def python_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables for such a child: `base` (by default this process's own), plus the one that protects its children.

    >>> python_environment({"LANG": "C"})
    {'PYTHONSAFEPATH': 'yes', 'LANG': 'C'}
    """
    own = dict(os.environ if base is None else base)
    if not own.get(SAFE_PATH):
        own.pop(SAFE_PATH, None)  # Python treats an empty value as absent
    return {SAFE_PATH: OWN_VALUE} | own


def program_environment() -> dict[str, str]:
    """The variables for a program that the user names: this process's own, as the user set them."""
    return {name: value for name, value in os.environ.items() if (name, value) != (SAFE_PATH, OWN_VALUE)}


def signal_name(number: int) -> str:
    """The name of the signal that ended a child; a real-time signal has a number only.

    >>> signal_name(11), signal_name(40)
    ('SIGSEGV', 'SIG40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
