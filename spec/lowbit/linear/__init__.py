"""Linear layers: products with quantised weights, in floating point and in integers, and their bounds."""
