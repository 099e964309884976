"""The paper's Table 2, and what it implies about the links of its machines.

Two rows that differ only in how many experts are copied tell how fast they were copied: the difference of bytes, by
the difference of seconds. Where that is more than the link can carry, the slower row did something else as well that
took time; a model of copies cannot give such a ratio, and must not be fitted until it does.

Source: MoE offloading §4.3, Table 2; errata M6, M8.
"""

from dataclasses import dataclass

from lowbit.quantization.hqq_table1 import SCHEMES, Scheme, mixtral
from lowbit_gpusim.sim.machines import MACHINES, Machine

LAYERS, EXPERTS, TOP_K = 32, 8, 2

ROWS = ("full", "without pre-loading", "without LRU and pre-loading", "naive")


@dataclass(frozen=True)
class Column:
    """One machine of the table.

    Attributes:
        name: of the machine, there.
        preset: its name in `lowbit_gpusim.sim.machines`.
        slots: k of §4.3.
        printed: tokens a second in the order of `ROWS`, by bits of the experts.
    """

    name: str
    preset: str
    slots: int
    printed: dict[int, tuple[float, float, float, float]]

    @property
    def machine(self) -> Machine:
        """The preset: what data sheets say."""
        return MACHINES[self.preset]


COLUMNS = (
    Column("A100", "a100", 4, {2: (3.061, 2.918, 2.265, 1.392), 3: (2.845, 2.683, 2.055, 1.246)}),
    Column("3080 Mobile", "rtx3080-mobile", 4, {2: (2.655, 2.227, 1.758, 1.059), 3: (2.475, 2.024, 1.595, 0.914)}),
    Column("3060", "rtx3060", 2, {2: (2.278, 2.051, 1.547, 0.919), 3: (2.038, 1.857, 1.346, 1.791)}),
    Column("T4", "t4", 4, {2: (2.092, 1.567, 1.168, 0.661), 3: (1.603, 1.365, 1.061, 0.580)}),
)
"""The 3060's naive 3-bit cell is kept as it is printed, 1.791; it is most likely 0.791 (errata M8)."""


def scheme(bits: int) -> Scheme:
    """How the paper quantised to so many bits: experts to 2 or 3, attention to 4."""
    found = SCHEMES[f"{bits}-bit"]
    assert found is not None
    return found


def expert_bytes(bits: int) -> int:
    """Bytes of one expert of Mixtral-8x7B as the paper's software stored it (3-bit codes ten to a word).

    >>> [round(expert_bytes(bits) / 1e6, 1) for bits in (2, 3)]
    [66.4, 82.7]
    """
    weights = mixtral().experts // (LAYERS * EXPERTS)
    return round(weights * scheme(bits).bits_per_weight(stored=True) / 8)


def attention_bytes() -> int:
    """Bytes of the attention of one layer, at the paper's 4 bits."""
    return round(mixtral().attention // LAYERS * scheme(4).bits_per_weight() / 8)


def printed(column: Column, bits: int, row: str) -> float:
    """Tokens a second, as printed."""
    return column.printed[bits][ROWS.index(row)]


def read(column: Column, bits: int, row: str) -> float:
    """The same, with the one cell that cannot be meant as it is printed read as it most likely was (errata M8)."""
    value = printed(column, bits, row)
    return 0.791 if value == 1.791 else value


def implied_gb(column: Column, bits: int) -> float:
    """GB/s that the naive row and the one above it imply: six experts of eight more in every layer.

    >>> [round(implied_gb(column, 2)) for column in COLUMNS]
    [46, 34, 29, 19]
    """
    more = LAYERS * (EXPERTS - TOP_K) * expert_bytes(bits)
    seconds = 1 / read(column, bits, "naive") - 1 / read(column, bits, "without LRU and pre-loading")
    return more / seconds / 1e9
