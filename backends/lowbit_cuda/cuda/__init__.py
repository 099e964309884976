"""The port on an NVIDIA GPU.

`device` implements `lowbit_cuda.port`. `memory` counts allocations, and `reserve` computes how much must stay free.
`context` shares the device with other libraries, `driver` turns the driver's answers into errors, `compiler` compiles
kernels once and caches them, `launches` starts them, and `availability` says what is missing where a GPU cannot be
used.

Every module here can be imported without NVIDIA's packages, which are imported when a device is opened or a kernel is
compiled. Streams, events, graphs and kernels are those of cuda.core. Allocations and copies are calls of the driver
(`cuda.bindings.driver`): cuda.core allocates from pools that keep more memory than is in use, which would make a budget
meaningless, and it copies whole buffers only.
"""
