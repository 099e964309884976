"""Expert offloading and kernels for NVIDIA GPUs.

Read `port` first: it is all that the engine and the models ask of a device. `cuda` implements it on a GPU; tests use a
simulated device from another package. `kernels` holds the kernels in CUDA C++ and describes their launches, `engine`
moves experts to the device, `model` decodes with both, and `backend` offers all of it as the backend ``cuda``.
"""
