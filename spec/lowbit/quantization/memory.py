r"""Memory: the size of a quantised matrix, and of a whole model.

When tokens are generated one at a time, every weight is read once per token, so the bytes of a model decide both where
it fits and how fast it can be. This chapter counts them.

**One matrix.** Codes of :math:`b` bits for an :math:`N \times M` matrix, and for each of its M columns a float32 scale
and a zero that is stored like a code, make

.. math:: b N M + 32 M + b M \quad\text{bits instead of}\quad 32 N M ,

about :math:`32/b` times fewer. With groups of :math:`g` rows a column has :math:`\lceil N/g \rceil` scales and zeros,

.. math:: b N M + (32 + b)\, M \lceil N / g \rceil ,

so a weight costs :math:`b + (32 + b)/g` bits; with a real minimum instead of an integer zero, :math:`b + 64/g`.

.. plot:: figures/memory.py

**A whole model.** GPTQ quantises the linear layers of the blocks. The embedding, the output head and the norms stay
float32 here. `ROWS_OF_TABLE_3` has the paper's measurements, and `table_3` sets ours beside them.

**What differs.** The paper measured the memory of a process while it generated 128 tokens, not of a model. Counted as
above, the float32 models are 25705, 49652 and 124088 MiB, and the paper has 850, 1060 and 1526 MiB more (3.3, 2.1 and
1.2 %). Keys and values of 128 tokens in float32 are 128, 200 and 390 MiB of that; the rest cannot be attributed.

With 4 bits it has 4508, 8756 and 19164 MiB more than the formula, with 3 bits 4544, 8130 and 17018. So the printed
reductions, 3.0 to 3.4 times and 3.3 to 4.0 times, are about half of what the sizes of the weights allow, 6.0 to 6.9 and
7.3 to 8.8. The excess is five to thirteen times that of the float32 run, so it belongs to the quantised run; yet for
one model it is the same within 13 % for both widths, though the packed weights differ by 31 %, so it is not
proportional to them. It amounts to 4.4 to 5.7 bits per parameter. The paper does not say what it is. Nothing here is
fitted to explain it.

Source: QIGen §3 (the size of a matrix), §4, table 3; figure 1; H. Touvron and others, LLaMA, 2023, table 2 (shapes).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from lowbit.contract.checks import check_choice, check_integer
from lowbit.quantization.affine import CONVENTIONS, Convention
from lowbit.quantization.packing import BITS

FLOAT_BITS = 32
MIB = 2**20

GROUP_SIZES = (16, 32, 64, 128)
"""The group sizes of the paper's experiments; the paper also uses full columns (errata Q9)."""


def matrix_bits(
    bits: int, rows: int, columns: int, group_size: int | None = None, convention: Convention = "zero_point"
) -> int:
    """The size of a quantised matrix in bits, with float32 scales.

    >>> matrix_bits(4, 4096, 4096) == 4 * 4096 * 4096 + 32 * 4096 + 4 * 4096  # as printed
    True
    >>> matrix_bits(4, 4096, 4096, group_size=128) / (4096 * 4096)
    4.28125

    Args:
        bits: b, the width of a code.
        rows: the paper's N.
        columns: the paper's M.
        group_size: g; ``None`` for full columns.
        convention: ``zero_point``, b bits for a zero, as printed; or ``minimum``, 32 bits.

    Raises:
        ArgumentError: wrong bits or convention, a size below 1, a group larger than a column.

    Source: QIGen §3; figure 1.
    """
    check_choice("bits", bits, BITS)
    check_choice("convention", convention, CONVENTIONS)
    check_integer("rows", rows, 1)
    check_integer("columns", columns, 1)
    check_integer("group_size", rows if group_size is None else group_size, 1, rows)
    groups = 1 if group_size is None else -(-rows // group_size)
    zero_bits = bits if convention == "zero_point" else FLOAT_BITS
    return bits * rows * columns + (FLOAT_BITS + zero_bits) * columns * groups


# **The models of the paper.**


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA model; every query head has a key-value head of its own.

    Attributes:
        layers: blocks.
        hidden: width of a token.
        feed_forward: width inside the feed-forward part.
        vocabulary: tokens.
    """

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int = 32000

    def linears(self) -> Iterator[tuple[int, int]]:
        """K × N of each linear layer of one block: query, key, value and output; gate, up and down."""
        yield from [(self.hidden, self.hidden)] * 4
        yield from [(self.hidden, self.feed_forward)] * 2
        yield self.feed_forward, self.hidden

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers of all blocks."""
        return self.layers * sum(rows * columns for rows, columns in self.linears())

    @property
    def other_weights(self) -> int:
        """Embedding, head, two norms a block and one at the end."""
        return 2 * self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden


LLAMA: Mapping[str, Shape] = MappingProxyType(
    {
        "7b": Shape(32, 4096, 11008),
        "13b": Shape(40, 5120, 13824),
        "30b": Shape(60, 6656, 17920),
    }
)
"""The models by the paper's names; the 30b has 32.5 billion parameters."""


def float_bytes(shape: Shape) -> int:
    """Bytes of a model in float32.

    >>> [round(float_bytes(shape) / MIB) for shape in LLAMA.values()]
    [25705, 49652, 124088]
    """
    return 4 * (shape.linear_weights + shape.other_weights)


def model_bytes(shape: Shape, bits: int, group_size: int | None, convention: Convention = "zero_point") -> int:
    """Bytes of a model whose linear layers are quantised and whose other weights are float32.

    >>> [round(model_bytes(LLAMA["7b"], bits, 128) / MIB) for bits in (3, 4)]
    [3528, 4306]

    Args and errors: as `matrix_bits`.

    Source: QIGen §4, table 3.
    """
    block = sum(matrix_bits(bits, rows, columns, group_size, convention) for rows, columns in shape.linears())
    return shape.layers * block // 8 + 4 * shape.other_weights


def cache_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of the keys and values of a number of tokens in float32.

    >>> [cache_bytes(shape, 128) // MIB for shape in LLAMA.values()]
    [128, 200, 390]
    """
    return 4 * 2 * shape.layers * tokens * shape.hidden


# **Table 3**, measured in MiB while generating 128 tokens. One of the two available copies lost the table's columns;
# both have these numbers.

ROWS_OF_TABLE_3: Mapping[tuple[str, int], int] = MappingProxyType(
    {
        ("7b", 32): 26555,
        ("7b", 3): 8072,
        ("7b", 4): 8814,
        ("13b", 32): 50712,
        ("13b", 3): 14333,
        ("13b", 4): 16483,
        ("30b", 32): 125614,
        ("30b", 3): 31173,
        ("30b", 4): 37176,
    }
)
"""MiB by model and bits; 32 stands for float32, the others have groups of 128."""


class Comparison(NamedTuple):
    """One row of Table 3 beside the formula's result.

    Attributes:
        model: its name.
        bits: 3 or 4.
        printed: the paper's reduction, float32 over quantised.
        counted: the formula's.
        excess: MiB by which the paper's size exceeds the formula's.
        excess_bits: the same in bits for each parameter.
    """

    model: str
    bits: int
    printed: float
    counted: float
    excess: float
    excess_bits: float


def table_3() -> list[Comparison]:
    """The paper's reductions beside the formula's.

    >>> for model, bits, printed, counted, excess, excess_bits in table_3():
    ...     print(f"{model:>4} {bits} {printed:.2f} {counted:.2f} {excess:6.0f} {excess_bits:.1f}")
      7b 3 3.29 7.29   4544 5.7
      7b 4 3.01 5.97   4508 5.6
     13b 3 3.54 8.00   8130 5.2
     13b 4 3.08 6.43   8756 5.6
     30b 3 4.03 8.77  17018 4.4
     30b 4 3.38 6.89  19164 4.9

    Source: QIGen §4, table 3.
    """
    rows = []
    for (model, bits), mib in ROWS_OF_TABLE_3.items():
        if bits < 32:
            shape = LLAMA[model]
            counted = model_bytes(shape, bits, 128)
            excess = mib * MIB - counted
            parameters = shape.linear_weights + shape.other_weights
            printed = ROWS_OF_TABLE_3[model, 32] / mib
            rows.append(
                Comparison(model, bits, printed, float_bytes(shape) / counted, excess / MIB, 8 * excess / parameters)
            )
    return rows
