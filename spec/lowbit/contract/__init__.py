"""Contracts: what an operation promises, how its arguments are checked, and how far rounding may carry a result.

Read `operation` first; `rounding` derives error bounds, and `checks` words what is refused.
"""
