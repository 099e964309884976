"""Quantising in other processes.

A process opens the model itself and reads the blocks assigned to it.

**Rounding to the nearest and HQQ** need the weights alone, so blocks are quantised in any order. A process makes the
part of a block: the tensors and notes that `lowbit.rewriting.quantizing` makes in order. If it sees the folder of the
result, whose name is unguessable, it writes the part there; a machine without that folder sends the tensors.

**GPTQ** calibrates a block on the output of the quantised blocks before it, so blocks are made one after another, and a
task is a *group*: the matrices of a block that share their inputs, such as query, key and value, or gate and up of an
expert. The main process reads the text: it runs a block on it, sends the inputs of each group, receives the codes, and
runs the quantised block for the next one. The task computes the Hessian, its factor and the codes.

Only the main process records what is finished, so the journal has one writer, and an interrupted job resumes like any
other.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.fetch import Report
from lowbit.model.calibration import Seen
from lowbit.model.config import LlamaConfig, check_meant
from lowbit.model.matrices import Matrix
from lowbit.rewriting.journal import Journal, write_part
from lowbit.rewriting.layouts import layout_of
from lowbit.rewriting.methods import Rounding
from lowbit.rewriting.quantizing import (
    Block,
    InOrder,
    Request,
    Tensors,
    groups_of,
    quantized_group,
    quantized_layer,
)
from lowbit.rewriting.source import Source, open_source
from lowbit.rewriting.targets import target_of
from lowbit.rewriting.writing import Packed, Part, Target, part_of_layer, shard_of
from lowbit.system.tasks import Executor, check_there


@dataclass(frozen=True)
class Apart:
    """The blocks of `lowbit.rewriting.quantizing.quantize`, on an executor.

    Attributes:
        executor: runs the tasks.
        path: of the model, the same on every machine.
        gptq_version: as `open_source` takes it.
    """

    executor: Executor
    path: Path
    gptq_version: Version | None = None

    def __call__(self, source: Source, target: Target, request: Request, parts: Journal, report: Report) -> None:
        """Quantise the blocks that are not finished.

        Raises:
            ArgumentError: weights that cannot be quantised in this way.
            FormatError: a damaged model, or another one under the path on another machine.
            UnavailableError: processes or machines fail repeatedly.
        """
        bits = (request.attention_bits, request.experts_bits)
        model = (self.path.absolute(), self.gptq_version, source.config, request.rounding, request.layout.name, bits)
        if request.tokens:
            _in_order(self.executor, GroupTask(*model), InOrder(source, target, request, parts, report))
            return
        layers = source.config.layers
        left = [number for number in range(layers) if parts.note_of(shard_of(number, layers)) is None]
        task = Task(*model, parts.folder)
        report("", layers - len(left), layers)
        for done, (number, part) in enumerate(self.executor.run(task, left), layers - len(left) + 1):
            if isinstance(part, Written):
                parts.note_part(shard_of(number, layers), part.digest, part.note)
            else:
                parts.commit(shard_of(number, layers), part.tensors, part.note)
            report("", done, layers)


@dataclass(frozen=True)
class Written:
    """A part that is already in the folder of the result.

    Attributes:
        digest: of its file.
        note: its entry in the journal.
    """

    digest: str
    note: Mapping[str, Any]


@dataclass(frozen=True)
class OfModel:
    """What a process needs to quantise a part of a model.

    Attributes:
        path: of the model.
        gptq_version: as `open_source` takes it.
        config: the shape of the intended model.
        rounding: how weights become codes.
        layout: the name of the output layout.
        bits: of attention, and of the other matrices.
    """

    path: Path
    gptq_version: Version | None
    config: LlamaConfig
    rounding: Rounding
    layout: str
    bits: tuple[int, int]

    @property
    def request(self) -> Request:
        """The request, without the calibration text."""
        return Request(self.rounding, layout_of(self.layout), *self.bits)

    def opened(self) -> Source:
        """The model.

        Raises:
            FormatError: the path has another model here.
            UnavailableError: the model is not here.
        """
        check_there(self.path)
        source = _opened(self.path, self.gptq_version)
        check_meant(source.name, source.config, self.config)
        return source


@dataclass(frozen=True)
class Task(OfModel):
    """Quantises a block.

    Attributes:
        folder: of the result, by its path on the starting machine.
    """

    folder: Path

    def __call__(self, number: int, threads: int) -> Part | Written:
        """The part of a block.

        Args:
            number: of the block.
            threads: the number of threads to use.

        Raises:
            FormatError: as `opened`.
            UnavailableError: as `opened`; the folder cannot be written.
        """
        source, request = self.opened(), self.request
        target, block = target_of(request.layout), Block(number, source.layer(number), None)
        packed = quantized_layer(source, target, request, block, threads)
        part = part_of_layer(target, source, number, block.layer, packed)
        if not self.folder.is_dir():
            return part
        return Written(write_part(self.folder / shard_of(number, self.config.layers), part.tensors), part.note)


@dataclass(frozen=True, eq=False)
class Group:
    """The matrices of a block that share their inputs.

    Attributes:
        number: of the block.
        name: of the matrix of `lowbit.model.calibration.source_of`.
        tensors: the tensors that hold them.
        seen: their inputs.
    """

    number: int
    name: str
    tensors: Tensors
    seen: Seen

    def __str__(self) -> str:
        """Its name in messages."""
        return f"{self.number}.{self.name}"


@dataclass(frozen=True)
class GroupTask(OfModel):
    """Quantises the matrices of a group by GPTQ."""

    def __call__(self, group: Group, threads: int) -> dict[str, Packed]:
        """The tensors by name; errors as `opened`. GPTQ's products use numpy's threads."""
        linears = _linears(self.opened(), group.number)
        return quantized_group(self.request, linears, group.name, group.tensors, group.seen)


def _in_order(executor: Executor, task: GroupTask, blocks: InOrder) -> None:
    """Quantise one block after another, the groups of each on an executor; errors as `Apart`."""
    waiting = deque[Group]()
    with closing(executor.run(task, waiting)) as results:
        for block in blocks:
            tensors = groups_of(blocks.source, blocks.target, block.number)
            waiting.extend(_groups(block, tensors))
            found = {group.name: packed for group, packed in islice(results, len(tensors))}
            blocks.commit(block, {stored: each for name in tensors for stored, each in found[name].items()})
            del block, found  # so that two blocks are not in memory at once


def _groups(block: Block, tensors: Mapping[str, Tensors]) -> list[Group]:
    """The groups of a block, those with the most inputs first, because they take longest."""
    seen = block.seen or Seen()
    found = [Group(block.number, name, held, seen.of(name)) for name, held in tensors.items()]
    return sorted(found, key=lambda group: group.seen.size, reverse=True)


@lru_cache(maxsize=1)
def _opened(path: Path, gptq_version: Version | None) -> Source:
    """A model, opened once in each process."""
    return open_source(path, gptq_version)


@lru_cache(maxsize=1)
def _linears(source: Source, number: int) -> Mapping[str, Matrix]:
    """The matrices of a block, read once in each process."""
    return source.layer(number).linears()
