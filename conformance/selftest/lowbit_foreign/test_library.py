"""The adapter for shared libraries: what crosses the border, and what happens when the other side misbehaves."""

import ctypes
import gc
import subprocess
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from building import SOURCES, STRICT, build, c_library, compiler

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.moe.offload import Arrangement, Request
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp import Format, cast
from lowbit_foreign import LibraryBackend
from lowbit_foreign.abi import Call, Value
from lowbit_foreign.declared import LinearRoundings
from lowbit_foreign.memory import MARGIN, GuardedArray, OutOfBoundsError


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The odd library."""
    return c_library(SOURCES / "odd.c", tmp_path_factory.mktemp("odd") / "libodd.so")


@pytest.fixture
def odd(library: Path) -> LibraryBackend:
    """A backend of the odd library."""
    return LibraryBackend(library)


def test_header_is_strict_c99_and_cpp(tmp_path: Path) -> None:
    """lowbit.h alone compiles without a warning as C99, C11, C++11 and C++20."""
    source = tmp_path / "alone.c"
    source.write_text('#include "lowbit.h"\n')
    for standard in ("c99", "c11"):
        build(
            [compiler("cc", "gcc"), f"-std={standard}", *STRICT, "-Wconversion", "-c", str(source), "-o", "/dev/null"]
        )
    for standard in ("c++11", "c++20"):
        words = [compiler("c++", "g++"), "-x", "c++", f"-std={standard}", *STRICT]
        build([*words, "-Wconversion", "-c", str(source), "-o", "/dev/null"])


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """Every field lies where the compiler puts it and is as long, and there is no other."""
    program = tmp_path / "sizes"
    build([compiler("cc", "gcc"), *STRICT, str(SOURCES / "sizes.c"), "-o", str(program)])
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    expected = {line.split()[0]: tuple(map(int, line.split()[1:])) for line in printed.splitlines()}
    given = {"lowbit_value": (0, ctypes.sizeof(Value)), "lowbit_call": (0, ctypes.sizeof(Call))}
    for name, kind in (("lowbit_value", Value), ("lowbit_call", Call)):
        for field, *_ in kind._fields_:
            given[f"{name}.{field}"] = (getattr(kind, field).offset, getattr(kind, field).size)
    assert given == expected


def test_capabilities(odd: LibraryBackend) -> None:
    """What the library declares arrives, and the name with it."""
    arithmetic = Arithmetic("factored", "float32", LinearRoundings(0.5, 1, 2))
    plain = ("packing.pack", "formats.quantize", "bfp.store", "offload.trace", "offload.engine")
    operations = {name: Declaration() for name in plain} | {"linear.qgemm": Declaration(arithmetic=arithmetic)}
    details = {"name": "odd", "version": "2", "made of": "C"}
    assert odd.capabilities() == Capabilities(operations, details=details, alignment=64, overread=32)
    assert odd.name == "odd"
    assert arithmetic.roundings(64, 30) == 32 + 3 + 2


def test_records_arrays_and_numbers_cross(odd: LibraryBackend) -> None:
    """A record that the library gives back part by part is the one that it was given, aligned as it declared."""
    for columns in range(1, 9):
        blocks = cast(np.arange(3 * columns, dtype=np.float32).reshape(3, columns), Format(4, 5))
        given = odd.run("bfp.store", blocks)
        assert given.format == blocks.format
        assert np.array_equal(given.mantissas, blocks.mantissas)
        assert given.mantissas.dtype == blocks.mantissas.dtype
        assert np.array_equal(given.exponents, blocks.exponents)


def test_lists_cross(odd: LibraryBackend) -> None:
    """Lists of records with lists in them come back, empty ones too."""
    requests = (Request(0, (1, 2), (3,)), Request(1, (0,)))
    assert odd.run("offload.trace", Arrangement(2, 4, 2), requests) == requests


def test_a_stored_matrix_is_a_result(odd: LibraryBackend) -> None:
    """The header's function begins it, and its tensor is written by name."""
    given = odd.run("formats.quantize", np.zeros((3, 64), np.float32), "q4_0")
    assert (given.format, given.rows, given.columns, given.options) == ("q4_0", 64, 3, ())
    assert np.array_equal(given.tensors[0], np.ones((3, 36), np.uint8))


def test_wrong_arguments_do_not_cross(odd: LibraryBackend) -> None:
    """The specification refuses before the library is asked, and what is not declared is not asked either."""
    with pytest.raises(ArgumentError, match="bits"):
        odd.run("packing.pack", np.zeros((8, 3), np.uint8), 5)
    with pytest.raises(NotDeclaredError, match=r"packing\.unpack"):
        odd.run("packing.unpack", np.zeros((1, 3), np.uint32), 4)


MISBEHAVIOUR: dict[int, tuple[type[Exception], str]] = {
    2: (RuntimeError, "'result' was never requested"),
    3: (RuntimeError, "status 77"),
    4: (RuntimeError, "odd fails in packing.pack: x{1023}$"),
    5: (ArgumentError, "codes of another colour"),
    6: (NotDeclaredError, "six columns"),
    7: (RuntimeError, "requested twice"),
    8: (RuntimeError, "dtype 99"),
    9: (RuntimeError, r"shape \(-1,\)"),
    10: (RuntimeError, "in packing.pack"),
    11: (OutOfBoundsError, "0 bytes after the end of 'result'"),
    12: (OutOfBoundsError, "3 bytes before the beginning of 'result'"),
    13: (RuntimeError, "without a path"),
    14: (RuntimeError, "42"),
    15: (RuntimeError, "2 dimensions"),
    16: (RuntimeError, "type of value is 'os.x'"),
    17: (RuntimeError, "decode"),
}


@pytest.mark.parametrize("columns", MISBEHAVIOUR)
def test_misbehaviour_is_an_error(odd: LibraryBackend, columns: int) -> None:
    """Each misbehaviour is an exception that says what was wrong, and the next call is none the worse for it."""
    kind, text = MISBEHAVIOUR[columns]
    with pytest.raises(kind, match=text) as caught:
        odd.run("packing.pack", np.zeros((8, columns), np.uint8), 4)
    assert type(caught.value) is kind
    assert (odd.run("packing.pack", np.zeros((8, 1), np.uint8), 4) == 0x07070707).all()


def matrix(columns: int) -> Any:
    return quantize(np.ones((8, columns), np.float32), bits=4, group_size=8)


def test_handles_are_given_back_once(library: Path) -> None:
    """A matrix is released when nobody holds it any more, or when the backend is closed, and not twice.

    The library counts what lives, and tells it when the next matrix is prepared.
    """
    odd = LibraryBackend(library)
    first = odd.prepare(matrix(1))
    base = first.nbytes
    second = odd.prepare(matrix(2))
    assert second.nbytes == base + 1
    del first
    gc.collect()
    assert odd.prepare(matrix(3)).nbytes == base + 1
    engines = [odd.open("offload.engine", Arrangement(2, 4, 2)) for _ in range(3)]
    engines[0].close()
    engines[0].close()
    assert odd.prepare(matrix(3)).nbytes == base + 3
    odd.close()
    odd.close()
    assert LibraryBackend(library).prepare(matrix(1)).nbytes == base
    del second, engines


def test_products_are_written_to_out(odd: LibraryBackend) -> None:
    """`out` is what comes back, also where it is less aligned than the library needs; qgemv is not declared."""
    prepared = odd.prepare(matrix(5))
    buffer = np.zeros(64, np.float32)
    for start in range(20):
        out = buffer[start : start + 15].reshape(3, 5)
        assert prepared.qgemm(np.zeros((3, 8), np.float32), out) is out
        assert (out == 5).all()
        out[:] = 0
    assert not buffer.any()
    assert (prepared.qgemm(np.zeros((1, 8), np.float32)) == 5).all()
    with pytest.raises(NotDeclaredError):
        prepared.qgemv(np.zeros(8, np.float32))
    with pytest.raises(RuntimeError, match="no handle"):
        odd.prepare(matrix(13))


def test_sessions_step(odd: LibraryBackend) -> None:
    """Sessions keep their own state, get the arguments of their steps, and check them first."""
    with (
        odd.open("offload.engine", Arrangement(2, 4, 2)) as one,
        odd.open("offload.engine", Arrangement(3, 4, 2)) as two,
    ):
        assert [one.step(Request(layer, (1,))) for layer in (0, 1, 0)] == [300, 401, 500]
        assert two.step(Request(0, (1,))) == 400
        with pytest.raises(ArgumentError):
            one.step(Request(7, (1,)))
        assert one.step(Request(1, (1,))) == 601


def test_memory_of_calls_is_given_back(odd: LibraryBackend) -> None:
    """What a call makes on the way is gone after it, without waiting for the garbage collector."""
    gc.disable()
    try:
        codes = np.zeros((8, 1), np.uint8)
        result = odd.run("packing.pack", codes, 4)
        alive = weakref.ref(result)
        del result
        assert alive() is None
    finally:
        gc.enable()


CAPABILITIES = {
    "": "its capabilities: content is 'Expecting value.*JSON in UTF-8",
    "[1]": r"content is \[1\]; allowed: an object",
    '{"name": "x", "name": "y", "operations": {}}': "the key 'name' is there twice",
    '{"name": "x", "operations": {}, "alignment": ' + "9" * 5000 + "}": "Exceeds the limit",
    '{"name": "x", "operations": {}, "alignment": 1e999}': "alignment is inf",
    '{"name": "x"}': "without operations",
    '{"name": "", "operations": {}}': "name is ''",
    '{"name": "x", "operations": {}, "alignement": 3}': "alignement",
    '{"name": "x", "operations": {}, "alignment": 48}': "alignment is 48",
    '{"name": "x", "operations": {}, "overread": -1}': "overread is -1",
    '{"name": "x", "operations": {}, "concurrent": 1}': "concurrent is 1",
    '{"name": "x", "operations": {"packing.puck": {}}}': "packing.puck",
    '{"name": "x", "operations": {"packing.pack": {"limit": {}}}}': "'limit'",
    '{"name": "x", "operations": {"packing.pack": {"limits": {"bits": 4}}}}': "limit bits of packing.pack is 4",
    '{"name": "x", "operations": {"packing.pack": {"limits": {"bits": []}}}}': "limit bits",
    '{"name": "x", "operations": {"linear.qgemv": {}}}': "arithmetic of linear.qgemv is missing",
    '{"name": "x", "operations": {"packing.pack": {"arithmetic": {}}}}': "arithmetic of packing.pack is given",
    '{"name": "x", "operations": {"linear.qgemv": {"arithmetic": {"form": "wide", "accumulator": "float32", '
    '"roundings": "any_order"}}}}': "form of arithmetic of linear.qgemv is 'wide'",
    '{"name": "x", "operations": {"linear.qgemv": {"arithmetic": {"form": "factored", "accumulator": "float32", '
    '"roundings": "few"}}}}': "roundings of arithmetic of linear.qgemv is 'few'",
    '{"name": "x", "operations": {"linear.qgemv": {"arithmetic": {"form": "factored", "accumulator": "float32", '
    '"roundings": {"rows": "1", "groups": 1, "constant": 1}}}}}': "roundings of .* is {",
    '{"name": "x", "operations": {"linear.gemv": {"limits": {"columns": {"multiple": 0}}}}}': "multiple of limit "
    "columns of linear.gemv is 0; allowed: an integer from 1",
    '{"name": "x", "operations": {"linear.gemv": {"limits": {"columns": {"step": 8}}}}}': "keys of limit columns of "
    "linear.gemv is 'step'",
    '{"name": "x", "operations": {"linear.gemv": {"limits": {"rows": {"least": 64, "most": 32}}}}}': "most of limit "
    "rows of linear.gemv is 32; allowed: an integer from 64",
    '{"name": "x", "operations": {"linear.gemv": {"arithmetic": {"form": "dequantised", "accumulator": "float16", '
    '"roundings": "any_order", "promotion": -1}}}}': "promotion of arithmetic of linear.gemv is -1",
}


NO_JSON = tuple(CAPABILITIES)[:4]
"""Texts that are no declaration at all: the backend is unavailable. Any other wrong one is refused as a declaration."""


@pytest.mark.parametrize("text", CAPABILITIES)
def test_wrong_capabilities_are_refused(text: str) -> None:
    """What a declaration says wrongly is named, on one line, with its place; nothing is guessed."""
    from lowbit_foreign.declared import read_text

    kind = UnavailableError if text in NO_JSON else ArgumentError
    with pytest.raises(kind, match=CAPABILITIES[text]) as caught:
        read_text(text.encode(), "library x")
    assert "\n" not in str(caught.value)


def test_libraries_that_cannot_be_used(tmp_path: Path) -> None:
    """No file, no library, another version, a missing function and a stateful operation without its functions are
    named when the backend is asked whether it is available; making one loads nothing."""
    text = tmp_path / "text.so"
    text.write_text("no library")
    bare = tmp_path / "bare.c"
    bare.write_text("int lowbit_run(void *c); int lowbit_run(void *c) { return c != 0; }\n")
    half = tmp_path / "half.c"
    parts = (
        (SOURCES / "odd.c").read_text().replace("void lowbit_close(", "void lowbit_forget(void *);void lowbit_forget(")
    )
    half.write_text(parts)
    found = {
        tmp_path / "none.so": "there is no such file",
        text: "cannot be loaded",
        c_library(bare, tmp_path / "bare.so"): "exports no lowbit_abi_version",
        c_library(SOURCES / "odd.c", tmp_path / "old.so", "-DVERSION=2"): "version 2",
        c_library(SOURCES / "odd.c", tmp_path / "null.so", "-DCAPABILITIES=NULL"): "gives NULL",
        c_library(half, tmp_path / "half.so"): "exports lowbit_open and no lowbit_close",
    }
    for path, reason in found.items():
        backend: Backend = LibraryBackend(path)
        state = backend.availability()
        assert not state.usable
        assert reason in state.reason
        assert state.remedy
        with pytest.raises(UnavailableError):
            backend.capabilities()


@pytest.mark.parametrize("alignment", [0, 1, 16, 64, 4096])
def test_results_are_aligned_and_show_what_is_written_beside(alignment: int) -> None:
    """An array for a result begins where it should, and a byte written to either margin is found."""
    for dtype in (np.uint8, np.float64):
        guarded = GuardedArray(np.dtype(dtype), (3, 5), alignment)
        assert guarded.array.__array_interface__["data"][0] % max(alignment, guarded.array.itemsize) == 0
        guarded.array[...] = 255
        assert guarded.stray_write() == ""
        for offset, text in (
            (-MARGIN, f"{MARGIN} bytes before"),
            (-1, "1 bytes before"),
            (guarded.array.nbytes, "0 bytes"),
        ):
            spoilt = GuardedArray(np.dtype(dtype), (3, 5), alignment)
            place = ctypes.c_uint8.from_address(spoilt.array.__array_interface__["data"][0] + offset)
            place.value ^= 1
            assert text in spoilt.stray_write()
