"""Tensor formats: how the field stores low-bit weights, activations and caches in bytes.

Read `table` first: it says what a format is. Each further chapter is one format, or a family that differs in a number:
a table of fields, and a function that turns the fields into numbers. `stored` lists the formats (`FORMATS`) and the
operations on them.
"""
