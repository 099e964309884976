"""Casts that the owners of formats made, bit by bit; ``data/write.py`` kept their numbers and what became of them.

A zero may have either sign, and padding means nothing: matrices are compared as the suite compares them.
"""

from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lowbit.arrays import F32, Array
from lowbit.tensor_formats.stored import FORMATS, Stored, quantized
from lowbit_conformance.suite.clauses.test_quantize import difference

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Cast:
    """A file, the format that it is of, and the choice of its table that the tool makes.

    Attributes:
        name: of the file.
        format: of `FORMATS`.
        choice: of the format's `encode`.
        options: of the format.
        stored_as: names of the tool for fields that the table names otherwise.
    """

    name: str
    format: str
    choice: str
    options: tuple[tuple[str, int], ...] = ()
    stored_as: dict[str, str] = field(default_factory=dict)


NEAREST = "nearest, x (1/m), the short last block x / m"
STEPS = "absmax in 65536 steps"
NOT_ZERO = "x / d, a d of 0 is 2^-23"
ROUNDED = "largest rounded to bits of mantissa: "
GROUPS = (("group_size", 32),)
BLOCKS = (("block_size", 32),)
PACKED = {"elements": "weight_packed", "scale": "weight_scale"}
TORCHAO = {
    "floor": "standard",
    "rceil": "scale rounded up",
    "ceil": "exponent rounded up",
}
ELEMENTS = {"mxfp8-e4m3": 3, "mxfp8-e5m2": 2, "mxfp4": 1}
"""Bits of their mantissas, to which torchao's mode EVEN rounds."""
CASTS = (
    *(Cast(name, name, NEAREST, (("blocksize", 32),)) for name in ("nf4", "fp4")),
    *(
        Cast(f"{name}-double-{rows}", f"{name}-double", f"{NEAREST}, {STEPS}", (("blocksize", 32),))
        for name, rows in (("nf4", 90), ("fp4", 1200), ("nf4", 4))
    ),
    *(
        Cast(f"{name}-{bits}", name, "two roundings", (("bits", bits), *BLOCKS))
        for name in ("matmulnbits", "matmulnbits-symmetric")
        for bits in (2, 4, 8)
    ),
    *(
        Cast(f"{name}-{bits}", name, "reference", (("bits", bits), *GROUPS))
        for name in ("ct-pack", "ct-pack-asym")
        for bits in (2, 3, 4, 8)
    ),
    Cast("ct-int", "ct-int", "reference", GROUPS),
    Cast("fp8-tensor", "fp8-tensor", NOT_ZERO),
    Cast("fp8-channel", "fp8-channel", NOT_ZERO),
    Cast("fp8-block", "fp8-block", NOT_ZERO, (), {"weight_scale_inv": "weight_scale"}),
    Cast("nvfp4-pack", "nvfp4-pack", "reference"),
    Cast("mxfp4", "mxfp4", f"{ROUNDED}1", (), PACKED),
    Cast("mxfp6", "mxfp6-e2m3", f"{ROUNDED}3", (), PACKED),
    Cast("mxfp8", "mxfp8-e4m3", f"{ROUNDED}1", (), PACKED | {"elements": "weight"}),
    *(
        Cast("iq4_nl", "iq4_nl", f"{choice}, two roundings", (), {"blocks": f"blocks-{kept}"})
        for choice, kept in (("one fit", "one"), ("search", "search"))
    ),
    *(
        Cast(f"torchao-{name}", name, choice, (), {each: f"{each}-{mode}" for each in ("elements", "scale")})
        for name, bits in ELEMENTS.items()
        for mode, choice in (TORCHAO | {"even": f"{ROUNDED}{bits}"}).items()
    ),
)


def given(cast: Cast) -> tuple[F32, Stored]:
    """The numbers of a file, in float32, and the matrix that the tool made of them."""
    with np.load(DATA / f"cast-{cast.name}.npz") as file:
        found = dict(file)
    x = found["x"]
    if x.dtype == np.uint16:
        x = x.view(ml_dtypes.bfloat16).astype(np.float32)
    fields: list[Array] = []
    for row in FORMATS[cast.format].tensors:
        array = found[cast.stored_as.get(row.name, row.name)]
        fields.append(array if array.dtype == row.numpy_dtype else array.view(row.numpy_dtype))
    return x, Stored(cast.format, x.shape[1], len(x), tuple(fields), cast.options)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: f"{cast.name}-{cast.choice}")
def test_a_tool_makes_one_of_the_choices(cast: Cast) -> None:
    """Every field is that of the choice of the table which the chapter says is the tool's."""
    x, expected = given(cast)
    assert difference(quantized(x, cast.format, cast.options, cast.choice, expected), expected) == ""


def test_files_tell_choices_apart() -> None:
    """The numbers of the files are such that no other rule for the power of two would have passed, too."""
    for cast in CASTS:
        if cast.name in ("mxfp4", "torchao-mxfp4", "torchao-mxfp8-e5m2"):
            x, expected = given(cast)
            others = FORMATS[cast.format].encode.keys() - {cast.choice}
            same = {
                each
                for each in others
                if not difference(quantized(x, cast.format, cast.options, each, expected), expected)
            }
            assert not same, f"{cast.name}: {cast.choice} is {same}"


def test_a_mean_is_followed_where_a_sum_in_some_order_gives_it() -> None:
    """The float32 next to the mean of 263 scales changes what follows from it; one that is 1/1000 larger is wrong."""
    cast = next(each for each in CASTS if each.name == "fp4-double-1200")
    x, expected = given(cast)
    names = [row.name for row in expected.table.fields]
    offset = expected.by_name["nested_offset"]
    for other, followed in ((np.nextafter(offset, np.float32(9)), True), (offset * np.float32(1.001), False)):
        tensors = tuple(other if name == "nested_offset" else expected.by_name[name] for name in names)
        judged = Stored(cast.format, expected.rows, expected.columns, tensors, cast.options)
        again = quantized(x, cast.format, cast.options, cast.choice, judged)
        assert np.array_equal(again.by_name["nested_offset"], other) == followed
        assert difference(judged, again), "the other fields are those of another mean"
