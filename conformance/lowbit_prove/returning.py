r"""The theorems of round-tripping bytes: encode(decode(b)) = b for blocks whose scale can be recovered.

Numbers that a block stores exactly should be stored again by the same bytes. That needs the scale, and a cast takes it
from the block's largest number. So let E be the largest magnitude of the grid from which a cast takes the scale back,
127 for Q8_0. For every scale d of the type and every G of the grid,

.. math:: v = d\,G \ \text{ beside }\ m = E\,d \quad\Rightarrow\quad \mathrm{decode}(\mathrm{encode}(v)) = v ,

with d stored as it was. An element depends on its own code and the scale only, and `decode` is one to one in the codes
(`lowbit_prove.formats`). So a block b with an element of magnitude E, and of two codes for one number the one that
`encode` takes, is what it was before. A block without such an element gets another scale.

**Exceptions.** Some rules do not recover every scale, and `LOST` counts those that they lose:

- ggml's E4M3 for NVFP4 takes 448 in the place of 256 to 416;
- KIVI in 16 bits rounds E d to 16 bits before it is divided again.

Scales of float32 are left out: a product of 127 and a scale is rounded, and some scales of int8 return as a neighbour.
That their codes return follows from the theorem of rounding. Also left out is compressed-tensors. It divides by
:math:`(2^b - 1) / 2`, which no code stands for, and computes in bfloat16: beside the code 127 and its scale 135/128,
the code -123 of 8 bits returns as -124.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from lowbit.arrays import F64
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import FORMATS
from lowbit.tensor_formats.table import Format
from lowbit_prove import encoding, grids
from lowbit_prove.encoding import AT_ONCE, Cast, scales_of
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem

LOST: Mapping[tuple[str, int | None, str], int] = {
    ("gguf-nvfp4", None, "reference"): 6,
    **{
        (f"kivi-{part}", bits, "in float16"): lost
        for part in ("keys", "values")
        for bits, lost in ((2, 4788), (4, 1560))
    },
    **{
        (f"kivi-{part}-bf16", bits, "in bfloat16"): lost
        for part in ("keys", "values")
        for bits, lost in ((2, 4620), (4, 1540))
    },
}
"""The number of decided scales that a choice does not give back."""
NEVER = ("ct-int", "ct-pack")
"""Formats whose bytes are not restored in general."""


def theorems() -> Iterator[Theorem]:
    """One theorem for each format and width whose scales have 16 or 8 bits."""
    for name, bits, makes in grids.grids():
        scale = makes(next(iter(FORMATS[name].encode))).scale
        if scale in (None, "float32") or name in NEVER:
            continue
        width, given = f"-u{bits}" if bits else "", (FORMATS[name], bits, makes)
        statement = "decode(encode(v)) = v for numbers v of the grid beside the largest, and the scale returns"
        subject = partial(encoding.subject, name, bits)
        yield Theorem(
            "encoding", f"{name}{width}/bytes", statement, subject, partial(decide, *given), partial(ran, *given)
        )


def extreme(cast: Cast) -> float:
    """E: the largest magnitude of the grid, which determines the scale."""
    grid = cast.grid
    magnitudes = np.abs(grid.levels)
    return float(magnitudes[magnitudes <= grid.most].max())


def decide(table: Format, bits: int | None, makes: grids.Makes, step: int = 1) -> Outcome:
    """Encode every number of the grid for every `step`-th scale, by each choice."""
    total = 0
    for choice in table.encode:
        cast = Cast(table, bits, choice, makes(choice))
        for sign in (-1.0, 1.0) if cast.grid.signed else (1.0,):
            found = _decided(cast, sign, step)
            if not isinstance(found, Proof):
                return found
            total += found.steps
    return Proof(total, "enumeration")


def _decided(cast: Cast, sign: float, step: int) -> Outcome:
    """Decide one choice, with largest numbers of one sign."""
    d, lost = kept_scales(cast, sign, step)
    allowed = LOST.get((cast.table.name, cast.bits, cast.choice), 0)
    if step == 1 and lost != allowed:
        told = f"{cast.choice}: {lost} scales do not return, and {allowed} should not"
        return Refutation(told, {"choice": cast.choice, "lost": lost})
    if step > 1 and lost and not allowed:
        return Refutation(f"{cast.choice}: a scale does not return", {"choice": cast.choice, "lost": lost})
    levels = _beside(cast, sign)
    count = max(1, AT_ONCE // len(levels))
    for first in range(0, len(d), count):
        some = d[first : first + count]
        m, v = sign * extreme(cast) * some, some[:, None] * levels
        wrong = cast.encoded(m, v).values != v
        if wrong.any():
            block, place = np.argwhere(wrong)[0]
            return _refutation(cast, float(m[block]), float(v[block, place]))
    return Proof(len(d) * len(levels) + 1, "enumeration")


def kept_scales(cast: Cast, sign: float, step: int) -> tuple[F64, int]:
    """The scales that a cast gives back, and the number of scales that it does not."""
    grid, d = cast.grid, cast.grid.scales[::step]
    m = extreme(cast) * d
    d, m = d[(m >= grid.first) & (m <= grid.last)], m[(m >= grid.first) & (m <= grid.last)]
    returned = np.abs(scales_of(cast, sign * m)) == d
    return d[returned], int((~returned).sum())


def _beside(cast: Cast, sign: float) -> F64:
    """The numbers of the grid other than E, for the scale 1, or for -1 if the scale has a sign and m does not have the
    opposite one."""
    levels = cast.grid.levels if not cast.grid.signed or sign < 0 else -cast.grid.levels
    return levels[np.abs(levels) <= extreme(cast)]


def _refutation(cast: Cast, m: float, v: float) -> Refutation:
    (given,) = cast.encoded(np.array([m]), np.array([[v]])).values[0]
    told = f"{cast.choice}: {v!r} beside {m!r} becomes {float(given)!r}"
    return Refutation(told, {"choice": cast.choice, "m": m, "x": v})


def ran(table: Format, bits: int | None, makes: grids.Makes, numbers: Numbers) -> Refutation | None:
    """Encode the number of a refutation again, or count the scales that are not given back.

    Raises:
        ArgumentError: a choice that the format does not have, or no numbers.
    """
    choice = check_choice("choice", numbers.get("choice"), list(table.encode))
    cast = Cast(table, bits, choice, makes(choice))
    if "lost" in numbers:
        lost, allowed = (
            kept_scales(cast, -1.0 if cast.grid.signed else 1.0, 1)[1],
            LOST.get((table.name, bits, choice), 0),
        )
        told = f"{choice}: {lost} scales do not return, and {allowed} should not"
        return Refutation(told, {"choice": choice, "lost": lost}) if lost != allowed else None
    m, v = numbers.get("m"), numbers.get("x")
    if not isinstance(m, float) or not isinstance(v, float):
        raise ArgumentError("numbers", sorted(numbers), "the numbers m and x, and the name of a choice")
    return _refutation(cast, m, v) if cast.encoded(np.array([m]), np.array([[v]])).values[0, 0] != v else None
