r"""The theorems of casts: a cast gives the exact rounding, for every float32.

Float32 has :math:`2^{32}` bit patterns. Compiled code takes each of them through the backend's own function
(``cpp/activations.h``, ``cpp/blocks.h``, ``cpp/casts.h``, ``cpp/stored.h``) and compares with what is exact, computed
in float64, which holds every number that occurs (``casts.cpp``). So these are proofs by enumeration:

- to float16 and bfloat16: the nearest value, ties to even, and infinity from the midpoint to it on;
- to blocks: the exponent of the largest element, and :math:`\mathrm{rint}(x / 2^e)` within the mantissa's range, for
  every x as the largest of its block, and for every x and every e beside a largest element;
- to 8-bit codes: the integer nearest to a product, from -128 to 128.

FP8 is cast by the specification only (`lowbit.numbers.floats.round_to`), on numpy's arrays. Its results go to compiled
code, which compares them with a search among the values of the type, for every float32.

All processors share the patterns, a range at a time.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from inspect import getsource

import numpy as np

from lowbit.arrays import F64, U32, Array
from lowbit.errors import UnavailableError
from lowbit.numbers import floats
from lowbit.numbers.floats import FLOATS, Name
from lowbit.system.storage import code_folder
from lowbit.system.threads import side_by_side, usable_processors
from lowbit_cppyy.kept.libraries import LIBRARY, compiler, kept_library
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

PATTERNS = 2**32
AT_ONCE = 2**26
"""The number of patterns of a range, which one thread processes."""
TOGETHER = 2**15
"""The count of numbers that numpy processes at once: few enough for its intermediate results to fit the processor's
cache."""
COMPILED: dict[str, tuple[str, Name | None, int]] = {
    "float16": ("wrong_half", "float16", 0),
    "bfloat16": ("wrong_brain", "bfloat16", 0),
    "bfp16-activations": ("wrong_blocks", None, 0),
    "bfp16": ("wrong_format", None, 8),
    "bfp12": ("wrong_format", None, 4),
    "products-to-8-bits": ("wrong_products", None, 0),
}
"""For each cast: its function of ``casts.cpp``, and the type that it searches or the number that it takes."""
BESIDE = {"bfp16-exponents": 0, "bfp16-operation-exponents": 8, "bfp12-exponents": 4}
"""Casts to blocks in which another element is the largest: the bits of a mantissa, or 0 for those of activations."""
NUMPY: tuple[Name, ...] = ("float8_e4m3fn", "float8_e5m2")


def theorems() -> Iterator[Theorem]:
    """One theorem for each cast."""
    for name in COMPILED:
        statement = "the exact rounding, for all 2^32 float32"
        run = partial(ran, partial(decide, name))
        yield Theorem("casts", name, statement, partial(_text, name), partial(decide, name), run)
    for name in BESIDE:
        statement = "the exact rounding with every exponent of a block, for all 2^32 float32"
        run = partial(ran, partial(scaled, name))
        yield Theorem("casts", name, statement, partial(_text, name), partial(scaled, name), run)
    for kind in NUMPY:
        subject = partial("{}\n{}".format, kind, getsource(floats))
        statement = "round_to is the exact rounding, for all 2^32 float32"
        yield Theorem("casts", kind, statement, subject, partial(fp8, kind), partial(ran, partial(fp8, kind)))


def ran(decide: Callable[..., Outcome], numbers: Numbers) -> Refutation | None:
    """Apply a cast to the pattern of a refutation."""
    bits = whole(numbers, "bits", PATTERNS - 1)
    found = decide(among=[Range(bits, bits + 1, 1)])
    if isinstance(found, Undecided):
        raise UnavailableError("lowbit prove", *found.reason.split("; "))
    return found if isinstance(found, Refutation) else None


def _text(name: str) -> str:
    """The cast, and all C++ on which the answer depends."""
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
    """The midpoints between neighbouring values of a type without sign; the last is between the largest value and
    infinity."""
    values = FLOATS[kind].values[: FLOATS[kind].top + 1]
    following = 2 * values[-1] - values[-2]  # the next value, if there were one
    found: F64 = (values + np.append(values[1:], following)) / 2
    return found


class Range(ctypes.Structure):
    """The patterns first, first + step, … below end, as the structure of ``casts.cpp``."""

    _fields_ = (("first", ctypes.c_uint64), ("end", ctypes.c_uint64), ("step", ctypes.c_uint64))

    @property
    def count(self) -> int:
        return len(range(self.first, self.end, self.step))

    @property
    def patterns(self) -> U32:
        found: U32 = np.arange(self.first, self.end, self.step, dtype=np.uint32)
        return found


def ranges(step: int, each: int = AT_ONCE) -> list[Range]:
    """Every pattern, or every `step`-th, in ranges of at most `each` patterns."""
    length = max(1, each // step) * step
    return [Range(first, min(PATTERNS, first + length), step) for first in range(0, PATTERNS, length)]


def decide(name: str, step: int = 1, text: str | None = None, among: list[Range] | None = None) -> Outcome:
    """Compare a compiled cast for every `step`-th float32."""
    function, kind, number = COMPILED[name]
    table = middles(kind) if kind else np.zeros(1)
    return _compared(function, table, len(table) + 1 if kind else number, among or ranges(step), text)


def scaled(name: str, step: int = 1, text: str | None = None, among: list[Range] | None = None) -> Outcome:
    """Compare a cast to blocks for every exponent."""
    return _compared("wrong_scaled", np.zeros(1), BESIDE[name], among or ranges(step), text)


def fp8(kind: Name, step: int = 1, among: list[Range] | None = None) -> Outcome:
    """Compare the specification's rounding to an 8-bit type for every `step`-th float32."""
    table = middles(kind)[:-1]  # values beyond the largest number saturate

    def given(part: Range) -> Array:
        with np.errstate(invalid="ignore"):  # from signalling NaNs
            numbers = part.patterns.view(np.float32).astype(np.float64)
        return floats.round_to(numbers, kind, "saturate")

    return _compared("wrong_byte", table, len(table) + 1, among or ranges(step), None, given)


def _compared(
    function: str,
    table: F64,
    count: int,
    among: list[Range],
    text: str | None,
    given: Callable[[Range], Array] | None = None,
) -> Outcome:
    """Pass every range to a function of ``casts.cpp``; `given` computes the results that it compares."""
    compiled = library(source() if text is None else text)
    if compiled is None:
        return Undecided("there is no C++ compiler; install g++ or clang++")
    call: Callable[..., int] = compiled[function]
    call.restype = ctypes.c_int64  # type: ignore[attr-defined]  # of ctypes
    values = table.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(count)

    def wrong(part: Range) -> int:
        if given is None:
            return call(*values, part)
        length = TOGETHER * part.step
        for first in range(part.first, part.end, length):
            few = Range(first, min(part.end, first + length), part.step)
            results = given(few)
            if (found := call(*values, few, results.ctypes.data_as(ctypes.c_void_p))) >= 0:
                return found
        return -1

    found = [each for each in side_by_side(wrong, among, usable_processors()) if each >= 0]
    if not found:
        return Proof(sum(each.count for each in among), "enumeration")
    number = float(np.array(found[0], np.uint32).view(np.float32))
    return Refutation(f"the cast of {number!r} is another", {"bits": found[0], "number": repr(number)})
