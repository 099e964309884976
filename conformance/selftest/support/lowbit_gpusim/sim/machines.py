"""Machines: how fast the simulated device and its link to the host are.

The model of time is small enough to be checked by hand. A copy over the link takes

.. math:: t_{copy} = l_{link} + \\frac{n}{B_{link}}

seconds for *n* bytes, each way by itself. A kernel takes

.. math:: t_{kernel} = l_{kernel} + \\max\\left(\\frac{n}{B_{memory}}, \\frac{f}{R}\\right)

for the *n* bytes that it declares to read and write (updated bytes count twice) and the *f* floating-point operations
that it declares. Bytes in pinned memory add :math:`t_{copy}`, without delaying copies. A copy within the device moves
its bytes twice, :math:`l_{kernel} + 2n / B_{memory}`. Every call takes :math:`l_{call}` of the host's time, and work of
the host on *n* bytes :math:`n / B_{host}` more.

**Parameters.** Bandwidths and rates are the makers', so they are limits and not measurements: that of a PCIe link is
its line rate less the line code, including packet headers. Real copies and kernels reach a fraction of each. Nothing is
fitted to published results. The three latencies and the host's bandwidth are in no data sheet; they are typical round
numbers, the same for all machines, and a study that depends on them should vary them (`dataclasses.replace`).

**Omitted from the model.** Caches, changing clocks, the host's memory bandwidth as a limit of copies, concurrent
kernels of several streams, and the lower cost of launches in a graph.

Source: MoE offloading §4.3 for the four machines and their links (it names none for the A100, which has PCIe 4); the
makers' documents named beside each number.
"""

from dataclasses import dataclass, replace

from lowbit.contract.checks import check_choice


@dataclass(frozen=True)
class Link:
    """The link between host and device, with the same speed in both directions at once.

    Attributes:
        name: of the preset.
        bandwidth: bytes per second, each way.
        latency: seconds from the start of a copy to its first byte.
    """

    name: str
    bandwidth: float
    latency: float = 8e-6


@dataclass(frozen=True)
class Machine:
    """A device, its link and its host.

    Attributes:
        name: of the preset.
        link: between host and device.
        memory: bytes of device memory.
        memory_bandwidth: of the device, bytes per second.
        float32_rate: of the device, floating-point operations per second.
        shared: bytes of shared memory that one block may use.
        host_bandwidth: bytes per second at which the host reads or writes its memory.
        kernel_latency: seconds of a kernel before its first and after its last useful instruction.
        call: seconds that a call to the port takes on the host.
    """

    name: str
    link: Link
    memory: int
    memory_bandwidth: float
    float32_rate: float
    shared: int
    host_bandwidth: float = 40e9
    kernel_latency: float = 3e-6
    call: float = 2e-6

    def link_seconds(self, nbytes: int) -> float:
        """Seconds of a copy between host and device."""
        return self.link.latency + nbytes / self.link.bandwidth

    def kernel_seconds(self, nbytes: int, operations: float = 0.0) -> float:
        """Seconds of a kernel, given the bytes that it reads and writes."""
        return self.kernel_latency + max(nbytes / self.memory_bandwidth, operations / self.float32_rate)

    def host_seconds(self, nbytes: int) -> float:
        """Seconds that the host takes to read or write this many bytes."""
        return nbytes / self.host_bandwidth


def pcie(gigatransfers: float) -> float:
    """Bytes per second each way of sixteen lanes with the 128b/130b line code.

    PCI Express Base Specification, revisions 3.0 to 5.0: 8, 16 and 32 GT/s a lane.
    """
    return 16 * gigatransfers * 1e9 * (128 / 130) / 8


LINKS = {
    link.name: link
    for link in (
        Link("pcie3", pcie(8)),  # 15.75 GB/s
        Link("pcie4", pcie(16)),  # 31.51 GB/s
        Link("pcie5", pcie(32)),  # 63.02 GB/s
        # NVIDIA Grace Hopper Superchip architecture whitepaper: 900 GB/s, half of it each way.
        Link("nvlink-c2c", 450e9),
    )
}
"""Links by name; all sixteen lanes wide where they have lanes."""

# Shared memory of a block: CUDA C++ programming guide, technical specifications by compute capability (8.0: 163 KiB,
# 8.6: 99 KiB, 7.5: 64 KiB).
MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA A100 80GB data sheet, SXM column: 80 GB, 2039 GB/s, 19.5 TFLOPS float32; its PCIe is of generation 4.
        Machine("a100", LINKS["pcie4"], 80 << 30, 2039e9, 19.5e12, 163 << 10),
        # NVIDIA GeForce RTX 30 laptop page: 6144 cores of 1.245 to 1.71 GHz, 16 GB on 256 bits. The page leaves the
        # memory's rate to the laptop's maker, 12 or 14 Gbit/s a pin: the higher. Clocks fall with the power allowed:
        # the lower. 2 x 6144 x 1.245 GHz operations, 32 x 14 GB/s. PCIe 4 by MoE offloading §4.3.
        Machine("rtx3080-mobile", LINKS["pcie4"], 16 << 30, 448e9, 2 * 6144 * 1.245e9, 99 << 10),
        # NVIDIA GeForce RTX 3060 page: 3584 cores of at most 1.78 GHz, 12 GB on 192 bits at 15 Gbit/s a pin. The card
        # has PCIe 4; the paper's machine has PCIe 3 (MoE offloading §4.3).
        Machine("rtx3060", LINKS["pcie3"], 12 << 30, 360e9, 2 * 3584 * 1.78e9, 99 << 10),
        # NVIDIA T4 data sheet: 16 GB, 320 GB/s ("320+"), 8.1 TFLOPS float32, PCIe 3 of 16 lanes.
        Machine("t4", LINKS["pcie3"], 16 << 30, 320e9, 8.1e12, 64 << 10),
    )
}
"""The paper's four machines by name."""


def machine_of(machine: str | Machine, link: str | Link | None) -> Machine:
    """The machine, with another link if one is given.

    Raises:
        ArgumentError: there is no such preset.
    """
    if isinstance(machine, str):
        check_choice("machine", machine, tuple(MACHINES))
        machine = MACHINES[machine]
    if isinstance(link, str):
        check_choice("link", link, tuple(LINKS))
        link = LINKS[link]
    return machine if link is None else replace(machine, link=link)
