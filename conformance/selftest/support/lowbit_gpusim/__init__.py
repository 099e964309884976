"""A simulated GPU, and GPU kernels compiled for a processor: how `lowbit_cuda` is tested without a GPU."""
