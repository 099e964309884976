"""optimum-quanto: products with 8-bit weights, integers and FP8, that have one scale for each output.

Weights are scaled in the type of the scales, or codes are multiplied and the sums are scaled; the library decides. The
bound takes both: weights are formed in the type of the activations.

Source: ``optimum/quanto/library/qbytes_mm.py``.
"""

from typing import Any

from atlas.entry import Entry, Project, library

torch = library("torch")
quanto = library("optimum.quanto")

TYPES = {
    "int8-token": "float32",
    "int8-token-f16": "float16",
    "int8-token-bf16": "bfloat16",
    "fp8-channel": "float32",
}


def integers(x: Any, codes: Any, scale: Any) -> Any:
    return torch.ops.quanto.qbytes_mm(x, codes, scale)


def floats(x: Any, weight: Any, weight_scale: Any) -> Any:
    return torch.ops.quanto.qbytes_mm(x, weight, weight_scale)


PROJECT = Project(
    "optimum-quanto",
    ("optimum-quanto", "torch"),
    tuple(
        Entry(
            "qbytes_mm",
            "floats" if format == "fp8-channel" else "integers",
            "linear.gemm",
            {"format": format, "activations": type, "result": type},
        )
        for format, type in TYPES.items()
    ),
)
