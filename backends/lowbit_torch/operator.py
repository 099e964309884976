"""The product with quantised weights as a PyTorch operator.

PyTorch traces a model to compile or export it, and it cannot see into numpy arrays. An *operator* registered with
``torch.library`` is an opaque node. This module registers

- ``lowbit::qlinear``, ``y = x W`` by any lowbit backend, and
- ``lowbit::dequantize``, the float32 W that the specification assigns to the codes.

Each has a *fake* implementation, which gives the dtype and shape of the result, also for a batch of unknown size, so
that ``torch.compile`` and ``torch.export`` meet no graph break. The real and the fake implementation raise the same
errors.

**Weights are plain tensors.** The operator takes words, scales and zeros, and no handle to a prepared object. So a
traced or exported program is complete, a state dict holds plain tensors, and copying a layer copies tensors. What a
backend prepares from the tensors is kept in `Engine.cache` until one of them is written to or freed, and is made when
it is first needed. The backend gets copies of its own, so weights are in memory twice: as they are stored, and as the
kernel reads them.

**Gradients.** The gradient with respect to x is :math:`g\\,W^\\top` with the dequantised weights, in float32; only
that product rounds. The weights have no gradient, and scales or zeros that require one are refused. The integer
contract rounds x, so it has no gradient either; computing one raises an error.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.arrays import Array
from lowbit.backend import PreparedLinear, load
from lowbit.backend.prepared import placed
from lowbit.contract.checks import check_choice
from lowbit.contract.operation import Parameters
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix, dequantize
from lowbit.quantization.packing import BITS, WORD_BITS

try:
    import torch as torch  # "as" marks a re-export: the other modules import torch from here
except ImportError as error:
    raise UnavailableError(
        "lowbit_torch", f"torch cannot be imported: {error}", "pip install 'lowbit[torch]'"
    ) from error

CONTRACTS = {"float32": ("linear.qgemv", "linear.qgemm"), "integer": ("linear.qgemm_bfp",)}
"""The operations that each contract calls; of ``float32`` the first for one row of x, the second for several."""
SCALES = (torch.float32, torch.float16)


# **Tensors as numpy arrays.** The words are int32 tensors, because few operators of PyTorch support uint32; the bits
# are the same, and the array is a view.


class Weights(NamedTuple):
    """W as the operators take it.

    Attributes:
        words: int32, ``K * bits // 32`` × N, the bits of the uint32 words.
        scales: float32 or float16, G × N.
        zeros: dtype of `scales` (``minimum``) or uint8 (``zero_point``), G × N.
        bits: 2, 3, 4 or 8.
        group_size: 1 to K.
        convention: ``minimum`` or ``zero_point``.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group_size: int
    convention: Convention

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {"words": self.words, "scales": self.scales, "zeros": self.zeros}

    @property
    def rows(self) -> int:
        """K."""
        rows: int = self.words.shape[0] * WORD_BITS // self.bits
        return rows

    @property
    def place(self) -> tuple[Any, ...]:
        """The identity of the tensors' memory and layout, which writes to the tensors do not change."""
        return (*map(place_of, self[:3]), *self[3:])


def matrix_of(weights: Weights) -> QuantizedMatrix:
    """A `QuantizedMatrix` that shares the memory of three tensors.

    Raises:
        ArgumentError: a field of `Weights` is wrong, or `QuantizedMatrix` refuses a value.
    """
    check_weights(weights)
    for name, tensor in weights.tensors.items():
        if tensor.device.type != "cpu":
            raise ArgumentError(f"device of {name}", tensor.device, "cpu")
    words, scales, zeros = (tensor.detach().contiguous().numpy() for tensor in weights.tensors.values())
    return QuantizedMatrix(words.view(np.uint32), scales, zeros, weights.bits, weights.rows, *weights[4:])


def check_weights(weights: Weights) -> None:
    """Refuse tensors with a wrong dtype or number of dimensions; values are not checked."""
    check_choice("bits", weights.bits, BITS)
    check_choice("convention", weights.convention, CONVENTIONS)
    check_choice("dtype of words", weights.words.dtype, (torch.int32,))
    check_choice("dtype of scales", weights.scales.dtype, SCALES)
    zero = weights.scales.dtype if weights.convention == "minimum" else torch.uint8
    check_choice("dtype of zeros", weights.zeros.dtype, (zero,))
    for name, tensor in weights.tensors.items():
        if tensor.dim() != 2:
            raise ArgumentError(f"shape of {name}", tuple(tensor.shape), "2 dimensions")


def check_activations(x: torch.Tensor, rows: int) -> None:
    """Refuse activations with a wrong dtype, length or device."""
    if x.dtype != torch.float32:
        raise ArgumentError("dtype of x", x.dtype, "torch.float32; QuantLinear(cast=True) accepts float16 and bfloat16")
    if x.dim() < 1 or x.shape[-1] != rows:
        raise ArgumentError("shape of x", tuple(x.shape), f"{rows} numbers in the last dimension")
    if x.device.type != "cpu" and not x.is_meta:
        raise ArgumentError("device of x", x.device, "cpu: lowbit computes there")


# **Backends.** Each backend is loaded once per process. A matrix is prepared once, under a lock, however many threads
# ask for it. Unless a backend declares that several threads may call it at once, calls are serialised.


class Engine:
    """A backend, and the weights that it has prepared.

    Attributes:
        backend: the backend.
        cache: for the memory and layout of three tensors, their versions and what was prepared from them.
    """

    def __init__(self, name: str) -> None:
        self.backend = load(name)
        claimed = self.backend.capabilities()
        self.declared, self.alignment, self.overread = claimed.operations, claimed.alignment, claimed.overread
        self.cache: dict[tuple[Any, ...], tuple[tuple[int, ...], PreparedLinear]] = {}
        self._preparing = threading.Lock()
        self._calling = nullcontext() if claimed.concurrent else self._preparing

    def check_declared(self, parameters: Parameters, contract: str) -> None:
        """Refuse weights for which the backend does not declare the operations of a contract.

        Args:
            parameters: of a matrix, as in `lowbit.quantization.affine.QuantizedMatrix.parameters`.
            contract: a name from `CONTRACTS`.

        Raises:
            NotDeclaredError: one of the operations is not declared for these parameters.
        """
        everything = {**parameters, **ACTIVATIONS.parameters} if contract == "integer" else parameters
        for operation in CONTRACTS[contract]:
            declaration = self.declared.get(operation)
            missing = declaration.lacks(everything) if declaration else ""
            if missing or not declaration:
                raise NotDeclaredError(self.backend.name, operation, missing)

    def prepared(self, weights: Weights) -> PreparedLinear:
        """What the backend prepared from the current words, scales and zeros."""
        place, state = weights.place, tuple(map(version_of, weights[:3]))
        found = self.cache.get(place)
        if found is None or found[0] != state:
            with self._preparing:
                found = self.cache.get(place)
                if found is None or found[0] != state:
                    found = state, self.backend.prepare(self._copied(matrix_of(weights)))
                    if place not in self.cache:
                        self._drop_with(weights, place)
                    self.cache[place] = found
        return found[1]

    def _copied(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """A copy with the alignment that the backend asks for; a backend that keeps it keeps no tensor alive."""
        parts = (matrix.words, matrix.scales, matrix.zeros)
        words, scales, zeros = (self.placed(part.shape, part.dtype) for part in parts)
        for copy, part in zip((words, scales, zeros), parts, strict=True):
            np.copyto(copy, part)
        return QuantizedMatrix(words, scales, zeros, matrix.bits, matrix.rows, matrix.group_size, matrix.convention)

    def _drop_with(self, weights: Weights, place: tuple[Any, ...]) -> None:
        """Empty a place of the cache when one of the tensors is freed, before another can occupy the same memory."""
        for tensor in weights[:3]:  # a tensor has one storage object for its whole life
            weakref.finalize(tensor.untyped_storage(), self.cache.pop, place, None).atexit = False

    def placed(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An array aligned to `alignment`, followed by `overread` readable bytes of its own."""
        return placed(shape, dtype, self.alignment, self.overread)

    def multiply(self, prepared: PreparedLinear, x: torch.Tensor, contract: str) -> torch.Tensor:
        """``x W``, written directly to a new tensor, unless the backend needs alignment or overread that it lacks.

        Args:
            prepared: the weights.
            x: float32, any leading dimensions, K in the last.
            contract: a name from `CONTRACTS`.

        Returns:
            float32, the leading dimensions of x, N in the last.
        """
        y = torch.empty((*x.shape[:-1], prepared.columns), dtype=torch.float32)
        if not y.numel():
            return y
        given = x.detach().contiguous().numpy().reshape(-1, prepared.rows)
        out = result = y.numpy().reshape(-1, prepared.columns)
        if self.overread or (self.alignment and (given.ctypes.data | out.ctypes.data) % self.alignment):
            copy, out = self.placed(given.shape, np.float32), self.placed(out.shape, np.float32)
            np.copyto(copy, given)
            given = copy
        with self._calling:
            if contract == "integer":
                prepared.qgemm_cast(given, out)
            elif len(given) == 1:
                prepared.qgemv(given[0], out[0])
            else:
                prepared.qgemm(given, out)
        if out is not result:
            np.copyto(result, out)
        return y


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The identity of a tensor's memory and layout, which writes to the tensor do not change."""
    return id(tensor.untyped_storage()), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes that PyTorch has counted; -1 for tensors of ``torch.inference_mode``, which has no count."""
    return -1 if tensor.is_inference() else int(tensor._version)


def forget(weights: Weights) -> None:
    """Drop what was prepared from words, scales and zeros, whose values have changed."""
    for loaded in list(_engines.values()):
        loaded.cache.pop(weights.place, None)


_engines: dict[str, Engine] = {}
_loading = threading.Lock()


def _reset_after_fork() -> None:
    """Start afresh in a forked child, where no other thread exists to release locks or run a backend's work."""
    global _loading
    _loading = threading.Lock()
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def engine(name: str) -> Engine:
    """The `Engine` of a backend, one for each process.

    Raises:
        ArgumentError: no installed package offers the backend.
        UnavailableError: the backend cannot run here.
    """
    found = _engines.get(name)
    if found is None:
        with _loading:
            found = _engines.get(name) or Engine(name)
            _engines[name] = found
    return found


# **The operators.**

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
WEIGHTS = "Tensor words, Tensor scales, Tensor zeros, int bits, int group_size, str convention"  # as in `Weights`
TRACEABLE = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(f"qlinear(Tensor x, {WEIGHTS}, str backend, str contract) -> Tensor", tags=TRACEABLE)
LIBRARY.define(f"dequantize({WEIGHTS}) -> Tensor", tags=TRACEABLE)


def qlinear(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """``y = x W``, operator ``lowbit::qlinear``.

    Args:
        x: float32, any leading dimensions, K in the last.
        given: the fields of `Weights`, the name of a lowbit backend, and the contract, ``float32`` or ``integer``.

    Returns:
        float32, the leading dimensions of x, N in the last.

    Raises:
        ArgumentError: an argument is wrong.
        UnavailableError: the backend cannot run here.
        NotDeclaredError: the backend does not declare the operation for these weights.
    """
    *weights, backend, contract = given
    check_choice("contract", contract, tuple(CONTRACTS))
    here = engine(backend)  # the weights are checked when they are prepared
    prepared = here.prepared(Weights(*weights))
    check_activations(x, prepared.rows)
    return here.multiply(prepared, x, contract)


def fake_qlinear(x: torch.Tensor, *given: Any) -> torch.Tensor:
    """An empty tensor with the dtype, shape and device of the result of `qlinear`, which raises the same errors."""
    weights, contract = Weights(*given[:-2]), given[-1]
    check_choice("contract", contract, tuple(CONTRACTS))
    check_weights(weights)
    check_activations(x, weights.rows)
    for name, tensor in weights.tensors.items():
        if tensor.device != x.device:  # for example weights on meta, which have no values yet
            raise ArgumentError(f"device of {name}", tensor.device, f"{x.device}, the device of x")
    return x.new_empty((*x.shape[:-1], weights.words.shape[1]))


def dequantized(*given: Any) -> torch.Tensor:
    """The weights by `lowbit.quantization.affine.dequantize`, operator ``lowbit::dequantize``.

    Args:
        given: the fields of `Weights`.

    Returns:
        float32, K × N.

    Raises:
        ArgumentError: an argument is wrong.
    """
    return torch.from_numpy(dequantize(matrix_of(Weights(*given))))


def fake_dequantized(*given: Any) -> torch.Tensor:
    """An empty tensor with the dtype, shape and device of the result of `dequantized`."""
    weights = Weights(*given)
    check_weights(weights)
    return weights.scales.new_empty((weights.rows, weights.words.shape[1]), dtype=torch.float32)


def save_weights(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save what the gradient needs; called only where a gradient is required.

    Raises:
        ArgumentError: scales or zeros require a gradient.
    """
    for place, name in ((2, "scales"), (3, "zeros")):
        if ctx.needs_input_grad[place]:
            raise ArgumentError(f"requires_grad of {name}", True, "False: quantised weights are not trained")
    ctx.save_for_backward(*inputs[1:4])
    ctx.choices, ctx.contract = inputs[4:7], inputs[8]


def gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradient with respect to x, with the dequantised weights.

    Raises:
        ArgumentError: the contract is ``integer``.
    """
    if ctx.contract == "integer":
        raise ArgumentError("contract", "'integer', and a gradient is required", "'float32': rounding has no gradient")
    weights = torch.ops.lowbit.dequantize(*ctx.saved_tensors, *ctx.choices)
    return (grad @ weights.T, *[None] * 8)


# One implementation for every device, so that a tensor on another device raises our error and not the dispatcher's.
LIBRARY.impl("qlinear", qlinear, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", dequantized, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::qlinear", fake_qlinear, lib=LIBRARY)
torch.library.register_fake("lowbit::dequantize", fake_dequantized, lib=LIBRARY)
torch.library.register_autograd("lowbit::qlinear", gradient, setup_context=save_weights, lib=LIBRARY)
PRODUCT = torch.ops.lowbit.qlinear.default
