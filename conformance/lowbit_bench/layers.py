"""Operations other than products: with the sizes that they have in a model, and normal numbers.

An operation is called as a decoder calls it, without a check of its arguments at each call
(`Backend.unchecked`). Bytes are those of its arguments and its result. Operations that keep a state between calls, such
as `kvcache.bfp`, are not timed.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.attention.rope import half_split, rotation
from lowbit.backend import Backend
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.numbers.floats import FLOATS
from lowbit.operations import OPERATIONS
from lowbit.quantization import bfp
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp_dot import dot
from lowbit.quantization.bfp_storage import store
from lowbit.quantization.packing import pack
from lowbit.tensor_formats.stored import FORMATS, RESULTS
from lowbit_bench.inputs import USUAL, Problem, drawn_matrix

EPSILON, THETA = 1e-5, 10000.0


@dataclass(frozen=True)
class Model:
    """Sizes of a model: of the hidden state and the feed-forward layer, heads of queries and of keys, their channels;
    experts, and those that a token needs."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 8
    chosen: int = 2


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "smollm2-135m": Model(576, 1536, 9, 3, 64),
        "qwen2.5-0.5b": Model(896, 4864, 14, 2, 64),
        "llama-7b": Model(4096, 11008, 32, 32, 128),
        "mixtral-8x7b": Model(4096, 14336, 32, 8, 128),
    }
)
CONTEXT = 1024


def stored_part(format: str, options: Mapping[str, int], part: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The format of keys or values, with its options: KIVI's differ, and as many numbers share a scale in both."""
    name = format.replace("keys", part)
    known = {"bits": 4, "tokens": 32, "group_size": options.get("tokens", 32)} | dict(options)
    return name, tuple((each, known.get(each, USUAL.get(each, 1))) for each in FORMATS[name].options)


class Inputs:
    """Draws the arguments of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self._rng = problem, np.random.default_rng(sum(value for _, value in problem.sizes))

    def __getattr__(self, size: str) -> int:
        return self.problem.size(size)

    def normal(self, *shape: int, deviation: float = 1.0) -> Array:
        """Normal numbers of the type of the activations."""
        numbers = self._rng.normal(scale=deviation, size=shape).astype(np.float32)
        return numbers.astype(FLOATS[next(each for each in RESULTS if each == self.problem.activations)].dtype)

    def weights(self, *shape: int) -> Array:
        """Of a size that leaves results near 1."""
        return self.normal(*shape, deviation=shape[-2] ** -0.5)

    def codes(self) -> Array:
        """Codes of 4 bits, hidden × inner."""
        return self._rng.integers(0, 16, (self.hidden, self.inner), np.uint8)

    def blocks(self, rows: int, columns: int) -> bfp.Blocks:
        return bfp.cast(self.normal(rows, columns), ACTIVATIONS)

    def cache(self, part: str) -> Any:
        """Keys or values of all heads in the format of the problem."""
        name, options = stored_part(self.problem.format, dict(self.problem.options), part)
        return drawn_matrix(name, self.kv_heads * self.head_dim, self.context, options)

    def chosen_experts(self) -> Array:
        every = [self._rng.permutation(self.experts)[: self.chosen] for _ in range(self.batch)]
        return np.array(every, np.int64)


Make = Callable[[Inputs], tuple[Any, ...]]
HEADS, EXPERTS = (
    ("heads", "kv_heads", "head_dim", "context", "batch"),
    ("hidden", "inner", "experts", "chosen", "batch"),
)
FULL: Mapping[str, tuple[tuple[str, ...], Make]] = MappingProxyType(
    {
        "blocks.rms_norm": (("hidden", "batch"), lambda i: (i.normal(i.batch, i.hidden), i.normal(i.hidden), EPSILON)),
        "blocks.swiglu": (("inner", "batch"), lambda i: (i.normal(i.batch, i.inner), i.normal(i.batch, i.inner))),
        "rope.rotate": (
            ("heads", "head_dim", "batch"),
            lambda i: (i.normal(i.batch, i.heads, i.head_dim), rotation(half_split(i.head_dim), THETA, 0, i.batch)),
        ),
        "attention.softmax": (("heads", "context", "batch"), lambda i: (i.normal(i.batch * i.heads, i.context),)),
        "attention.attend": (
            HEADS,
            lambda i: (
                i.normal(i.batch, i.heads, i.head_dim),
                i.normal(i.kv_heads, i.context, i.head_dim),
                i.normal(i.kv_heads, i.context, i.head_dim),
            ),
        ),
        "attention.attend_stored": (
            HEADS,
            lambda i: (i.normal(i.batch, i.heads, i.head_dim), i.cache("keys"), i.cache("values")),
        ),
        "routing.gate": (
            ("hidden", "experts", "batch"),
            lambda i: (i.normal(i.batch, i.hidden), i.weights(i.hidden, i.experts)),
        ),
        "routing.top_k": (("experts", "chosen", "batch"), lambda i: (i.normal(i.batch, i.experts), i.chosen)),
        "routing.weights": (
            ("experts", "chosen", "batch"),
            lambda i: (i.normal(i.batch, i.experts), i.chosen_experts()),
        ),
        "routing.expert": (
            ("hidden", "inner", "batch"),
            lambda i: (
                i.normal(i.batch, i.hidden),
                i.weights(i.hidden, i.inner),
                i.weights(i.hidden, i.inner),
                i.weights(i.inner, i.hidden),
            ),
        ),
        "bfp.cast": (("hidden", "batch"), lambda i: (i.normal(i.batch, i.hidden), ACTIVATIONS)),
        "bfp.decode": (("hidden", "batch"), lambda i: (i.blocks(i.batch, i.hidden),)),
        "bfp.store": (("hidden", "batch"), lambda i: (i.blocks(i.batch, i.hidden),)),
        "bfp.load": (("hidden", "batch"), lambda i: (store(i.blocks(i.batch, i.hidden)),)),
        "bfp.dot": (
            ("head_dim", "context", "batch"),
            lambda i: (i.blocks(i.batch, i.head_dim), i.blocks(i.context, i.head_dim)),
        ),
        "bfp.total": (
            ("head_dim", "context", "batch"),
            lambda i: (dot(i.blocks(i.batch, i.head_dim), i.blocks(i.context, i.head_dim)),),
        ),
        "packing.pack": (("hidden", "inner"), lambda i: (i.codes(), 4)),
        "packing.unpack": (("hidden", "inner"), lambda i: (pack(i.codes(), 4), 4)),
        "affine.dequantize": (
            ("hidden", "inner"),
            lambda i: (quantize(i.normal(i.hidden, i.inner), bits=4, group_size=64),),
        ),
        "formats.dequantize": (
            ("hidden", "inner"),
            lambda i: (drawn_matrix(i.problem.format, i.hidden, i.inner, i.problem.options), i.problem.result),
        ),
        "formats.quantize": (
            ("hidden", "batch"),
            lambda i: (i.normal(i.batch, i.hidden), i.problem.format, i.problem.options),
        ),
        "pooling.pool": (
            ("hidden", "heads", "kv_heads", "head_dim"),
            lambda i: (i.normal(i.hidden, i.heads * i.head_dim), i.heads, i.kv_heads),
        ),
        "gptq.hessian": (("hidden", "batch"), lambda i: (i.normal(i.batch, i.hidden),)),
    }
)
"""By operation the sizes that it has, and its arguments."""

OTHERS = tuple(FULL)
WITH_FORMAT = ("attention.attend_stored", "formats.dequantize", "formats.quantize")
WITHOUT_TYPES = ("bfp.", "packing.", "affine.", "pooling.", "gptq.")
"""Beginnings of the names of operations whose arguments have one type only."""


def other_problem(
    operation: str,
    model: str,
    context: int,
    batch: int,
    format: str,
    activations: str,
    result: str,
    given: Mapping[str, int],
) -> Problem:
    """A problem from what the command line says.

    Raises:
        ArgumentError: another operation or model; a format that is missing, unknown or not wanted; a type or an option
            that it does not have; sizes that the format cannot have.
    """
    check_choice("--op", operation, OTHERS)
    check_choice("--preset", model, tuple(MODELS))
    check_choice("--activations", activations, RESULTS[:1] if operation.startswith(WITHOUT_TYPES) else RESULTS)
    check_choice("--result", result, RESULTS)
    names, _ = FULL[operation]
    known = {**dataclasses.asdict(MODELS[model]), "context": context, "batch": batch}
    sizes = tuple((name, known[name]) for name in names)
    if operation not in WITH_FORMAT:
        if format:
            raise ArgumentError("--format", format, f"leaving it out, since {operation} has none")
        return Problem(operation, sizes, "", (), activations, activations)
    check_choice("--format", format, tuple(FORMATS))
    table = FORMATS[format]
    options = tuple((name, given.get(name, USUAL.get(name, 1))) for name in table.options)
    at = dict(sizes)
    if operation == "attention.attend_stored":
        _, options = stored_part(format, given, "keys")
        for part in ("keys", "values"):
            name, chosen = stored_part(format, dict(options), part)
            FORMATS[name].sizes(at["kv_heads"] * at["head_dim"], context, dict(chosen))
    elif operation == "formats.dequantize":
        table.sizes(at["hidden"], at["inner"], dict(options))
    else:
        check_choice("--format", format, [name for name, each in FORMATS.items() if each.encode])
        table.sizes(at["hidden"], batch, dict(options))
    return Problem(operation, sizes, format, options, activations, result)


def arguments_of(problem: Problem) -> tuple[Any, ...]:
    """The arguments of a call."""
    _, make = FULL[problem.operation]
    return make(Inputs(problem))


def call_of_other(backend: Backend, problem: Problem, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """The operation as a call without arguments, on a copy of these.

    Raises:
        LowbitError: the backend does not declare it, or not for these arguments.
    """
    parameters = OPERATIONS[problem.operation].parameters(*arguments)
    return partial(backend.unchecked(problem.operation, parameters), *copy.deepcopy(arguments))


def bytes_of(value: Any) -> int:
    """The bytes of all arrays in arguments or a result."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple | list):
        return sum(map(bytes_of, value))
    if dataclasses.is_dataclass(value):
        return sum(bytes_of(getattr(value, each.name)) for each in dataclasses.fields(value))
    return 0
