"""How far a result may lie from the exact one: the bounds of the specification, each called like its operation.

Those of products with affine and stored matrices, and of attention to a stored cache, are not here. They depend on the
type in which a kernel holds its weights, which a declaration, a vector and a diagnosis each know in a different way.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowbit.arrays import F64
from lowbit.attention.bounds import attend_bound, attend_shaped_bound, softmax_bound
from lowbit.attention.rope import rotate_bound
from lowbit.contract.rounding import Arithmetic, Bound
from lowbit.linear.integer_bounds import integer_bound
from lowbit.model.bounds import clamped_swiglu_bound, geglu_bound, rms_norm_bound, soft_cap_bound, swiglu_bound
from lowbit.moe.bounds import expert_bound, gate_bound, sparse_bound, weights_bound
from lowbit.operations import OPERATIONS
from lowbit.quantization.gptq_bounds import hessian_bound, targets_bound
from lowbit.quantization.hqq import qgemv_bound
from lowbit.quantization.hqq_solver import step_bound

BOUNDS: Mapping[str, Callable[..., Bound]] = {
    "attention.attend": attend_bound,
    "attention.attend_shaped": attend_shaped_bound,
    "attention.softmax": softmax_bound,
    "blocks.clamped_swiglu": clamped_swiglu_bound,
    "blocks.geglu": geglu_bound,
    "blocks.rms_norm": rms_norm_bound,
    "blocks.soft_cap": soft_cap_bound,
    "blocks.swiglu": swiglu_bound,
    "gptq.hessian": hessian_bound,
    "gptq.targets": targets_bound,
    "hqq.qgemv": qgemv_bound,
    "hqq.step": step_bound,
    "linear.qgemm_bfp": integer_bound,
    "rope.rotate": rotate_bound,
    "routing.expert": expert_bound,
    "routing.gate": gate_bound,
    "routing.sparse": sparse_bound,
    "routing.weights": weights_bound,
}
"""Each takes all arguments of its operation in order, the declared arithmetic, and the exact result."""


def bound_of(operation: str, arguments: Iterable[Any], arithmetic: Arithmetic, exact: F64, **options: Any) -> Bound:
    """The bound of one call, which may leave out arguments that have a default.

    Args:
        operation: one of `BOUNDS`.
        arguments: of the call, in their order.
        arithmetic: what the backend declares.
        exact: the reference's result.
        options: of the bound itself, besides the arguments of the operation.
    """
    call = inspect.signature(OPERATIONS[operation].compute).bind(*arguments)
    call.apply_defaults()
    return BOUNDS[operation](*call.args, arithmetic, exact, **options)
