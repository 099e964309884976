"""Attention, as launches: rotations, appending to the cache, and attending over it.

A cache of G heads has room for C tokens of :math:`d_h` channels each, one head after another, so a block of threads
reads contiguous memory for its head. Keys may be float32, float16 or BFP12, which takes half a byte per channel and a
separate exponent for every 32 of them; values are floats.

Kernels read the position of the first token from device memory, and the part of the cache that they use depends on it.
So the extents here are upper limits.

Source: the chapters `lowbit.attention.rope`, `lowbit.attention.attention`, `lowbit.attention.kvcache`.
"""

from functools import partial

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit_cuda.kernels.layouts import MOST, PART
from lowbit_cuda.kernels.parameters import FLOAT_NAMES, MOST_TOKENS, THREADS, counts, integers, number, product_of
from lowbit_cuda.port import Access, Kernel, Numbers, Parameter

KEYS = {**FLOAT_NAMES, "bfp12": "bfp12"}
MOST_HEAD_DIM = 256
BFP_BLOCK = 32
"""Channels in a block of the BFP12 cache."""
CHUNK = 256
"""Tokens whose scores one block of `attend` holds at once."""
ATTEND_SHARED = 4 * (MOST_HEAD_DIM + CHUNK + 16 + 8 * MOST_HEAD_DIM)
POSITION = Parameter("position", "int32", "read", lambda numbers: 1)


def rope() -> Kernel:
    """Rotates heads in place by their positions, half-split."""

    def check(numbers: Numbers) -> None:
        counts(numbers, "tokens", "heads", "head_dim", most={"tokens": MOST_TOKENS})
        counts(numbers, "context", "head_dim")
        if number(numbers, "head_dim") % 2:
            raise ArgumentError("head_dim", numbers["head_dim"], "an even number")

    return Kernel(
        name="rope",
        source="attention.cuh",
        parameters=(
            Parameter("x", "float32", "update", product_of("tokens", "heads", "head_dim")),
            Parameter("table", "float32", "read", product_of("context", "head_dim")),
            POSITION,
            *integers("tokens", "heads", "head_dim", "context"),
        ),
        grid=lambda n: (-(-number(n, "heads") * number(n, "head_dim") // 2 // THREADS), number(n, "tokens"), 1),
        block=THREADS,
        check=check,
    )


def check_heads(numbers: Numbers, keys: str) -> None:
    """Check the limits of a cache."""
    counts(numbers, "tokens", "kv_heads", "head_dim", most={"tokens": MOST_TOKENS, "head_dim": MOST_HEAD_DIM})
    counts(numbers, "kv_heads", "capacity", "head_dim")
    unit = BFP_BLOCK if keys == "bfp12" else 4
    if number(numbers, "head_dim") % unit:
        raise ArgumentError("head_dim", numbers["head_dim"], f"a multiple of {unit} up to {MOST_HEAD_DIM}")


def _cached(name: str, kind: str, access: Access) -> tuple[Parameter, ...]:
    """The spans of cached keys or values, G × C × d_h; BFP12 has half a byte per channel and separate exponents."""
    elements = product_of("kv_heads", "capacity", "head_dim")
    if kind != "bfp12":
        return (Parameter(name, kind, access, elements, exact=False, alignment=PART),)
    return (
        Parameter(name, "uint8", access, lambda n: elements(n) // 2, exact=False, alignment=PART),
        Parameter("exponents", "uint8", access, lambda n: elements(n) // BFP_BLOCK, exact=False),
    )


def append(keys: str = "float32") -> Kernel:
    """Stores T tokens' keys or values, T × G × d_h, in a cache G × C × d_h, starting at the position."""
    rows = Parameter("x", "float32", "read", product_of("tokens", "kv_heads", "head_dim"))
    return Kernel(
        name=f"append_{KEYS[keys]}",
        source="attention.cuh",
        parameters=(
            *_cached("cache", keys, "write"),
            rows,
            POSITION,
            *integers("tokens", "kv_heads", "head_dim", "capacity"),
        ),
        grid=lambda n: (-(-number(n, "kv_heads") * number(n, "head_dim") // THREADS), number(n, "tokens"), 1),
        block=THREADS,
        check=partial(check_heads, keys=keys),
    )


def attend(keys: str = "float32", values: str = "float32") -> Kernel:
    """Grouped-query attention of T tokens, T × H × d_h, over a cache that already contains them.

    Token t is at the position plus t. It attends to all tokens up to itself, or to the last ``window`` of them if that
    is not 0.
    """

    def check(numbers: Numbers) -> None:
        check_heads(numbers, keys)
        counts(numbers, "tokens", "heads", "head_dim")
        check_integer("window", numbers["window"], 0, MOST)
        if number(numbers, "heads") % number(numbers, "kv_heads"):
            raise ArgumentError("heads", numbers["heads"], f"a multiple of the {numbers['kv_heads']} key-value heads")

    heads = product_of("tokens", "heads", "head_dim")
    return Kernel(
        name=f"attend_{KEYS[keys]}_{FLOAT_NAMES[values]}",
        source="attention.cuh",
        parameters=(
            Parameter("y", "float32", "write", heads),
            Parameter("queries", "float32", "read", heads, alignment=PART),
            *_cached("keys", keys, "read"),
            *_cached("values", values, "read"),
            POSITION,
            *integers("tokens", "heads", "kv_heads", "head_dim", "capacity", "window"),
        ),
        grid=lambda n: (number(n, "heads"), number(n, "tokens"), 1),
        block=THREADS,
        shared=lambda n: ATTEND_SHARED,
        check=check,
    )
