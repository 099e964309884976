"""Formats: how low-bit models are stored on disk, one file per format.

A format's reader turns a file into the values of the chapters: a `QuantizedMatrix` wherever the stored layout *is* an
affine grouping, bit for bit, and float32 otherwise. Matrices are transposed to K × N when they are read. Every field is
checked before it is used: whatever a file contains, reading it gives a result or a one-line `FormatError`. `chat`
writes conversations by the template of a file, in a separate process, `chat_process`.
"""
