"""The linear layers of a PyTorch model: which of them can be quantised, and why not the others.

A layer is chosen by its name in the model, and what cannot be replaced is told with the reason, never passed over:
a layer of another class may compute something else, a hook would be lost, and some modules of torch read the weights of
the layers in them instead of calling them.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import BITS, check_rows
from lowbit_torch.operator import torch

WIDENED = (torch.float16, torch.bfloat16)
"""The dtypes each of whose numbers is a float32 number."""


def linears_named(model: torch.nn.Module, names: Sequence[str]) -> list[tuple[torch.nn.Linear, list[str]]]:
    """The Linears of a model of whose names one fits, in its order, each with all the names that fit.

    Args:
        model: may hold a layer in several places.
        names: full names or patterns; ``*`` stands for any characters, dots too.

    Raises:
        ArgumentError: the model is itself a Linear, or a name or pattern fits none.
    """
    if isinstance(model, torch.nn.Linear):
        raise ArgumentError("model", "a Linear itself", "a module that holds Linears; see QuantLinear.from_linear")
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear)
    }
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in linears):
            known = ", ".join([*linears][:8]) + (", …" if len(linears) > 8 else "")
            raise ArgumentError("names", repr(pattern), f"what fits a Linear of the model: {known or 'it has none'}")
    found: dict[int, tuple[torch.nn.Linear, list[str]]] = {}
    for name, linear in linears.items():
        if any(fnmatchcase(name, pattern) for pattern in names):
            found.setdefault(id(linear), (linear, []))[1].append(name)
    return list(found.values())


def check_sizes(in_features: int, bits: int, group_size: int | None) -> int:
    """The group size of a layer, K where None is given.

    Raises:
        ArgumentError: K does not fill whole units of codes, or the group size is not 1 to K.
    """
    check_choice("bits", bits, BITS)
    check_integer("in_features", in_features, 1)
    check_rows("in_features", in_features, bits)
    if group_size is None:
        return in_features
    check_integer("group_size", group_size, 1, in_features)
    return group_size


def peculiarity(linear: torch.nn.Module) -> str:
    """Why a layer may not be taken for a ``torch.nn.Linear`` with weights to round, in words; empty if it may."""
    if type(linear) is not torch.nn.Linear:
        return f"a {type(linear).__name__}, which may compute otherwise than torch.nn.Linear"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks, which would be lost"
    for name, tensor in (("weights", linear.weight), ("bias", linear.bias)):
        if tensor is not None and tensor.dtype not in (torch.float32, *WIDENED):
            return f"{name} in {tensor.dtype}, not float32, float16 or bfloat16"
        if tensor is not None and tensor.device.type not in ("cpu", "meta"):
            return f"{name} on {tensor.device}, not on the CPU"
    return ""


def dependence(model: torch.nn.Module, name: str) -> str:
    """Why the module around a layer needs its float weights, in words; empty if it does not, as far as is known."""
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        return "TransformerEncoderLayer reads the weights of its layers itself"
    return ""
