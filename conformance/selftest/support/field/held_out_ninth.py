"""The ninth list of mistakes that was held out; see `held_out`. It is about the same five formats as the eighth.

Sixty mistakes, twelve in each of GPTQ, AWQ, Q4_K, MXFP4 and FP8, with activations in float16, bfloat16 and 8 bits. The
modules `held_out_ninth_words` and `held_out_ninth_blocks` hold them. A comment says which public project had a mistake
like it. Their right answers are sentences that were chosen before any mistake was tried. A diagnosis is right if it
says the same in other words; `held_out_ninth_names` has its names for it.
"""

from field.held_out_eighth import BRAIN, GPTQ, INT8, Q8_0, Kind, Planted
from field.held_out_ninth_names import NAMES
from field.mistakes import HALF

Q8_K: dict[str, object] = {"activations": "q8_k", "result": "float32"}

NINTH_KERNELS: dict[tuple[str, str], tuple[str, dict[str, object]]] = {
    ("tiles.cpp", "gptq_parts"): ("linear.gemv", {**GPTQ, **HALF}),
    ("tiles.cpp", "awq_tiles"): ("linear.gemm", {"format": "awq-gemm", **BRAIN}),
    ("tiles.cpp", "q4_k_sums"): ("linear.gemm", {"format": "q4_k", **BRAIN}),
    ("tiles.cpp", "mxfp4_steps"): ("linear.gemm", {"format": "mxfp4", **HALF}),
    ("tiles.cpp", "fp8_steps"): ("linear.gemv", {"format": "fp8-block", **HALF}),
    ("tiles.cpp", "fp8_table"): ("linear.gemm_cast", {"format": "fp8-channel", **INT8}),
    ("words.rs", "gptq"): ("linear.gemm", {**GPTQ, **BRAIN}),
    ("words.rs", "awq"): ("linear.gemv", {"format": "awq-gemm", **BRAIN}),
    ("words.rs", "q4_k_q8_k"): ("linear.gemm_cast", {"format": "q4_k", **Q8_K}),
    ("torch_blocks.py", "gptq_int8"): ("linear.gemm_cast", {**GPTQ, **INT8}),
    ("torch_blocks.py", "awq_vector"): ("linear.gemv", {"format": "awq-gemm", **HALF}),
    ("torch_blocks.py", "q4_k"): ("linear.gemm", {"format": "q4_k", **HALF}),
    ("torch_blocks.py", "mxfp4_q8_0"): ("linear.gemm_cast", {"format": "mxfp4", **Q8_0}),
    ("torch_blocks.py", "fp8_vector"): ("linear.gemv", {"format": "fp8-channel", **BRAIN}),
    ("torch_blocks.py", "fp8_block_int8"): ("linear.gemm_cast", {"format": "fp8-block", **INT8}),
}


def held(id: str, kind: Kind, place: tuple[str, str], what: str, old: str, new: str, *answers: str) -> Planted:
    """A mistake in a kernel, which is given by its file and its name."""
    return Planted(*place, what, old, new, (*answers, *NAMES.get(id, ())), id, kind)
