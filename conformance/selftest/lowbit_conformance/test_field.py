"""Kernels in the styles of the field: right ones pass, and the diagnosis names the mistakes of wrong ones.

All mistakes take minutes: ``python -m field.trying`` in conformance/selftest/support. A fixed sample is tried here.
"""

import pytest
from building import compiler
from field.judging import judge
from field.legal import judged
from field.mistakes import HELD_OUT, KERNELS, MISTAKES, Mistake
from field.trying import changed, kernels, outcome, tried

from lowbit.backend.function import Claim

RIGHT = {
    "numpy_kernels": ("gptq_factored", "awq", "q4_k_q8_k", "fp8_channel"),
    "cpp_kernels": ("gptq", "mxfp4", "fp8_block"),
}
SAMPLE = MISTAKES[::9]


def test_right_kernels_pass() -> None:
    """In numpy and in C++, without padding or wrapping."""
    compiler("g++")
    with kernels():
        for module, names in RIGHT.items():
            for name in names:
                operation, limits = KERNELS[name]
                found = judge(f"{module}:{name}", Claim(operation, limits))
                assert found.executed > 5 and not found.failures, (module, name, found.failures)


@pytest.mark.parametrize("mistake", SAMPLE, ids=lambda each: f"{each.kernel}-{each.what}".replace(" ", "-"))
def test_a_mistake_is_killed_and_named(mistake: Mistake) -> None:
    """By a name that says what it is."""
    if mistake.file == "kernels.cpp":
        compiler("g++")
    assert outcome(mistake, tried(mistake)) == "named"


@pytest.mark.parametrize("way", ["sums_of_32", "kahan", "weights_in_three_steps"])
def test_a_legal_way_is_not_refused(way: str) -> None:
    """Three of those that ``python -m field.legal 200`` tries with many seeds."""
    found = judged(way, seeds=1)
    assert found.executed > 5 and not found.failures


def test_every_mistake_changes_its_kernel() -> None:
    """The source holds its text, the change gives another source, and each mistake of the first list has a name."""
    assert len(MISTAKES) >= 50 and len(HELD_OUT) >= 20
    sources = {changed(mistake) for mistake in (*MISTAKES, *HELD_OUT)}
    assert len(sources) == len(MISTAKES) + len(HELD_OUT)
    assert sum(bool(mistake.names) for mistake in MISTAKES) >= 0.9 * len(MISTAKES)
