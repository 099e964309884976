"""Defects: mistakes that real kernels make, each with a name, a cause and code; and the diagnosis that names them.

`bank` holds them by name, and makes a backend of each: ``lowbit conformance bank:NAME``. The diagnosis compares them
with the results of failed cases.
"""
