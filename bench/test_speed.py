"""Products of every backend, each call paired with a plain read of as many bytes.

The cases, their inputs and the way to call a backend are those of ``lowbit bench``. pytest-benchmark keeps the runs, so
that two of them can be compared: ``--benchmark-autosave`` in one, ``--benchmark-compare`` in the next.

Weights lie in memory so many times that no call finds its own in a cache. Before each timed call the reader reads as
many bytes as the call will, so that the two alternate through the same minute on the same machine; a row's *share* is
the median of the ratios, the time of reading over the time of the call.
"""

import itertools
import math
import time
from collections.abc import Iterator
from functools import cache
from statistics import median
from typing import Any

import numpy as np
import pytest
from limits import ROTATION, MemoryReader
from verdicts import Verdicts

from lowbit.backend import Backend
from lowbit.errors import NotDeclaredError
from lowbit_bench.inputs import PRESETS, Problem, activations_of, call_of, prepared, problem, weights_of

LARGE = PRESETS["llama-7b"][:2]
STORED = ("q4_0", "q8_0", "q4_k", "q6_k", "gptq-v2")
SMALL_ROTATION = 2**27  # four times a cache of 32 MiB, for matrices of which a gigabyte would be thousands
PAIRS, FEW = 40, 5
SECONDS = 0.1  # a call that takes longer is measured a few times
SLOW = ("reference",)  # measured on small shapes


def cases() -> Iterator[Problem]:
    """The layers of SmolLM2, two of a Llama of 7 billion parameters, other widths, several rows, stored formats."""
    for shape in PRESETS["smollm2-135m"]:
        yield own(shape, group_size=64)
    for shape in LARGE:
        yield own(shape)
    for bits in (3, 2):
        yield own(LARGE[1], bits=bits)
    yield own((576, 1536), batch=16, group_size=64)
    yield own(LARGE[0], batch=16)
    for format in STORED:
        yield problem("linear.gemv", LARGE[1], 1, format, "float32", "float32", {})
    yield problem("linear.gemm_cast", LARGE[1], 1, "q4_k", "q8_k", "float32", {})


def own(shape: tuple[int, int], batch: int = 1, **options: int) -> Problem:
    """A product with the specification's own matrix."""
    return problem("linear.qgemm" if batch > 1 else "linear.qgemv", shape, batch, "", "", "", options)


weights = cache(weights_of)


@pytest.mark.parametrize("problem", [*cases()], ids=lambda problem: problem.id)
def test_product(
    benchmark: Any, problem: Problem, backend: Backend, reader: MemoryReader, conformance: Verdicts
) -> None:
    """Time one product; asserts nothing about the time, and that the result is finite."""
    large = (problem.rows, problem.columns) in LARGE
    if backend.name in SLOW and (large or problem.batch > 1):
        pytest.skip("the specification is not made for this size")
    benchmark.group = problem.id
    x = activations_of(problem)
    try:
        first, nbytes = prepared(backend, problem, weights(problem))
        started = time.perf_counter()
        result = call_of(backend, problem, first, x)()
        slow = time.perf_counter() - started > SECONDS
    except NotDeclaredError as error:
        pytest.skip(str(error))
    assert np.isfinite(result).all()
    copies = 4 if slow else math.ceil((ROTATION if large else SMALL_ROTATION) / nbytes)
    more = (prepared(backend, problem, weights(problem))[0] for _ in range(copies - 1))
    rotation = itertools.cycle([call_of(backend, problem, each, x) for each in (first, *more)])
    limits: list[float] = []

    def read_then_next() -> tuple[tuple[Any, ...], dict[str, Any]]:
        limits.append(reader.seconds(nbytes))
        return (next(rotation),), {}

    rounds, warm = (FEW, 1) if slow else (PAIRS, 2)
    benchmark.pedantic(lambda call: call(), setup=read_then_next, rounds=rounds, warmup_rounds=warm)

    times = list(benchmark.stats.stats.data)
    paired = list(zip(limits[-len(times) :], times, strict=True))  # the first reads belong to the rounds of warming up
    benchmark.extra_info |= {
        "backend": backend.name,
        "conformance": conformance.of(backend.name, operations=(problem.operation,)),
        "bytes": nbytes,
        "copies": copies,
        "read_limit_ms": round(1e3 * median(limit for limit, _ in paired), 4),
        "share_of_limit": round(median(limit / time for limit, time in paired), 3),
    }
