"""The bank of defects: mistakes that real kernels make, each with a name, a cause and code.

Each is run as a whole backend, ``lowbit conformance bank:NAME``, to measure what the suite can find (`matrix`); and
each arithmetical one is compared with the result of a failing case, to name the mistake that was made (`diagnosis`).

>>> len(BANK) >= 60
True
>>> BANK["zero-plus-one"].cause
'A zero-point as it is meant is read as one that was stored less one.'
>>> backend("none").name
'bank:none'
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from lowbit.backend import Backend
from lowbit.errors import ArgumentError
from lowbit_conformance.defects import (
    activations,
    attention,
    block_sums,
    blocks,
    codes,
    common,
    depth,
    engines,
    experts,
    groups,
    habits_addresses,
    habits_calls,
    habits_ends,
    habits_everywhere,
    habits_memory,
    habits_sizes,
    habits_stale,
    habits_state,
    heads,
    integers,
    orders,
    quantisers,
    reals,
    routes,
    subnormal,
    sums,
    zeros,
)
from lowbit_conformance.defects.backends import CONTROL, BankBackend, Unchecked
from lowbit_conformance.defects.defect import Defect

PRODUCTS = (codes, groups, zeros, sums, integers)
CACHES = (blocks, block_sums, attention, heads, engines)
ARITHMETICAL = (*PRODUCTS, *CACHES, routes, experts, activations, quantisers, reals, depth, orders, subnormal, common)
HABITUAL = (
    habits_memory,
    habits_addresses,
    habits_stale,
    habits_sizes,
    habits_calls,
    habits_state,
    habits_ends,
    habits_everywhere,
)


def _gathered() -> dict[str, Defect]:
    found: dict[str, Defect] = {}
    for module in (*ARITHMETICAL, *HABITUAL):
        for defect in module.DEFECTS:
            if defect.name in found:
                raise ValueError(f"two defects are called {defect.name}")
            found[defect.name] = defect
    return found


BANK: Mapping[str, Defect] = MappingProxyType(_gathered())
"""All defects by name."""

__all__ = ["BANK", "CONTROL", "BankBackend", "Defect", "backend", "defect_of", "uses_reference"]


def defect_of(name: str) -> Defect:
    """The defect of this name; that of ``none`` is the control.

    Raises:
        ArgumentError: there is none.
    """
    if name == CONTROL.name:
        return CONTROL
    if name not in BANK:
        nearest = ", ".join(get_close_matches(name, BANK, 3))
        allowed = f"none, or one of the {len(BANK)} names that the kill matrix in the docs lists"
        raise ArgumentError("defect", repr(name), f"{allowed}; the nearest are {nearest}" if nearest else allowed)
    return BANK[name]


def backend(name: str) -> Backend:
    """A backend with the defect of this name; ``none`` is the control.

    Raises:
        ArgumentError: there is no such defect.
    """
    defect = defect_of(name)
    return Unchecked(defect) if defect is habits_everywhere.CHECKS_NOTHING else BankBackend(defect)


def uses_reference(name: str) -> bool:
    """Whether a backend of the bank may call the reference to be right in what it does not spoil."""
    return name == CONTROL.name or (name in BANK and BANK[name].uses_reference)
