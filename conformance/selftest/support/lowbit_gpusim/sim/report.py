"""Properties of a simulated device for reports and tests, beyond those of the port."""

from collections.abc import Mapping

from lowbit_gpusim.sim.faults import Faults
from lowbit_gpusim.sim.log import Record, records
from lowbit_gpusim.sim.machines import Machine
from lowbit_gpusim.sim.memory import Pool
from lowbit_gpusim.sim.order import RaceError
from lowbit_gpusim.sim.streams import Streams


class Reported:
    """The parts of a `SimDevice` and what is to be said of them.

    Attributes:
        machine: how fast it is.
    """

    def __init__(
        self, machine: Machine, streams: Streams, pools: tuple[Pool, Pool], faults: Faults, how: Mapping[str, str]
    ) -> None:
        self.machine, self._streams, self._faults, self._how = machine, streams, faults, how
        self._device, self._host = pools
        self._closed = False
        self._loaded, self._loaded_late = set[str](), list[str]()
        self._leaks: tuple[str, ...] = ()

    @property
    def budget(self) -> int:
        """Bytes of device memory that may be in use."""
        return self._device.budget

    @property
    def used(self) -> int:
        """Bytes of device memory in use, counted as `lowbit_cuda.port.charge` says."""
        return self._device.used

    @property
    def peak(self) -> int:
        """The largest value of `used` so far."""
        return self._device.peak

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory in use, each allocation rounded up to `ALIGNMENT`."""
        return self._host.used

    @property
    def calls(self) -> int:
        """The number of calls that a `Failure` could make fail."""
        return self._faults.calls.total()

    @property
    def calls_by_kind(self) -> Mapping[str, int]:
        """The same, by kind."""
        return dict(self._faults.calls)

    @property
    def failed(self) -> bool:
        """Whether the requested failure has happened; for a late one, whether it was reported."""
        return self._faults.happened

    @property
    def log(self) -> tuple[Record, ...]:
        """The latest operations whose times are settled, by number; after `finish`, all."""
        return records(self._streams.tasks)

    @property
    def races(self) -> tuple[RaceError, ...]:
        """The races found with ``on_race="list"``."""
        return tuple(self._streams.races)

    @property
    def loaded_late(self) -> tuple[str, ...]:
        """Kernels that were loaded by their first launch, because `load` was not called for them."""
        return tuple(self._loaded_late)

    @property
    def unwritten(self) -> Mapping[str, int]:
        """Descriptions of reads of unwritten bytes, with their counts."""
        return dict(self._streams.unwritten)

    def leaks(self) -> tuple[str, ...]:
        """The purposes of memory that was not freed by now or, on a closed device, by the time it was closed."""
        return self._leaks if self._closed else self._in_use()

    def describe(self) -> Mapping[str, str]:
        """The presets and the schedule."""
        machine = self.machine
        return {"device": f"simulated {machine.name}", "link": machine.link.name, **self._how}

    def _in_use(self) -> tuple[str, ...]:
        pools = self._host, self._device
        return tuple(allocation.memory.what for pool in pools for allocation in pool.allocations.values())
