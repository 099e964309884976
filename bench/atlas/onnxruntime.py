"""ONNX Runtime: MatMulNBits at accuracy level 0, which are two backends (`lowbit_adapters.onnx_runtime`).

Blocks of more than 256 are declared, since the operator's documentation allows every power of two from 16.
"""

from collections.abc import Iterator

from atlas.entry import Entry, Project
from lowbit.contract.rounding import Arithmetic

KINDS = (
    ("onnxruntime", "MatMulNBits, integer zero-points", "zero_point", (2, 4, 8), "dequantised"),
    ("onnxruntime-minimum", "MatMulNBits, zeros in float", "minimum", (2, 4), "factored"),
)


def entries() -> Iterator[Entry]:
    for name, kernel, convention, bits, form in KINDS:
        limits = {"format": f"affine: {convention}", "activations": "float32", "bits": bits, "group_size": "2^4 … 2^16"}
        for operation in ("linear.qgemm", "linear.qgemv"):
            arithmetic = Arithmetic("factored" if form == "factored" else "dequantised")
            yield Entry(kernel, name, operation, limits, arithmetic, backend=name)


PROJECT = Project("ONNX Runtime", ("onnxruntime", "onnx"), tuple(entries()))
