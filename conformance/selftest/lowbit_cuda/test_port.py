"""The contract of the port (`port_contract`), kept by each device."""

import pytest
from port_contract import BUDGET, KERNELS, PROGRAMS

from lowbit_cuda.cuda.availability import availability
from lowbit_cuda.cuda.device import CudaDevice
from lowbit_gpusim.sim.device import SimDevice

GPU = availability()


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_simulation_keeps_the_contract(name: str, schedule: str) -> None:
    """Under each schedule, with every race an error."""
    with SimDevice(budget=BUDGET, schedule=schedule, seed=7) as device:
        PROGRAMS[name](device)


@pytest.mark.skipif(not GPU.usable, reason=f"{GPU.reason}: {GPU.remedy}")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gpu_keeps_the_contract(name: str) -> None:
    """The same programs on a real device, where there is one."""
    with CudaDevice(BUDGET, kernels=KERNELS) as device:
        PROGRAMS[name](device)
