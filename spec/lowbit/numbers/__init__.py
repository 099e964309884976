"""Number types: what the bits of a small floating-point number mean, and how numbers are rounded to them.

Every other chapter that stores a float in 4, 6, 8 or 16 bits refers to `floats`.
"""
