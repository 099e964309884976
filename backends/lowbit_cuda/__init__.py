"""Experts that do not fit: an offload engine and kernels for NVIDIA GPUs, and a simulated device that proves them.

`port` is what an engine may ask of a device; `cuda` and `sim` are the two devices; `engine` brings experts to either;
`kernels` are the kernels, in CUDA C++ that is also tested as C++ (`shim`); `model` is a decoder on a port.
"""
