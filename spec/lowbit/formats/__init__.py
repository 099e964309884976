"""Formats: how low-bit models lie on disk, one file a format.

A format's reader turns a file into the values of the chapters: a `QuantizedMatrix` wherever the stored layout *is* an
affine grouping, bit for bit, and float32 otherwise. Matrices are transposed at the door to K × N. A file is checked
before it is believed: whatever it contains, reading it ends in a result or in a `FormatError` of one line.
"""
