"""The product with quantised weights as an operator of PyTorch.

PyTorch traces a model to compile or to export it, and numpy arrays are opaque to it. An *operator* that is registered
with ``torch.library`` is a node that it need not look into. Registered here are

- ``lowbit::qlinear``, ``y = x W`` by any lowbit backend, and
- ``lowbit::dequantize``, the float32 W that the specification says the codes stand for.

Each has a *fake* twin, which says dtype and shape of the result, also of a batch whose size is not known yet, so that
``torch.compile`` and ``torch.export`` meet no graph break. Fake and real refuse a wrong argument in the same words.

**Weights are plain tensors.** The operator takes words, scales and zeros and not a handle to something prepared: so a
traced or exported program is complete, a state dict holds plain tensors, and a copy of a layer is a copy of tensors.
What a backend prepares from them is kept in `Engine.shelf` until one of the three is written to or freed, and is made
when first needed. The backend is given copies of its own, so weights are in memory twice: as they are stored, and as
the kernel reads them.

**Gradients.** The gradient with respect to x is :math:`g\\,W^\\top` with the dequantised weights, in float32: exact but
for the roundings of that product. The weights themselves have none, and scales or zeros that ask for one are refused.
The integer contract rounds x, so it has no gradient either, which is said when one is computed.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

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
from lowbit.quantization.bfp import format_parameters
from lowbit.quantization.packing import BITS, WORD_BITS

try:
    import torch as torch  # "as", because the other chapters take it from here, where its absence is put in words
except ImportError as error:
    raise UnavailableError(
        "lowbit_torch", f"torch cannot be imported: {error}", "pip install 'lowbit[torch]'"
    ) from error

CONTRACTS = {"float32": ("linear.qgemv", "linear.qgemm"), "integer": ("linear.qgemm_bfp",)}
"""The operations that a contract calls; of ``float32`` the first for one row of x, the second for several."""
SCALES = (torch.float32, torch.float16)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Words, scales and zeros."""


# **Tensors as numpy sees them.** The words are int32 tensors, because few operators of torch know uint32; the bits are
# the same, and the array is a view.


def matrix_of(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, convention: Convention
) -> QuantizedMatrix:
    """A `QuantizedMatrix` on the memory of three tensors.

    Args:
        words: int32, ``K * bits // 32`` × N, the bits of the uint32 words.
        scales: float32 or float16, G × N.
        zeros: dtype of `scales` (``minimum``) or uint8 (``zero_point``), G × N.
        bits: 2, 3, 4 or 8.
        group_size: 1 to K.
        convention: ``minimum`` or ``zero_point``.

    Raises:
        ArgumentError: any of these does not hold, or a value is one that `QuantizedMatrix` refuses.
    """
    check_weights(words, scales, zeros, bits, convention)
    for name, tensor in (("words", words), ("scales", scales), ("zeros", zeros)):
        if tensor.device.type != "cpu":
            raise ArgumentError(f"device of {name}", tensor.device, "cpu")
    arrays = [tensor.detach().contiguous().numpy() for tensor in (words, scales, zeros)]
    rows = words.shape[0] * WORD_BITS // bits
    return QuantizedMatrix(arrays[0].view(np.uint32), arrays[1], arrays[2], bits, rows, group_size, convention)


def check_weights(words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, convention: str) -> None:
    """Refuse tensors whose dtype or number of dimensions is wrong; their values are not looked at."""
    check_choice("bits", bits, BITS)
    check_choice("convention", convention, CONVENTIONS)
    check_choice("dtype of words", words.dtype, (torch.int32,))
    check_choice("dtype of scales", scales.dtype, SCALES)
    check_choice("dtype of zeros", zeros.dtype, (scales.dtype if convention == "minimum" else torch.uint8,))
    for name, tensor in (("words", words), ("scales", scales), ("zeros", zeros)):
        if tensor.dim() != 2:
            raise ArgumentError(f"shape of {name}", tuple(tensor.shape), "2 dimensions")


def check_activations(x: torch.Tensor, rows: int) -> None:
    """Refuse activations of another dtype, length or device."""
    if x.dtype != torch.float32:
        raise ArgumentError("dtype of x", x.dtype, "torch.float32; QuantLinear(cast=True) takes float16 and bfloat16")
    if x.dim() < 1 or x.shape[-1] != rows:
        raise ArgumentError("shape of x", tuple(x.shape), f"{rows} numbers in the last dimension")
    if x.device.type != "cpu" and not x.is_meta:
        raise ArgumentError("device of x", x.device, "cpu: lowbit computes there")


# **A backend at work.** Backends are loaded once for the process. A matrix is prepared once, under a lock, however many
# threads ask for it; where a backend does not say that several threads may call it, they take turns.


class Engine:
    """A backend, and what it has prepared.

    Attributes:
        backend: the backend.
        shelf: where three tensors lie in memory, and how they are read, to the state in which they were and what was
            prepared from it.
    """

    def __init__(self, name: str) -> None:
        self.backend = load(name)
        claimed = self.backend.capabilities()
        self.declared, self.alignment, self.overread = claimed.operations, claimed.alignment, claimed.overread
        self.shelf: dict[tuple[Any, ...], tuple[tuple[int, ...], PreparedLinear]] = {}
        self._preparing = threading.Lock()
        self._turn = nullcontext() if claimed.concurrent else self._preparing

    def check_declared(self, parameters: Parameters, contract: str) -> None:
        """Refuse weights for which the backend does not declare the operations of a contract.

        Args:
            parameters: those of a matrix, as `lowbit.quantization.affine.matrix_parameters` has them.
            contract: of `CONTRACTS`.

        Raises:
            NotDeclaredError: one of the operations is not declared, or not for these parameters.
        """
        everything = {**parameters, **format_parameters(ACTIVATIONS)} if contract == "integer" else parameters
        for operation in CONTRACTS[contract]:
            declaration = self.declared.get(operation)
            missing = declaration.lacks(everything) if declaration else ""
            if missing or not declaration:
                raise NotDeclaredError(self.backend.name, operation, missing)

    def prepared(self, tensors: Tensors, bits: int, group_size: int, convention: Convention) -> PreparedLinear:
        """What the backend made of words, scales and zeros as they are now."""
        place = (*map(place_of, tensors), bits, group_size, convention)
        state = tuple(map(version_of, tensors))
        found = self.shelf.get(place)
        if found is None or found[0] != state:
            with self._preparing:
                found = self.shelf.get(place)
                if found is None or found[0] != state:
                    matrix = self._own(matrix_of(*tensors, bits, group_size, convention))
                    found = self._keep(place, state, self.backend.prepare(matrix), tensors)
        return found[1]

    def _own(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """A copy where the backend asks its arrays to lie. One that keeps the arrays keeps no tensor alive."""
        parts = (matrix.words, matrix.scales, matrix.zeros)
        words, scales, zeros = (self.placed(part.shape, part.dtype) for part in parts)
        for copy, part in zip((words, scales, zeros), parts, strict=True):
            np.copyto(copy, part)
        return QuantizedMatrix(words, scales, zeros, matrix.bits, matrix.rows, matrix.group_size, matrix.convention)

    def _keep(
        self,
        place: tuple[Any, ...],
        state: tuple[int, ...],
        prepared: PreparedLinear,
        tensors: Tensors,
    ) -> tuple[tuple[int, ...], PreparedLinear]:
        """Put it on the shelf until one of the tensors is freed, before another can lie in the same place."""
        if place not in self.shelf:  # the storage of a tensor is one Python object as long as it lives
            for tensor in tensors:
                weakref.finalize(tensor.untyped_storage(), self.shelf.pop, place, None).atexit = False
        self.shelf[place] = found = (state, prepared)
        return found

    def placed(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An array at an address that is a multiple of `alignment`, with `overread` bytes after it that are ours."""
        return placed(shape, dtype, self.alignment, self.overread)

    def multiply(self, prepared: PreparedLinear, x: torch.Tensor, contract: str) -> torch.Tensor:
        """``x W``, written to a new tensor and not copied, unless the backend wants arrays where torch has none.

        Args:
            prepared: the weights.
            x: float32, any leading dimensions, K in the last.
            contract: of `CONTRACTS`.

        Returns:
            float32, the leading dimensions of x and N.
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
        with self._turn:
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
    """What stays the same while a tensor is the same numbers read in the same way, but for writes to them."""
    return id(tensor.untyped_storage()), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has written to it; tensors made in ``torch.inference_mode`` are not counted."""
    return -1 if tensor.is_inference() else int(tensor._version)


def forget(tensors: Tensors, bits: int, group_size: int, convention: Convention) -> None:
    """Take from every shelf what was prepared from words, scales and zeros, since their numbers are others now."""
    place = (*map(place_of, tensors), bits, group_size, convention)
    for loaded in list(_engines.values()):
        loaded.shelf.pop(place, None)


_engines: dict[str, Engine] = {}
_loading = threading.Lock()


def _begin_anew() -> None:
    """In a forked child: a lock that another thread held is nobody's there, and backends have left their threads."""
    global _loading
    _loading = threading.Lock()
    _engines.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def engine(name: str) -> Engine:
    """The engine of the backend of this name, the same for the whole process.

    Raises:
        ArgumentError: no installed package offers the backend.
        UnavailableError: it cannot run here.
    """
    found = _engines.get(name)
    if found is None:
        with _loading:
            found = _engines.get(name) or Engine(name)
            _engines[name] = found
    return found


# **The operators.**

LIBRARY = torch.library.Library("lowbit", "FRAGMENT")
WEIGHTS = "Tensor words, Tensor scales, Tensor zeros, int bits, int group_size, str convention"
TRACEABLE = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(f"qlinear(Tensor x, {WEIGHTS}, str backend, str contract) -> Tensor", tags=TRACEABLE)
LIBRARY.define(f"dequantize({WEIGHTS}) -> Tensor", tags=TRACEABLE)


def qlinear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group_size: int,
    convention: Convention,
    backend: str,
    contract: str,
) -> torch.Tensor:
    """``y = x W``, operator ``lowbit::qlinear``.

    Args:
        x: float32, any leading dimensions, K in the last.
        words, scales, zeros, bits, group_size, convention: W, as in `matrix_of`.
        backend: the name of a lowbit backend.
        contract: ``float32`` or ``integer``.

    Returns:
        float32, the leading dimensions of x and N.

    Raises:
        ArgumentError: an argument is wrong.
        UnavailableError: the backend cannot run here.
        NotDeclaredError: the backend does not declare the operation, or not for these weights.
    """
    if contract not in CONTRACTS:
        check_choice("contract", contract, tuple(CONTRACTS))
    here = engine(backend)  # the weights are checked when they are prepared
    prepared = here.prepared((words, scales, zeros), bits, group_size, convention)
    check_activations(x, prepared.rows)
    return here.multiply(prepared, x, contract)


def check_qlinear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    convention: str,
    contract: str,
) -> None:
    """What real and fake operator refuse alike."""
    check_choice("contract", contract, tuple(CONTRACTS))
    check_weights(words, scales, zeros, bits, convention)
    check_activations(x, words.shape[0] * WORD_BITS // bits)
    for name, tensor in (("words", words), ("scales", scales), ("zeros", zeros)):
        if tensor.device != x.device:  # weights on meta, for one, which still wait for their numbers
            raise ArgumentError(f"device of {name}", tensor.device, f"{x.device}, as of x")


def fake_qlinear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bits: int,
    group_size: int,
    convention: Convention,
    backend: str,
    contract: str,
) -> torch.Tensor:
    """Dtype, shape and device of the result of `qlinear`."""
    check_qlinear(x, words, scales, zeros, bits, convention, contract)
    return x.new_empty((*x.shape[:-1], words.shape[1]))


def dequantized(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, convention: Convention
) -> torch.Tensor:
    """The weights as `lowbit.quantization.affine.dequantize` has them, operator ``lowbit::dequantize``.

    Args:
        words, scales, zeros, bits, group_size, convention: W, as in `matrix_of`.

    Returns:
        float32, K × N.

    Raises:
        ArgumentError: an argument is wrong.
    """
    return torch.from_numpy(dequantize(matrix_of(words, scales, zeros, bits, group_size, convention)))


def fake_dequantized(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, group_size: int, convention: Convention
) -> torch.Tensor:
    """Dtype, shape and device of the result of `dequantized`."""
    check_weights(words, scales, zeros, bits, convention)
    return scales.new_empty((words.shape[0] * WORD_BITS // bits, words.shape[1]), dtype=torch.float32)


def note_weights(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient needs; called only where something asks for one.

    Raises:
        ArgumentError: scales or zeros ask for a gradient.
    """
    for place, name in ((2, "scales"), (3, "zeros")):
        if ctx.needs_input_grad[place]:
            raise ArgumentError(f"requires_grad of {name}", True, "False: quantised weights are not trained")
    ctx.save_for_backward(*inputs[1:4])
    ctx.choices, ctx.contract = inputs[4:7], inputs[8]


def gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradient with respect to x, with the dequantised weights.

    Raises:
        ArgumentError: the integer contract.
    """
    if ctx.contract == "integer":
        raise ArgumentError("contract", "'integer', where a gradient is asked for", "'float32': rounding has none")
    weights = torch.ops.lowbit.dequantize(*ctx.saved_tensors, *ctx.choices)
    return (grad @ weights.T, *[None] * 8)


# One implementation for every device, so that a tensor elsewhere is refused in our words and not in the dispatcher's.
LIBRARY.impl("qlinear", qlinear, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", dequantized, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::qlinear", fake_qlinear, lib=LIBRARY)
torch.library.register_fake("lowbit::dequantize", fake_dequantized, lib=LIBRARY)
torch.library.register_autograd("lowbit::qlinear", gradient, setup_context=note_weights, lib=LIBRARY)
PRODUCT = torch.ops.lowbit.qlinear.default
