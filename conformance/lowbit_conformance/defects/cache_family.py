"""Mistakes in attention over a stored cache: keys or values that are read wrong, heads, tokens and the scale of scores.

The kinds of stored matrices are tried in the keys, in the values and in both.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from lowbit.arrays import F64, Array
from lowbit.attention.attention import attended
from lowbit.attention.stored import in_heads
from lowbit.backend.reference import in_type
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.table import Terms
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.stored import DECODES
from lowbit_conformance.defects.stored_bits import of_blocks
from lowbit_conformance.defects.stored_codes import reread
from lowbit_conformance.defects.stored_fields import of_fields
from lowbit_conformance.defects.stored_parts import of_numbers
from lowbit_conformance.defects.stored_words import of_words

OPERATION = "attention.attend_stored"
Read = Callable[[Stored], Terms]
Way = Callable[..., Array]


def numbers_of(read: Read | None, part: Stored, head_dim: int) -> F64:
    return in_heads(part.values if read is None else read(part).values, head_dim)


def attend(
    of_keys: Read | None, of_values: Read | None, q: Array, keys: Stored, values: Stored, w: Any = None
) -> Array:
    """Attention with keys or values that are read wrongly."""
    with np.errstate(all="ignore"):
        own = numbers_of(of_keys, keys, q.shape[2]), numbers_of(of_values, values, q.shape[2])
        return in_type(attended(q.astype(np.float64), *own, w), q.dtype.name)


def scaled(factor: Callable[[int, int, int], float], q: Array, keys: Stored, values: Stored, w: Any = None) -> Array:
    """Scores with another scale, a function of the head size and of the numbers of query and key heads."""
    with np.errstate(all="ignore"):
        own = numbers_of(None, keys, q.shape[2]), numbers_of(None, values, q.shape[2])
        scale = factor(q.shape[2], q.shape[1], len(own[0]))
        return in_type(attended(q.astype(np.float64), *own, w, scale), q.dtype.name)


def heads_in(order: Callable[[Array, int, int], Array], q: Array, keys: Stored, values: Stored, w: Any = None) -> Array:
    """Query head j reads another head of the cache than ``j // (H / G)``."""
    with np.errstate(all="ignore"):
        own_keys, own_values = numbers_of(None, keys, q.shape[2]), numbers_of(None, values, q.shape[2])
        heads = order(np.arange(q.shape[1]), q.shape[1], len(own_keys)) % len(own_keys)
        found = attended(q.astype(np.float64), own_keys[heads], own_values[heads], w)
        return in_type(found, q.dtype.name)


def windowed(by: int, q: Array, keys: Stored, values: Stored, w: Any = None) -> Array:
    """A window with more or fewer tokens.

    Raises:
        ValueError: there is no such window.
    """
    if w is None or w + by < 1:
        raise ValueError("there is no window")
    return attend(None, None, q, keys, values, w + by)


def seeing(end: Callable[[int, int, int], int], q: Array, keys: Stored, values: Stored, w: Any = None) -> Array:
    """Query i of T sees the tokens up to an end other than S - T + i + 1, of S.

    Raises:
        ValueError: a query would see no token.
    """
    own_keys, own_values = numbers_of(None, keys, q.shape[2]), numbers_of(None, values, q.shape[2])
    length, found = own_keys.shape[1], []
    for i, query in enumerate(q.astype(np.float64)):
        stop = min(length, end(i, len(q), length))
        if stop < 1:
            raise ValueError("a query sees no token")
        with np.errstate(all="ignore"):
            found.append(attended(query[None], own_keys[:, :stop], own_values[:, :stop], w)[0])
    return in_type(np.array(found), q.dtype.name)


def with_fields_of(role: str, for_keys: bool, q: Array, keys: Stored, values: Stored, w: Any = None) -> Array:
    """Keys or values with the fields of one role taken from the other.

    Raises:
        ValueError: they have no such field in common.
    """
    own, other = (keys, values) if for_keys else (values, keys)
    theirs = other.table.fields_of(other.by_name)
    names = [row.name for row in own.table.fields if row.role == role and row in other.table.fields]
    if not names:
        raise ValueError(f"keys and values have no {role} in common")
    read = partial(reread, changed={name: np.ascontiguousarray(theirs[name]) for name in names})
    return attend(read if for_keys else None, None if for_keys else read, q, keys, values, w)


ENDS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    ("one token after its own", lambda i, t, s: s - t + i + 2),
    ("the token before its own", lambda i, t, s: s - t + i),
    ("the last of all", lambda i, t, s: s),
    ("token i, as if there were no tokens before the queries", lambda i, t, s: i + 1),
)
SCALES: tuple[tuple[str, Callable[[int, int, int], float]], ...] = (
    ("divided by d_h and not by its root", lambda d, h, g: 1 / d),
    ("multiplied by the root of d_h", lambda d, h, g: float(np.sqrt(d))),
    ("divided twice by the root of the number of heads", lambda d, h, g: 1 / float(np.sqrt(d * h))),
    ("divided by the root of all channels of queries", lambda d, h, g: 1 / float(np.sqrt(d * h))),
    ("divided by the root of all channels of keys", lambda d, h, g: 1 / float(np.sqrt(d * g))),
    ("divided by the root of d_h / 2", lambda d, h, g: 1 / float(np.sqrt(d / 2))),
    ("divided by the root of 2 d_h", lambda d, h, g: 1 / float(np.sqrt(2 * d))),
    ("divided by the root of 64", lambda d, h, g: 1 / 8),
    ("divided by the root of 128", lambda d, h, g: 1 / float(np.sqrt(128))),
    ("negated", lambda d, h, g: -1 / float(np.sqrt(d))),
    ("in base 2: they are multiplied by the logarithm of e", lambda d, h, g: float(np.log2(np.e) / np.sqrt(d))),
    ("in base 2: the factor log2 e is missing", lambda d, h, g: float(np.log(2) / np.sqrt(d))),
)
HEADS: tuple[tuple[str, Callable[[Array, int, int], Array]], ...] = (
    ("j mod G", lambda j, h, g: j % g),
    ("0", lambda j, h, g: 0 * j),
    ("j, the last one past the end", lambda j, h, g: np.minimum(j, g - 1)),
    ("G - 1 - j G / H", lambda j, h, g: g - 1 - j // (h // g)),
    ("j / G", lambda j, h, g: j // g),
)


def kinds(format: str) -> Iterator[tuple[str, str, Read]]:
    """Mistakes in the numbers of a format."""
    yield from ((name, cause, change) for name, (cause, change) in DECODES.items())
    yield from of_numbers()
    yield from of_fields(format)
    yield from of_blocks(format)
    yield from of_words(format)


def ways() -> Iterator[tuple[str, str, Way]]:
    """Mistakes that do not depend on the format."""
    for role, said in (("scale", "scales"), ("zero", "zeros or minima"), ("codes", "codes")):
        for for_keys, own, other in ((True, "Keys", "values"), (False, "Values", "keys")):
            cause = f"{own} have the {said} of {other}."
            yield f"cache-{role}-of-the-other", cause, partial(with_fields_of, role, for_keys)
    for words, factor in SCALES:
        yield "cache-scores-scaled-otherwise", f"Scores are {words}.", partial(scaled, factor)
    for words, order in HEADS:
        yield "cache-heads-in-another-order", f"Query head j reads head {words} of the cache.", partial(heads_in, order)
    for words, end in ENDS:
        yield "cache-mask-ends-elsewhere", f"Query i sees the tokens up to {words}.", partial(seeing, end)
    for by in (1, -1, 2, -2):
        cause = f"A window has {abs(by)} token{'s' * (abs(by) > 1)} too {'many' if by > 0 else 'few'}."
        yield "cache-window-of-another-size", cause, partial(windowed, by)


@cache
def members(keys: str, values: str) -> tuple[Defect, ...]:
    """All members for a cache with keys and values in two formats."""
    found = [arithmetical(name, cause, "", {OPERATION: way}) for name, cause, way in ways()]
    for name, cause, change in kinds(keys):
        slug, said = name.replace("stored-", "keys-"), f"Of keys: {cause[0].lower()}{cause[1:]}"
        found.append(arithmetical(slug, said, "", {OPERATION: partial(attend, change, None)}))
    for name, cause, change in kinds(values):
        slug, said = name.replace("stored-", "values-"), f"Of values: {cause[0].lower()}{cause[1:]}"
        found.append(arithmetical(slug, said, "", {OPERATION: partial(attend, None, change)}))
    for name, cause, change in kinds(keys) if keys == values else ():
        slug, said = name.replace("stored-", "cache-"), f"Of keys and values: {cause[0].lower()}{cause[1:]}"
        found.append(arithmetical(slug, said, "", {OPERATION: partial(attend, change, change)}))
    return tuple(found)


def of_caches(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the formats of failures, if all failures have the same pair."""
    if operation != OPERATION:
        return ()
    formats = {(each.arguments[1].format, each.arguments[2].format) for each in failures}
    return members(*formats.pop()) if len(formats) == 1 else ()
