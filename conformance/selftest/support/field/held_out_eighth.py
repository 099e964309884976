"""The eighth list of mistakes that was held out; see `held_out`. Its kernels multiply by the five formats most in use.

Sixty mistakes, twelve in each of GPTQ, AWQ, Q4_K, MXFP4 and FP8, with activations in float16, bfloat16 and 8 bits. The
modules `held_out_eighth_words` and `held_out_eighth_blocks` hold them. Their right answers are sentences that were
chosen before any mistake was tried. A diagnosis is right if it says the same in other words; `held_out_eighth_names`
has its names for it.
"""

from dataclasses import dataclass
from typing import Literal

from field.held_out_eighth_names import NAMES
from field.mistakes import HALF, Mistake

BRAIN: dict[str, object] = {"activations": "bfloat16", "result": "bfloat16"}
INT8: dict[str, object] = {"activations": "int8-token", "result": "float32"}
Q8_0: dict[str, object] = {"activations": "q8_0", "result": "float32"}
GPTQ: dict[str, object] = {"format": "gptq-v1", "bits": 4}

EIGHTH_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("more.cpp", "gptq_tiled"): ("linear.gemm", {**GPTQ, **HALF}),
    ("more.cpp", "gptq_int8"): ("linear.gemm_cast", {**GPTQ, **INT8}),
    ("more.cpp", "awq_int8"): ("linear.gemm_cast", {"format": "awq-gemm", **INT8}),
    ("more.cpp", "awq_vector"): ("linear.gemv", {"format": "awq-gemv", **BRAIN}),
    ("more.cpp", "q4_k"): ("linear.gemm", {"format": "q4_k", **BRAIN}),
    ("more.cpp", "mxfp4_q8_0"): ("linear.gemm_cast", {"format": "mxfp4", **Q8_0}),
    ("more.cpp", "mxfp4_int8"): ("linear.gemm_cast", {"format": "mxfp4", **INT8}),
    ("more.cpp", "fp8_tiled"): ("linear.gemm", {"format": "fp8-channel", **HALF}),
    ("more.cpp", "fp8_block_int8"): ("linear.gemm_cast", {"format": "fp8-block", **INT8}),
    ("vector_kernels.py", "gptq_words"): ("linear.gemv", {**GPTQ, **BRAIN}),
    ("vector_kernels.py", "gptq_8bit"): ("linear.gemm", {"format": "gptq-v1", "bits": 8, **BRAIN}),
    ("vector_kernels.py", "awq_repeated"): ("linear.gemm", {"format": "awq-gemm", **HALF}),
    ("vector_kernels.py", "q4_k_blocks"): ("linear.gemv", {"format": "q4_k", **BRAIN}),
    ("vector_kernels.py", "q4_k_masks"): ("linear.gemm", {"format": "q4_k", **HALF}),
    ("vector_kernels.py", "mxfp4_columns"): ("linear.gemv", {"format": "mxfp4", **HALF}),
    ("vector_kernels.py", "mxfp4_bits"): ("linear.gemm", {"format": "mxfp4", **HALF}),
    ("vector_kernels.py", "fp8_vector"): ("linear.gemv", {"format": "fp8-channel", **HALF}),
    ("vector_kernels.py", "fp8_block_vector"): ("linear.gemv", {"format": "fp8-block", **BRAIN}),
}

Kind = Literal["unpacking", "zeros", "scales", "indexing", "arithmetic", "old output"]


@dataclass(frozen=True)
class Planted(Mistake):
    """A mistake with its kind.

    Attributes:
        id: its name in this list.
        kind: what the mistake concerns.
    """

    id: str = ""
    kind: Kind = "indexing"


def planted(id: str, kind: Kind, place: tuple[str, str], what: str, old: str, new: str, *answers: str) -> Planted:
    """A mistake in a kernel, which is given by its file and its name."""
    return Planted(*place, what, old, new, (*answers, *NAMES[id]), id, kind)
