r"""The theorems of places: packing, and where a prepared matrix holds the same codes.

*Packing* is a bijection: for every value of the words, ``pack(unpack(words)) = words``, and code :math:`k` is the bits
:math:`bk` to :math:`bk + b - 1` of the column's stream. *Interleaving* moves the codes of a unit and loses none: for
every value of the words, the fields of code :math:`k` in the interleaved words (`lowbit_cppyy.layout.interleaving`)
hold what `lowbit.quantization.packing.unpack` reads from the words.

A unit of one column is all that needs a proof: no unit and no column depends on another.
"""

from collections.abc import Iterator
from functools import partial
from inspect import getsource
from types import ModuleType
from typing import Any

import numpy as np
import z3

from lowbit.arrays import U32
from lowbit.quantization import packing
from lowbit.quantization.packing import BITS, CODES_PER_UNIT, WORD_BITS, WORDS_PER_UNIT
from lowbit_cppyy.layout import interleaving
from lowbit_cppyy.layout.interleaving import fields
from lowbit_prove import terms
from lowbit_prove.solver import satisfied
from lowbit_prove.symbols import Symbols, unknowns
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, whole

CODE = np.dtype(np.uint8)


def theorems() -> Iterator[Theorem]:
    """The theorems of each width."""
    for bits in BITS:
        statement = "unpack(words)_k = bits bk … bk + b − 1 of the stream, and pack(unpack(words)) = words"
        subject = partial(_subject, bits, packing)
        yield Theorem("places", f"packing-u{bits}", statement, subject, partial(packed, bits), partial(ran, bits))
    for bits in BITS:
        statement = "the fields of code k in interleave(words) hold unpack(words)_k"
        subject = partial(_subject, bits, interleaving)
        run = partial(ran_interleaved, bits)
        yield Theorem("places", f"interleaving-u{bits}", statement, subject, partial(interleaved, bits), run)


def _subject(bits: int, chapter: ModuleType) -> str:
    return f"{bits} bits\n{getsource(chapter)}"


def packed(bits: int) -> Outcome:
    """Whether packing matches its chapter and has an inverse."""
    words = _unit(bits)
    codes = _unchecked(packing.unpack)(words, bits)
    stream = terms.expression(_stream(words), np.dtype(np.uint32))
    expected = [terms.extended(terms.part(stream, bits * k, bits), 8) for k in range(CODES_PER_UNIT[bits])]
    return compared(
        [
            (f"code {k}", code, wanted, CODE)
            for k, (code, wanted) in enumerate(zip(codes.data.flat, expected, strict=True))
        ]
        + _words(words, _unchecked(packing.pack)(codes, bits))
    )


def interleaved(bits: int) -> Outcome:
    """Whether interleaving moves every code to its fields."""
    words = _unit(bits)
    codes, moved = _unchecked(packing.unpack)(words, bits), _moved(words, bits)
    found = []
    for k in range(CODES_PER_UNIT[bits]):
        value = z3.BitVecVal(0, 8)
        for field in fields(bits, k):
            part = terms.part(moved.data[field.word, 0], field.position, field.width)
            value = value | terms.extended(part, 8) << field.first
        found.append((f"code {k}", value, codes.data[k, 0], CODE))
    return compared(found)


# **On numbers.**


def _numbers(bits: int, numbers: Numbers) -> U32:
    """The words of a refutation; words that it does not name are 0."""
    names = [str(each) for each in _unit(bits).data[:, 0]]
    words = [whole(numbers, each, 2**WORD_BITS - 1) if each in numbers else 0 for each in names]
    return np.array(words, np.uint32)[:, None]


def ran(bits: int, numbers: Numbers) -> Refutation | None:
    """Pack and unpack the words of a refutation."""
    words = _numbers(bits, numbers)
    codes = _unchecked(packing.unpack)(words, bits)
    stream = sum(int(word) << WORD_BITS * place for place, word in enumerate(words[:, 0]))
    for k, code in enumerate(codes[:, 0].tolist()):
        if code != stream >> bits * k & (1 << bits) - 1:
            return Refutation(f"code {k} is {code}")
    again = _unchecked(packing.pack)(codes, bits)
    return None if np.array_equal(again, words) else Refutation(f"packed again, the words are {again[:, 0].tolist()}")


def ran_interleaved(bits: int, numbers: Numbers) -> Refutation | None:
    """Interleave the words of a refutation."""
    words = _numbers(bits, numbers)
    codes, moved = _unchecked(packing.unpack)(words, bits)[:, 0].tolist(), _moved(words, bits)
    for k, code in enumerate(codes):
        parts = [(int(moved[f.word, 0]) >> f.position & (1 << f.width) - 1) << f.first for f in fields(bits, k)]
        if sum(parts) != code:
            return Refutation(f"the fields of code {k} hold {sum(parts)}, and the code is {code}")
    return None


def compared(pairs: list[tuple[str, Any, Any, terms.Dtype]]) -> Outcome:
    """Whether numbers are equal for all values of their variables: each with a name, its value and the expected
    value."""
    for name, given, wanted, dtype in pairs:
        same = terms.same(given, wanted, dtype)
        different = z3.Not(same) if isinstance(same, z3.ExprRef) else z3.BoolVal(not same)
        if (numbers := satisfied(different)) is not None:
            return Refutation(f"{name} is another number", numbers)
    return Proof(len(pairs))


def _unit(bits: int) -> Symbols:
    return unknowns("w", (WORDS_PER_UNIT[bits], 1), np.uint32)


def _moved(words: Any, bits: int) -> Any:
    return interleaving.interleave(words, bits)


def _unchecked(operation: Any) -> Any:
    """An operation without the checks of its arguments, which accept only numpy arrays."""
    return operation.__wrapped__


def _stream(words: Symbols) -> Any:
    return terms.joined(list(words.data[:, 0]), WORD_BITS)


def _words(words: Symbols, again: Symbols) -> list[tuple[str, Any, Any, terms.Dtype]]:
    pairs = enumerate(zip(again.data.flat, words.data.flat, strict=True))
    return [(f"word {place}", given, wanted, words.dtype) for place, (given, wanted) in pairs]
