r"""The version of a GPTQ checkpoint, from the zeros that it stores.

Version 1 stores a zero less one and version 2 as it is (`lowbit.tensor_formats.gptq`). The version of a checkpoint is a
label, ``checkpoint_format``, which some tools do not write and others write wrongly. Symmetric codes of *b* bits have
the zero :math:`2^{b-1}` everywhere. So where every stored zero of some matrices is :math:`2^{b-1} - 1` they are of
version 1, and where every one is :math:`2^{b-1}`, of version 2.

Source: GPTQModel, formats ``gptq`` and ``gptq_v2``.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import numpy as np

from lowbit.formats.checkpoint.prequantized import Layout, Packed
from lowbit.formats.checkpoint.tensors import Place, Table
from lowbit.tensor_formats.gptq import codes_of
from lowbit.text import quoted

Version = Literal["v1", "v2"]
VERSIONS: tuple[Version, ...] = get_args(Version)

MOST_SAMPLED_BYTES = 2**22
SAMPLES = 3


@dataclass(frozen=True)
class Zeros:
    """The evidence of the stored zeros of some matrices on their version.

    Attributes:
        sampled: the modules of these matrices.
        value: the common value of all stored zeros; None if they differ, as with matrices of several widths.
        version: the format that this implies, without the type of its scales; empty if it implies none.
        labelled: the format of the label, or of checkpoints without one.
        has_label: whether there is a label.
    """

    sampled: tuple[str, ...]
    value: int | None
    version: str
    labelled: str
    has_label: bool

    @property
    def sentence(self) -> str:
        """The evidence as a sentence."""
        many = f"{len(self.sampled)} sampled matri{'x' if len(self.sampled) == 1 else 'ces'}"
        said = f"the label says {self.labelled}" if self.has_label else f"without a label it would be {self.labelled}"
        if not self.version:
            return f"The stored zeros of {many} do not show the version; {said}."
        doubt = "" if self.version == self.labelled else f", although {said}"
        less = " less one" if self.version == "gptq-v1" else ""
        value = f"the middle of its codes{less}" if self.value is None else self.value
        return f"Every stored zero of {many} is {value}, so this is {self.version}{doubt}."


def sampled_zeros(table: Table, matrices: list[Packed], *, has_label: bool) -> Zeros | None:
    """Read the zeros of up to `SAMPLES` GPTQ matrices, spread over the model; None if there is no such matrix.

    Args:
        table: of the checkpoint.
        matrices: those that are quantised, each with the version of its label.
        has_label: whether there is a label; without one the version is 1.

    Raises:
        ArgumentError: a file cannot be read.
        FormatError: a file has changed since its header was read.
    """
    known = [each for each in matrices if each.layout.format.startswith("gptq-") and _zeros(each, table).nbytes > 0]
    known = [each for each in known if _zeros(each, table).nbytes <= MOST_SAMPLED_BYTES]
    if not known:
        return None
    spread = (known[number * (len(known) - 1) // (SAMPLES - 1)] for number in range(SAMPLES))
    chosen = list({each.module: each for each in spread}.values())
    values = [_values(each, table) for each in chosen]
    versions = {_version(found, each.layout.options["bits"]) for found, each in zip(values, chosen, strict=True)}
    together = set[int]().union(*values)
    only = together.pop() if len(together) == 1 else None
    labelled = chosen[0].layout.format.removesuffix("-bf16")
    version = versions.pop() if len(versions) == 1 else ""
    return Zeros(tuple(each.module for each in chosen), only, version, labelled, has_label)


def _version(values: set[int], bits: int) -> str:
    """The version of a matrix with these stored zeros; empty if they do not show it."""
    middle = 2 ** (bits - 1)
    if values == {middle - 1}:
        return "gptq-v1"
    return "gptq-v2" if values == {middle} else ""


def _zeros(matrix: Packed, table: Table) -> Place:
    return table[f"{matrix.module}.qzeros"]


def _values(matrix: Packed, table: Table) -> set[int]:
    """The numbers that are stored as zeros."""
    place = _zeros(matrix, table)
    what = f"tensor {quoted(matrix.module + '.qzeros')}"
    words = place.shard.read(what, place.offset, np.dtype("<i4"), prod(place.shape)).reshape(place.shape)
    return {int(each) for each in np.unique(codes_of(words.T, matrix.layout.options["bits"]))}


def of_version(matrices: list[Packed], version: str) -> list[Packed]:
    """The same matrices with their GPTQ formats changed to a version."""

    def changed(layout: Layout) -> Layout:
        return replace(layout, format=version + "-bf16" * layout.format.endswith("-bf16"))

    return [
        replace(each, layout=changed(each.layout)) if each.layout.format.startswith("gptq-") else each
        for each in matrices
    ]
