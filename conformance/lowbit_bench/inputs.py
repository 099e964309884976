"""What is measured: an operation, its formats and types, and its sizes.

A product has a matrix K × N and rows of activations; any other operation (`lowbit_bench.layers`) has the sizes that it
has in a model.

The values of a matrix do not affect speed as long as they are usual numbers: subnormal numbers are slow on some
processors. So matrices are drawn as the conformance suite draws them, and activations are normal numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.backend import Backend
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.numbers.floats import FLOATS
from lowbit.quantization import bfp
from lowbit.quantization.affine import quantize
from lowbit.quantization.packing import BITS, check_rows
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Stored
from lowbit.tensor_formats.stored import quantize as cast
from lowbit_conformance.suite.format_inputs import FormatCase, activation_options, drawn

Shape = tuple[int, int]

PRESETS: Mapping[str, tuple[Shape, ...]] = MappingProxyType(
    {
        "smollm2-135m": ((576, 576), (576, 192), (576, 1536), (1536, 576)),
        "qwen2.5-0.5b": ((896, 896), (896, 128), (896, 4864), (4864, 896)),
        "llama-7b": ((4096, 4096), (4096, 11008), (11008, 4096)),
        "sweep": ((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192)),
    }
)
"""K × N, y = x W: the linear layers of models, and squares."""

OWN = ("linear.qgemv", "linear.qgemm", "linear.qgemm_bfp")
STORED = ("linear.gemv", "linear.gemm", "linear.gemm_cast")
PRODUCTS = (*OWN, *STORED)
USUAL = MappingProxyType({"bits": 4, "group_size": 128, "blocksize": 64, "block_size": 32, "scale_group": 64})
"""Defaults for the options of formats."""
TILE = 512
"""Number of random columns; wider matrices repeat them, which does not affect kernels."""
MOST_WEIGHTS = 2**31
"""Largest number of weights of a matrix; larger ones would take hours to draw."""
USUAL_RESULT = 128.0
"""The magnitude of a usual float16 result, far below the largest float16, 65504."""


@dataclass(frozen=True)
class Problem:
    """One call of an operation.

    Attributes:
        operation: one of `PRODUCTS`, or of `lowbit_bench.layers.OTHERS`.
        sizes: ``rows`` K, ``columns`` N and ``batch`` T of a product; of another operation those of a model.
        format: of the stored matrix; empty for the specification's own.
        options: of the format, or ``bits`` and ``group_size`` of the specification's own.
        activations: their type, or the format in which they are stored.
        result: its type.
    """

    operation: str
    sizes: tuple[tuple[str, int], ...]
    format: str
    options: tuple[tuple[str, int], ...]
    activations: str
    result: str

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Problem":
        """Restore a problem from lists made by `dataclasses.asdict` and JSON."""
        pairs = {name: tuple((key, value) for key, value in fields[name]) for name in ("sizes", "options")}
        return cls(**{**fields, **pairs})

    def size(self, name: str) -> int:
        """One of its sizes."""
        return dict(self.sizes)[name]

    @property
    def rows(self) -> int:
        """K of a product."""
        return self.size("rows")

    @property
    def columns(self) -> int:
        """N of a product."""
        return self.size("columns")

    @property
    def batch(self) -> int:
        """T, the tokens."""
        return self.size("batch")

    @property
    def id(self) -> str:
        """The heading of the comparison."""
        options = "".join(f" {name}={value}" for name, value in self.options)
        what = f" {self.format}" if self.format else ""
        sizes = dict(self.sizes)
        first = f"{sizes.pop('rows')}x{sizes.pop('columns')}" if "rows" in sizes else ""
        words = [first, *(f"{name} {value}" for name, value in sizes.items())]
        usual = "float32" if self.operation == "linear.gemm_cast" else self.activations
        types = self.activations if self.result == usual else f"{self.activations} to {self.result}"
        return f"{self.operation}{what}{options} {types} {' '.join(filter(None, words))}"


def problem(
    operation: str, shape: Shape, batch: int, format: str, activations: str, result: str, given: Mapping[str, int]
) -> Problem:
    """A problem from the arguments of the command line.

    Raises:
        ArgumentError: a format is missing, unknown or not applicable; the format does not have a type or option; the
            format cannot have these sizes.
    """
    if operation in ("linear.qgemv", "linear.gemv") and batch != 1:
        raise ArgumentError("--batch", batch, f"1, since {operation} multiplies one vector")
    rows, columns = shape
    if rows * columns > MOST_WEIGHTS:
        raise ArgumentError("--shape", f"{rows}x{columns}", f"at most {MOST_WEIGHTS} weights")
    sizes = (("rows", rows), ("columns", columns), ("batch", batch))
    if operation in OWN:
        if format:
            sentence = f"--format is not possible: {operation} has the specification's own format"
            raise ArgumentError("--format", format, "none", sentence)
        check_choice("--activations", activations or "float32", ("float32",))
        check_choice("--result", result or "float32", ("float32",))
        return Problem(operation, sizes, "", own_options(rows, given), "float32", "float32")
    check_choice("--format", format, tuple(FORMATS))
    table = FORMATS[format]
    check_known(given, tuple(table.options), f"the format {format}")
    options = tuple((name, given.get(name, USUAL.get(name, 1))) for name in table.options)
    table.sizes(rows, columns, dict(options))
    if operation == "linear.gemm_cast":
        check_choice("--activations", activations, [name for name, each in FORMATS.items() if each.encode])
    else:
        check_choice("--activations", activations, RESULTS)
    check_choice("--result", result, RESULTS)
    return Problem(operation, sizes, format, options, activations, result)


def own_options(rows: int, given: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The options of the specification's own layout; a group has at most the rows of the matrix.

    Raises:
        ArgumentError: another option, a width that does not exist, or rows that do not fill its units.
    """
    check_known(given, ("bits", "group_size"), "the specification's own layout")
    bits, group_size = (given.get(name, USUAL[name]) for name in ("bits", "group_size"))
    check_choice("--option bits", bits, BITS)
    check_integer("--option group_size", group_size, 1)
    check_rows("K of --shape", rows, bits)
    return ("bits", bits), ("group_size", min(group_size, rows))


def check_known(given: Mapping[str, int], known: Sequence[str], of: str) -> None:
    """Refuse options with other names.

    Raises:
        ArgumentError: there is one.
    """
    for name in given:
        if name not in known:
            raise ArgumentError("--option", repr(name), f"{spoken(known) or 'no option'}, of {of}")


# **Making the inputs.**


def weights_of(problem: Problem) -> Any:
    """The matrix: a `QuantizedMatrix` or a `Stored`."""
    options = dict(problem.options)
    if not problem.format:
        rng = np.random.default_rng(problem.rows)
        weights = rng.normal(size=(problem.rows, min(problem.columns, TILE))).astype(np.float32)
        return quantize(wide(weights, problem.columns), bits=options["bits"], group_size=options["group_size"])
    return drawn_matrix(problem.format, problem.rows, problem.columns, problem.options)


def drawn_matrix(format: str, rows: int, columns: int, options: tuple[tuple[str, int], ...]) -> Stored:
    """A matrix of a format; if columns are stored separately, wide matrices repeat the random columns."""
    whole = FORMATS[format].block is None
    case = FormatCase(
        "linear.gemm/C2", "random", "", format, rows, columns if whole else min(columns, TILE), options=options
    )
    matrix = drawn(case, powers=False)
    if matrix.columns == columns:
        return matrix
    tensors = tuple(wide(each.T, columns).T for each in matrix.tensors)
    return Stored(format, rows, columns, tuple(map(np.ascontiguousarray, tensors)))


def wide(array: Array, columns: int) -> Array:
    """Columns, repeated up to this number."""
    return np.ascontiguousarray(np.tile(array, -(-columns // array.shape[1]))[:, :columns])


def activations_of(problem: Problem, deviation: float = 0.0) -> Any:
    """The activations: an array, blocks, or a `Stored`.

    Args:
        problem: a product.
        deviation: of the weights, if known. With it, float16 activations are so small that results do not overflow.
    """
    x = np.random.default_rng(problem.rows).normal(size=(problem.batch, problem.rows)).astype(np.float32)
    if "float16" in (problem.activations, problem.result):
        x *= np.float32(shrinking(deviation * problem.rows**0.5))
    if problem.operation == "linear.qgemm_bfp":
        return bfp.cast(x, ACTIVATIONS)
    if problem.operation == "linear.gemm_cast":
        return cast(x, problem.activations, activation_options(problem.activations))
    typed = x.astype(FLOATS["float32" if problem.operation in OWN else problem.activations].dtype)
    return typed[0] if problem.operation.endswith("gemv") else typed


def shrinking(result: float) -> float:
    """The power of two, at most 1, that scales activations so that a result of this magnitude becomes a usual one.

    >>> shrinking(20000.0), shrinking(0.0)
    (0.00390625, 1.0)
    """
    return float(2.0 ** np.floor(np.log2(USUAL_RESULT / result))) if result > USUAL_RESULT else 1.0


Call = Callable[[], Any]


def prepared(backend: Backend, problem: Problem, weights: Any) -> tuple[Any, int]:
    """The matrix in the backend's own form, and the bytes of it that a call reads.

    A backend of stored matrices that has no prepared form is called with the matrix itself.

    Raises:
        LowbitError: the backend does not declare the problem, or cannot prepare the matrix.
    """
    if not problem.format:
        own = backend.prepare(weights)
        return own, own.nbytes
    if type(backend)._prepare_stored is not Backend._prepare_stored:
        stored = backend.prepare_stored(weights)
        return stored, stored.nbytes
    return weights, weights.nbytes


def call_of(backend: Backend, problem: Problem, weights: Any, x: Any) -> Call:
    """The product as a call without arguments."""
    method = problem.operation.partition(".")[2]
    if not problem.format:
        multiply = getattr(weights, method)
        return lambda: multiply(x)
    if isinstance(weights, Stored):
        return lambda: backend.run(problem.operation, x, weights, problem.result)
    multiply = getattr(weights, method)
    return lambda: multiply(x, problem.result)


def options_of(texts: Sequence[str]) -> dict[str, int]:
    """Options ``NAME=NUMBER`` of a format.

    Raises:
        ArgumentError: another form.
    """
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (value.isascii() and value.isdigit()):
            raise ArgumentError("--option", repr(text), "NAME=NUMBER, such as group_size=64")
        found[name] = int(value)
    return found


def shape_of(text: str) -> Shape:
    """``KxN``.

    Raises:
        ArgumentError: another form.
    """
    rows, _, columns = text.partition("x")
    if not (text.isascii() and rows.isdigit() and columns.isdigit() and int(rows) and int(columns)):
        raise ArgumentError("--shape", repr(text), f"KxN, such as 4096x11008, or a --preset: {spoken(list(PRESETS))}")
    return int(rows), int(columns)
