"""auto-round-lib: the kernels of AutoRound, which are Intel's for weights in 8 bits with a scale for each output.

Source: the comments on ``woqgemm_s8`` in ``auto_round_kernel``: types and shapes, and nothing on the arithmetic.
"""

from typing import Any

from atlas.entry import Entry, Project, library

torch = library("torch")
kernel = library("auto_round_kernel")


def product(x: Any, codes: Any, scale: Any) -> Any:
    return kernel.woqgemm_s8(x, codes, scale)


PROJECT = Project(
    "auto-round-lib",
    ("auto-round-lib", "torch"),
    tuple(
        Entry("woqgemm_s8", "product", "linear.gemm", {"format": format, "activations": type, "result": type})
        for format, type in (("int8-token", "float32"), ("int8-token-bf16", "bfloat16"))
    ),
)
