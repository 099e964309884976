"""How the host is separated from the judge: what may be tried, and what a report says of what was used.

`confinement` does it, in the host.
"""

import os
import sys
from types import MappingProxyType

from lowbit.errors import ArgumentError

VARIABLE = "LOWBIT_ISOLATION"
"""The environment variable that selects one method. Only the judge reads it; a host does not have it."""

ISOLATION = MappingProxyType(
    {
        "namespaces": "separate namespaces; a backend does not see the process that judges it",
        "landlock": "a Landlock domain; a backend cannot trace, signal or limit the process that judges it",
        "none": "none; a backend can reach the process that judges it",
        "unobserved": "none; a backend can reach the process that judges it. Without /proc it was not seen whether "
        "calls leave child processes behind, or threads, open files and mapped memory",
        "": "not known; the run ended before the backend was loaded",
    }
)
"""The methods, the strongest first, and what a report says about each."""

ADVISORY = "advisory; it shows a backend that calls or copies the specification, not one that hides this"
"""What a report says about the seal (`sealing`), which is in the backend's process."""


def methods() -> tuple[str, ...]:
    """The methods to try, one after another.

    Raises:
        ArgumentError: the user has named one that does not exist.
    """
    known = ("namespaces", "landlock", "none")
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return known if sys.platform == "linux" else ("none",)
    if chosen not in known:
        raise ArgumentError(VARIABLE, chosen, ", ".join(known))
    return (chosen,)
