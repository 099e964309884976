"""The backend of `lowbit_cuda.backend` on a simulated device, for machines without a GPU.

``lowbit_gpusim.backend:NumpyOnSim`` computes with numpy in place of kernels, which tests everything but the kernels:
layouts, order, memory, the engine. ``lowbit_gpusim.backend:ShimOnSim`` runs the kernels' own C++
(`lowbit_gpusim.shim`), thread by thread and slowly. Neither is shipped, and neither says anything about speed.

>>> from lowbit.backend import load
>>> load("lowbit_gpusim.backend:NumpyOnSim").name
'cuda-numpy-on-sim'
"""

from functools import cache

from lowbit.backend import Availability
from lowbit.errors import UnavailableError
from lowbit_cuda.backend import PortBackend
from lowbit_cuda.port import DevicePort
from lowbit_gpusim.shim.build import compiler
from lowbit_gpusim.shim.runner import ShimKernels
from lowbit_gpusim.sim.device import SimDevice

MACHINE = "a100"


class NumpyOnSim(PortBackend):
    """The simulated device with numpy in place of kernels."""

    name = "cuda-numpy-on-sim"

    def open_port(self, budget: int | None) -> DevicePort:
        return SimDevice(MACHINE, budget=budget, log_limit=0)


class ShimOnSim(PortBackend):
    """The simulated device with the kernels' own C++."""

    name = "cuda-shim-on-sim"

    def availability(self) -> Availability:
        try:
            compiler()
        except UnavailableError as error:
            return Availability(False, error.reason, error.remedy)
        return Availability(True)

    def open_port(self, budget: int | None) -> DevicePort:
        return SimDevice(MACHINE, budget=budget, kernels=_kernels(), log_limit=0)


@cache
def _kernels() -> ShimKernels:
    """The kernels, compiled once per process."""
    return ShimKernels()
