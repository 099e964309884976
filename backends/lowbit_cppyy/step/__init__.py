"""Whole steps: the program of a decoder as one C++ function.

`phases` groups the lines of a program, `source` prints them, `parts` collects the matrices, and `decoder` calls the
function for every token.
"""
