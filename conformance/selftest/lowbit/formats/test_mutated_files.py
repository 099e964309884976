"""Every reader of foreign bytes, given mutated ones: it reads them or says in one line what is wrong with them.

Each test runs a seeded slice of some hundred mutations; ``LOWBIT_MUTATIONS=100000`` makes as many in each.
"""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fuzzing import fuzzed
from mixtral.recordings import FILE, Recordings

from lowbit.errors import ArgumentError, FormatError
from lowbit_cuda.cuda import compiler

MIB = 1 << 20


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("target", "count", "ends"),
    [
        ("vectors", 600, {"agree", "disagree", "FormatError"}),
        ("trees", 600, {"read", "ArgumentError"}),
        ("declared", 600, {"read", "ArgumentError", "UnavailableError"}),
        ("lines", 600, {"value", "ArgumentError", "NotDeclaredError", "RuntimeError", "BrokenLineError"}),
        ("results", 200, {"value", "ArgumentError", "ValueError"}),
        ("stored", 200, {"value", "ArgumentError", "ValueError"}),
        ("checkpoint", 200, {"read", "FormatError"}),
        ("shards", 200, {"read", "FormatError"}),
        ("gguf", 200, {"read", "FormatError"}),
        ("inspected", 400, {"read", "FormatError"}),
        ("prequantised", 300, {"read", "ArgumentError", "FormatError"}),
        ("quantized", 200, {"read", "FormatError"}),
        ("outcome", 200, {"read", "warned", "passed over"}),
        ("cubin", 200, {"read", "none"}),
        ("kills", 150, {"resumed", "begun anew", "ArgumentError"}),
        ("recordings", 200, {"read", "FormatError"}),
    ],
)
def test_mutations_are_read_or_refused(target: str, count: int, ends: set[str], seed: int) -> None:
    """No other exception, no warning, no hang, no control character in a message, and little memory."""
    found = fuzzed(target, seed, count)
    assert not found["faults"]
    assert set(found["ends"]) == ends  # each way is taken, so that the mutations are neither too wild nor too tame
    assert found["grown"] < 256 * MIB


def test_an_absurd_size_takes_no_memory() -> None:
    """A vector of some kilobytes whose one size is up to 2^40 is answered or refused within a small address space."""
    found = fuzzed("sizes", seed=1, count=400, space=1 << 30)
    assert not found["faults"]
    assert {"agree", "disagree"} <= set(found["ends"])
    assert found["grown"] < 64 * MIB


def recordings_with(path: Path, name: str, content: bytes) -> Path:
    """The recordings of the repository with another array."""
    with zipfile.ZipFile(FILE) as sound, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in sound.namelist():
            archive.writestr(member, content if member == f"{name}.npy" else sound.read(member))
    return path


def array_file(shape: tuple[int, ...], dtype: str, data: bytes = b"") -> bytes:
    """A file of numpy that says this of its data."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue() + data


def test_recordings_are_read_within_bounds(tmp_path: Path) -> None:
    """An array of a terabyte, one of objects, a zip bomb, arrays that do not belong together and a pipe are refused
    by name, before memory is taken; the repository's own are read."""
    wrong = {
        "array tokens is 'uint8' .1099511627776,. in 0 bytes; allowed: uint8": ("tokens", array_file((2**40,), "|u1")),
        "array chosen is 'object' .3,. in 9 bytes; allowed: uint8": ("chosen", array_file((3,), "|O", b"cposix\n()")),
        "array guess_1 is 134217856 bytes; allowed: at most": ("guess_1", array_file((2**27,), "|u1", bytes(2**27))),
        "array header is 'uint8' .. in 1 bytes; allowed: text, once": ("header", array_file((), "|u1", b"1")),
        "shape of array chosen is .*; allowed: 3 x 16 x 4 x 2": ("tokens", array_file((3, 4), "|u1", bytes(12))),
        "array tokens is .*; allowed: an array of numpy": ("tokens", b"no array"),
    }
    for text, (name, content) in wrong.items():
        with pytest.raises(FormatError, match=text):
            Recordings.load(recordings_with(tmp_path / "r.npz", name, content))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "none", tmp_path):
        with pytest.raises(ArgumentError, match="a file of recordings that exists"):
            Recordings.load(path)
    assert Recordings.load().chosen.shape[1] == 16


def test_an_entry_that_others_can_change_is_none(tmp_path: Path) -> None:
    """A sound one under a link, with a second name or writeable by a group is compiled anew: a cubin is code."""
    path, aside, key = tmp_path / "kernel.cubin", tmp_path / "aside", "0" * 64
    compiler._write(path, key, compiler.Cubin("kernel.cu", "sm_90", "12.9", b"\x7fELF", "log"))
    assert compiler._read(path, key) is not None
    aside.hardlink_to(path)
    assert compiler._read(path, key) is None
    path.unlink()
    path.symlink_to(aside)
    assert compiler._read(path, key) is None
    aside.replace(path)
    assert compiler._read(path, key) is not None
    path.chmod(0o660)
    assert compiler._read(path, key) is None


def test_a_strange_entry_of_the_cache_of_kernels_is_none(tmp_path: Path) -> None:
    """A header nested without end, and a pipe that nobody writes to: both are made anew."""
    deep = tmp_path / "deep.cubin"
    deep.write_bytes(b"[" * 100_000 + b"\n")
    os.mkfifo(tmp_path / "pipe.cubin")
    for path in (deep, tmp_path / "pipe.cubin"):
        assert compiler._read(path, "0" * 64) is None
