"""``lowbit prove``: what is decidable about kernels, formats and layouts, proved for all values at once.

In reading order: `theorem` (statements and outcomes), `terms` and `symbols` (arrays of unknowns that numpy's own
functions take), `solver`, `reals` (floats as real numbers), `machine` (the interpreter on symbols), `setting` (what a
kernel's memories hold) with `prepared_setting` and `stored_setting`. Then come the theorems: `places`, `layouts`,
`formats`, `storage`, `products` with `demonstration`, `memory` with `accesses` and `arrays`, `roundings` and
`stored_roundings` with `depths` and `formulas`, `instructions` with `intrinsics`, `bodies` and `probes`, `casts` with
``casts.cpp``, `steps`, `graphs`, `offload`. Last are `catalogue`, `certificates`, `known`, `deciding`, `replay` and
`command`.

It needs the package ``z3-solver`` (extra: prove). docs/proofs.rst lists the theorems and what they assume.
"""
