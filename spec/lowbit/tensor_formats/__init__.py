"""Tensor formats: how the field stores low-bit weights, activations and caches in bytes.

Read `table` first: it says what a format is. Each further chapter is one format, or a family that differs in a number:
a table of fields, and a function that turns the fields into numbers. `stored` names the formats and what a backend can
be asked to do with any of them.
"""
