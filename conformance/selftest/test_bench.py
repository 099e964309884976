"""The benchmarks' own instruments: the readers read every byte, and the spin runs on every thread."""

import limits
import pytest


def test_the_readers_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading sums every word (it raises if it does not), also where the rotation begins again."""
    monkeypatch.setattr(limits, "ROTATION", 2**24)
    monkeypatch.setattr(limits, "TRIAL", 2**20)
    reader = limits.MemoryReader(2)
    assert reader.fastest in {way.name for way in reader.ways}
    assert len(reader.ways) == len({(way.reader, way.chunk) for way in reader.ways}) > 1
    assert all(reader.seconds(nbytes) > 0 for nbytes in (2**23, 2**23 + 8, 2**20 + 24))
    reader.try_again(2**20)
    assert reader.fastest == reader.ways[0].name
    assert reader.freedom() > 0
