r"""GPTQ: codes in 32-bit words along K, zeros packed along N.

The layout of AutoGPTQ, of its successor GPTQModel, and of most quantised checkpoints of 2023 and 2024. A weight is

.. math:: w_{kn} = s_{gn}\,(q_{kn} - z_{gn}), \qquad g = \mathrm{g\_idx}[k],

with codes :math:`q` and zeros :math:`z` of *b* bits, and a group index for each row of K. With act-order the rows of a
group are scattered over the matrix, and only ``g_idx`` says where.

**Codes.** Word :math:`i` of a column of ``qweight`` holds rows :math:`\tfrac{32}{b} i` and following, the first in its
lowest bits. With 3 bits a column is one stream of bits, as in the chapter `packing`. ``qzeros`` packs the zeros of a
group in the same way, along N.

**Two versions.** Version 2 stores the zero itself. Version 1 stores the zero minus one, and there is no agreement on a
stored zero of all ones (15 in 4 bits): adding one gives 16 in wider arithmetic, and 0 in *b* bits. AutoGPTQ's quantiser
has no zero of 16. Its packer turns a zero of 0 into -1, whose ones also fill the zeros of the following columns in the
same word; GPTQModel's conversion from version 2 borrows from the next column instead. The kernels:

================================================================ ==================================================
adds in wider arithmetic: 16                                     adds in *b* bits: 0
================================================================ ==================================================
exllama; vLLM's ``q_gemm.cu`` (offset 1 after unpacking);        AutoGPTQ's copies of exllama and exllamav2;
AutoGPTQ's Triton kernels, its conversion to Marlin, and         AutoGPTQ's ``qlinear_cuda_old.py`` without CUDA; its
``qlinear_cuda.py`` without CUDA; its CUDA kernels for 2 and     CUDA kernel for 4 bits; GPTQModel's conversion of
3 bits                                                           3 bits
================================================================ ==================================================

So there are two formats, and a kernel declares the one that it reads: ``gptq-v1`` with 16, which most kernels use and
checkpoints with a zero of 16 need, and ``gptq-v1-wrapped`` with 0. They differ only in these zeros. Two kernels read
neither: AutoGPTQ's CUDA kernel for 8 bits keeps only four bits of the sum, and GPTQModel adds one to whole words of 2,
4 or 8 bits, so that a stored 15 carries into the zero of the next column.

**Scales** are float16 in most checkpoints. For models in bfloat16, AutoRound writes codes of 4 and 8 bits with bfloat16
scales, which are formats of their own: ``gptq-v1-bf16`` and ``gptq-v2-bf16``.

Source: AutoGPTQ ``qlinear_cuda.py``, ``qlinear_cuda_old.py``, ``triton_utils/dequant.py``, ``q4_matrix.cu``,
``autogptq_cuda_kernel_256.cu``; exllama ``q4_matrix.cu``; vLLM ``csrc/quantization/gptq/q_gemm.cu``; GPTQModel
``utils/model.py`` (formats ``gptq`` and ``gptq_v2``); AutoRound, its export to AutoGPTQ.
"""

from functools import partial

from lowbit.arrays import F64, Array
from lowbit.tensor_formats.bits import exact, stream
from lowbit.tensor_formats.table import Field, Format, Sizes, Tensors, Terms


def fields(scales: str) -> tuple[Field, ...]:
    """The table of fields, with scales of this type."""
    return (
        Field("qweight", "int32", ("K*bits/32", "N"), "codes", "codes along K, the first row in the lowest bits"),
        Field("qzeros", "int32", ("G", "N*bits/32"), "zero", "zeros along N, the first column in the lowest bits"),
        Field("scales", scales, ("G", "N"), "scale", "one scale for each group and column"),
        Field("g_idx", "int32", ("K",), "index", "the group of each row", below="G"),
    )


def codes_of(words: Array, bits: int) -> F64:
    """The codes of each column of words; the stream of the chapter `packing`, for every width."""
    return exact(stream(words.T, bits, 32 * len(words) // bits)).T


def _decode(stored_less: int, wraps: bool, tensors: Tensors, at: Sizes) -> Terms:
    """s (q − z), where zeros are stored minus `stored_less`, which is added back, modulo 2^b if it `wraps`."""
    codes = codes_of(tensors["qweight"], at["bits"])
    zeros = codes_of(tensors["qzeros"].T, at["bits"]).T + stored_less
    if wraps:
        zeros %= 2 ** at["bits"]
    scales, group = exact(tensors["scales"]), tensors["g_idx"]
    return Terms(scales[group] * codes, (-scales * zeros)[group])


TRAPS = (
    "With act-order the group of row k is g_idx[k], and not k divided by the group size.",
    "Version 1 stores zeros less one; a stored 15 is a zero of 16 in 4 bits, or of 0 where one is added in 4 bits.",
)


def _format(
    name: str, title: str, source: str, stored_less: int, *, wraps: bool = False, scales: str = "float16"
) -> Format:
    return Format(
        name=name,
        title=title,
        fields=fields(scales),
        decode=partial(_decode, stored_less, wraps),
        options={"bits": (2, 3, 4, 8) if scales == "float16" else (4, 8), "group_size": None},
        source=source,
        traps=TRAPS if stored_less else TRAPS[:1],
    )


WRAPPING = "AutoGPTQ, its copies of exllama and qlinear_cuda_old.py"
LESS_ONE, AS_IS, BF16 = "GPTQ, zeros stored less one", "GPTQ, zeros as they are", "AutoRound, its export to AutoGPTQ"

GPTQ_V1 = _format("gptq-v1", LESS_ONE, "AutoGPTQ; GPTQModel, format gptq", 1)
GPTQ_V1_WRAPPED = _format("gptq-v1-wrapped", f"{LESS_ONE} modulo 2^b", WRAPPING, 1, wraps=True)
GPTQ_V2 = _format("gptq-v2", AS_IS, "GPTQModel, format gptq_v2", 0)
GPTQ_V1_BF16 = _format("gptq-v1-bf16", f"{LESS_ONE}, bfloat16 scales", BF16, 1, scales="bfloat16")
GPTQ_V2_BF16 = _format("gptq-v2-bf16", f"{AS_IS}, bfloat16 scales", BF16, 0, scales="bfloat16")
