"""The kernels: their sources in CUDA C++, what a launch of each reads and writes, and the same computation in numpy.

`table` describes every kernel to a port, `numpy_kernels` computes the same in numpy, and `layouts` defines how matrices
lie in device memory. The sources (``.cuh``) are compiled for a device by NVRTC, and for tests by g++.
"""
