"""Signatures: what an annotation asks for is what its check refuses, and the check comes before the function."""

from types import GenericAlias
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from lowbit.arrays import F32, F64, I64
from lowbit.contract.signature import (
    CHOICE,
    FINITE,
    POSITIVE,
    In,
    OneOf,
    Shape,
    Valid,
    View,
    checked,
    described,
    signature_of,
    unchecked,
)
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS


class Matrix:
    """A value of three rows."""

    rows = 3

    @property
    def parameters(self) -> dict[str, object]:
        return {"order": "rows"}


def even(matrix: Matrix) -> None:
    if matrix.rows % 2 == 0:
        raise ArgumentError("rows", matrix.rows, "an odd number")


def distinct(ids: I64, *others: object) -> None:
    if len(set(ids.tolist())) < len(ids):
        raise ArgumentError("ids", "one twice", "distinct ids")


@checked(also=distinct)
def taken(
    ids: Annotated[I64, Shape("k")],
    x: Annotated[F32 | F64, View("T", "matrix.rows"), FINITE],
    scales: Annotated[F32, Shape("k", "k"), POSITIVE],
    matrix: Annotated[Matrix, Valid(even)],
    bits: Annotated[int, OneOf((2, 4))] = 4,
    method: Literal["mean", "first"] = "mean",
    *,
    count: Annotated[int, In(1, "T"), CHOICE] = 1,
    share: Annotated[float, In(0, 0.5)] = 0.25,
    window: Annotated[int, In(1)] | None = None,
) -> str:
    """What all marks together say."""
    return "taken"


IDS, X, SCALES, MATRIX = np.arange(2), np.ones((4, 6))[:, ::2], np.ones((2, 2), np.float32), Matrix()
RIGHT: dict[str, Any] = {"ids": IDS, "x": X, "scales": SCALES, "matrix": MATRIX}


def of_four_rows() -> Matrix:
    made = Matrix()
    made.rows = 4
    return made


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"ids": IDS.astype(np.int32)}, "dtype of ids is int32; allowed: int64"),
    "dtypes": ({"x": X.astype(np.float16)}, "dtype of x is 'float16'; allowed: float32 or float64"),
    "no-array": ({"ids": [0, 1]}, "ids is a list; allowed: a numpy array of int64"),
    "attribute": ({"x": X[:, :2]}, r"shape of x is \(4, 2\); allowed: any x 3"),
    "shared-size": ({"scales": np.ones((3, 3), np.float32)}, r"shape of scales is \(3, 3\); allowed: 2 x 2"),
    "strided": ({"scales": np.ones((2, 4), np.float32)[:, ::2]}, "scales is not contiguous"),
    "not-finite": ({"x": X * np.inf}, r"x\[0, 0\] is inf; allowed: finite numbers"),
    "not-positive": ({"scales": SCALES * 0}, "scales is as low as 0.0; allowed: above 0"),
    "class": ({"matrix": 3}, "matrix is an int; allowed: a .*Matrix"),
    "valid": ({"matrix": of_four_rows(), "x": np.ones((4, 4))}, "rows is 4; allowed: an odd number"),
    "one-of": ({"bits": 3}, "bits is 3; allowed: 2 or 4"),
    "one-of-kind": ({"bits": 4.0}, "bits is 4.0; allowed: 2 or 4"),
    "literal": ({"method": "last"}, "method is 'last'; allowed: mean or first"),
    "low": ({"count": 0}, "count is 0; allowed: an integer from 1 to 4"),
    "high": ({"count": 5}, "count is 5; allowed: an integer from 1 to 4"),
    "number": ({"share": 0.75}, "share is 0.75; allowed: a number from 0 to 0.5"),
    "nan": ({"share": float("nan")}, "share is nan"),
    "beyond-floats": ({"share": 10**400}, "share is 1000.*; allowed: a number from 0 to 0.5"),
    "optional": ({"window": 0}, "window is 0; allowed: an integer of at least 1"),
    "also": ({"ids": np.zeros(2, np.int64)}, "ids is one twice; allowed: distinct ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mark_refuses_what_it_should(name: str) -> None:
    """The right call passes; with one argument changed it does not, and the message says which and what is allowed."""
    changed, text = WRONG[name]
    assert taken(**RIGHT) == taken(*RIGHT.values()) == taken(**RIGHT, window=3) == "taken"
    for refusing in (taken, signature_of(taken).check):
        with pytest.raises(ArgumentError, match=text):
            refusing(**RIGHT | changed)


@pytest.mark.parametrize(
    "array",
    (np.ndarray[Any, np.dtype[np.float32]], GenericAlias(np.ndarray, (np.float32,))),
    ids=["ndarray of a shape and a dtype", "NDArray of a class"],
)
def test_both_forms_of_an_array_type_name_its_elements(array: Any) -> None:
    """numpy 2.5 keeps the class of the elements in ``NDArray[T]``; before, it stands within ``dtype[T]``."""
    assert described("x", Annotated[array, Shape("T")]).classes == (np.float32,)


def test_a_name_that_occurs_twice_is_one_size() -> None:
    """In one array, too."""
    with pytest.raises(ArgumentError, match=r"shape of scales is \(3, 2\); allowed: k x k"):
        square(np.ones((3, 2), np.float32))


@checked
def square(scales: Annotated[F32, Shape("k", "k")]) -> None:
    """Takes a square."""


@pytest.mark.parametrize("arguments", [(), (np.ones((1, 1), np.float32), 2)], ids=["few", "many"])
def test_a_wrong_number_of_arguments_is_pythons_own_error(arguments: tuple[Any, ...]) -> None:
    """As with any function, a missing argument or an unknown name is a TypeError."""
    with pytest.raises(TypeError):
        square(*arguments)
    with pytest.raises(TypeError):
        square(np.ones((1, 1), np.float32), other=1)  # type: ignore[call-arg]  # wrong on purpose


def test_parameters_are_the_choices_of_a_call() -> None:
    """Choices by name, with their defaults, and those of an argument's value; no other number."""
    given = signature_of(taken).parameters(*RIGHT.values(), bits=2, count=3)
    assert given == {"order": "rows", "bits": 2, "method": "mean", "count": 3}


def test_nothing_is_computed_before_the_check() -> None:
    """The function behind the door is never entered with wrong arguments; `unchecked` is that function."""
    entered = []

    @checked
    def function(x: Annotated[F32, Shape("n")]) -> None:
        entered.append(x)

    with pytest.raises(ArgumentError):
        function([1])  # type: ignore[arg-type]  # wrong on purpose
    assert not entered
    unchecked(function)([1])  # type: ignore[arg-type]  # nobody looks
    assert entered == [[1]]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_of_an_operation_is_described(name: str) -> None:
    """None is without an annotation that its check uses, but for those that `also` sees to."""
    signature = OPERATIONS[name].signature
    for each in signature.arguments:
        assert each.classes or each.choices is not None, each.name
