"""Operations other than products: with the sizes that they have in a model, and normal numbers.

An operation is called as a decoder calls it, without a check of its arguments at each call (`Backend.unchecked`). Bytes
are those of its arguments and its result. One that keeps a state is opened and takes its steps anew in each call.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from lowbit.attention.rope import half_split, rotation
from lowbit.backend import Backend
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp_dot import dot
from lowbit.quantization.bfp_storage import store
from lowbit.quantization.packing import pack
from lowbit.tensor_formats.stored import FORMATS, RESULTS, Result
from lowbit_bench.inputs import USUAL, Problem, check_known, drawn_matrix
from lowbit_bench.offline import CHOICES, OFFLINE, STEPS
from lowbit_bench.sizes import MODELS, Inputs, stored_part

EPSILON, THETA = 1e-5, 10000.0
Make = Callable[[Inputs], tuple[Any, ...]]
ATTENTION = ("attention.attend", "attention.attend_shaped", "attention.attend_stored")
"""The operations whose queries are those of the last tokens of the context."""
NEWEST = 32
"""Number of new tokens beside a stored cache."""
HEADS = ("heads", "kv_heads", "head_dim", "context", "batch")
FULL: Mapping[str, tuple[tuple[str, ...], Make]] = MappingProxyType(
    {
        **OFFLINE,
        "blocks.rms_norm": (("hidden", "batch"), lambda i: (i.normal(i.batch, i.hidden), i.normal(i.hidden), EPSILON)),
        "blocks.swiglu": (("inner", "batch"), lambda i: (i.normal(i.batch, i.inner), i.normal(i.batch, i.inner))),
        "blocks.geglu": (("inner", "batch"), lambda i: (i.normal(i.batch, i.inner), i.normal(i.batch, i.inner))),
        "blocks.clamped_swiglu": (
            ("inner", "batch"),
            lambda i: (i.normal(i.batch, i.inner), i.normal(i.batch, i.inner), 7.0),
        ),
        "blocks.soft_cap": (("hidden", "batch"), lambda i: (i.normal(i.batch, i.hidden), 30.0)),
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
        "attention.attend_shaped": (
            HEADS,
            lambda i: (
                i.normal(i.batch, i.heads, i.head_dim),
                i.normal(i.kv_heads, i.context, i.head_dim),
                i.normal(i.kv_heads, i.context, i.head_dim),
                None,
                None,
                50.0,
                i.normal(i.heads),
            ),
        ),
        "attention.attend_stored": (
            HEADS,
            lambda i: (i.normal(i.batch, i.heads, i.head_dim), i.cache("keys"), i.cache("values")),
        ),
        "attention.attend_residual": (
            HEADS,
            lambda i: (
                i.normal(i.batch, i.heads, i.head_dim),
                i.cache("keys"),
                i.cache("values"),
                i.normal(NEWEST, i.kv_heads, i.head_dim),
                i.normal(NEWEST, i.kv_heads, i.head_dim),
            ),
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
"""For each operation, the names of its sizes and a function that makes its arguments."""

OTHERS = tuple(FULL)
STORED_CACHES = ("attention.attend_residual", "attention.attend_stored")
WITH_FORMAT = (*STORED_CACHES, "formats.dequantize", "formats.quantize")
WITHOUT_TYPES = (
    *("bfp.", "packing.", "affine.", "pooling.", "gptq.", "hqq.", "ksort.", "blocking.", "floats.", "offload."),
    "kvcache.bfp",
)
"""Prefixes of the names of operations whose arguments have only one type."""


def types_of(operation: str) -> tuple[Result, ...]:
    """The types that the arguments may have, the usual one first."""
    if operation == "kvcache.kivi":
        return RESULTS[1:]
    return RESULTS[:1] if operation.startswith(WITHOUT_TYPES) else RESULTS


def sizes_of(operation: str) -> tuple[str, ...]:
    """The names of the sizes that an operation other than a product has."""
    return FULL[operation][0]


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
    """A problem from the arguments of the command line.

    Raises:
        ArgumentError: the model is unknown; a format is missing, unknown or not applicable; the format does not have a
            type or option; the format cannot have these sizes.
    """
    check_choice("--preset", model, tuple(MODELS))
    check_choice("--activations", activations, types_of(operation))
    check_choice("--result", result, RESULTS)
    names, _ = FULL[operation]
    known = {**dataclasses.asdict(MODELS[model]), "context": context, "batch": batch}
    sizes = tuple((name, known[name]) for name in names)
    if operation in ATTENTION and context < batch:
        sentence = f"--context is {context}; allowed: at least {batch}, because it holds the tokens of --batch too"
        raise ArgumentError("--context", context, f"at least {batch}", sentence)
    if operation not in WITH_FORMAT:
        if format:
            raise ArgumentError("--format", format, "none", f"--format is not possible: {operation} has no format")
        check_known(given, (), operation)
        check_choice("--result", result, (activations,))
        return Problem(operation, sizes, "", (), activations, activations)
    check_choice("--format", format, tuple(FORMATS))
    table = FORMATS[format]
    check_known(given, tuple(table.options), f"the format {format}")
    options = tuple((name, given.get(name, USUAL.get(name, 1))) for name in table.options)
    at = dict(sizes)
    if operation != "formats.dequantize":
        check_choice("--result", result, (activations,))
    if operation in STORED_CACHES:
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
        LowbitError: the backend does not declare it for these arguments.
    """
    own, choices = copy.deepcopy(arguments), CHOICES.get(problem.operation, {})
    parameters = OPERATIONS[problem.operation].parameters(*own, **choices)
    call = partial(backend.unchecked(problem.operation, parameters), *own, **choices)
    if problem.operation not in STEPS:
        return call
    steps = STEPS[problem.operation](Inputs(problem))

    def opened() -> list[Any]:
        state = call()
        answers = [state.step(*each) for each in steps]
        getattr(state, "close", lambda: None)()
        return answers

    return opened


def bytes_of(value: Any) -> int:
    """The bytes of all arrays in arguments or a result."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple | list):
        return sum(map(bytes_of, value))
    if dataclasses.is_dataclass(value):
        return sum(bytes_of(getattr(value, each.name)) for each in dataclasses.fields(value))
    return 0
