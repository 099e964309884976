"""The words in which a micro-kernel is written: QIGen's Table 1, and the few more that real bits need.

A program over these words says *what* a kernel does to vector registers; what each word becomes on one processor is
said in `lowbit_cppyy.isa`, and what it means in numpy in `lowbit_cppyy.interpreter`. The three must agree, and tests
hold them to it.

Table 1 leaves types out. Here a register holds `lanes` integers (`int`, unsigned, 32 bits each) or as many float32
(`float`), and the words that read memory say which: ``load_int``, ``load_float``. Beyond Table 1 there are ``slli`` and
``or`` (a 3-bit code may straddle two words) and ``prefetch`` (which changes no value). ``reduce_add`` is not needed:
lanes are output columns (errata Q5).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["int", "float", "none"]
Operand = Literal["int", "float", "address", "scalar", "count"]


@dataclass(frozen=True)
class Word:
    """One instruction: what kind of register it gives, what it takes, and what it means.

    Operands: `int` and `float` are registers, `address` is a place in memory, `scalar` one number that a constant or
    a place in memory gives, `count` a constant number of bits.
    """

    gives: Kind
    takes: tuple[Operand, ...]
    meaning: str


VOCABULARY: Mapping[str, Word] = MappingProxyType(
    {
        "load_int": Word("int", ("address",), "the words from this address on, one a lane"),
        "load_float": Word("float", ("address",), "the float32 from this address on, one a lane"),
        "store": Word("none", ("address", "float"), "writes the register to this address"),
        "broadcast_int": Word("int", ("scalar",), "every lane is this integer"),
        "broadcast_float": Word("float", ("scalar",), "every lane is this float32"),
        "fmadd": Word("float", ("float", "float", "float"), "a * b + c"),
        "srli": Word("int", ("int", "count"), "a >> i, zeros moved in"),
        "slli": Word("int", ("int", "count"), "a << i, zeros moved in"),
        "and": Word("int", ("int", "int"), "bitwise and"),
        "or": Word("int", ("int", "int"), "bitwise or"),
        "cvt_int_float": Word("float", ("int",), "the integer, below 2**24, as float32"),
        "prefetch": Word("none", ("address",), "asks for this address; no effect on any value"),
    }
)
