"""The tenth list of mistakes that was held out; see `held_out`. It is about the same five formats as the ninth.

Sixty mistakes, twelve in each of GPTQ, AWQ, Q4_K, MXFP4 and FP8, with activations in float16, bfloat16 and 8 bits, and
in the casts to Q8_K and Q8_0. The modules `held_out_tenth_words` and `held_out_tenth_blocks` hold them. A comment says
which public project had a mistake like it. Their right answers are sentences that were chosen before any mistake was
tried; `held_out_tenth_names` has the names that the diagnosis has for the same.
"""

from field.held_out_eighth import BRAIN, GPTQ, INT8, Kind, Planted
from field.held_out_ninth import Q8_K
from field.held_out_tenth_names import NAMES
from field.mistakes import HALF

TENTH_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("strips.cpp", "gptq_sorted"): ("linear.gemv", {**GPTQ, **HALF}),
    ("strips.cpp", "awq_split"): ("linear.gemv", {"format": "awq-gemm", **HALF}),
    ("strips.cpp", "q4_k_words"): ("linear.gemm_cast", {"format": "q4_k", **Q8_K}),
    ("strips.cpp", "mxfp4_pairs"): ("linear.gemm", {"format": "mxfp4", **BRAIN}),
    ("strips.cpp", "fp8_shifted"): ("linear.gemm", {"format": "fp8-block", **HALF}),
    ("split_kernels.py", "gptq_split"): ("linear.gemm", {**GPTQ, **BRAIN}),
    ("split_kernels.py", "q4_k_eight"): ("linear.gemv", {"format": "q4_k", **BRAIN}),
    ("split_kernels.py", "mxfp4_int8"): ("linear.gemm_cast", {"format": "mxfp4", **INT8}),
    ("split_kernels.py", "q8_0"): ("formats.quantize", {"format": "q8_0"}),
    ("torch_groups.py", "awq_int8"): ("linear.gemm_cast", {"format": "awq-gemm", **INT8}),
    ("torch_groups.py", "mxfp4_vector"): ("linear.gemv", {"format": "mxfp4", **BRAIN}),
    ("torch_groups.py", "fp8_columns"): ("linear.gemm", {"format": "fp8-channel", **BRAIN}),
}


def held(id: str, kind: Kind, place: tuple[str, str], what: str, old: str, new: str, *answers: str) -> Planted:
    """A mistake in a kernel, which is given by its file and its name."""
    return Planted(*place, what, old, new, (*answers, *NAMES.get(id, ())), id, kind)
