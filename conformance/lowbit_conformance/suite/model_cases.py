"""Cases from a model's own matrices: its shapes and its weights, as stored and re-quantised."""

from collections.abc import Iterator
from pathlib import Path

from lowbit.errors import ArgumentError
from lowbit.model.matrices import to_float
from lowbit.quantization import affine
from lowbit.quantization.affine import QuantizedMatrix
from lowbit_conformance.suite.cases import MatrixCase

LAYER = "blk.0."
MATRICES = ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_down")
REQUANTIZED = ((4, 64), (4, 128), (3, 64), (2, 64))
VECTORS = 3


def model_matrices_of(path: str) -> dict[str, QuantizedMatrix]:
    """The matrices of the first layer with distinct shapes: as stored if that is affine grouping, and re-quantised.
    Later layers repeat the shapes.

    Raises:
        FormatError, ArgumentError: the file is not a model that lowbit reads, or has none of these matrices.
    """
    from lowbit.formats.gguf.reader import open_gguf  # which takes a while, and few runs name a model

    matrices: dict[str, QuantizedMatrix] = {}
    source = open_gguf(Path(path))
    for name in MATRICES:
        stored = source.tensor(f"{LAYER}{name}.weight")
        if isinstance(stored, QuantizedMatrix):
            matrices[f"{name}-stored"] = stored
        weights = to_float(stored)
        for bits, group_size in REQUANTIZED:
            if weights.shape[0] % 32 == 0 and group_size <= weights.shape[0]:
                again = affine.quantize(weights, bits=bits, group_size=group_size)
                matrices[f"{name}-{bits}bits-groups{group_size}"] = again
    if not matrices:
        raise ArgumentError("model", path, "a model with at least one matrix that can be quantised")
    return matrices


def model_cases(matrices: dict[str, QuantizedMatrix]) -> Iterator[MatrixCase]:
    """For each matrix a case with one vector and one with several; the test fills in the clause."""
    for variant, matrix in matrices.items():
        for vectors in (0, VECTORS):
            yield MatrixCase(
                "model/C0",
                "model",
                variant,
                matrix.bits,
                matrix.rows,
                matrix.columns,
                matrix.group_size,
                matrix.convention,
                "float16" if matrix.scales.itemsize == 2 else "float32",
                vectors,
            )
