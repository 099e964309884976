"""Quantisation: real numbers to small codes and back, and how the codes are packed and stored.

Read `packing` and `affine` first. `gptq`, `act_order` and `hqq` are methods for choosing the codes, `bfp` is a format
for activations and caches, and `memory` counts the bytes.
"""
