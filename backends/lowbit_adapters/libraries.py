"""Installed libraries: found on the file system, so that a list of backends imports none of them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from lowbit.backend import Availability


def availability(libraries: Mapping[str, str]) -> Availability:
    """Whether all libraries are installed.

    >>> availability({"numpy": "numpy"})
    Availability(usable=True, reason='', remedy='')
    >>> availability({"no_such_module": "no-such-package"}).remedy
    'install no-such-package, or lowbit[adapters]'

    Args:
        libraries: from module to the name of the distribution that provides it.
    """
    missing = [name for module, name in libraries.items() if find_spec(module) is None]
    if not missing:
        return Availability(True)
    verb = "is" if len(missing) == 1 else "are"
    names = " and ".join(missing)
    return Availability(False, f"{names} {verb} not installed", f"install {names}, or lowbit[adapters]")


def versions(libraries: Mapping[str, str]) -> dict[str, str]:
    """From distribution to version, for reports; only installed ones."""
    found = {}
    for name in libraries.values():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
