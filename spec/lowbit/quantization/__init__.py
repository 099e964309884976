"""Quantisation: real numbers to small codes and back, and how the codes are packed and stored."""
