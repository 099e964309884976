"""What a test says to the code under test, beside `Remote`'s own methods."""

from typing import Any

from lowbit.affine import Floats, QuantizedMatrix


class BrokenPromiseError(AssertionError):
    """A verdict on the way a call was made rather than on its result; the first word of its text is the verdict."""


def frozen(*arrays: Any) -> None:
    pass


def freeze(matrix: QuantizedMatrix) -> QuantizedMatrix:
    return matrix


def prepare(backend: Any, matrix: QuantizedMatrix) -> Any:
    return backend.prepare(matrix)


def multiply(linear: Any, x: Floats, vectors: int) -> Floats:
    return linear.guarded(x, vectors)  # type: ignore[no-any-return]
