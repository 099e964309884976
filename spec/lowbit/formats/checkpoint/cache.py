"""Quantised checkpoints: a large model quantised block by block, once, and kept in files.

Quantising Mixtral 8x7B reads 93 GB. So it is done once: block after block is read, quantised as a plan says
(`lowbit.model.quantization_plan`), and written to a file of its own; the next run finds the files and maps them. The
matrices of a block are read and quantised several at a time, one on each processor (`threads`), but no more than fit in
`MOST_BYTES`: four of Mixtral's. These matrices and one quantised block are all that is in memory at any time. The
result does not depend on the number of threads.

**GPTQ** needs a block as a whole, and what its matrices see behind the quantised blocks before it. So blocks are made
in order, and the residual streams of the calibration text go through each as soon as it is made. A block that is made
again later has them go through all blocks before it. numpy's products add up in an order that depends on the number of
its threads, so here codes may differ where another number of them moves a target across a tie.

**Names.** The folder is named by a digest of everything that determines its content: every tensor of the checkpoint
(`lowbit.formats.checkpoint.digests`), the configuration, the index, the plan, and `VERSION`, which changes when the
method does. Another plan, or another checkpoint under the same path, has another folder; names and times of files do
not matter. A tensor that is read later must still have its digest.

**Trust.** A file in the folder is used only if it carries the same digest and is consistent (`quantized_file`);
otherwise it is made again. Another user could write such a file with other weights. So a folder in which others can
write is refused (`storage.own_folder`), and a file in it that belongs to another user, or that others can write to, is
made again (`storage.opened_own`).

**Interrupts and concurrency.** A file appears whole under its name or not at all, so an interrupt loses one block. Two
processes that quantise the same model write the same bytes, each to a temporary file, and the last one to finish
replaces the file by an equal one.

Old folders are never removed: each holds a whole model, and only the user knows whether it is still needed. They are in
``quantized`` in the cache folder of `lowbit.formats.fetch`, and can be deleted at any time.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowbit.arrays import F32
from lowbit.backend.whole_model import spoken_bytes
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.checkpoint.quantized_file import Origin, check_origin, read_matrices, write_quantized
from lowbit.formats.checkpoint.reader import Checkpoint
from lowbit.model.calibration import CalibrationText, Streams
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Embedding, Matrix, shape_of, widened
from lowbit.model.quantization_plan import HEAD, Plan
from lowbit.model.weights import LayerWeights, Progress, assembled, linear_shapes, vector_sizes
from lowbit.system.memory import check_memory
from lowbit.system.scratch import sweep
from lowbit.system.storage import CACHE_VARIABLE, cache_folder, make_folder, opened_own, own_folder
from lowbit.system.threads import usable_processors
from lowbit.text import quoted

KEPT = "the cache of quantised weights"
VERSION = 1
FOLDER = "quantized"
SLACK = 2**9
"""An upper bound on the bytes of a file's header for each matrix."""
MOST_BYTES = 2**32
"""The memory for quantising matrices."""
COPIES = 4
"""The peak memory of quantising a matrix by the most demanding method, as a multiple of its float32 weights."""


@dataclass(frozen=True, eq=False)
class QuantizedCheckpoint:
    """A quantised checkpoint: a `LayeredWeights` whose blocks are mapped from files, which are made on first access.

    Attributes:
        source: the checkpoint.
        plan: how its matrices are quantised.
        folder: where the files are.
        digest: the digest that names the folder.
    """

    source: Checkpoint
    plan: Plan
    folder: Path
    digest: str

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model."""
        return self.source.config

    @property
    def embedding(self) -> F32 | Embedding:
        """Vocabulary × hidden, as the checkpoint stores it."""
        return self.source.embedding

    @property
    def norm(self) -> F32:
        """Float32, hidden."""
        return self.source.norm

    @property
    def head(self) -> Matrix:
        """Hidden × vocabulary."""
        if self.plan.head is None:
            return self.source.head
        shape = (self.config.hidden, self.config.vocabulary)
        return self._read(HEAD, {HEAD: shape})[HEAD]

    def layer(self, number: int) -> LayerWeights:
        """One block; its file is first made if it is missing or damaged.

        Raises:
            ArgumentError: there is no such block; weights that cannot be quantised in this way.
            FormatError: the checkpoint has changed.
            UnavailableError: the file cannot be written.
        """
        sizes = vector_sizes(self.config)
        shapes: dict[str, tuple[int, ...]] = {name: (sizes[name],) for name in self._vectors}
        found = self._read(self._name(number), shapes | linear_shapes(self.config))
        vectors = {name: vector for name in self._vectors if isinstance(vector := found.pop(name), np.ndarray)}
        return assembled(self.config, vectors, found)

    @property
    def _vectors(self) -> Iterable[str]:
        """The names of the vectors of a block."""
        return self.source.architecture.all_vectors

    def keep(self, name: str, walk: "Walk | None" = None) -> None:
        """Make the file of a part of `parts` unless it exists; of an existing file only the header is checked.

        Args:
            name: of the part.
            walk: for a plan with a calibration text: its streams, if earlier parts have used them; else they begin at
                the embedding.
        """
        with suppress(ArgumentError, FormatError):
            check_origin(self._own_file(name), Origin(self.digest, name))
            return
        write_quantized(self._file(name), self._made(name, walk), Origin(self.digest, name))

    def parts(self) -> list[str]:
        """The names of all files: the blocks in order, then the head if it is quantised."""
        return [self._name(number) for number in range(self.config.layers)] + [HEAD] * (self.plan.head is not None)

    def missing_bytes(self) -> int:
        """The approximate size of the files that are missing."""
        missing = [name for name in self.parts() if not self._file(name).exists()]
        head = {HEAD: (self.config.hidden, self.config.vocabulary)}
        return sum(self._file_bytes(head if name == HEAD else linear_shapes(self.config)) for name in missing)

    def _file_bytes(self, shapes: dict[str, tuple[int, int]]) -> int:
        """The approximate size of a file with matrices of these shapes and the vectors of a block."""
        matrices = sum(
            4 * rows * columns if (choice := self.plan.of(name)) is None else choice.nbytes(rows, columns)
            for name, (rows, columns) in shapes.items()
        )
        return matrices + 4 * sum(vector_sizes(self.config)[name] for name in self._vectors) + SLACK * (len(shapes) + 2)

    def _name(self, number: int) -> str:
        return f"layer-{number:05}"

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _own_file(self, name: str) -> Path:
        """The file of a part, if no other user can change its content while it is mapped."""
        path = self._file(name)
        try:
            opened_own(path).close()
        except OSError as error:
            allowed = "a plain file of this user, to which no other can write"
            raise ArgumentError("cache", f"{quoted(str(path))} ({error.strerror})", allowed) from error
        return path

    def _made(self, name: str, walk: "Walk | None" = None) -> dict[str, Matrix]:
        """A part from the checkpoint."""
        if name == HEAD:
            return {HEAD: self.plan(HEAD, self.source.head)}
        number = int(name.rpartition("-")[2])
        if self.plan.text is None:
            layer = self.source.layer(number, self.plan, threads_for(self.config))
        else:
            whole, streams = self.source.layer(number), (walk or Walk(self, self.plan.text)).to(number)
            layer = self.plan.on_inputs(whole, streams.seen(number, whole))
        layer = layer.changed(widened)
        return {vector: getattr(layer, vector) for vector in self._vectors} | layer.linears()

    def _read(self, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Matrix]:
        """A part from its file, which is first made if it is missing or damaged."""
        with suppress(ArgumentError, FormatError):
            return self._checked(name, shapes)
        make_folder(self.folder)
        write_quantized(self._file(name), self._made(name), Origin(self.digest, name))
        return self._checked(name, shapes)

    def _checked(self, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Matrix]:
        found = read_matrices(self._own_file(name), Origin(self.digest, name))
        given = {part: shape_of(matrix) for part, matrix in found.items()}
        if given != shapes:
            part = min(part for part in given.keys() | shapes.keys() if given.get(part) != shapes.get(part))
            allowed = "of the shape that the model asks for"
            raise FormatError(self._file(name).name, f"shape of {quoted(part)}", given.get(part, "missing"), allowed)
        return found


class Walk:
    """The residual streams of a calibration text, which pass through the blocks of a model on demand.

    Args:
        model: its quantised blocks are read, or made if they are missing.
        text: to calibrate on.
    """

    def __init__(self, model: QuantizedCheckpoint, text: CalibrationText) -> None:
        self._model, self._number = model, 0
        self._streams = text.streams(model.config, model.embedding)

    def to(self, number: int) -> Streams:
        """The streams before a block that no earlier call has passed."""
        while self._number < number:
            self._streams = self._streams.through(self._number, self._model.layer(self._number))
            self._number += 1
        return self._streams


def quantized(
    source: Checkpoint,
    plan: Plan,
    folder: Path | None = None,
    progress: Progress | None = None,
    checking: Progress | None = None,
) -> QuantizedCheckpoint:
    """Quantise a checkpoint as a plan says, each part in its own file; existing parts are kept.

    Args:
        source: from `open_checkpoint`.
        plan: how its matrices are quantised.
        folder: the parent of this model's folder; ``quantized`` in the cache folder by default.
        progress: called after each part.
        checking: called while the digests of the tensors are computed, with bytes done and total bytes.

    Raises:
        ArgumentError: weights that cannot be quantised in this way.
        FormatError: a weight that is not finite, or a checkpoint that has changed since it was opened.
        UnavailableError: too little disk space, or a folder that cannot be written, or in which another user can write.
    """
    plan.check(source.config)
    check_memory(f"quantising {source.file}", _needed(source.config, plan.text))
    parent = own_folder(cache_folder() / FOLDER if folder is None else folder, KEPT)
    with _in_words(parent), tempfile.TemporaryFile(dir=parent):
        pass  # refuses an unwritable folder before anything is read
    source = source.identified(checking)
    digest = digest_of(source, plan)
    place = own_folder(parent / digest, KEPT)
    result = QuantizedCheckpoint(source, plan, place, digest)
    with _in_words(place):
        sweep(place)
        free = shutil.disk_usage(place).free
    if (needed := result.missing_bytes()) > free:
        reason = f"{spoken_bytes(needed)} are needed and {place.parent} has {spoken_bytes(free)}"
        remedy = f"free disk space or name another folder in {CACHE_VARIABLE}"
        raise UnavailableError("disk space for quantised weights", reason, remedy)
    parts, walk = result.parts(), None if plan.text is None else Walk(result, plan.text)
    for done, name in enumerate(parts, start=1):
        result.keep(name, walk)
        if progress is not None:
            progress(done, len(parts))
    return result


def threads_for(config: LlamaConfig) -> int:
    """How many matrices of a model are quantised at a time."""
    return max(1, min(usable_processors(), MOST_BYTES // (COPIES * 4 * _largest(config))))


def _needed(config: LlamaConfig, text: CalibrationText | None) -> int:
    """An upper bound on the bytes for quantising one matrix; with a text, about the bytes of one block and its
    inputs."""
    if text is None:
        return COPIES * 4 * _largest(config)
    streams, inputs = 2 * 8 * config.hidden, 4 * (3 * config.hidden + config.feed_forward)
    block = sum(rows * columns for rows, columns in linear_shapes(config).values())
    return 2 * 4 * block + len(text.tokens) * (streams + inputs)


def _largest(config: LlamaConfig) -> int:
    """Weights of the largest matrix of a block."""
    return max(rows * columns for rows, columns in linear_shapes(config).values())


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """Turn an error of the file system into one that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = f"name a folder that you can write to in {CACHE_VARIABLE}"
        raise UnavailableError(KEPT, f"{folder}: {error.strerror}", remedy) from error


def digest_of(source: Checkpoint, plan: Plan) -> str:
    """The digest of everything that determines the quantised weights; each tensor of the checkpoint has its own."""
    content = {"version": VERSION, **source.contents(), "plan": plan.fields()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
