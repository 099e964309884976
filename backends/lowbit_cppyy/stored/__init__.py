"""Products with stored matrices: published formats, each a row of a table, by kernels of one generator.

In reading order: `parts` (what a kernel knows of a format), `formats` (the table), `layout` (the stream of weights),
`recipe` and `kernel` (the program), `activations` (the stream of activations), `linear` (a prepared matrix).
"""
