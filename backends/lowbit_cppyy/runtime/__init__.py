"""The runtime: what this machine has, and compiling and calling kernels on it."""
