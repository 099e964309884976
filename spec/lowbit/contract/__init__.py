"""Contracts: what an operation promises, how its arguments are checked, and how large a rounding error may be.

Read `operation` first; `rounding` derives error bounds, and `checks` words the refusals.
"""
