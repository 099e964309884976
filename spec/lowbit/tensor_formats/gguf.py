"""What the formats of GGUF share: their owner, and fields that several blocks have."""

from functools import partial

from lowbit.tensor_formats.table import Field, Format

SOURCE = "ggml, ggml-common.h and ggml-quants.c"
GgufFormat = partial(Format, source=SOURCE)

D = Field("d", "float16", (), "scale", "the scale of the block", signed=True)
QS = Field("qs", "uint8", (16,), "codes", "element i in the low half of byte i, element i + 16 in its high half")
