r"""Bits per weight: the size of a model quantised by HQQ, and Table 1 of MoE offloading recomputed.

A weight of b bits costs more than b bits: its group's scale and zero are 8 bits each, and the scales' own scale and
zero 16 bits each for every `scale_group` of them. (All zeros of a tensor share one pair; that is 32 bits a tensor and
is left out.) With groups of g,

.. math:: b + \frac{8}{g} + \frac{8}{g} + \frac{32}{g \cdot \text{scale group}} .

For the 2-bit scheme of the paper, g = 16 and scale groups of 128, that is 3.016 bits, where the paper says 2.6 (errata
M6). An `hqq.HqqMatrix` that is stored so has exactly this size; the tests count its bytes.

**Table 1** gives the size of Mixtral-8x7B under 16 pairs of schemes, one for attention and one for the experts, with
embeddings, logits, gates and norms left in 16 bits. Its "GB" are GiB: the unquantised model has 46.7 billion
parameters, 93.4 GB or 86.99 GiB, and 86.99 is what is printed (errata M7). `table_1` computes every row from the shape
of the model and from the formula, and lists printed minus computed. Nothing is fitted. What it shows:

- Rows with experts in 16 bits agree within 0.01 GiB, except the one with attention at 3 bits, which is printed 0.08
  larger.
- Rows with experts at 4 or 2 bits are printed 0.50 to 0.63 GiB larger, with experts at 3 bits 3.1 to 3.2.
- The 3-bit codes of the software that the paper used lie ten to a 32-bit word, and the 64 codes of a group are padded
  to seventy: 3.5 bits each. Counted so (`stored`), 3-bit rows fall in line: attention at 3 bits is within 0.01, and
  every row with quantised experts, of 4, 3 or 2 bits, is printed 0.50 to 0.56 larger than computed.

A surplus that does not change with the bits of the experts is not a matter of bits per weight; the paper does not
explain it, and neither do we.

Source: MoE offloading §4.2, Table 1; errata M6, M7. The shape of the model: Mixtral-8x7B (arXiv 2401.04088), Table 1.
"""

from dataclasses import dataclass

from lowbit.contract.checks import check_choice, check_integer
from lowbit.quantization.packing import BITS

GIB = 2**30


@dataclass(frozen=True)
class Scheme:
    """How one kind of weights is quantised.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: g.
        scale_group: how many scales share a second-level scale.

    Raises:
        ArgumentError: wrong bits, or a size below 1.
    """

    bits: int
    group_size: int
    scale_group: int

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_integer("group_size", self.group_size, least=1)
        check_integer("scale_group", self.scale_group, least=1)

    @property
    def code_bits(self) -> float:
        """Bits of a code in the stored format: b, or for b = 3 a tenth of a word, with groups padded to tens.

        >>> Scheme(3, 64, 128).code_bits
        3.5
        """
        return 32 * -(-self.group_size // 10) / self.group_size if self.bits == 3 else self.bits

    def bits_per_weight(self, *, stored: bool = False) -> float:
        """Bits per weight, with codes of b bits or with codes as `stored`.

        >>> round(Scheme(2, 16, 128).bits_per_weight(), 3)
        3.016
        """
        scales_and_zeros = 16 / self.group_size + 32 / (self.group_size * self.scale_group)
        return (self.code_bits if stored else self.bits) + scales_and_zeros


SCHEMES: dict[str, Scheme | None] = {
    "FP16": None,
    "4-bit": Scheme(4, 64, 256),
    "3-bit": Scheme(3, 64, 128),
    "2-bit": Scheme(2, 16, 128),
}
"""The four schemes of §4.2; None means plain 16 bits."""

PRINTED: dict[tuple[str, str], float] = {
    ("FP16", "FP16"): 86.99,
    ("FP16", "4-bit"): 25.82,
    ("FP16", "3-bit"): 23.21,
    ("FP16", "2-bit"): 19.33,
    ("4-bit", "FP16"): 85.16,
    ("4-bit", "4-bit"): 23.99,
    ("4-bit", "3-bit"): 21.37,
    ("4-bit", "2-bit"): 17.54,
    ("3-bit", "FP16"): 85.08,
    ("3-bit", "4-bit"): 23.92,
    ("3-bit", "3-bit"): 21.31,
    ("3-bit", "2-bit"): 17.46,
    ("2-bit", "FP16"): 84.96,
    ("2-bit", "4-bit"): 23.79,
    ("2-bit", "3-bit"): 21.18,
    ("2-bit", "2-bit"): 17.30,
}
"""Table 1: schemes of attention and experts, and the printed size."""


# **The model**: how many weights of which kind.


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters.

    Attributes:
        attention: of queries, keys, values and outputs.
        experts: of all experts.
        other: embedding, logits, gates and norms, which stay in 16 bits.
    """

    attention: int
    experts: int
    other: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.experts + self.other


def mixtral() -> Weights:
    """Mixtral-8x7B: 32 layers, hidden 4096, 8 experts of 14336, 32 query and 8 key-value heads of 128, 32000 tokens.

    The paper's own counts, 46.7 billion in all and 45.1 billion (96.6 %) in experts:

    >>> weights = mixtral()
    >>> print(f"{weights.total / 1e9:.1f} {weights.experts / 1e9:.1f} {weights.experts / weights.total:.1%}")
    46.7 45.1 96.6%
    """
    layers, hidden, feed_forward, experts, vocabulary = 32, 4096, 14336, 8, 32000
    queries, keys = 32 * 128, 8 * 128
    attention = layers * (2 * hidden * queries + 2 * hidden * keys)
    other = 2 * vocabulary * hidden + layers * experts * hidden + (2 * layers + 1) * hidden
    return Weights(attention, layers * experts * 3 * hidden * feed_forward, other)


@dataclass(frozen=True)
class Row:
    """One row of the table, in GiB.

    Attributes:
        attention: name of the scheme of attention.
        experts: name of the scheme of the experts.
        printed: in the paper.
        computed: by the formula, with codes of b bits.
        stored: by the formula, with 3-bit codes as the software stored them.
    """

    attention: str
    experts: str
    printed: float
    computed: float
    stored: float

    @property
    def residual(self) -> float:
        """Printed minus computed."""
        return self.printed - self.computed

    @property
    def stored_residual(self) -> float:
        """Printed minus stored."""
        return self.printed - self.stored


def size_gib(attention: str, experts: str, *, stored: bool = False) -> float:
    """The size of Mixtral-8x7B in GiB under two of the `SCHEMES`."""
    weights, bits = mixtral(), []
    for name in (attention, experts):
        check_choice("scheme", name, tuple(SCHEMES))
        scheme = SCHEMES[name]
        bits.append(16 if scheme is None else scheme.bits_per_weight(stored=stored))
    return (bits[0] * weights.attention + bits[1] * weights.experts + 16 * weights.other) / 8 / GIB


def table_1() -> list[Row]:
    """Every row of Table 1, computed again.

    >>> for row in table_1():
    ...     sizes = f"{row.printed:6.2f} {row.computed:6.2f} {row.residual:+5.2f}"
    ...     print(f"{row.attention:5} {row.experts:5} {sizes} {row.stored:6.2f} {row.stored_residual:+5.2f}")
    FP16  FP16   86.99  86.99 -0.00  86.99 -0.00
    FP16  4-bit  25.82  25.31 +0.51  25.31 +0.51
    FP16  3-bit  23.21  20.07 +3.14  22.70 +0.51
    FP16  2-bit  19.33  18.82 +0.51  18.82 +0.51
    4-bit FP16   85.16  85.16 +0.00  85.16 +0.00
    4-bit 4-bit  23.99  23.48 +0.51  23.48 +0.51
    4-bit 3-bit  21.37  18.24 +3.13  20.86 +0.51
    4-bit 2-bit  17.54  16.99 +0.55  16.99 +0.55
    3-bit FP16   85.08  85.00 +0.08  85.08 +0.00
    3-bit 4-bit  23.92  23.32 +0.60  23.40 +0.52
    3-bit 3-bit  21.31  18.08 +3.23  20.79 +0.52
    3-bit 2-bit  17.46  16.83 +0.63  16.91 +0.55
    2-bit FP16   84.96  84.96 -0.00  84.96 -0.00
    2-bit 4-bit  23.79  23.28 +0.51  23.28 +0.51
    2-bit 3-bit  21.18  18.04 +3.14  20.67 +0.51
    2-bit 2-bit  17.30  16.79 +0.51  16.79 +0.51
    """
    return [
        Row(attention, experts, printed, size_gib(attention, experts), size_gib(attention, experts, stored=True))
        for (attention, experts), printed in PRINTED.items()
    ]
