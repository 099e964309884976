"""Kernels: memory layouts, a vocabulary of vector instructions, and programs that a generator writes in it."""
