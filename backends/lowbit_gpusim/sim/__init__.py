"""A simulated device: memory, order and time of a GPU without one.

`device` is where to begin; it says what there is.
"""

from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import Failure
from lowbit_gpusim.sim.log import Record, timeline
from lowbit_gpusim.sim.machines import LINKS, MACHINES, Link, Machine
from lowbit_gpusim.sim.order import RaceError

__all__ = ["LINKS", "MACHINES", "Failure", "Link", "Machine", "RaceError", "Record", "SimDevice", "timeline"]
