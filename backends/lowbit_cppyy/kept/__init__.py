"""Compiled steps that are kept between processes.

Starting cppyy, compiling kernels and laying out weights takes seconds, with the same result every time. So the step of
a model in a file is made once and kept in the cache: its C++ as shared libraries of the system's compiler, and its
weights as laid out.

`recorder` records the parts of a step instead of making it. `libraries` compiles it. `image` writes it to a file, and
makes the step from that file again. `steps` finds the file of a model, or makes it.
"""
