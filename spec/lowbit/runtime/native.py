"""Which matrices a backend would multiply by natively, from its declaration and the headers of a model.

`lowbit.runtime.linears` gives each matrix to the backend as it is stored, if the backend declares the product. Any
other matrix is dequantised to float32 first, which takes 4 bytes for each weight, and is multiplied by numpy, or in
float32 by a backend that runs whole models. Here the same question is asked before any weight is read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowbit.backend.base import Declaration
from lowbit.backend.registry import DEFAULT_ORDER
from lowbit.contract.operation import Parameters
from lowbit.contract.ranges import Range
from lowbit.linear.integer import ACTIVATIONS
from lowbit.runtime.inspection import Matrices
from lowbit.runtime.linears import CONTRACTS, FLOATS, Contract, cast_for, has_whole_blocks
from lowbit.tensor_formats import dense
from lowbit.tensor_formats.stored import FORMATS

Operations = Mapping[str, Mapping[str, Any]]
"""The operations in a description from `lowbit.backend.asking.ask`, with their limits."""

UNPREPARED = "the backend prepares no stored matrices, so models give it none"
UNDESCRIBED = "no format of lowbit.tensor_formats describes it"
NO_INTEGERS = "linear.qgemm_bfp is not declared"
"""In this case a backend refuses the whole contract, even for matrices in the bytes of a format."""
REQUANTISED: Parameters = {"bits": 4, "group_size": 64, "convention": "minimum", "scale_dtype": "float16"}
"""The choices of a matrix quantised with --bits 4 --group-size 64."""


@dataclass
class Products:
    """How a backend multiplies by the matrices of one type.

    Attributes:
        type: as in `lowbit.runtime.inspection.Held`.
        is_quantised: whether they are not floats.
        matrices: how many there are.
        native: for each contract, how many the backend multiplies by in their stored form.
        lacking: for each contract, why it does not multiply by the others, and how many matrices for each reason.
    """

    type: str
    is_quantised: bool
    matrices: int = 0
    native: Counter[Contract] = field(default_factory=Counter)
    lacking: dict[Contract, Counter[str]] = field(default_factory=lambda: {each: Counter() for each in CONTRACTS})

    def add(self, contract: Contract, count: int, missing: str) -> None:
        """Count matrices that a backend multiplies by, or those for which something is missing."""
        if missing:
            self.lacking[contract][missing] += count
        else:
            self.native[contract] += count

    @property
    def is_native(self) -> bool:
        """Whether it multiplies by all of them in float32 in their stored form."""
        return self.native["float32"] == self.matrices


def products(operations: Operations, matrices: Iterable[Matrices], *, prepares_stored: bool) -> list[Products]:
    """How a backend with these declarations multiplies by each type of matrix.

    Args:
        operations: of the backend.
        matrices: of the model.
        prepares_stored: whether the backend can prepare matrices in the bytes of a format.
    """
    found: dict[str, Products] = {}
    for each in matrices:
        choices = each.choices
        is_quantised = choices is not None and choices.get("format") not in dense.NAMES
        row = found.setdefault(each.type, Products(each.type, is_quantised))
        row.matrices += each.count
        for contract in CONTRACTS:
            row.add(contract, each.count, _missing(operations, contract, choices, prepares_stored))
    return list(found.values())


def _missing(operations: Operations, contract: Contract, choices: Parameters | None, prepares_stored: bool) -> str:
    """Why a backend does not multiply natively by a matrix; empty if it does."""
    if choices is None:
        return FLOATS
    if choices.get("format") == "":
        return UNDESCRIBED
    if contract == "integer" and "linear.qgemm_bfp" not in operations:
        return NO_INTEGERS
    missing = UNPREPARED
    if "format" not in choices or prepares_stored:
        missing = lacks(operations, *_call(contract, choices)) or _uncut(contract, choices)
    return FLOATS if missing and choices.get("format") in dense.NAMES else missing


def _uncut(contract: Contract, choices: Parameters) -> str:
    """Why activations cannot be cast; empty if they can, or need not be."""
    rows = choices.get("rows")  # some headers do not say how many
    if contract == "float32" or "format" not in choices or not isinstance(rows, int):
        return ""
    activations = cast_for(FORMATS[str(choices["format"])])
    return "" if has_whole_blocks(rows, activations) else f"linear.gemm_cast lacks rows {rows} of {activations}"


def _call(contract: Contract, choices: Parameters) -> tuple[str, Parameters]:
    """The operation for one token, and its parameters."""
    if "format" not in choices:
        return ("linear.qgemv", choices) if contract == "float32" else _blocks(choices)
    operation, activations = "linear.gemv", "float32"
    if contract == "integer":
        operation, activations = "linear.gemm_cast", cast_for(FORMATS[str(choices["format"])])
    return operation, {**choices, "activations": activations, "result": "float32", "batch": 1}


def _blocks(choices: Parameters) -> tuple[str, Parameters]:
    return "linear.qgemm_bfp", {**choices, **ACTIVATIONS.parameters}


def lacks(operations: Operations, operation: str, parameters: Parameters) -> str:
    """A description of what is not declared for a call; empty if everything is declared.

    >>> limits = {"linear.gemv": {"format": ["q4_k"], "rows": {"multiple": 256, "least": 256, "most": None}}}
    >>> lacks(limits, "linear.gemv", {"format": "q4_k", "rows": 512})
    ''
    >>> lacks(limits, "linear.gemv", {"format": "q6_k"}), lacks(limits, "linear.qgemv", {"bits": 4})
    ('linear.gemv lacks format q6_k', 'linear.qgemv is not declared')
    """
    if operation not in operations:
        return f"{operation} is not declared"
    limits = operations[operation]
    declared = {name: Range(**each) if isinstance(each, dict) else tuple(each) for name, each in limits.items()}
    missing = Declaration(declared).lacks(parameters)
    return f"{operation} lacks {missing}" if missing else ""


def advice(name: str, found: Mapping[str, list[Products]], operations: Operations, *, runs: bool) -> str:
    """Advice about the matrices that a backend does not multiply by natively, in one sentence.

    Args:
        name: of the backend.
        found: what each usable backend does, this one included.
        operations: of this backend.
        runs: whether lowbit runs the model.
    """
    slow = [each for each in found[name] if not each.is_native]
    if not runs:
        if not any(each.is_quantised for each in found[name]):
            return "No matrix is quantised."
        packed = [each for each in slow if each.is_quantised]
        return f"It has {f'no kernels for {_types(packed)}' if packed else 'kernels for every quantised matrix'}."
    if not slow:
        return "Nothing to do: every matrix is multiplied as it is stored."
    other = _native_elsewhere(name, found, {each.type for each in slow})
    if other is not None:
        return f"Use --backend {other}, which multiplies by {_types(slow)} as stored."
    if not lacks(operations, "linear.qgemv", REQUANTISED):
        return f"Use --bits 4 --group-size 64: {name} multiplies natively by what that makes of {_types(slow)}."
    return "Use another backend: it has no products for these matrices, nor for what --bits 4 makes of them."


def _types(found: Iterable[Products]) -> str:
    return ", ".join(each.type for each in found)


def _native_elsewhere(name: str, found: Mapping[str, list[Products]], types: set[str]) -> str | None:
    """The first backend, from the fastest, that multiplies natively by all of these types; None if there is none."""
    fastest_first = [*(each for each in DEFAULT_ORDER if each in found), *(each for each in found)]
    for other in fastest_first if types else ():
        if other != name and types <= {each.type for each in found[other] if each.is_native}:
            return other
    return None
