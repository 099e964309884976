"""The port on an NVIDIA GPU.

`device` keeps what `lowbit_cuda.port` promises; `memory` counts, `reserve` says what allocations must leave and `host`
what can be page-locked, `context` shares the device with other libraries, `driver` puts into words what NVIDIA's driver
answers, `compiler` turns kernels into machine code, once, and `availability` says what is missing where this cannot
run.

Everything here can be imported without NVIDIA's packages; they are imported when a device is opened or a kernel is
compiled. Where cuda.core has an object for something, a device, a stream, an event, a graph, a kernel, that is used.
Allocations and copies are the driver's own (`cuda.bindings.driver`): cuda.core allocates from pools that keep more than
is in use, which would make a budget meaningless, and it copies whole buffers.

Source: lowbit's own.
"""

from lowbit_cuda.cuda.availability import availability
from lowbit_cuda.cuda.device import CudaDevice

__all__ = ["CudaDevice", "availability"]
