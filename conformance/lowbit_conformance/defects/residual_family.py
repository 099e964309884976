"""Mistakes in attention over stored tokens and new ones, as `cache_family` has them for stored tokens alone.

Both parts are put together in another way, for keys, for values or for both; stored tokens are read wrong; or what is
done with all tokens is wrong: the heads, the scale of scores, the mask, the softmax.
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
from lowbit_conformance.defects.cache_family import ENDS, HEADS, SCALES, Read, kinds
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.narrow import FORMATS, Change
from lowbit_conformance.defects.places import ORDERS, Order
from lowbit_conformance.defects.residual_attention import OPERATION, Join, joined

Way = Callable[..., Array]
Then = Callable[[F64, F64, F64], F64]
"""From queries, T × H × d_h, and all keys and values, G × S × d_h, to the result."""


def numbers_of(part: Stored, newest: Array, read: Read | None = None) -> tuple[F64, F64]:
    """Stored tokens and new ones, each G × tokens × d_h."""
    stored = part.values if read is None else read(part).values
    return in_heads(stored, newest.shape[2]), newest.astype(np.float64).swapaxes(0, 1)


def plainly(q: F64, keys: F64, values: F64) -> F64:
    return attended(q, keys, values, None)


def attend(
    of_keys: Join, of_values: Join, then: Then, q: Array, keys: Stored, values: Stored, new_k: Array, new_v: Array
) -> Array:
    """Attention over keys and values that are joined in other ways."""
    with np.errstate(all="ignore"):
        all_keys, all_values = of_keys(*numbers_of(keys, new_k)), of_values(*numbers_of(values, new_v))
        return in_type(then(q.astype(np.float64), all_keys, all_values), q.dtype.name)


def misread(
    of_keys: Read | None, of_values: Read | None, q: Array, keys: Stored, values: Stored, new_k: Array, new_v: Array
) -> Array:
    """Attention with stored keys or values that are read wrongly."""
    with np.errstate(all="ignore"):
        own = joined(*numbers_of(keys, new_k, of_keys)), joined(*numbers_of(values, new_v, of_values))
        return in_type(plainly(q.astype(np.float64), *own), q.dtype.name)


# **Parts** that are joined differently.


def cut(numbers: F64, length: int) -> F64:
    """This number of tokens; if there are fewer, the last one is repeated.

    Raises:
        ValueError: there are no tokens.
    """
    if not numbers.shape[1]:
        raise ValueError("there are no tokens")
    return numbers[:, np.minimum(np.arange(length), numbers.shape[1] - 1)]


def in_order(of_stored: bool, axis: int, order: Order, stored: F64, newest: F64) -> F64:
    """The heads (axis 0), tokens (1) or channels (2) of one part in another order."""
    part = stored if of_stored else newest
    count = part.shape[axis]
    taken = np.take(part, order(np.arange(count), count) % count, axis=axis)
    return joined(taken, newest) if of_stored else joined(stored, taken)


def strided(exchanged: tuple[int, int], stored: F64, newest: F64) -> F64:
    """New tokens read as if two axes had been exchanged in memory: tokens × heads × channels is their order."""
    kept = np.ascontiguousarray(newest.swapaxes(0, 1))
    shape = list(kept.shape)
    one, other = exchanged
    shape[one], shape[other] = shape[other], shape[one]
    return joined(stored, kept.reshape(shape).swapaxes(one, other).swapaxes(0, 1))


def rewritten(exchanged: tuple[int, int], stored: F64, newest: F64) -> F64:
    """New tokens that were written with two axes exchanged, and are read as tokens × heads × channels."""
    kept = newest.swapaxes(0, 1)
    return joined(stored, np.ascontiguousarray(kept.swapaxes(*exchanged)).reshape(kept.shape).swapaxes(0, 1))


def overlapping(by: int, stored: F64, newest: F64) -> F64:
    """New tokens begin some places early, over stored ones, or late, after zeros."""
    if by < 0:
        return joined(cut(stored, stored.shape[1] + by), newest, np.zeros_like(newest[:, :-by]))
    return joined(stored, np.zeros_like(newest[:, :by]), newest)[:, : stored.shape[1] + newest.shape[1]]


def rounded(way: Change, stored: F64, newest: F64) -> F64:
    return joined(stored, way(newest.astype(np.float32)).astype(np.float64))


def scaled(factor: float, stored: F64, newest: F64) -> F64:
    return joined(stored, newest * factor)


def coarse(of_all: bool, axis: tuple[int, ...], bits: int, stored: F64, newest: F64) -> F64:
    """New or all tokens, rounded to steps of the largest number along some axes; in float32, as kernels round."""
    part = (joined(stored, newest) if of_all else newest).astype(np.float32)
    step = np.abs(part).max(axis=axis, keepdims=True) * np.float32(2.0 ** (1 - bits))
    rough = np.where(step > 0, np.rint(part / np.where(step > 0, step, np.float32(1))) * step, part).astype(np.float64)
    return rough if of_all else joined(stored, rough)


def last_repeated(stored: F64, newest: F64) -> F64:
    every = joined(stored, newest)
    return joined(every[:, :-1], every[:, -2:-1])


def moved(by: int, stored: F64, newest: F64) -> F64:
    return np.roll(joined(stored, newest), by, axis=1)


JOINS: tuple[tuple[str, str, Join], ...] = (
    ("new-first", "New tokens are placed before the stored ones", lambda s, n: joined(n, s)),
    (
        "new-lost",
        "New tokens are not read, and the last stored one stands for them",
        lambda s, n: cut(s, s.shape[1] + n.shape[1]),
    ),
    (
        "stored-lost",
        "Stored tokens are not read, and the first new one stands for them",
        lambda s, n: joined(np.repeat(n[:, :1], s.shape[1], axis=1), n),
    ),
    ("new-as-0", "New tokens count as 0", lambda s, n: joined(s, 0 * n)),
    ("stored-as-0", "Stored tokens count as 0", lambda s, n: joined(0 * s, n)),
    ("last-as-0", "The last token counts as 0", lambda s, n: joined(s, n[:, :-1], 0 * n[:, -1:])),
    ("last-as-the-one-before", "The last token is read as the one before it", last_repeated),
    (
        "first-new-as-last-stored",
        "The first new token is read as the last stored one",
        lambda s, n: joined(s, s[:, -1:], n[:, 1:]),
    ),
    (
        "last-stored-as-first-new",
        "The last stored token is read as the first new one",
        lambda s, n: joined(s[:, :-1], n[:, :1], n),
    ),
    ("moved-earlier", "All tokens are read one place early, the first one last", partial(moved, -1)),
    ("moved-later", "All tokens are read one place late, the last one first", partial(moved, 1)),
)
AXES = (("head", 0), ("token", 1), ("channel", 2))
EXCHANGED = (("tokens and heads", (0, 1)), ("heads and channels", (1, 2)), ("tokens and channels", (0, 2)))


def joins() -> Iterator[tuple[str, str, Join]]:
    """Names, beginnings of sentences, and other ways to join the parts."""
    yield from JOINS
    for said, axis in AXES:
        for of_stored, part in ((False, "new"), (True, "stored")):
            for name, words, order in ORDERS:
                cause = f"Of {part} tokens, each {said} is taken {words}"
                yield f"{part}-{said}s-{name}", cause, partial(in_order, of_stored, axis, order)
    for words, axes in EXCHANGED:
        yield "new-axes-exchanged", f"New tokens are read with {words} exchanged in memory", partial(strided, axes)
        yield "new-axes-exchanged", f"New tokens are written with {words} exchanged in memory", partial(rewritten, axes)
    for by in (-1, 1):
        words = "over the last stored one" if by < 0 else "and a token of zeros lies before them"
        yield (
            "new-begin-elsewhere",
            f"New tokens begin one place {'early' if by < 0 else 'late'}, {words}",
            partial(overlapping, by),
        )
    for format, (words, ways) in FORMATS.items():
        for way in ways:
            yield f"new-in-{format}", f"New tokens are {words}", partial(rounded, way)
    for factor in (0.5, 2.0, -1.0):
        yield "new-scaled", f"New tokens are multiplied by {factor:g}", partial(scaled, factor)
    for of_all, part in ((True, "All tokens"), (False, "New tokens")):
        for axes_of, said in (
            ((0, 1, 2), "of all"),
            ((2,), "of each head"),
            ((0, 2), "of each token"),
            ((1,), "of each channel"),
        ):
            for bits in (2, 3, 4, 7, 8):
                cause = f"{part} are rounded to {bits} bits, with a step from the largest {said}"
                yield f"{part.split()[0].lower()}-rounded", cause, partial(coarse, of_all, axes_of, bits)


# **Changes of all tokens.**


def seeing(end: Callable[[int, int, int], int], q: F64, keys: F64, values: F64) -> F64:
    """Query i of T sees the tokens up to an end other than S − T + i + 1, of S.

    Raises:
        ValueError: a query would see no token.
    """
    length, found = keys.shape[1], []
    for i, query in enumerate(q):
        stop = min(length, end(i, len(q), length))
        if stop < 1:
            raise ValueError("a query sees no token")
        found.append(attended(query[None], keys[:, :stop], values[:, :stop], None)[0])
    return np.array(found)


def with_heads(order: Callable[[Array, int, int], Array], q: F64, keys: F64, values: F64) -> F64:
    """Query head j reads another head of the cache than ``j // (H / G)``."""
    heads = order(np.arange(q.shape[1]), q.shape[1], len(keys)) % len(keys)
    return attended(q, keys[heads], values[heads], None)


def with_scale(factor: Callable[[int, int, int], float], q: F64, keys: F64, values: F64) -> F64:
    return attended(q, keys, values, None, factor(q.shape[2], q.shape[1], len(keys)))


Merge = Callable[[F64, F64, int, int], F64]
"""From the results over stored and over new tokens, and the numbers of both, to one result."""
MERGES: tuple[tuple[str, Merge], ...] = (
    ("of which the mean is taken", lambda old, new, s, n: (old + new) / 2),
    ("which are added", lambda old, new, s, n: old + new),
    ("of which the mean by the numbers of tokens is taken", lambda old, new, s, n: (s * old + n * new) / (s + n)),
    ("of which only that over stored tokens is returned", lambda old, new, s, n: old),
    ("of which only that over new tokens is returned", lambda old, new, s, n: new),
)


def in_two(of_values: bool, merge: Merge, q: Array, keys: Stored, values: Stored, new_k: Array, new_v: Array) -> Array:
    """A softmax over stored tokens and one over new ones; the numbers of new keys, or of new values, divide them.

    Raises:
        ValueError: a query sees only stored tokens.
    """
    own_keys, own_values = joined(*numbers_of(keys, new_k)), joined(*numbers_of(values, new_v))
    wide, length = q.astype(np.float64), own_keys.shape[1]
    border, found = (values if of_values else keys).columns, []
    for i, query in enumerate(wide):
        stop = length - len(wide) + i + 1
        if stop <= border:
            raise ValueError("a query sees no new token")
        old = attended(query[None], own_keys[:, :border], own_values[:, :border], None)[0]
        new = attended(query[None], own_keys[:, border:stop], own_values[:, border:stop], None)[0]
        found.append(merge(old, new, border, stop - border))
    return in_type(np.array(found), q.dtype.name)


def unscaled(of_new: bool, q: Array, keys: Stored, values: Stored, new_k: Array, new_v: Array) -> Array:
    """Scores of one part are not divided by the root of d_h."""
    factor = np.sqrt(q.shape[2])
    old, new = numbers_of(keys, new_k)
    own_keys = joined(old, new * factor) if of_new else joined(old * factor, new)
    return in_type(plainly(q.astype(np.float64), own_keys, joined(*numbers_of(values, new_v))), q.dtype.name)


def exchanged(which: str, q: Array, keys: Stored, values: Stored, new_k: Array, new_v: Array) -> Array:
    """Keys and values in each other's place.

    Raises:
        ValueError: keys and values have other sizes.
    """
    if keys.columns != values.columns:
        raise ValueError("other sizes")
    (old_k, fresh_k), (old_v, fresh_v) = numbers_of(keys, new_k), numbers_of(values, new_v)
    if which in ("new", "both"):
        fresh_k, fresh_v = fresh_v, fresh_k
    if which in ("stored", "both"):
        old_k, old_v = old_v, old_k
    return in_type(plainly(q.astype(np.float64), joined(old_k, fresh_k), joined(old_v, fresh_v)), q.dtype.name)


def ways() -> Iterator[tuple[str, str, Way]]:
    """Mistakes that do not depend on the formats."""
    for name, words, join in joins():
        yield f"residual-{name}", f"{words}: keys and values.", partial(attend, join, join, plainly)
        yield f"residual-keys-{name}", f"{words}: keys only.", partial(attend, join, joined, plainly)
        yield f"residual-values-{name}", f"{words}: values only.", partial(attend, joined, join, plainly)
    for words, factor in SCALES:
        way = partial(attend, joined, joined, partial(with_scale, factor))
        yield "residual-scores-scaled-otherwise", f"Scores are {words}.", way
    for words, order in HEADS:
        way = partial(attend, joined, joined, partial(with_heads, order))
        yield "residual-heads-in-another-order", f"Query head j reads head {words} of the cache.", way
    for words, end in ENDS:
        way = partial(attend, joined, joined, partial(seeing, end))
        yield "residual-mask-ends-elsewhere", f"Query i sees the tokens up to {words}.", way
    for words, merge in MERGES:
        for of_values, said in ((False, "keys"), (True, "values")):
            cause = f"Stored and new {said} have a softmax each, {words}."
            yield "residual-softmax-for-each-part", cause, partial(in_two, of_values, merge)
    for of_new, part in ((True, "new"), (False, "stored")):
        cause = f"Scores of {part} tokens are not divided by the root of d_h."
        yield f"residual-scores-of-{part}-tokens-unscaled", cause, partial(unscaled, of_new)
    for which, part in (("new", "new tokens"), ("stored", "stored tokens"), ("both", "all tokens")):
        cause = f"Keys and values of {part} are exchanged."
        yield "residual-keys-and-values-exchanged", cause, partial(exchanged, which)


@cache
def members(keys: str, values: str) -> tuple[Defect, ...]:
    """All members for keys and values in two formats."""
    found = [arithmetical(name, cause, "", {OPERATION: way}) for name, cause, way in ways()]
    sides = [("keys", keys, True, False), ("values", values, False, True)]
    sides += [("keys and values", keys, True, True)] if keys == values else []
    for said, format, for_keys, for_values in sides:
        slug = "cache" if for_keys and for_values else said
        for name, cause, change in kinds(format):
            read = partial(misread, change if for_keys else None, change if for_values else None)
            words = f"Of {said}: {cause[0].lower()}{cause[1:]}"
            found.append(arithmetical(name.replace("stored-", f"{slug}-"), words, "", {OPERATION: read}))
    return tuple(found)


def of_residuals(failures: list[Any], operation: str) -> tuple[Defect, ...]:
    """The members for the formats of failures, if all failures have the same pair."""
    if operation != OPERATION:
        return ()
    formats = {(each.arguments[1].format, each.arguments[2].format) for each in failures}
    return members(*formats.pop()) if len(formats) == 1 else ()
