"""Linear layers: products with quantised weights, in floating point and in integers, and their bounds.

Read `linear` first, and `bounds` for how exact a product must be; `integer` and `integer_bounds` are the same for
integer activations.
"""
