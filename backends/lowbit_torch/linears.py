"""Which linear layers of a PyTorch model can be quantised, and why the others cannot.

Layers are chosen by their names in the model. A layer that cannot be replaced is reported with the reason: a layer of
another class may compute something else, a hook would be lost, and some modules of PyTorch read the weights of their
layers instead of calling them.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.packing import check_rows
from lowbit_torch.operator import torch

WIDENED = (torch.float16, torch.bfloat16)
"""The dtypes whose values are all float32 values."""


def linears_named(model: torch.nn.Module, names: Sequence[str]) -> list[tuple[torch.nn.Linear, list[str]]]:
    """The Linears of a model that have a matching name, in the order of the model, each with all matching names.

    Args:
        model: may hold one layer in several places.
        names: full names or patterns; ``*`` matches any characters, including dots.

    Raises:
        ArgumentError: the model is itself a Linear, or a name or pattern matches none.
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
            raise ArgumentError("names", repr(pattern), f"the name of a Linear of the model: {known or 'it has none'}")
    found: dict[int, tuple[torch.nn.Linear, list[str]]] = {}
    for name, linear in linears.items():
        if any(fnmatchcase(name, pattern) for pattern in names):
            found.setdefault(id(linear), (linear, []))[1].append(name)
    return list(found.values())


def check_sizes(in_features: int, bits: int, group_size: int | None) -> int:
    """The group size of a layer with a valid number of bits; K if None is given.

    Raises:
        ArgumentError: K does not fill whole units of codes, or the group size is not 1 to K.
    """
    check_integer("in_features", in_features, 1)
    check_rows("in_features", in_features, bits)
    if group_size is None:
        return in_features
    check_integer("group_size", group_size, 1, in_features)
    return group_size


def peculiarity(linear: torch.nn.Module) -> str:
    """Why a layer cannot be treated as a ``torch.nn.Linear`` with weights to quantise; empty if it can."""
    if type(linear) is not torch.nn.Linear:
        return f"a {type(linear).__name__}, which may compute something other than torch.nn.Linear does"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "it has hooks, which would be lost"
    for name, tensor in (("weights", linear.weight), ("bias", linear.bias)):
        if tensor is not None and tensor.dtype not in (torch.float32, *WIDENED):
            return f"{name} in {tensor.dtype}, not float32, float16 or bfloat16"
        if tensor is not None and tensor.device.type not in ("cpu", "meta"):
            return f"{name} on {tensor.device}, not on the CPU"
    return ""


def dependence(model: torch.nn.Module, name: str) -> str:
    """Why the module around a layer needs its float weights; empty if it is not known to."""
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, torch.nn.TransformerEncoderLayer):
        return "TransformerEncoderLayer reads the weights of its layers itself"
    return ""
