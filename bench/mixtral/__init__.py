"""A small Mixtral that this repository trains, what its routing is like, and the paper's Table 2 replayed from it."""
