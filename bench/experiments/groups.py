"""GQA, figure 6: the time of attention for one token, and the bytes of its cache, by the number of key-value heads.

A native kernel attends for one token with 32 query heads of 128 channels over a cache in float32. What a whole model
takes besides does not depend on the key-value heads, but for the projections of keys and values. A row has the median
of its calls. It is a timing, so run it where nothing else runs: all rows in one run, each number of heads in turn.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from experiments.running import Experiment, Row
from lowbit import backend as registry

HEADS, HEAD_DIM = 32, 128
GROUPS = (32, 16, 8, 4, 2, 1)
CONTEXTS = (1024, 4096)
CALLS, QUICK_CONTEXT, QUICK_CALLS = 101, 16, 3
BACKEND, OPERATION = "cppyy", "attention.attend"


def rows(quick: bool) -> list[Row]:
    """Every number of key-value heads at each length of the cache."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for context in (QUICK_CONTEXT,) if quick else CONTEXTS:
        for groups in GROUPS:
            settings: dict[str, str | int] = {"backend": BACKEND, "context": context, "kv_heads": groups}
            yield Row(settings, partial(measured, context, groups, QUICK_CALLS if quick else CALLS))


def measured(context: int, groups: int, calls: int) -> dict[str, Any]:
    """The median and the quartiles of a call in seconds, and the bytes of keys and values."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((1, HEADS, HEAD_DIM)).astype(np.float32)
    keys, values = rng.standard_normal((2, groups, context, HEAD_DIM)).astype(np.float32)
    with registry.load(BACKEND) as engine:
        engine.run(OPERATION, queries, keys, values)  # compiles the kernel
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            engine.run(OPERATION, queries, keys, values)
            seconds.append(time.perf_counter() - began)
    low, median, high = (float(each) for each in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return {"median": median, "quartiles": [low, high], "cache_bytes": keys.nbytes + values.nbytes}


EXPERIMENT = Experiment("groups", "Time of attention and bytes of the cache by key-value heads (GQA, figure 6).", rows)
