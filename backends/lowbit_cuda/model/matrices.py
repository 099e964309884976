"""Matrices on a device: the layout of each, and the kernel that multiplies by it.

A quantised matrix keeps its words in another order (`lowbit_cuda.kernels.layouts`). Plain weights are stored in float16
where that is exact, otherwise in float32.

The layout and the number of tokens select the kernel; the number of tokens changes no bit of a token's result.

An *expert*, or the feed-forward part of a dense block, is three matrices in one contiguous buffer.
"""

from dataclasses import dataclass

import numpy as np

from lowbit.arrays import F32, U8
from lowbit.errors import ArgumentError
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import GatedWeights
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.stored import Stored
from lowbit_cuda.kernels.layouts import DenseLayout, MatrixLayout
from lowbit_cuda.kernels.table import kernel
from lowbit_cuda.model.arena import Arena
from lowbit_cuda.port import Kernel, Span

Layout = MatrixLayout | DenseLayout

MANY = 8
"""The number of tokens that the kernels for several tokens process at once."""


def layout_of(matrix: Matrix) -> Layout:
    """The layout of a matrix.

    Raises:
        ArgumentError: a group ends inside a unit, or the matrix is too large for the kernels.
    """
    matrix = known(matrix)
    if not isinstance(matrix, np.ndarray):
        return MatrixLayout.of(matrix)
    rows, columns = matrix.shape
    return DenseLayout(rows, columns, "float16" if fits_float16(matrix) else "float32")


def known(matrix: Matrix) -> QuantizedMatrix | F32:
    """The matrix itself, or plain weights for a stored format, for which the device has no kernels."""
    return to_float(matrix) if isinstance(matrix, Stored) else matrix


def fits_float16(weights: F32) -> bool:
    """Whether float16 holds every weight exactly.

    >>> fits_float16(np.array([0.5, -3.0], np.float32)), fits_float16(np.array([0.1], np.float32))
    (True, False)
    """
    with np.errstate(over="ignore"):
        return bool((weights.astype(np.float16) == weights).all())


def packed_bytes(layout: Layout, matrix: Matrix) -> U8:
    """The bytes of a matrix in its own layout or, for plain weights, in float32."""
    matrix = known(matrix)
    if isinstance(layout, DenseLayout):
        if not isinstance(matrix, np.ndarray):
            raise ArgumentError("matrix", "quantised", "plain weights, as in earlier layers")
        if layout.dtype == "float16" and not fits_float16(matrix):
            raise ArgumentError("matrix", "not exact in float16", "weights that are, as in earlier layers")
        return layout.apply(matrix)
    if isinstance(matrix, np.ndarray):
        raise ArgumentError("matrix", "plain weights", f"{layout.bits} bits, as in earlier layers")
    return layout.apply(matrix)


def product(layout: Layout, tokens: int) -> Kernel:
    """The kernel that multiplies this number of tokens by a matrix of this layout."""
    if isinstance(layout, DenseLayout):
        return kernel("dense", weights=layout.dtype)
    return kernel("gemm", bits=layout.bits, scales=layout.scale_dtype, tokens=1 if tokens == 1 else MANY)


def products(layout: Layout) -> tuple[Kernel, ...]:
    """The kernels that multiply by a matrix of this layout, for any number of tokens."""
    return tuple(dict.fromkeys((product(layout, 1), product(layout, MANY))))


def multiply(arena: Arena, layout: Layout, packed: Span, y: Span, x: Span, tokens: int) -> None:
    """Y (T × N) = X (T × K) W."""
    made = product(layout, tokens)
    if isinstance(layout, DenseLayout):
        arena.launch(made, y=y, x=x, weights=packed, tokens=tokens, rows=layout.rows, columns=layout.columns)
        return
    arena.launch(made, y=y, x=x, **layout.spans(packed), tokens=tokens, **layout.numbers)


class Resident:
    """A matrix that stays on the device."""

    def __init__(self, arena: Arena, matrix: Matrix, what: str) -> None:
        self._arena, self.layout = arena, layout_of(matrix)
        arena.load(*products(self.layout))
        self._packed = arena.store(packed_bytes(self.layout, matrix), what)

    def __call__(self, y: Span, x: Span, tokens: int) -> None:
        """Y = X W."""
        multiply(self._arena, self.layout, self._packed, y, x, tokens)


# **Experts.**


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of an expert: its three matrices, one after another."""

    gate: Layout
    up: Layout
    down: Layout

    @classmethod
    def of(cls, expert: GatedWeights) -> "ExpertLayout":
        """The layout of this expert."""
        return cls(layout_of(expert.gate), layout_of(expert.up), layout_of(expert.down))

    @property
    def parts(self) -> tuple[Layout, Layout, Layout]:
        """The layouts of the three matrices, in the order in which they are stored."""
        return self.gate, self.up, self.down

    @property
    def nbytes(self) -> int:
        """Bytes of an expert."""
        return sum(part.nbytes for part in self.parts)

    @property
    def inner(self) -> int:
        """Elements between the two halves, per token."""
        return self.gate.columns

    @property
    def fused(self) -> bool:
        """Whether one kernel computes the first half: both matrices have the same quantised layout."""
        return isinstance(self.gate, MatrixLayout) and self.gate == self.up

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that `run` launches, for any number of tokens."""
        if self.fused:
            return (*(self._half(tokens) for tokens in (1, MANY)), *products(self.down))
        return (*products(self.gate), *products(self.up), kernel("swiglu"), *products(self.down))

    def _half(self, tokens: int) -> Kernel:
        """The kernel of the first half of a fused layout."""
        assert isinstance(self.gate, MatrixLayout)
        bits, scales = self.gate.bits, self.gate.scale_dtype
        return kernel("expert_in", bits=bits, scales=scales, tokens=1 if tokens == 1 else MANY)

    def apply(self, expert: GatedWeights) -> U8:
        """The bytes of an expert.

        Raises:
            ArgumentError: its matrices have other layouts.
        """
        matrices = expert.linears().values()
        return np.concatenate([packed_bytes(*each) for each in zip(self.parts, matrices, strict=True)])

    def wider(self, others: "ExpertLayout") -> "ExpertLayout":
        """The layout that can hold both experts: float32 where one of them needs it.

        Raises:
            ArgumentError: they are quantised differently.
        """
        return ExpertLayout(*map(_wider, self.parts, others.parts))

    def restore(self, packed: U8) -> GatedWeights:
        """The expert that was packed, the inverse of `apply`."""
        ends = np.cumsum([part.nbytes for part in self.parts])
        split = zip(self.parts, np.split(packed, ends[:-1]), strict=True)
        return GatedWeights(*(layout.restore(part) for layout, part in split))

    def run(self, arena: Arena, packed: Span, y: Span, x: Span, inner: Span, spare: Span | None, tokens: int) -> None:
        """Y (T × hidden) = (silu(X gate) ⊗ X up) down.

        Scratch memory: `inner` has T × `inner` elements and `spare` twice as many; a fused layout needs no `spare`.
        """
        gate, up, down = self._spans(packed)
        if isinstance(self.gate, MatrixLayout) and self.fused:
            matrices = self.gate.spans(gate, "gate_") | self.gate.spans(up, "up_")
            arena.launch(self._half(tokens), y=inner, x=x, **matrices, tokens=tokens, **self.gate.numbers)
        else:
            assert spare is not None
            count = tokens * self.inner
            left, right = spare.part(0, 4 * count), spare.part(4 * count, 4 * count)
            multiply(arena, self.gate, gate, left, x, tokens)
            multiply(arena, self.up, up, right, x, tokens)
            arena.launch(kernel("swiglu"), y=inner, gate=left, up=right, count=count)
        multiply(arena, self.down, down, y, inner, tokens)

    def _spans(self, packed: Span) -> tuple[Span, Span, Span]:
        first, second = self.gate.nbytes, self.gate.nbytes + self.up.nbytes
        return packed.part(0, first), packed.part(first, self.up.nbytes), packed.part(second, self.down.nbytes)


def _wider(one: Layout, other: Layout) -> Layout:
    if one == other:
        return one
    if isinstance(one, DenseLayout) and isinstance(other, DenseLayout):
        return DenseLayout(one.rows, one.columns, "float32")
    raise ArgumentError("an expert", other, f"{one}, as the others: all use the same slots")
