"""A simulated device: the memory, order and time of a GPU, without a GPU.

Begin with `device`.
"""
