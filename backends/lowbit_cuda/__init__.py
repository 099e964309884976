"""Expert offloading and kernels for NVIDIA GPUs.

Read `port` first: it is all that the engine and the models ask of a device. `cuda` implements it on a GPU;
`lowbit_gpusim` implements it as a simulation, on which everything here is tested. `kernels` holds the kernels in CUDA
C++ and describes their launches, `engine` moves experts to the device, `model` decodes with both, and `backend` offers
all of it as the backend ``cuda``.
"""
