"""Quantising blocks in other processes, in any order.

A process opens the model itself, reads the blocks that it is given, and makes the part of each: tensors and notes,
those that `lowbit.rewriting.quantizing` makes in order. Where it sees the folder of the result, whose name nobody can
guess, it writes the part there; a machine without that folder sends the tensors. The process that was started notes
what is finished, so the journal has one writer, and an interrupted job is resumed as any other.

GPTQ calibrates a block on what the blocks before it give, so its blocks depend on one another. Rounding to the nearest
and HQQ need the weights alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.fetch import Report
from lowbit.model.config import LlamaConfig, check_meant
from lowbit.rewriting.journal import Journal, write_part
from lowbit.rewriting.layouts import layout_of
from lowbit.rewriting.methods import Rounding
from lowbit.rewriting.quantizing import Request, quantized_layer
from lowbit.rewriting.source import Source, open_source
from lowbit.rewriting.targets import target_of
from lowbit.rewriting.writing import Part, Target, part_of_layer, shard_of
from lowbit.system.tasks import Executor, check_there


@dataclass(frozen=True)
class Apart:
    """The blocks of `lowbit.rewriting.quantizing.quantize`, on an executor.

    Attributes:
        executor: runs the tasks.
        path: of the model; every machine finds it there.
        gptq_version: as `open_source` takes it.
    """

    executor: Executor
    path: Path
    gptq_version: Version | None = None

    def __call__(self, source: Source, target: Target, request: Request, parts: Journal, report: Report) -> None:
        """Quantise the blocks that are not finished.

        Raises:
            ArgumentError: a request for GPTQ; weights that cannot be quantised so.
            FormatError: a damaged model, or another one under the path on another machine.
            UnavailableError: processes or machines are lost again and again.
        """
        if request.tokens:
            sentence = "--processes and --cluster do not apply to --method gptq, which needs one block for the next"
            raise ArgumentError("--method", request.rounding.method, "rtn or hqq", sentence)
        layers = source.config.layers
        left = [number for number in range(layers) if parts.note_of(shard_of(number, layers)) is None]
        bits = (request.attention_bits, request.experts_bits)
        model = (self.path.absolute(), self.gptq_version, source.config)
        task = Task(*model, request.rounding, request.layout.name, bits, parts.folder)
        report("", layers - len(left), layers)
        for done, (number, part) in enumerate(self.executor.run(task, left), layers - len(left) + 1):
            if isinstance(part, Written):
                parts.note_part(shard_of(number, layers), part.digest, part.note)
            else:
                parts.commit(shard_of(number, layers), part.tensors, part.note)
            report("", done, layers)


@dataclass(frozen=True)
class Written:
    """A part that is in the folder of the result.

    Attributes:
        digest: of its file.
        note: what the journal notes of it.
    """

    digest: str
    note: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What a process has to know to quantise a block.

    Attributes:
        path: of the model.
        gptq_version: as `open_source` takes it.
        config: the shape of the model that is meant.
        rounding: how weights become codes.
        layout: the name of the layout that is written.
        bits: of attention, and of the other matrices.
        folder: of the result, as the process that was started sees it.
    """

    path: Path
    gptq_version: Version | None
    config: LlamaConfig
    rounding: Rounding
    layout: str
    bits: tuple[int, int]
    folder: Path

    def __call__(self, number: int, threads: int) -> Part | Written:
        """The part of a block.

        Args:
            number: of the block.
            threads: that may compute.

        Raises:
            FormatError: the path has another model here.
            UnavailableError: the model is not here, or the folder cannot be written.
        """
        check_there(self.path)
        source = _opened(self.path, self.gptq_version)
        check_meant(source.name, source.config, self.config)
        layout = layout_of(self.layout)
        request, target, layer = Request(self.rounding, layout, *self.bits), target_of(layout), source.layer(number)
        packed = quantized_layer(source, target, request, number, layer, None, threads)
        part = part_of_layer(target, source, number, layer, packed)
        if not self.folder.is_dir():
            return part
        return Written(write_part(self.folder / shard_of(number, self.config.layers), part.tensors), part.note)


@lru_cache(maxsize=1)
def _opened(path: Path, gptq_version: Version | None) -> Source:
    """A model, opened once in each process."""
    return open_source(path, gptq_version)
