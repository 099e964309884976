"""Tuning: the search for the fastest kernels of this machine, and what was found."""
