"""What the formats of GGUF share: their owner, and the fields of several blocks."""

from typing import Any

from lowbit.tensor_formats.table import Decode, Field, Format


def gguf(
    type: str, *, block: int, fields: tuple[Field, ...], decode: Decode, prefix: str = "", **others: Any
) -> Format:
    """The format of a GGUF type.

    Args:
        type: its name in ggml.
        block, fields, decode, others: as in `Format`.
        prefix: of the name, if another owner has a format of this name.
    """
    return Format(
        name=prefix + type.lower(),
        title=f"GGUF {type}",
        block=block,
        fields=fields,
        decode=decode,
        source="ggml, ggml-common.h and ggml-quants.c",
        **others,
    )


D = Field("d", "float16", (), "scale", "the scale of the block", signed=True)
QS = Field("qs", "uint8", (16,), "codes", "element i in the low half of byte i, element i + 16 in its high half")
