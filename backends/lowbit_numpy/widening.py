"""Inputs of 16 bits: widened to float32, computed with, and the result rounded to their type."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from lowbit.numbers.floats import FLOATS

Hook = TypeVar("Hook", bound=Callable[..., Any])
TYPES = {"inputs": ("float32", "float16", "bfloat16")}
NARROW = tuple(FLOATS[name].dtype for name in TYPES["inputs"][1:])


def widened(hook: Hook) -> Hook:
    """A hook for all three types from one for float32; integers pass through."""

    @wraps(hook)
    def with_any_type(self: Any, *arguments: Any, **choices: Any) -> Any:
        kind = arguments[0].dtype
        if kind not in NARROW:
            return hook(self, *arguments, **choices)

        def wide(part: Any) -> Any:
            return part.astype(np.float32) if isinstance(part, np.ndarray) and part.dtype == kind else part

        result = hook(self, *map(wide, arguments), **{name: wide(part) for name, part in choices.items()})
        with np.errstate(over="ignore"):
            return result.astype(kind) if result.dtype == np.float32 else result

    return with_any_type  # type: ignore[return-value]  # it has the parameters of the hook
