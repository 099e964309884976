"""``qgemv`` and ``qgemm`` of every backend, each call paired with a plain read of as many bytes.

Weights lie in memory so many times that no call finds its own in a cache. Before each timed call the reader reads as
many bytes as the call will, so that the two alternate through the same minute on the same machine; a row's *share* is
the median of the ratios, the time of reading over the time of the call.
"""

import itertools
import math
from statistics import median
from typing import Any

import numpy as np
import pytest
from limits import ROTATION, MemoryReader
from problems import PROBLEMS, Problem
from verdicts import Verdicts

from lowbit.backend import Backend
from lowbit.errors import NotDeclaredError

SMALL_ROTATION = 2**27  # four times a cache of 32 MiB, for matrices of which a gigabyte would be thousands
PAIRS = 40
SLOW = ("reference",)  # measured on small shapes and few times


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_product(
    benchmark: Any, problem: Problem, backend: Backend, reader: MemoryReader, conformance: Verdicts
) -> None:
    """Time one product; asserts nothing about the time, and that the result is finite."""
    if backend.name in SLOW and (problem.large or problem.vectors):
        pytest.skip("the specification is not made for this size")
    benchmark.group = problem.id
    matrix, x = problem.matrix(), problem.activations()
    try:
        first = backend.prepare(matrix)
    except NotDeclaredError as error:
        pytest.skip(str(error))
    copies = math.ceil((ROTATION if problem.large else SMALL_ROTATION) / first.nbytes)
    if backend.name in SLOW:
        copies = 4
    rotation = itertools.cycle([first, *(backend.prepare(matrix) for _ in range(copies - 1))])
    out = np.empty((*x.shape[:-1], matrix.columns), np.float32)
    limits: list[float] = []

    def read_then_next() -> tuple[tuple[Any, ...], dict[str, Any]]:
        limits.append(reader.seconds(first.nbytes))
        linear = next(rotation)
        return (linear.qgemm if problem.vectors else linear.qgemv, x, out), {}

    pairs = 5 if backend.name in SLOW else PAIRS
    benchmark.pedantic(lambda call, x, out: call(x, out), setup=read_then_next, rounds=pairs, warmup_rounds=2)
    assert np.isfinite(out).all()

    times = list(benchmark.stats.stats.data)
    paired = list(zip(limits[-len(times) :], times, strict=True))  # the first reads belong to the rounds of warming up
    benchmark.extra_info |= {
        "backend": backend.name,
        "conformance": conformance.of(backend.name),
        "bytes": first.nbytes,
        "copies": copies,
        "read_limit_ms": round(1e3 * median(limit for limit, _ in paired), 4),
        "share_of_limit": round(median(limit / time for limit, time in paired), 3),
    }
