"""Products whose parts are too large or too small by a factor: it is solved for from all wrong results together.

A product is the sum of two parts: x times codes that are scaled, and x times what zeros or minima add. A kernel that
forgets a constant, or applies one twice, multiplies one of them or both by a factor. Least squares finds the factors.
Whether they explain every result is then tested as for any other defect.
"""

from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import PRODUCTS
from lowbit_conformance.defects.stored_codes import like, numbers_of

NEAR = 2.0**-9
"""Tolerance relative to a factor, or to 1 if it is smaller; 16-bit results are no more exact."""
DENOMINATORS = (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 448, 512, 1024)


def parts(x: Any, weights: Stored) -> tuple[F64, F64]:
    """The terms of codes and of zeros in the result, each T × N."""
    numbers, terms = numbers_of(x), weights.terms
    with np.errstate(all="ignore"):
        return numbers @ terms.products, numbers @ np.broadcast_to(terms.offsets, terms.products.shape)


def scaled(of_codes: float, of_zeros: float, x: Any, weights: Stored, result: Any = "float32") -> Array:
    """The product with both parts multiplied by a factor."""
    codes, zeros = parts(x, weights)
    with np.errstate(all="ignore"):
        return like(x, of_codes * codes + of_zeros * zeros)


def meant(factor: float) -> float:
    """The simple number near a factor, or the factor itself.

    >>> meant(0.50001), meant(1 / 127.01) == 1 / 127, meant(-8.001)
    (0.5, True, -8.0)
    """
    for below in DENOMINATORS:
        for number in (round(factor * below) / below, below / round(below / factor) if abs(factor) < below else 0.0):
            if number and abs(factor - number) <= NEAR * max(1.0, abs(number)):
                return float(number)
    return float(factor)


def written(factor: float) -> str:
    """A factor in few characters.

    >>> written(1 / 127), written(16.0), written(0.015625), written(0.3)
    ('1 / 127', '16', '1 / 64', '0.3')
    """
    inverse = 1 / factor if factor else 0.0
    whole = abs(inverse - round(inverse)) < 1e-9 and abs(inverse) > 1.5
    return f"1 / {round(inverse):d}" if whole else f"{factor:.5g}"


def solved(failures: list[Any]) -> tuple[float, float] | None:
    """The factors of codes and of zeros that fit all failures best; None if failures do not determine them."""
    rows, given = [], []
    for each in failures:
        codes, zeros = parts(*each.arguments[:2])
        wanted = np.atleast_2d(each.given).astype(np.float64)
        if wanted.shape != codes.shape:
            return None
        sizes = np.abs(codes) + np.abs(zeros)
        there = np.isfinite(wanted) & np.isfinite(codes) & np.isfinite(zeros) & (sizes > 0)
        if not there.any():
            continue
        weight = 1 / np.sqrt(np.square(sizes[there]).sum())
        rows.append(np.stack([codes[there], zeros[there]], axis=1) * weight)
        given.append(wanted[there] * weight)
    if not rows:
        return None
    design, target = np.concatenate(rows), np.concatenate(given)
    found = np.linalg.lstsq(design, target, rcond=1e-9)[0]
    if not design[:, 1].any():
        found[1] = found[0]
    return (float(found[0]), float(found[1])) if np.isfinite(found).all() else None


def of_factors(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The factors of both parts, or of one of them, if one is not 1."""
    if operation not in PRODUCTS or not failures:
        return ()
    try:
        found = solved(failures)
    except (ValueError, np.linalg.LinAlgError):
        return ()
    if found is None:
        return ()
    codes, zeros = map(meant, found)
    if codes == zeros != 1:
        name, cause = "result-times-a-factor", f"Results are {written(codes)} times what is right."
    elif codes == 1 != zeros:
        name, cause = "stored-offset-times-a-factor", f"Terms of zeros or minima are multiplied by {written(zeros)}."
    elif zeros == 1 != codes:
        name, cause = (
            "stored-products-times-a-factor",
            f"Sums of codes are multiplied by {written(codes)}, zeros are not.",
        )
    else:
        return ()
    return (arithmetical(name, cause, "", {operation: partial(scaled, codes, zeros)}),)
