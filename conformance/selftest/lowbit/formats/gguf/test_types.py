"""The numbers of GGUF are those of the ``gguf`` package."""

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from lowbit.formats.gguf.types import BLOCKS, DEFAULT_ALIGNMENT, TensorType, ValueType


def test_the_tables_are_those_of_the_package() -> None:
    """Of every type that the installed version knows."""
    assert {each.name: int(each) for each in ValueType} == {each.name: int(each) for each in GGUFValueType}
    ours = {each.name: (int(each), BLOCKS[each]) for each in TensorType}
    assert ours == {each.name: (int(each), GGML_QUANT_SIZES[each]) for each in GGMLQuantizationType}
    assert DEFAULT_ALIGNMENT == GGUF_DEFAULT_ALIGNMENT
