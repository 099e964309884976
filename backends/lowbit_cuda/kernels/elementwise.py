"""Elementwise operations, norms and row copies, as launches.

These kernels read and write little compared with the weights, so they are simple rather than fast: a thread processes
one element or four, and a norm takes one block per token. They keep the order of sums fixed. `combine` adds the answers
of a token's experts in the order in which they are stored, by ascending expert, so an answer does not depend on which
expert was computed first.

With `gather` and `scatter` an expert runs once for all tokens of a prompt that chose it: their rows are gathered, and
its answers scattered to their places.

Source: the chapters `lowbit.model.block` and `lowbit.moe.routing`.
"""

from lowbit.errors import ArgumentError
from lowbit_cuda.kernels.parameters import (
    FLOAT_NAMES,
    MOST_TOKENS,
    RESULT,
    SHARED_SUMS,
    THREADS,
    counts,
    integers,
    number,
    over,
    product_of,
)
from lowbit_cuda.port import Access, Kernel, Numbers, Parameter

# **Elementwise operations and norms.**


def rms_norm() -> Kernel:
    """Each token, scaled to a root mean square of 1 and then by the gain."""

    def check(numbers: Numbers) -> None:
        counts(numbers, "tokens", "columns", most={"tokens": MOST_TOKENS})
        if not 2.0**-126 <= float(numbers["epsilon"]) <= 3.4028234663852886e38:
            raise ArgumentError("epsilon", numbers["epsilon"], "2^-126 to the largest float32")

    return Kernel(
        name="rms_norm",
        source="between.cuh",
        parameters=(
            RESULT,
            Parameter("x", "float32", "read", product_of("tokens", "columns")),
            Parameter("gain", "float32", "read", product_of("columns")),
            *integers("tokens", "columns"),
            Parameter("epsilon", "float32"),
        ),
        grid=lambda n: (number(n, "tokens"), 1, 1),
        block=THREADS,
        shared=lambda n: SHARED_SUMS,
        check=check,
    )


def _elements(name: str, *spans: tuple[str, Access]) -> Kernel:
    count = product_of("count")
    return Kernel(
        name=name,
        source="between.cuh",
        parameters=(*(Parameter(given, "float32", access, count) for given, access in spans), *integers("count")),
        grid=over(count),
        block=THREADS,
        check=lambda numbers: counts(numbers, "count"),
    )


def swiglu() -> Kernel:
    """silu(gate) ⊗ up."""
    return _elements("swiglu", ("y", "write"), ("gate", "read"), ("up", "read"))


def add() -> Kernel:
    """Y = Y + X."""
    return _elements("add", ("y", "update"), ("x", "read"))


def combine() -> Kernel:
    """Y = Y + the weighted answers of each token's k experts, T × k × N, added in the order in which they are stored.

    The caller stores them by ascending expert, whatever the order in which they were computed. The weights may be in
    host memory, where they were computed.
    """
    return Kernel(
        name="combine",
        source="between.cuh",
        parameters=(
            Parameter("y", "float32", "update", product_of("tokens", "columns")),
            Parameter("answers", "float32", "read", product_of("tokens", "experts", "columns")),
            Parameter("weights", "float32", "read", product_of("tokens", "experts"), host=True),
            *integers("tokens", "experts", "columns"),
        ),
        grid=lambda n: (-(-number(n, "columns") // THREADS), number(n, "tokens"), 1),
        block=THREADS,
        check=lambda numbers: counts(numbers, "tokens", "experts", "columns", most={"tokens": MOST_TOKENS}),
    )


# **Gathering and scattering rows.**


def _rows_kernel(name: str, target: Parameter, source: Parameter) -> Kernel:
    def check(numbers: Numbers) -> None:
        counts(numbers, "count", "columns", most={"count": MOST_TOKENS})
        counts(numbers, "rows", "columns")

    index = Parameter("index", "int32", "read", product_of("count"))
    return Kernel(
        name=name,
        source="between.cuh",
        parameters=(target, source, index, *integers("count", "rows", "columns")),
        grid=lambda n: (-(-number(n, "columns") // THREADS), number(n, "count"), 1),
        block=THREADS,
        check=check,
    )


def gather(table: str = "float32") -> Kernel:
    """Row i of Y is row index[i] of X, or zeros where X has no such row: tokens of an expert, or an embedding."""
    target = Parameter("y", "float32", "write", product_of("count", "columns"))
    source = Parameter("x", table, "read", product_of("rows", "columns"))
    return _rows_kernel(f"gather_{FLOAT_NAMES[table]}", target, source)


def scatter() -> Kernel:
    """Row index[i] of Y is row i of X; no index occurs twice. Other rows of Y are unchanged."""
    target = Parameter("y", "float32", "write", product_of("rows", "columns"), exact=False)
    source = Parameter("x", "float32", "read", product_of("count", "columns"))
    return _rows_kernel("scatter", target, source)
