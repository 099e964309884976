"""Every reader of foreign bytes, given mutated ones: it reads them or says in one line what is wrong with them.

Each test runs a seeded slice of some thousand mutations; ``LOWBIT_MUTATIONS=100000`` makes as many in each.
"""

import pytest
from fuzzing import fuzzed

MIB = 1 << 20


@pytest.mark.parametrize(
    ("target", "count", "ends"),
    [
        ("vectors", 2000, {"agree", "disagree", "FormatError"}),
        ("trees", 2000, {"read", "ArgumentError"}),
        ("declared", 2000, {"read", "UnavailableError"}),
        ("lines", 2000, {"value", "ArgumentError", "NotDeclaredError", "RuntimeError", "BrokenLineError"}),
        ("results", 1000, {"value", "ArgumentError", "ValueError"}),
        ("checkpoint", 400, {"read", "FormatError"}),
        ("shards", 400, {"read", "FormatError"}),
        ("gguf", 400, {"read", "FormatError"}),
        ("quantized", 400, {"read", "FormatError"}),
    ],
)
def test_mutations_are_read_or_refused(target: str, count: int, ends: set[str]) -> None:
    """No other exception, no warning, no hang, no control character in a message, and little memory."""
    found = fuzzed(target, seed=1, count=count)
    assert not found["faults"]
    assert set(found["ends"]) == ends  # each way is taken, so that the mutations are neither too wild nor too tame
    assert found["grown"] < 256 * MIB


def test_an_absurd_size_takes_no_memory() -> None:
    """A vector of some kilobytes whose one size is up to 2^40 is answered or refused within a small address space."""
    found = fuzzed("sizes", seed=1, count=1500, space=1 << 30)
    assert not found["faults"]
    assert {"agree", "disagree"} <= set(found["ends"])
    assert found["grown"] < 64 * MIB
