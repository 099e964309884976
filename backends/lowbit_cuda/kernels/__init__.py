"""The kernels: their sources in CUDA C++, and what a launch of each reads and writes.

`table` describes every kernel to a port, and `layouts` defines how matrices lie in device memory. The sources
(``.cuh``) are compiled for a device by NVRTC, and for tests by g++.
"""
