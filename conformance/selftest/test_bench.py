"""The benchmarks' own instruments: the readers read every byte, and the spin runs on every thread."""

import limits
import pytest


def test_the_readers_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader sums every word (it raises if it does not), also where the rotation begins again."""
    monkeypatch.setattr(limits, "ROTATION", 2**24)
    monkeypatch.setattr(limits, "TRIAL", 2**20)
    reader = limits.MemoryReader(2)
    assert reader.fastest in range(len(limits.READERS))
    assert all(reader.seconds(nbytes) > 0 for nbytes in (2**23, 2**23 + 8, 2**20 + 24))
    assert reader.freedom() > 0
