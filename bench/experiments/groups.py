"""GQA, figure 6: the time of attention for one token, and the bytes of its cache, by the number of key-value heads.

A native kernel attends for one token with 32 query heads of 128 channels over a cache in float32. What a whole model
takes besides does not depend on the key-value heads, but for the projections of keys and values. A row has the medians
of the calls for one length of the cache, in which the numbers of heads take turns. It is a timing, so run it where
nothing else runs.
"""

import time
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
    """Every length of the cache, with every number of key-value heads."""
    calls = QUICK_CALLS if quick else CALLS
    return [
        Row({"backend": BACKEND, "context": context}, partial(measured, context, calls))
        for context in ((QUICK_CONTEXT,) if quick else CONTEXTS)
    ]


def measured(context: int, calls: int) -> dict[str, Any]:
    """For each number of heads the median and the quartiles of a call in seconds, and the bytes of keys and values."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((1, HEADS, HEAD_DIM)).astype(np.float32)
    caches = [rng.standard_normal((2, groups, context, HEAD_DIM)).astype(np.float32) for groups in GROUPS]
    seconds: list[list[float]] = [[] for _ in GROUPS]
    with registry.load(BACKEND) as engine:
        attend = engine.unchecked(OPERATION)  # as a decoder calls it: a check would read the whole cache once more
        for _ in range(calls + 1):
            for cache, own in zip(caches, seconds, strict=True):
                began = time.perf_counter()
                attend(queries, *cache)
                own.append(time.perf_counter() - began)
    found = []
    for groups, cache, own in zip(GROUPS, caches, seconds, strict=True):
        low, median, high = (float(each) for each in np.quantile(own[1:], (0.25, 0.5, 0.75)))  # the first call compiles
        found.append({"kv_heads": groups, "median": median, "quartiles": [low, high], "cache_bytes": cache.nbytes})
    return {"groups": found}


EXPERIMENT = Experiment("groups", "Time of attention and bytes of the cache by key-value heads (GQA, figure 6).", rows)
