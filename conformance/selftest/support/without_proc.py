"""A Python that takes the system for macOS: without ``/proc``, and without functions that only Linux has.

What remains is Linux all the same. So this shows that lowbit does without them, and not that it runs on macOS.
"""

import builtins
import fcntl
import io
import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paths import SUPPORT

LACKING: dict[ModuleType, tuple[str, ...]] = {
    os: ("memfd_create", "sched_getaffinity", "sched_setaffinity", "waitid", "pidfd_open", "O_PATH", "eventfd"),
    fcntl: ("F_ADD_SEALS", "F_SEAL_SHRINK", "F_SETSIG", "F_SETLEASE"),
    signal: ("SIGRTMIN", "SIGRTMAX", "pidfd_send_signal"),
}


def hides_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which nothing below ``/proc`` exists."""

    def hiding(path: object = ".", *arguments: object, **options: object) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).split("/")[:2] == ["", "proc"]:
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return hiding


def hide() -> None:
    """Hide them from this process."""
    for name in ("listdir", "open", "scandir", "stat", "lstat"):
        setattr(os, name, hides_proc(getattr(os, name)))
    io.open = builtins.open = hides_proc(open)
    for module, names in LACKING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sysconfig.get_config_vars()  # kept from now on; the file that they are read from is named after the system
    sys.platform = "darwin"


def environment(folder: Path) -> dict[str, str]:
    """The variables of a child that begins so; `folder` takes what Python runs at its start."""
    (folder / "sitecustomize.py").write_text("import without_proc\n\nwithout_proc.hide()\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, SUPPORT)))}
