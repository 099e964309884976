"""Products with stored matrices: the field's formats, each a row of a table, by kernels of one generator.

In the order of reading: `parts` (what a kernel knows of a format), `formats` (the table), `layout` (the stream of
weights), `recipe` and `kernel` (the program), `activations` (the stream of activations), `linear` (a prepared matrix).
"""
