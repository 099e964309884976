r"""The theorems of casts: what a cast gives is the exact rounding, for every float32.

Float32 has :math:`2^{32}` bit patterns. Compiled code takes each of them through the backend's own function
(``cpp/activations.h``, ``cpp/blocks.h``, ``cpp/casts.h``, ``cpp/stored.h``) and compares with what is exact, computed
in float64, which holds every number that occurs (``casts.cpp``). So these are proofs by enumeration:

- to float16 and bfloat16: the nearest value, of two the even one, infinity from the middle to it on;
- to blocks: the exponent of the largest element, and :math:`\mathrm{rint}(x / 2^e)` within the mantissa's range, for
  every x as the largest of its block and for every x beside a largest element with :math:`e = 0`. For the other
  exponents, :math:`x\,2^{-e}` is exact or far below one half, and one x in 65537 is compared;
- to 8-bit codes: the integer nearest to a product, from -128 to 128.

FP8 is cast by the specification only (`lowbit.numbers.floats.round_to`), on numpy's arrays. It is compared with a
search among the values of the type, for every float32.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from inspect import getsource

import numpy as np

from lowbit.arrays import F64
from lowbit.numbers import floats
from lowbit.numbers.floats import FLOATS, Name
from lowbit.system.storage import code_folder
from lowbit_cppyy.kept.libraries import LIBRARY, compiler, kept_library
from lowbit_prove.theorem import Outcome, Proof, Refutation, Theorem, Undecided

PATTERNS = 2**32
OTHERS = 65537
"""Where the largest element has another exponent, one pattern in this many is compared; the number is an odd prime."""
AT_ONCE = 2**22
"""Patterns that numpy takes at once."""
COMPILED: dict[str, tuple[str, Name | None, int]] = {
    "float16": ("wrong_half", "float16", 0),
    "bfloat16": ("wrong_brain", "bfloat16", 0),
    "bfp16-activations": ("wrong_blocks", None, 0),
    "bfp16": ("wrong_format", None, 8),
    "bfp12": ("wrong_format", None, 4),
    "products-to-8-bits": ("wrong_products", None, 0),
}
"""For each cast its function of ``casts.cpp``, the type that it searches, or a number that it is given."""
NUMPY: tuple[Name, ...] = ("float8_e4m3fn", "float8_e5m2")


def theorems() -> Iterator[Theorem]:
    """One for each cast."""
    for name in COMPILED:
        statement = "the exact rounding, for all 2^32 float32"
        yield Theorem("casts", name, statement, partial(_text, name), partial(decide, name))
    statement = f"the exact rounding with every exponent of a block, for one float32 in {OTHERS}"
    yield Theorem("casts", "bfp16-exponents", statement, partial(_text, "exponents"), scaled)
    for kind in NUMPY:
        subject = partial("{}\n{}".format, kind, getsource(floats))
        yield Theorem(
            "casts", kind, "round_to is the exact rounding, for all 2^32 float32", subject, partial(fp8, kind)
        )


def _text(name: str) -> str:
    """The cast, and all C++ that the answer depends on."""
    folder = files("lowbit_cppyy") / "cpp"
    headers = sorted(each.read_text() for each in folder.iterdir() if each.name.endswith(".h"))
    return "\0".join((name, source(), *headers))


def source() -> str:
    """The C++ of the comparisons."""
    return (files("lowbit_prove") / "casts.cpp").read_text()


@cache
def library(text: str) -> ctypes.CDLL | None:
    """The comparisons, compiled; None without a compiler."""
    command = compiler()
    if command is None:
        return None
    folder = code_folder("proofs")
    return ctypes.CDLL(str(folder / kept_library(folder, "casts", command, text, LIBRARY)))


def middles(kind: Name) -> F64:
    """The numbers between neighbouring values of a type without sign; the last is between the largest and infinity."""
    values = FLOATS[kind].values[: FLOATS[kind].top + 1]
    following = 2 * values[-1] - values[-2]  # what would be the next value
    found: F64 = (values + np.append(values[1:], following)) / 2
    return found


def decide(name: str, step: int = 1, text: str | None = None) -> Outcome:
    """Compare a compiled cast for one float32 in `step`."""
    function, kind, number = COMPILED[name]
    table = middles(kind) if kind else np.zeros(1)
    return _compared(function, table, len(table) + 1 if kind else number, step, text)


def scaled(step: int = OTHERS, text: str | None = None) -> Outcome:
    """Compare the cast to blocks for every exponent."""
    return _compared("wrong_scaled", np.zeros(1), 0, step, text)


def _compared(function: str, table: F64, count: int, step: int, text: str | None) -> Outcome:
    compiled = library(source() if text is None else text)
    if compiled is None:
        return Undecided("there is no C++ compiler; install g++ or clang++")
    call: Callable[..., int] = compiled[function]
    call.restype = ctypes.c_int64  # type: ignore[attr-defined]  # of ctypes
    found = call(table.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(count), ctypes.c_uint64(step))
    if found < 0:
        return Proof(-(-PATTERNS // step), "enumeration")
    number = float(np.array(found, np.uint32).view(np.float32))
    return Refutation(f"the cast of {number!r} is another", {"bits": found, "number": repr(number)})


def fp8(kind: Name, step: int = 1) -> Outcome:
    """Compare the specification's rounding to a type of 8 bits for one float32 in `step`."""
    between, sign = middles(kind), 1 << (FLOATS[kind].bits - 1)
    for first in range(0, PATTERNS, AT_ONCE * step):
        bits = np.arange(first, min(PATTERNS, first + AT_ONCE * step), step, dtype=np.uint32)
        numbers = bits.view(np.float32)
        bits, numbers = bits[~np.isnan(numbers)], numbers[~np.isnan(numbers)]
        wide = np.abs(numbers.astype(np.float64))
        expected = np.searchsorted(between, wide, side="left")
        tie = between[np.minimum(expected, len(between) - 1)] == wide
        expected = np.minimum(expected + (tie & (expected % 2 == 1)), FLOATS[kind].top)
        given = floats.round_to(numbers.astype(np.float64), kind, "saturate")
        wrong = np.flatnonzero(given != (expected | sign * np.signbit(numbers)))
        if len(wrong):
            number = repr(float(numbers[wrong[0]]))
            return Refutation(f"the cast of {number} is another", {"bits": int(bits[wrong[0]]), "number": number})
    return Proof(-(-PATTERNS // step), "enumeration")
