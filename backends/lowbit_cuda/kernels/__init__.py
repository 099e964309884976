"""The kernels: their sources in CUDA C++, what a launch of each reads and writes, and what each means in numpy.

`table` describes every kernel to a port, `numpy_kernels` says what it computes, and `layouts` how matrices lie in
memory for it. The sources (``.cuh``) are compiled for a device by NVRTC, and by g++ for tests.
"""
