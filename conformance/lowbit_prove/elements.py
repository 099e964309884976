r"""The theorem of elements: every product of two elements of OCP MX is exact in float32.

Let P and R be elements of any two of the six formats of OCP MX. A float32 holds :math:`P R`, so a kernel that
multiplies elements in float32 rounds only where it adds. All pairs of all codes are enumerated, and multiplied in
float64, which has room for twice their bits. Infinities and NaNs of E5M2 and E4M3 are left out, because no matrix may
hold them.
"""

from collections.abc import Iterator
from functools import cache, partial
from inspect import getsource
from itertools import combinations_with_replacement

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.contract.checks import check_choice
from lowbit.numbers.floats import FLOATS
from lowbit.tensor_formats import microscaling
from lowbit.tensor_formats.bits import end_to_end
from lowbit.tensor_formats.stored import FORMATS
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, whole

BITS = {"mxfp8-e5m2": 8, "mxfp8-e4m3": 8, "mxfp6-e3m2": 6, "mxfp6-e2m3": 6, "mxfp4": 4, "mxint8": 8}
"""The formats of OCP MX, with the bits of their elements."""


def theorems() -> Iterator[Theorem]:
    """One theorem about all pairs of formats."""
    subject = partial(getsource, microscaling)
    yield Theorem(
        "formats", "ocp-mx/products", "every product of two elements is exact in float32", subject, decide, ran
    )


@cache
def elements(name: str) -> F64:
    """float64, 2^bits: the element of each code, as `decode` gives it with the scale 1; NaN if no matrix can hold
    it."""
    table, bits = FORMATS[name], BITS[name]
    at = table.sizes(max(2**bits, 32), 1, {})
    codes = np.resize(np.arange(2**bits), (1, at.K))
    field = next(each for each in table.fields if each.role == "codes")
    scale = np.full((1, at.K // 32), 1, FLOATS["float8_e8m0fnu"].dtype)
    tensors = {field.name: end_to_end(codes, bits, np.uint8).view(field.numpy_dtype), "scale": scale}
    with np.errstate(invalid="ignore"):
        values = table.terms(tensors, at).values[: 2**bits, 0]
    return np.where(np.isfinite(values), values, np.nan)


def in_float32(first: F32, second: F32) -> F32:
    """The products computed in float32."""
    return first * second


def decide() -> Outcome:
    """Multiply every element of each format by every element of every format."""
    steps = 0
    for names in combinations_with_replacement(BITS, 2):
        first, second = (elements(each) for each in names)
        wrong = _inexact(first[:, None], second)
        if wrong.any():
            return _refutation(names, *(int(each) for each in np.argwhere(wrong)[0]))
        steps += wrong.size
    return Proof(steps, "enumeration")


def _inexact(first: F64, second: F64) -> F64:
    given = in_float32(first.astype(np.float32), second.astype(np.float32)).astype(np.float64)
    wrong: F64 = (given != first * second) & ~np.isnan(first * second)
    return wrong


def _refutation(names: tuple[str, ...], first: int, second: int) -> Refutation:
    a, b = elements(names[0])[first], elements(names[1])[second]
    told = f"{float(a)!r} of {names[0]} times {float(b)!r} of {names[1]} is not exact"
    return Refutation(told, {"first": names[0], "second": names[1], "code": first, "other": second})


def ran(numbers: Numbers) -> Refutation | None:
    """Multiply the two elements of a refutation."""
    names = tuple(check_choice(each, numbers.get(each), list(BITS)) for each in ("first", "second"))
    codes = [whole(numbers, key, 2 ** BITS[name] - 1) for key, name in zip(("code", "other"), names, strict=True)]
    first, second = (elements(name)[code] for name, code in zip(names, codes, strict=True))
    return _refutation(names, *codes) if _inexact(np.array([first]), np.array([second])).any() else None
