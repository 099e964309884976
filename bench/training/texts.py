"""The texts of the small models: bytes, nine tenths to train on and one to keep."""

import numpy as np

from lowbit.arrays import U8
from lowbit.formats.fetch import fetch, read_text


def split(name: str) -> tuple[U8, U8]:
    """A text's bytes in UTF-8: what the model was trained on, and the last tenth, which it was not."""
    whole = np.frombuffer(read_text(fetch(name)).encode(), np.uint8)
    kept = whole.size - whole.size // 10
    return whole[:kept], whole[kept:]
