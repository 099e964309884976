"""Kernels in the styles of the field, on the bytes of published formats, and one mistake planted in each at a time.

They are written as their authors would write them: vectorised, or in loops of C++. Nothing pads or wraps them for the
suite. `mistakes` changes their source text, and `judging` runs the suite on the result.
"""
