"""Number types: what the bits of a small floating-point number mean, and how a number is rounded to one.

Everything above this folder that stores a float in 4, 6, 8 or 16 bits refers to `floats`.
"""
