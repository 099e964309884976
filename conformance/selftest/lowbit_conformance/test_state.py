"""What backends remember, where arrays begin and how large they are: what the suite finds, and how it makes it so."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kills import matrix
from kills.trial import started, try_out

from lowbit.attention.rope import half_split, interleaved, rotation
from lowbit.quantization.affine import quantize
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.isolation.arena import PAGE, Arena, Placement
from lowbit_conformance.isolation.calls import Call, Variant
from lowbit_conformance.isolation.placing import placed
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.clauses.test_state import assert_own_results, others, rewritten

FOUND = [
    ("result-by-address", "attention.attend/H4 packing.unpack/H4"),
    ("result-by-object", "blocks.rms_norm/H4"),
    ("result-by-samples", "routing.top_k/H4"),
    ("result-by-histogram", "bfp.cast/H4"),
    ("result-given-out-again", "packing.unpack/H4"),
    ("result-of-another-matrix", "linear.qgemv/C3"),
    ("rows-of-the-call-before", "linear.qgemm/C3"),
    ("weights-without-zeros", "linear.qgemv/C3"),
    ("weights-by-sum", "linear.qgemm/C3"),
    ("race-on-the-first-call", "linear.qgemv/C3"),
    ("x-at-one-offset", "linear.qgemv/H4 rope.rotate/H4"),
    ("output-at-one-offset", "linear.qgemm/H4"),
    ("x-off-a-cache-line", "linear.qgemv/H4 routing.gate/H4"),
    ("output-off-a-register", "linear.qgemv/H4"),
    ("scratch-of-a-matrix", "linear.qgemv/C3 linear.qgemm/C3"),
    ("matrix-at-one-offset", "linear.qgemv/H4"),
    ("bytes-at-odd-addresses", "packing.pack/H4"),
    ("tokens-in-16-bits", "rope.rotate/C1"),
    ("context-past-a-buffer", "attention.attend/C3"),
    ("hidden-past-a-buffer", "routing.gate/C1"),
    ("experts-in-a-byte", "routing.top_k/C1"),
    ("tokens-borrowed", "kvcache.bfp/C1"),
]


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found[0])
def test_it_is_found_by_its_clauses(found: tuple[str, str]) -> None:
    """Each of these clauses finds the defect, with a verdict that the bank expects."""
    name, clauses = found
    for clause in clauses.split():
        entry = matrix.described(name) | matrix.entry_of(try_out(name, seeds=0, only=(clause,), deadline=60.0))
        assert matrix.fair(entry), entry


@pytest.mark.parametrize("name", ["matrix-borrowed", "matrix-read-when-needed"])
def test_a_borrowed_matrix_is_a_read_after_the_call(name: str) -> None:
    """The arrays that a matrix was prepared from are out of bounds afterwards, and the report names them."""
    first = try_out(name, seeds=0, only=("linear.qgemv/C1",)).first
    assert first.verdict in ("OOB_READ", "CRASHED(SIGSEGV)")
    assert "matrix" in first.message or first.verdict.startswith("CRASHED")


@pytest.fixture
def remote() -> Iterator[Remote]:
    with started("none", 10.0) as made:
        yield made


def test_the_same_arrays_stay_where_they_are(remote: Remote) -> None:
    """Calls of one kind in a series have one home, whose pages are given back at its end; other calls have others."""
    x = np.arange(24, dtype=np.float32)
    prepared = remote.prepare(quantize(np.ones((24, 5), np.float32), bits=4, group_size=8))
    before = len(remote.arena._taken)
    with remote.same_arrays():
        first = prepared.guarded(x[None], 0).copy()
        second = prepared.guarded(2 * x[None], 0).copy()
        taken = len(remote.arena._taken)
        prepared.guarded(np.stack([x, x]), 2)
        assert (taken - before, len(remote.arena._taken) - taken) == (2, 2)
    assert np.array_equal(2 * first, second)
    assert len(remote.arena._taken) == before


def test_a_series_survives_a_refused_call(remote: Remote) -> None:
    """A verdict inside a series ends it, and the memory is free again."""
    codes = np.zeros((8, 3), np.uint8)
    with pytest.raises(BrokenPromiseError, match="on purpose"), remote.same_arrays():
        remote.run("packing.pack", codes, 4)
        raise BrokenPromiseError("on purpose")
    assert not remote.arena._taken
    assert remote.run("packing.pack", codes, 4).shape == (1, 3)


def test_offsets_are_those_of_the_elements_or_of_the_alignment() -> None:
    """An array begins at each offset, in elements or in steps of a declared alignment, from the border of its pages."""
    arena = Arena()
    array = np.ones(7, np.float32)
    for side in ("left", "right"):
        starts = []
        for offset in range(4):
            segment = arena.place("x", array, Placement(side, 1, offset=offset), False)
            starts.append(segment.start if side == "left" else segment.last - segment.end)
            arena.free([segment])
        assert [start % PAGE for start in starts] == [0, 4, 8, 12]
    aligned = [arena.place("x", array, Placement("left", 1, 32, 0, offset), False).start % 64 for offset in range(3)]
    assert aligned == [0, 32, 0]
    arena.close()


def test_an_offset_of_every_argument(remote: Remote) -> None:
    """With a stride each array begins at an offset of its own."""
    call = Call("run", "packing.pack", (np.zeros((8, 3), np.uint8), 4))
    attempt = placed(call, Variant(side=1, offset=5, stride=3), remote.arena, remote.capabilities())
    assert [segment.start % PAGE for segment in attempt.segments] == [5]
    remote.arena.free(attempt.segments)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8, np.int64, np.uint32])
def test_other_contents_differ_in_little(dtype: type) -> None:
    """Floats: one element is larger than all, and changes places with others; integers: two of a row change places."""
    array: Any = np.random.default_rng(1).integers(0, 16, (3, 5)).astype(dtype)
    found = list(others(array))
    assert len(found) >= 4
    floats = array.dtype.kind == "f"
    for one, before in zip(found, [array, *found] if floats else [array] * len(found), strict=False):
        assert one.dtype == array.dtype and one.shape == array.shape
        assert 0 < (one != before).sum() <= 2
    assert not floats or len({float(np.sort(one, axis=None).sum()) for one in found}) == 1
    assert floats or all(np.array_equal(np.sort(one, axis=1), np.sort(array, axis=1)) for one in found)
    assert len({one.tobytes() for one in [*found, array]}) == len(found) + 1


def test_there_are_no_other_contents_of_nothing() -> None:
    """An empty array and one of equal integers have none."""
    assert not list(others(np.zeros((0, 3), np.float32)))
    assert not list(others(np.full((2, 3), 7, np.uint8)))


def test_a_rewritten_rotation_is_a_rotation() -> None:
    """Both channels of a pair turn by one angle, so a kernel that multiplies complex numbers is right; and others are
    given other angles."""
    x = np.ones((2, 1, 6), np.float32)
    for layout in (interleaved(6), half_split(6)):
        first, second = np.flatnonzero(layout.sign < 0), layout.partner[layout.sign < 0]
        call = Call("run", "rope.rotate", (x, rotation(layout, 100.0, 1, 2)))
        turns = [each.arguments[1] for each in rewritten(call)]
        for turn in turns:
            assert np.array_equal(turn.cos[:, first], turn.cos[:, second])
            assert np.array_equal(turn.sin[:, first], -turn.sin[:, second])
            assert np.array_equal(turn.layout.sign[first], -turn.layout.sign[second])
        assert len({(turn.cos.tobytes(), turn.sin.tobytes()) for turn in turns}) >= 4


def test_the_sign_of_a_dequantised_zero_is_open() -> None:
    """As clause C1 says: code 8 of MXFP4 is -0. Another number than the reference's is found all the same."""
    elements, scale = np.full((1, 16), 0x88, np.uint8), np.full((1, 1), 127, np.uint8)
    matrix = Stored("mxfp4", 32, 1, (elements, scale.view(ml_dtypes.float8_e8m0fnu)))
    call = Call("run", "formats.dequantize", (matrix,), {"result": "float32"})
    for zero in (0.0, -0.0):
        assert_own_results([call], [np.full((32, 1), zero, np.float32)])
    with pytest.raises(BrokenPromiseError, match="after other contents"):
        assert_own_results([call], [np.full((32, 1), 0.5, np.float32)])
