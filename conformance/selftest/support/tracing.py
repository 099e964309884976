"""Memory of Python's allocations, traced for a while."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def traced() -> Iterator[None]:
    """Trace inside what is allocated.

    What earlier tests left is collected before, and nothing is collected inside: the finalizers of others, and the
    warnings that they print with lines of source, would be counted too.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()
