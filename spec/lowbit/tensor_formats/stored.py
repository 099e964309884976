r"""Stored matrices: a value with a format, and turning it into numbers.

A `Stored` is a matrix as a file holds it: the name of a format, the sizes, the options, and the arrays. Its constructor
checks all of them, so a kernel never sees bytes that its format does not allow.

**Dequantising** gives each number in a floating-point type of the caller's choice. The exact number is rounded once, or
first to float32 and from there to a 16-bit type, since dequantising kernels do both; the choice is the kernel's, and
the same throughout a call. Where the owner of a format applies scale and zero in steps and rounds each, its chapter
says so, and that is a third choice: in float32 for any result, in 16 bits for a result of that type.

**Quantising** is the way back, for formats whose owner says how numbers become codes: casts of activations, and the
simple casts of weights. The result is exact, byte for byte: ggml computes in float32, and so does the reference. Where
kernels in use differ, in ties or in the inverse of a scale, the format names their choices, and a kernel makes the same
one throughout a call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

import lowbit.tensor_formats
from lowbit.arrays import F64, Activations, Array
from lowbit.contract.checks import check_choice
from lowbit.contract.operation import EXACT, Parameters, operation
from lowbit.contract.signature import FINITE, ONE_TYPE, Shape, checked
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS, rounded
from lowbit.tensor_formats import dense
from lowbit.tensor_formats.table import Format, Sizes, Terms
from lowbit.text import kind_of


def _chapters() -> Iterator[ModuleType]:
    """The modules of this folder that are chapters of formats: all besides this one, by name."""
    for found in sorted(iter_modules(lowbit.tensor_formats.__path__), key=lambda each: each.name):
        if f"{lowbit.tensor_formats.__name__}.{found.name}" != __name__:
            yield import_module(f"{lowbit.tensor_formats.__name__}.{found.name}")


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        found.name: found
        for module in _chapters()
        for found in sorted((each for each in vars(module).values() if isinstance(each, Format)), key=lambda f: f.name)
    }
)
"""All formats by name. To add one, write its chapter."""

OPTIONS = tuple(sorted({name for each in FORMATS.values() for name in each.options}))
"""The names of the options that any format has."""

Result = Literal["float32", "float16", "bfloat16"]
RESULTS: tuple[Result, ...] = get_args(Result)


def check_options(options: object) -> None:
    """Refuse anything but a tuple of names and integers, each name once."""
    pairs = options if isinstance(options, tuple) else ()
    sound = all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and type(each[1]) is int
        for each in pairs
    )
    if not isinstance(options, tuple) or not sound or len({each[0] for each in pairs}) < len(pairs):
        raise ArgumentError(
            "options", "of another form", "a tuple of pairs, such as (('bits', 4), ('group_size', 128))"
        )


@dataclass(frozen=True, eq=False)
class Stored:
    """A matrix K × N in a format.

    >>> import numpy as np
    >>> Stored("q8_0", rows=32, columns=1, tensors=(np.zeros((1, 34), np.uint8),)).values.shape
    (32, 1)

    Attributes:
        format: a name of `FORMATS`.
        rows: K, the length of the sums of ``y = x W``.
        columns: N.
        tensors: the arrays of the format's table, in its order.
        options: name and value of each option of the format.

    Raises:
        ArgumentError: no such format; sizes, options or arrays that it does not allow.
    """

    format: str
    rows: int
    columns: int
    tensors: tuple[Array, ...]
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_choice("format", self.format, list(FORMATS))
        check_options(self.options)
        if not isinstance(self.tensors, tuple):
            raise ArgumentError("tensors", kind_of(self.tensors), "a tuple of arrays")
        if len(self.tensors) != len(self.table.tensors):
            names = ", ".join(each.name for each in self.table.tensors)
            raise ArgumentError("number of tensors", len(self.tensors), f"{len(self.table.tensors)}: {names}")
        self.table.checked(self.by_name, self.sizes)

    @property
    def table(self) -> Format:
        """The format."""
        return FORMATS[self.format]

    @property
    def sizes(self) -> Sizes:
        """The sizes by the names of the table."""
        return self.table.sizes(self.rows, self.columns, dict(self.options))

    @property
    def by_name(self) -> dict[str, Array]:
        """The arrays by the names of the table."""
        return {row.name: each for row, each in zip(self.table.tensors, self.tensors, strict=True)}

    @property
    def terms(self) -> Terms:
        """The exact numbers, in the two parts that kernels sum."""
        return self.table.terms(self.by_name, self.sizes)

    @property
    def values(self) -> Array:
        """float64, K × N: the exact numbers."""
        return self.terms.values

    @property
    def sums(self) -> F64 | None:
        """float64, N × blocks: the sums stored in blocks of activations, if their format has them."""
        sums = self.table.sums
        return None if sums is None else sums(self.table.fields_of(self.by_name))

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(each.nbytes for each in self.tensors)

    def with_columns(self, index: npt.NDArray[np.integer[Any]]) -> "Stored":
        """The matrix with column ``index[n]`` as column n; for block formats and floats, whose columns are rows of an
        array.

        Raises:
            ArgumentError: a format whose columns share bytes.
        """
        if self.table.block is None and self.format not in dense.NAMES:
            apart = ", ".join(name for name, each in FORMATS.items() if each.block or name in dense.NAMES)
            raise ArgumentError("format of a matrix whose columns are chosen", repr(self.format), apart)
        return replace(self, columns=len(index), tensors=(np.ascontiguousarray(self.tensors[0][index]),))

    @property
    def parameters(self) -> Parameters:
        """Its choices, by the names under which a backend declares what it handles."""
        return {"format": self.format, **dict(self.options), "rows": self.rows, "columns": self.columns}


def stored(format: str, rows: int, columns: int, tensors: Mapping[str, Array], **options: int) -> Stored:
    """A stored matrix from arrays by name.

    Raises:
        ArgumentError: no such format; arrays or options that it does not have; anything that `Stored` refuses.
    """
    check_choice("format", format, list(FORMATS))
    table = FORMATS[format]
    if tensors.keys() != {each.name for each in table.tensors}:
        raise ArgumentError("tensors", sorted(tensors), ", ".join(each.name for each in table.tensors))
    named = tuple((name, options[name]) for name in table.options if name in options)
    if len(named) != len(options):
        raise ArgumentError(f"options of {format}", sorted(options), ", ".join(table.options) or "none")
    return Stored(format, rows, columns, tuple(tensors[each.name] for each in table.tensors), named)


@checked
def dequantize(weights: Stored, result: Result = "float32") -> Array:
    """The numbers of a stored matrix, each rounded once.

    Args:
        weights: K × N.
        result: the type of the result.

    Returns:
        K × N of that type (float32, float16, or ml_dtypes bfloat16); numbers beyond its largest become infinite.

    Raises:
        ArgumentError: not a `Stored`; an unknown type.
    """
    return rounded(weights.values, result)


def dequantized(weights: Stored, result: Result) -> Iterator[Array]:
    """The allowed results of `dequantize`, K × N of the type of the result: each choice once, the reference first.

    Args:
        weights, result: as for `dequantize`, which checks them; not checked again.
    """
    yield rounded(weights.values, result)
    if result != "float32":
        yield rounded(rounded(weights.values, "float32").astype(np.float64), result)
    if weights.table.stepwise is not None:
        numbers = weights.table.stepwise(weights.table.fields_of(weights.by_name), weights.sizes)
        if numbers.dtype in (np.float32, FLOATS[result].dtype):
            yield rounded(numbers.astype(np.float64), result)


operation(
    "formats.dequantize",
    "Stored matrix to numbers",
    dequantize,
    promise=EXACT,
    source="the owners of the formats",
    clauses={
        "C1": "Each element is the number that the format's table gives, rounded once to the type of the result, or "
        "to float32 and then to that type, or computed in the steps that the format's chapter names; the same way in "
        "every element of a call. A zero may have either sign.",
        "C2": "The result is K × N of the type that was asked for, whatever the values of unused bits are.",
    },
)


def _check_quantize(x: Array, format: str, options: tuple[tuple[str, int], ...] = ()) -> None:
    encoding = [name for name, each in FORMATS.items() if each.encode]
    check_choice("format", format, encoding)
    check_options(options)
    at = FORMATS[format].sizes(x.shape[1], x.shape[0], dict(options))
    for each in FORMATS[format].tensors:
        each.sizes(at)


@checked(also=_check_quantize)
def quantize(
    x: Annotated[Activations, Shape("N", "K"), FINITE, ONE_TYPE],
    format: str,
    options: tuple[tuple[str, int], ...] = (),
) -> Stored:
    """Numbers in a format, as encoded by its owner's reference.

    >>> import numpy as np
    >>> quantize(np.linspace(-1, 1, 32, dtype=np.float32)[np.newaxis], "q8_0").tensors[0][0, :4].tolist()
    [8, 32, 129, 137]

    Args:
        x: float32, float16 or bfloat16, which a cast widens first, N × K, finite: each row becomes a column of the
            matrix, so T rows of activations become K × T.
        format: one that defines how numbers become codes.
        options: name and value of each option of the format.

    Returns:
        K × N.

    Raises:
        ArgumentError: no such format, or one without a rule; sizes or options that it does not allow; a scale that its
            dtype cannot hold, or whose inverse is infinite.
    """
    return quantized(x, format, options)


def quantized(
    x: Activations,
    format: str,
    options: tuple[tuple[str, int], ...] = (),
    choice: str | None = None,
    judged: Stored | None = None,
) -> Stored:
    """Numbers in a format, by one of the choices of its `encode`.

    Args:
        x, format, options: as for `quantize`, which checks them; not checked again.
        choice: a name in the format's `encode`; None for the reference of its owner.
        judged: a cast of the same numbers under test. If the format has a field of float32 sums, this cast adopts those
            of `judged` that some order of summation can give.

    Raises:
        ArgumentError: as for `quantize`.
    """
    table = FORMATS[format]
    at = table.sizes(x.shape[1], x.shape[0], dict(options))
    other = None if judged is None else judged.by_name
    fields = table.encoded(np.ascontiguousarray(x.T, np.float64), at, choice, other)
    return Stored(format, at.K, at.N, table.tensors_of(fields, at), options)


def _parameters(x: Any, format: str, options: tuple[tuple[str, int], ...] = ()) -> Parameters:
    return {"format": format, **dict(options), "rows": x.shape[1], "columns": x.shape[0]}


operation(
    "formats.quantize",
    "Numbers to stored matrix",
    quantize,
    promise=EXACT,
    source="the owners of the formats",
    parameters=_parameters,
    clauses={
        "C1": "Every code, scale, minimum and sum is that of the owner's reference, or of one of the choices that the "
        "format's chapter names, the same in every block of a call. A zero may have either sign, and codes whose scale "
        "is 0 may be any. A mean that a format stores may be summed in any order, and the fields that follow from it "
        "are exact for the mean that was stored.",
        "C2": "A block depends on its own numbers only.",
    },
)
