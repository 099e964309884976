"""Backends: what a kernel author implements, how lowbit finds it, and the data that pass between the two.

The names below are the public interface of the package; its chapters say what each of them means.
"""

from lowbit.backend.base import (
    PRODUCTS,
    Availability,
    Backend,
    Capabilities,
    Declaration,
)
from lowbit.backend.prepared import PreparedLinear
from lowbit.backend.registry import DEFAULT_ORDER, ENTRY_POINTS, find, load, names
from lowbit.backend.session import Session
from lowbit.contract.ranges import Range

__all__ = [
    "DEFAULT_ORDER",
    "ENTRY_POINTS",
    "PRODUCTS",
    "Availability",
    "Backend",
    "Capabilities",
    "Declaration",
    "PreparedLinear",
    "Range",
    "Session",
    "find",
    "load",
    "names",
]
