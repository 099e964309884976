"""The kept step of a model: found in the cache, or made and kept there.

A step is kept for a model by the digest of its file, for an instruction set and a kind of processor, for the tuned
kernels in use, and for this code: a changed source file or compiler makes another. The folder holds the `MOST` most
recently used steps.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import I64, Array
from lowbit.errors import NotDeclaredError, UnavailableError
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Rows
from lowbit.model.matrices import Embedding, Matrix
from lowbit.model.step import Step
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.system.storage import cache_folder, code_folder, record_of
from lowbit.tensor_formats.stored import Stored
from lowbit.text import cleaned
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.kept import image
from lowbit_cppyy.kept.image import KeptParts
from lowbit_cppyy.kept.libraries import FUNCTIONS, OPTIONS, Compiling, MissingError, Source, compiler, identity
from lowbit_cppyy.kept.recorder import Recorder
from lowbit_cppyy.runtime.compiler import stop_at_exit, using
from lowbit_cppyy.runtime.vendor import kind
from lowbit_cppyy.step.decoder import PURPOSES, CompiledDecoder
from lowbit_cppyy.step.embedding import Description, of_codes, of_floats, of_stored
from lowbit_cppyy.step.parts import StepParts
from lowbit_cppyy.step.source import StepSource

FOLDER, SUFFIX = "steps", ".step"
MOST = 8
MOST_LIBRARIES = 4 * MOST
"""The most libraries to keep. A step has two; steps of one shape share the first."""
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """The recorded objects of a step.

    Attributes:
        embedding: of the model.
        parts: of the step, created while a recorder is the runtime.
        facts: for the caller, in types that JSON has.
    """

    embedding: Rows
    parts: StepParts
    facts: Facts


@dataclass(frozen=True)
class Wanted:
    """The requested step.

    Attributes:
        identity: of the weights and of how to multiply by them: the digest of a file, and a contract.
        config: of the model.
        table: the instruction set.
        step: reads the model and returns the program of the step.
        make: creates the step while a recorder is the runtime.
    """

    identity: Sequence[str]
    config: LlamaConfig
    table: InstructionSet
    step: Callable[[], Step]
    make: Callable[[], Made]


def kept(wanted: Wanted, threads: int) -> tuple[CompiledDecoder, KeptParts, Facts] | None:
    """The decoder of a kept step, and its facts; None if the step cannot be kept.

    A warning gives the reason if it lies with the folder, the disk or the compiler: each start then compiles the step
    again.

    Raises:
        LowbitError: what `Wanted.make` raises, unless there is no step for this model or too little memory.
    """
    command = compiler()
    if command is None:
        return None
    try:
        folder = code_folder(FOLDER)
        path = folder / (_key(wanted, command) + SUFFIX)
        if (found := image.read(path)) is None:
            found = _made(wanted, path)
        else:
            _used_now(path)
        try:
            return _opened(wanted, found, folder, threads)
        except (MissingError, OSError):
            return _opened(wanted, _made(wanted, path), folder, threads)
    except NotDeclaredError:
        return None
    except (UnavailableError, MissingError, OSError) as error:
        warnings.warn(f"the compiled step is not kept: {cleaned(str(error))}", UserWarning, stacklevel=2)
        return None


def _opened(wanted: Wanted, found: image.Image, folder: Path, threads: int) -> tuple[CompiledDecoder, KeptParts, Facts]:
    """The decoder of an image.

    Raises:
        MissingError: a library is missing or damaged, or the image belongs to another model.
    """
    if found.header["config"] != _plain(wanted.config):
        raise MissingError("the configuration")
    parts = KeptParts(folder, found, threads)
    stop_at_exit(parts)
    decoder = CompiledDecoder(wanted.config, *_embedding(found, wanted.config), parts)
    return decoder, parts, found.header["facts"]


# **Making.**


def _made(wanted: Wanted, path: Path) -> image.Image:
    """Record a step and write it while its libraries are compiled."""
    recorder, table = Recorder(), wanted.table
    with Compiling(path.parent) as libraries:
        libraries.begin(Source.of("step", "step.h", [StepSource(wanted.step(), table)], table, FUNCTIONS))
        with using(recorder):
            made = wanted.make()
            parts = made.parts
            tables = [
                ((each, exact), parts.table_of(each, exact=exact)) for each in PURPOSES for exact in (False, True)
            ]
        recording = recorder.recording
        kernels = [each for each in recording.kernels.values() if not isinstance(each, StepSource)]
        libraries.begin(Source.of("kernels", "linear.h", kernels, table))
        embedding, arrays = _kept_embedding(made.embedding, len(recording.arrays))

        def header() -> dict[str, Any]:
            return {
                "config": _plain(wanted.config),
                "libraries": libraries.names(),
                "model": parts.model,
                "keys": parts.keys,
                "tables": tables,
                "embedding": embedding,
                "facts": made.facts,
            }

        found = image.written_image(path, recording, arrays, header)
    _forget_old(path, {name for name, _ in found.header["libraries"]})
    return found


def _plain(config: LlamaConfig) -> Any:
    """A configuration after a round trip through JSON."""
    return json.loads(json.dumps(asdict(config)))


def _key(wanted: Wanted, command: str) -> str:
    config = json.dumps(asdict(wanted.config), sort_keys=True)  # the context is a parameter and not in the file
    processor = wanted.table.name, kind()
    said = [*wanted.identity, config, *processor, identity(command), *OPTIONS, *_code(), *_tuned()]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:40]


def _code() -> Iterator[str]:
    """The identity of this code: names, sizes and times of the files of both packages."""
    for package in ("lowbit", "lowbit_cppyy"):
        yield from _listed(Path(str(files(package))), (".py", ".h"))


def _tuned() -> Iterator[str]:
    """The same for the outcomes of searches, which choose kernels."""
    yield os.environ.get("LOWBIT_CPPYY_TUNED", "")
    yield from _listed(cache_folder() / "tuned", (".json",))


def _listed(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            with suppress(OSError):  # a dangling link, as editors leave, or a file that was just removed
                found = os.stat(os.path.join(place, name)) if name.endswith(suffixes) else None
                if found is not None:
                    yield f"{os.path.relpath(place, folder)}/{name} {found.st_size} {found.st_mtime_ns}"


def _used_now(path: Path) -> None:
    """Record for `_forget_old` that a step is used now, if the folder can be written.

    The time is that of an empty file next to the step, because the step itself must not change
    (`lowbit.formats.digests`).
    """
    with suppress(OSError):
        _use_of(path).touch()


def _use_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.used")


def _forget_old(made: Path, libraries: Collection[str]) -> None:
    """Remove all but the `MOST` most recently used steps, and all but `MOST_LIBRARIES` libraries.

    The new step and its libraries stay, although one of them may be older than others that nothing needs. Any other
    step whose library is gone is made again.
    """

    def used(path: Path) -> float:
        times = [0.0]
        for each in (path, _use_of(path)):
            with suppress(OSError):
                times.append(each.stat().st_mtime)
        return max(times)

    def in_use(path: Path) -> bool:
        return path == made or path.name in libraries

    for ending, most in ((SUFFIX, MOST), (".so", MOST_LIBRARIES)):
        found = sorted(made.parent.glob(f"*{ending}"), key=lambda path: (in_use(path), used(path)), reverse=True)
        for path in found[most:]:
            for each in () if in_use(path) else (path, record_of(path), _use_of(path)):
                with suppress(OSError):
                    each.unlink()


# **The embedding** is kept in its stored format, a fraction of its size in float32.


def _kept_embedding(rows: Rows, first: int) -> tuple[dict[str, Any], list[Array]]:
    """The description of the embedding, and its arrays, numbered from `first`."""
    table = rows.matrix if isinstance(rows, Embedding) else None
    if table is None:
        return {"kind": "float", "first": first}, [np.asarray(rows)]
    if isinstance(table, Stored):
        own: dict[str, Any] = {"format": table.format, "rows": table.rows, "options": table.options}
        return {"kind": "stored", "first": first, "own": own}, list(table.tensors)
    names = "bits", "rows", "group_size", "convention"
    own = {name: getattr(table, name) for name in names}
    return {"kind": "affine", "first": first, "own": own}, [table.words, table.scales, table.zeros]


def _embedding(found: image.Image, config: LlamaConfig) -> tuple[Rows, Description]:
    """The embedding of a kept step. Its arrays may be large, so only the columns that are read are checked."""
    said = found.header["embedding"]
    arrays, own = found.arrays[said["first"] :], said.get("own")

    def affine(ids: I64) -> Matrix:
        words, scales, zeros = (np.ascontiguousarray(array[:, ids]) for array in arrays)
        return QuantizedMatrix(words=words, scales=scales, zeros=zeros, **own)

    def stored(ids: I64) -> Matrix:
        options = tuple((name, value) for name, value in own["options"])
        return Stored(own["format"], own["rows"], len(ids), (arrays[0][ids],), options)

    if said["kind"] == "float":
        return arrays[0], of_floats(arrays[0], config)
    shape = config.vocabulary, config.hidden
    if said["kind"] == "affine":
        words, scales, zeros = arrays
        return Embedding(shape, affine), of_codes((words, scales, zeros), own, config)
    return Embedding(shape, stored), of_stored(own["format"], arrays[0], config)
