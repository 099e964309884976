r"""Attention over stored tokens and the newest ones, which are not stored yet.

A cache that stores its tokens in few bits keeps the newest in the type of the model: KIVI because a key can only be
stored with its group and because attention reads the newest values most (`kivi_cache`), other caches because storing
token by token is slow. A step of decoding reads both parts. Its kernel multiplies the query by stored keys and by new
ones, takes one softmax over all scores, and adds the products with stored and with new values.

Of S tokens, the first :math:`S - R_k` keys and :math:`S - R_v` values are stored matrices as in the chapter `stored`,
and the newest :math:`R_k` keys and :math:`R_v` values follow them. The two numbers may differ, as KIVI's do. Both are
at least 1, because the query's own token is new, and at least one token is stored; before that, attention is that of
the chapter `attention`.

**The bound** is that of the chapter `stored` over all tokens together. New numbers have the type of the queries, so a
kernel reads them without an error, whatever type it converts stored numbers to.

Source: KIVI (arXiv 2402.02750) §3.3, algorithm 1; its ``models/llama_kivi.py``; ``QuantizedCache`` of transformers.
"""

from typing import Annotated, Any

import numpy as np

from lowbit.arrays import F64, Activations
from lowbit.attention.attention import attended, check_sizes
from lowbit.attention.stored import Numbers, bound_over, in_heads, numbers_of
from lowbit.contract.operation import BOUNDED, Parameters, operation
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.contract.signature import FINITE, ONE_TYPE, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.tensor_formats.stored import Stored


def _check_parts(
    queries: Activations, keys: Stored, values: Stored, newest_keys: Activations, newest_values: Activations
) -> None:
    tokens, heads, head_dim = queries.shape
    channels = newest_keys.shape[1] * head_dim
    for name, part in (("rows of keys", keys), ("rows of values", values)):
        if part.rows != channels:
            raise ArgumentError(name, part.rows, f"{channels}, the channels of the newest keys")
    length = keys.columns + len(newest_keys)
    if length != values.columns + len(newest_values):
        given = f"{length} and {values.columns + len(newest_values)}"
        raise ArgumentError("tokens of keys and values", given, "the same number, stored and new together")
    check_sizes(tokens, heads, newest_keys.shape[1], length)


@checked(also=_check_parts)
def attend_residual(
    queries: Annotated[Activations, Shape("T", "H", "d_h"), FINITE, ONE_TYPE],
    keys: Stored,
    values: Stored,
    newest_keys: Annotated[Activations, Shape("R_k", "G", "d_h"), FINITE, ONE_TYPE],
    newest_values: Annotated[Activations, Shape("R_v", "G", "d_h"), FINITE, ONE_TYPE],
) -> F64:
    """Grouped-query attention of the last T of S tokens over stored and new tokens.

    A stored token and a new one with equal keys; the query attends to both:

    >>> one = Stored("float16", 2, 1, (np.array([[1, 3]], np.float16),))
    >>> new_key, new_value = np.array([[[1, 3]]], np.float32), np.array([[[0, 1]]], np.float32)
    >>> attend_residual(np.zeros((1, 1, 2), np.float32), one, one, new_key, new_value)[0, 0]
    array([0.5, 2. ])

    Args:
        queries: float32, float16 or bfloat16, T × H × d_h, of the tokens at positions S − T to S − 1.
        keys: G d_h × (S − R_k): the channels of all heads, token by token.
        values: G d_h × (S − R_v).
        newest_keys: of the type of the queries, R_k × G × d_h.
        newest_values: of the type of the queries, R_v × G × d_h.

    Returns:
        float64, T × H × d_h: the value with which a backend's result is compared.

    Raises:
        ArgumentError: wrong dtype, shape or layout of an array, or numbers that are not finite; sizes that do not
            match.
    """
    own_keys, own_values = all_numbers(keys, newest_keys), all_numbers(values, newest_values)
    return attended(queries.astype(np.float64), own_keys, own_values, None)


def all_numbers(stored: Stored, newest: Activations) -> F64:
    """float64, G × S × d_h: stored tokens, followed by the new ones."""
    return np.concatenate([in_heads(stored.values, newest.shape[2]), newest.astype(np.float64).swapaxes(0, 1)], axis=1)


def _parameters(queries: Any, keys: Stored, values: Stored, newest_keys: Any, newest_values: Any) -> Parameters:
    return {"key_format": keys.format, "value_format": values.format, "head_dim": queries.shape[2]}


def attend_residual_bound(
    queries: Activations,
    keys: Stored,
    values: Stored,
    newest_keys: Activations,
    newest_values: Activations,
    arithmetic: Arithmetic,
    exact: F64,
) -> Bound:
    """The bound of `attention.attend_residual`, head by head and token by token.

    Args:
        queries, keys, values, newest_keys, newest_values: as given to the operation.
        arithmetic: what the backend declares; its roundings are taken at d_h for scores and at S for outputs.
        exact: float64, T × H × d_h: the reference's result.

    Raises:
        ArgumentError: a form that does not apply to stored numbers; an arithmetic that would allow more than a tenth.
    """

    def read(by: Arithmetic) -> tuple[Numbers, Numbers]:
        return _numbers(keys, newest_keys, by), _numbers(values, newest_values, by)

    return bound_over(queries, read, arithmetic, exact)


def _numbers(stored: Stored, newest: Activations, arithmetic: Arithmetic) -> Numbers:
    """All numbers, G × S × d_h, as a kernel of this arithmetic reads them."""
    old = numbers_of(stored, newest.shape[2], arithmetic)
    new = newest.astype(np.float64).swapaxes(0, 1)
    parts = (old.values, new), (old.gauge, np.abs(new)), (old.off, np.zeros(new.shape))
    return Numbers(*(np.concatenate(part, axis=1) for part in parts))


operation(
    "attention.attend_residual",
    "Attention over stored tokens and the newest ones",
    attend_residual,
    promise=BOUNDED,
    source="KIVI (arXiv 2402.02750) §3.3; the owners of the formats",
    parameters=_parameters,
    clauses={
        "C1": "Where one score lies 200 and more above all others, the result is that token's value, stored or new, "
        "exactly where the declared types hold it; query head h reads key-value head ⌊h / r⌋ of both parts.",
        "C2": "Each element differs from the exact one, of one softmax over all tokens, by at most the bound derived "
        "from the declared arithmetic and the type into which stored numbers are turned.",
        "C3": "A token depends on no later token, and on no unused bits of the last word: changing those changes no "
        "bit.",
    },
)
