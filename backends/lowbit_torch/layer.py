"""A linear layer for PyTorch with quantised weights, computed by any backend.

`QuantLinear` takes the place of ``torch.nn.Linear``: the same inputs and outputs, weights of 2, 3, 4 or 8 bits, and a
product computed by a lowbit backend. `replace_linears` replaces the layers of a model by name.

``torch.nn.Linear.weight`` is N × K and lowbit's W is K × N, so weights are transposed when a layer is made. PyTorch
traces the operator of `lowbit_torch.operator`, which also says how long prepared weights are kept and what has a
gradient.

**Contents of a layer.** A layer holds only tensors, so ``state_dict``, ``copy.deepcopy``, ``pickle``, ``torch.save``
and safetensors work unchanged. A backend prepares its own form of the weights when the layer is first called.

============  ===========================  ==================================================================
``words``     int32, K · bits / 32 × N     the codes: the bits of the uint32 words of the chapter `packing`
``scales``    float32 or float16, G × N
``zeros``     as scales, or uint8, G × N   ``minimum`` or ``zero_point``
``bias``      float32, N                   optional; added in float32
``layout``    int64, 5                     in the state dict only: its version (1), bits, K, group_size, convention
============  ===========================  ==================================================================

**Nothing is rounded silently.** ``model.half()`` and ``model.to(torch.bfloat16)`` leave these tensors as they are.
Activations are float32. Those of float16 and bfloat16 are refused unless the layer was made with ``cast=True``; then
they are widened to float32, which is exact, and the result is rounded once to the dtype of the input, after the bias
was added. The integer contract, which casts activations to 8-bit mantissas (chapter `integer`), must be asked for by
name. float64 is always refused. A layer stays on the CPU, or on ``meta``, where it has no values yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from lowbit.backend import load
from lowbit.contract.checks import check_choice, check_instance, check_integer
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import (
    CONVENTIONS,
    SCALE_DTYPES,
    Convention,
    QuantizedMatrix,
    ScaleDtype,
    quantize,
)
from lowbit.quantization.packing import BITS, WORD_BITS
from lowbit_torch.linears import WIDENED, check_sizes, dependence, linears_named, peculiarity
from lowbit_torch.operator import CONTRACTS, PRODUCT, Weights, engine, forget, matrix_of, torch

LAYOUT = 1
"""Version of the contents of a state dict."""


# **The layer.**


class QuantLinear(torch.nn.Module):
    """``y = x W + bias`` with quantised weights, for inference.

    A new layer has weights of zero, for ``load_state_dict`` to fill; `from_linear` and `from_matrix` make a layer
    with its weights.

    Attributes:
        in_features: K.
        out_features: N.
        bits, group_size, convention: as in `lowbit.quantization.affine.QuantizedMatrix`.
        backend: the name of the backend that computes.
        contract: ``float32``, the operations `linear.qgemv` and `linear.qgemm`; or ``integer``, `linear.qgemm_bfp`.
        cast: whether activations may be float16 and bfloat16.

    Args:
        in_features, out_features, bits, convention, contract, cast: the attributes.
        backend: its name; None for the default, the first of `lowbit.backend.DEFAULT_ORDER` that can run here.
        group_size: 1 to K, or None for K, which is one group per column.
        scale_dtype: ``float32`` or ``float16``.
        bias: whether the layer has one.

    Raises:
        ArgumentError: an argument is wrong. Whether the backend can run is checked when the layer is first called.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        convention: Convention = "minimum",
        scale_dtype: ScaleDtype = "float32",
        bias: bool = True,
        backend: str | None = None,
        contract: str = "float32",
        cast: bool = False,
    ) -> None:
        super().__init__()
        check_options(bits, convention, scale_dtype, backend, contract, cast)
        check_integer("out_features", out_features, 1)
        group_size = check_sizes(in_features, bits, group_size)
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size, self.convention = bits, group_size, convention
        self.backend, self.contract, self.cast = backend_name(backend), contract, cast
        groups, stored = -(-in_features // group_size), getattr(torch, scale_dtype)
        zero = stored if convention == "minimum" else torch.uint8
        words = torch.zeros(in_features * bits // WORD_BITS, out_features, dtype=torch.int32)
        self.register_buffer("words", words)
        self.register_buffer("scales", torch.ones(groups, out_features, dtype=stored))
        self.register_buffer("zeros", torch.zeros(groups, out_features, dtype=zero))
        self.register_buffer("bias", torch.zeros(out_features, dtype=torch.float32) if bias else None)

    @classmethod
    def from_matrix(
        cls,
        matrix: QuantizedMatrix,
        bias: torch.Tensor | None = None,
        *,
        backend: str | None = None,
        contract: str = "float32",
        cast: bool = False,
    ) -> Self:
        """A layer with the weights of a quantised matrix, which are copied.

        Args:
            matrix: K × N.
            bias: float32, N, copied; or None.
            backend, contract, cast: as in `QuantLinear`.

        Raises:
            ArgumentError: an argument is wrong.
        """
        check_instance("matrix", matrix, QuantizedMatrix)
        with torch.device("meta"):  # the tensors are set below
            layer = cls(
                matrix.rows,
                matrix.columns,
                bits=matrix.bits,
                group_size=matrix.group_size,
                convention=matrix.convention,
                scale_dtype=str(matrix.scales.dtype),  # type: ignore[arg-type]  # the matrix has been checked
                bias=bias is not None,
                backend=backend,
                contract=contract,
                cast=cast,
            )
        layer.words = torch.from_numpy(np.array(matrix.words).view(np.int32))
        layer.scales = torch.from_numpy(np.array(matrix.scales))
        layer.zeros = torch.from_numpy(np.array(matrix.zeros))
        if bias is not None:
            check_bias(bias, matrix.columns)
            layer.bias = bias.detach().cpu().clone()
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        bits: int = 4,
        group_size: int | None = 128,
        convention: Convention = "minimum",
        scale_dtype: ScaleDtype = "float32",
        backend: str | None = None,
        contract: str = "float32",
        cast: bool = False,
    ) -> Self:
        """A layer with the weights of a ``torch.nn.Linear``, rounded to nearest by `affine.quantize`.

        A Linear on ``meta`` has no values; it gives a layer on ``meta``, for ``load_state_dict(…, assign=True)``.

        Args:
            linear: weights and bias are float32, float16 or bfloat16, finite, and on the CPU.
            bits, group_size, convention, scale_dtype, backend, contract, cast: as in `QuantLinear`.

        Raises:
            ArgumentError: an argument is wrong, K does not fill whole units, or the layer has another class.
        """
        check_options(bits, convention, scale_dtype, backend, contract, cast)
        if reason := peculiarity(linear):
            raise ArgumentError("linear", reason, "a plain torch.nn.Linear with weights that float32 can hold")
        rows, size = linear.in_features, check_sizes(linear.in_features, bits, group_size)
        choices: dict[str, Any] = {"bits": bits, "group_size": size, "convention": convention}
        choices["scale_dtype"] = scale_dtype
        shared: dict[str, Any] = {"backend": backend, "contract": contract, "cast": cast}
        if linear.weight.is_meta:
            with torch.device("meta"):
                return cls(rows, linear.out_features, bias=linear.bias is not None, **choices, **shared)
        weights = np.ascontiguousarray(linear.weight.detach().float().numpy().T)
        bias = None if linear.bias is None else linear.bias.detach().float()
        matrix = quantize(weights, **choices)
        return cls.from_matrix(matrix, bias, **shared)

    def matrix(self) -> QuantizedMatrix:
        """The weights as a `QuantizedMatrix` that shares the memory of this layer's tensors.

        Raises:
            ArgumentError: the tensors are on ``meta``, or hold values that a quantised matrix cannot have.
        """
        return matrix_of(self._weights())

    def _weights(self) -> Weights:
        return Weights(self.words, self.scales, self.zeros, self.bits, self.group_size, self.convention)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x W + bias``.

        Args:
            x: float32, any leading dimensions, K in the last; with `cast` also float16 and bfloat16.

        Returns:
            the dtype and leading dimensions of x, N in the last.

        Raises:
            ArgumentError: x has a wrong dtype, shape or device, or, under the integer contract, is not finite.
            UnavailableError: the backend cannot run here.
            NotDeclaredError: the backend does not declare the operation for these weights.
        """
        given = x.dtype
        if self.cast and given in WIDENED:
            x = x.float()
        y = PRODUCT(x, *self._weights(), self.backend, self.contract)
        if self.bias is not None:
            y = y + self.bias
        return y if given == torch.float32 else y.to(given)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}, convention={self.convention}, "
            f"backend={self.backend}, contract={self.contract}, cast={self.cast}"
        )

    # Called by PyTorch when a model is moved, saved and loaded.

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Accept a move to the CPU or to ``meta``; refuse any other device; ignore a change of dtype."""
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                if moved.device.type not in ("cpu", "meta"):
                    raise ArgumentError("device of QuantLinear", moved.device, "cpu: lowbit computes there")
                self._buffers[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
        return self

    def _layout(self) -> list[int]:
        return [LAYOUT, self.bits, self.in_features, self.group_size, CONVENTIONS.index(self.convention)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "layout"] = torch.tensor(self._layout(), dtype=torch.int64, device="cpu")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load all tensors, or none if one of them is wrong."""
        given = {name: state_dict[prefix + name] for name in (*self._buffers, "layout") if prefix + name in state_dict}
        try:
            self._check_state(given)
        except ArgumentError as error:
            error_msgs.append(f"{prefix.rstrip('.') or 'QuantLinear'}: {error}")
            return
        if strict and "layout" not in given:
            missing_keys.append(prefix + "layout")
        unexpected: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs)
        unexpected_keys += [name for name in unexpected if name != prefix + "layout"]
        forget(self._weights())

    def _check_state(self, given: dict[str, torch.Tensor]) -> None:
        """Refuse tensors of another layout, shape or dtype, and values that a quantised matrix cannot have."""
        if "layout" in given and given["layout"].tolist() != self._layout():
            allowed = f"{self._layout()}: version, bits, in_features, group_size, convention"
            raise ArgumentError("layout", given["layout"].tolist(), allowed)
        for name, tensor in self._buffers.items():
            if tensor is None or name not in given:
                continue
            if given[name].shape != tensor.shape:
                raise ArgumentError(f"shape of {name}", tuple(given[name].shape), str(tuple(tensor.shape)))
            check_choice(f"dtype of {name}", given[name].dtype, (tensor.dtype,))
        if {"words", "scales", "zeros"} <= given.keys() and not given["words"].is_meta:
            matrix_of(self._weights()._replace(**{name: given[name].cpu() for name in ("words", "scales", "zeros")}))


def backend_name(given: str | None) -> str:
    """The name that was given, or that of the default backend."""
    if given is not None:
        return given
    with load() as default:
        return default.name


def check_options(bits: int, convention: str, scale_dtype: str, backend: str | None, contract: str, cast: bool) -> None:
    """Check the options that do not depend on weights."""
    check_choice("bits", bits, BITS)
    check_choice("convention", convention, CONVENTIONS)
    check_choice("scale_dtype", scale_dtype, SCALE_DTYPES)
    check_choice("contract", contract, tuple(CONTRACTS))
    check_choice("cast", cast, (True, False))
    if not isinstance(backend, str | None):
        raise ArgumentError("backend", repr(backend), "a name, or None for the default")


def check_bias(bias: torch.Tensor, columns: int) -> None:
    """Refuse a bias that is not float32, N."""
    check_choice("dtype of bias", getattr(bias, "dtype", None), (torch.float32,))
    if tuple(bias.shape) != (columns,):
        raise ArgumentError("shape of bias", tuple(bias.shape), f"({columns},)")


# **A whole model.** Layers are chosen by name; the report gives the reason for each layer that was not replaced.


@dataclass(frozen=True)
class Replacement:
    """The result of `replace_linears`.

    Attributes:
        replaced: names of the layers that were replaced, in the order of the model.
        skipped: names of the matching layers that were not replaced, with the reason.
    """

    replaced: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def replace_linears(
    model: torch.nn.Module,
    names: str | Sequence[str] = "*",
    *,
    bits: int = 4,
    group_size: int | None = 128,
    convention: Convention = "minimum",
    scale_dtype: ScaleDtype = "float32",
    backend: str | None = None,
    contract: str = "float32",
    cast: bool = False,
) -> Replacement:
    """Replace each ``torch.nn.Linear`` whose name matches by a `QuantLinear`, one after another.

    A layer that the model holds in several places is quantised once and replaced in all of them.

    Args:
        model: changed in place.
        names: full names of layers or patterns, for example ``layers.*.mlp.*``; ``*`` also matches dots.
        bits, group_size, convention, scale_dtype, backend, contract, cast: as in `QuantLinear`.

    Raises:
        ArgumentError: an option is wrong, or a name matches no Linear of the model.
        UnavailableError: the backend cannot run here.
        NotDeclaredError: the backend does not declare the products for these options. After any of these errors the
            model is unchanged.
    """
    check_options(bits, convention, scale_dtype, backend, contract, cast)
    backend = backend_name(backend)
    choices: dict[str, Any] = {"bits": bits, "convention": convention, "scale_dtype": scale_dtype}
    shared: dict[str, Any] = {"backend": backend, "contract": contract, "cast": cast}
    report = Replacement()
    chosen = linears_named(model, [names] if isinstance(names, str) else names)
    for linear, places in chosen:
        if reason := _obstacle(model, linear, places, bits, group_size):
            report.skipped.update(dict.fromkeys(places, reason))
        else:
            size = linear.in_features if group_size is None else group_size
            engine(backend).check_declared(choices | {"group_size": size}, contract)
    while chosen:
        linear, places = chosen.pop(0)  # its float weights can be freed before the next layer is quantised
        if places[0] in report.skipped:
            continue
        try:
            layer = QuantLinear.from_linear(linear, group_size=group_size, **choices, **shared).train(linear.training)
        except ArgumentError as error:  # its values are not finite, or too large for the dtype of scales
            report.skipped.update(dict.fromkeys(places, str(error)))
            continue
        for place in places:
            model.set_submodule(place, layer)
        report.replaced.extend(places)
    return report


def _obstacle(
    model: torch.nn.Module, linear: torch.nn.Linear, places: Sequence[str], bits: int, group_size: int | None
) -> str:
    """Why a layer cannot be replaced, judged without its values; empty if it can."""
    try:
        check_sizes(linear.in_features, bits, group_size)
    except ArgumentError as error:
        return str(error)
    return peculiarity(linear) or next(filter(None, (dependence(model, place) for place in places)), "")
