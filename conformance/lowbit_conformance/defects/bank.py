"""The bank of defects: mistakes that real kernels make, by name.

Each runs as a whole backend, ``lowbit conformance bank:NAME``, to measure what the suite can find; and each is compared
with the results of failed cases, to name the mistake (`diagnosis`).

>>> len(BANK) >= 60
True
>>> BANK["zero-plus-one"].cause
'A zero-point as it is meant is read as one that was stored less one.'
>>> backend("none").name
'bank:none'
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from lowbit.backend import Backend
from lowbit.errors import ArgumentError
from lowbit_conformance.defects import (
    activations,
    attention,
    block_sums,
    blocks,
    casts,
    clamped,
    codes,
    depth,
    depth_layers,
    depth_products,
    engines,
    experts,
    gelus,
    groups,
    heads,
    integers,
    kivi,
    orders,
    quantisers,
    reals,
    residual_attention,
    routes,
    shaped_attention,
    small_floats,
    stored,
    stored_attention,
    subnormal,
    sums,
    types,
    zeros,
)
from lowbit_conformance.defects.backends import CONTROL, BankBackend
from lowbit_conformance.defects.defect import Defect

PRODUCTS = (codes, groups, zeros, sums, integers)
CACHES = (blocks, block_sums, attention, shaped_attention, heads, engines, kivi)
FORMATS = (small_floats, stored, casts, types, stored_attention, residual_attention)
LAYERS = (routes, experts, activations, gelus, clamped, quantisers, reals, orders, subnormal)
DEEP = (depth_products, depth_layers, depth)
MODULES = (*PRODUCTS, *CACHES, *LAYERS, *FORMATS, *DEEP)


def gathered(defects: Iterable[Defect]) -> dict[str, Defect]:
    """Defects by name.

    Raises:
        ValueError: two have the same name.
    """
    found: dict[str, Defect] = {}
    for defect in defects:
        if defect.name in found:
            raise ValueError(f"two defects are called {defect.name}")
        found[defect.name] = defect
    return found


BANK: Mapping[str, Defect] = MappingProxyType(gathered(defect for module in MODULES for defect in module.DEFECTS))
"""All defects by name."""


def defect_of(name: str, known: Mapping[str, Defect] = BANK) -> Defect:
    """The defect with this name; ``none`` is the control, which has no mistake.

    Raises:
        ArgumentError: there is no such defect.
    """
    if name == CONTROL.name:
        return CONTROL
    if name not in known:
        nearest = ", ".join(get_close_matches(name, known, 3))
        allowed = f"none, or one of {len(known)} names that the kill matrix in the docs lists"
        raise ArgumentError("defect", repr(name), f"{allowed}; the nearest are {nearest}" if nearest else allowed)
    return known[name]


def backend(name: str) -> Backend:
    """A backend with the defect of this name; ``none`` is the control.

    Raises:
        ArgumentError: there is no such defect.
    """
    return BankBackend(defect_of(name))
