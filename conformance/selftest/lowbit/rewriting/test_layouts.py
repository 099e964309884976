"""Layouts: the tensors of a directory that tools ask for beside those of a format."""

import numpy as np
import pytest
from paths import SUPPORT
from safetensors.numpy import load_file

from lowbit.rewriting.layouts import state_of_hqq
from lowbit.tensor_formats.stored import stored

PUBLISHED = SUPPORT.parent / "lowbit/formats/checkpoint/quantised"
OF_THE_SOLVER = ("optimize", "round_zero")
"""How hqq found the codes: lowbit only has them."""
MODULE = "model.layers.0.self_attn.q_proj."


def test_the_state_of_hqq_is_what_hqq_writes() -> None:
    """Its own package wrote the directory: the same names, types, shapes and numbers."""
    (file,) = (PUBLISHED / "hqq-4").glob("*.safetensors")
    theirs = {name.removeprefix(MODULE): each for name, each in load_file(file).items() if name.startswith(MODULE)}
    arrays = {name: theirs.pop(name) for name in ("W_q", "scale", "zero")}
    columns, rows = (int(size) for size in theirs["shape"])
    ours = dict(state_of_hqq(stored("hqq-axis1", rows, columns, arrays, bits=4, group_size=32)))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        if name not in OF_THE_SOLVER:
            np.testing.assert_array_equal(ours[name], array)


@pytest.mark.parametrize(
    ("bits", "packing", "view"), [(2, "2bit_u8", "uint8"), (3, "3bit_32", "int32"), (8, "8bit_u8", "uint8")]
)
def test_how_hqq_unpacks(bits: int, packing: str, view: str) -> None:
    """Each number of bits has the packing of hqq, under its name there."""
    rows, columns, size = 32, 10, 16
    words = (rows * columns // size // 10, size) if bits == 3 else (rows * columns // size * bits // 8, size)
    arrays = {"W_q": np.zeros(words, view)}
    arrays |= {name: np.ones((rows * columns // size, 1), np.float16) for name in ("scale", "zero")}
    options = {"group_size": size} if bits == 3 else {"bits": bits, "group_size": size}
    found = dict(state_of_hqq(stored("hqq-axis1-3bit" if bits == 3 else "hqq-axis1", rows, columns, arrays, **options)))
    assert (found["packing"].tobytes(), found["unpack_view_dtype"].tobytes()) == (
        packing.encode(),
        f"torch.{view}".encode(),
    )
    assert int(found["nbits"]) == bits
