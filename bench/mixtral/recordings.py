"""Recorded routings: which experts a real model asked for, and which would have been guessed, token by token.

`routings.npz` holds small integers only, so that it can be read by anything that reads numpy's arrays:

=================== ==================== =======================================================================
array               shape                what
=================== ==================== =======================================================================
``header``          ()                   JSON: what the weights were (their sums), what was read, how
``tokens``          P × T                the bytes that were read, P passages of T
``chosen``          P × L × T × 2        the experts that each layer ran, best first
``guess_a``         P × L−a × T × 4      at l: the likeliest experts of layer l + a, guessed at layer l, best first
``renormed_a``      P × L−a × T × 4      the same, the input re-normalised with the norm of layer l + a first
=================== ==================== =======================================================================

with a = 1, 2 and 10 layers ahead (errata M5). A guess is the later layer's gate on this layer's gate input.
"""

import io
import json
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Self

import numpy as np

from lowbit.arrays import U8, Array
from lowbit.errors import ArgumentError, FormatError
from lowbit.moe.offload import Request
from lowbit.system.json_files import parsed
from lowbit.system.storage import written
from lowbit.text import quoted

HERE = Path(__file__).parent
FILE = HERE / "routings.npz"
AHEAD = (1, 2, 10)
GUESSED = 4
NAMES = ("header", "tokens", "chosen", *(f"{name}_{ahead}" for name in ("guess", "renormed") for ahead in AHEAD))
MOST_BYTES = 1 << 26
"""Of one array."""

Small = U8


@dataclass(frozen=True, eq=False)
class Recordings:
    """The arrays of the file; `guesses` and `renormed` by the number of layers ahead."""

    header: dict[str, Any]
    tokens: Small
    chosen: Small
    guesses: dict[int, Small]
    renormed: dict[int, Small]

    @property
    def layers(self) -> int:
        """L."""
        return int(self.chosen.shape[1])

    def of_layer(self, layer: int) -> list[list[tuple[int, ...]]]:
        """For each passage the experts that one layer needed, pass after pass: what `lowbit.model.replay` reads."""
        return [[tuple(pair) for pair in passage[layer].tolist()] for passage in self.chosen]

    def requests(self, passage: int, count: int, *, renormed: bool = False) -> list[Request]:
        """What an engine would have been asked for in one passage, with `count` guesses for each next layer."""
        return requests(self.chosen[passage], (self.renormed if renormed else self.guesses)[1][passage], count)

    def save(self, path: Path) -> None:
        """Write the file under a temporary name, then rename it."""
        named: dict[str, Any] = {f"guess_{ahead}": array for ahead, array in self.guesses.items()}
        named |= {f"renormed_{ahead}": array for ahead, array in self.renormed.items()}
        header = np.array(json.dumps(self.header, ensure_ascii=False))
        with written(path) as stream:
            np.savez_compressed(stream, header=header, tokens=self.tokens, chosen=self.chosen, **named)

    @classmethod
    def load(cls, path: Path = FILE) -> Self:
        """Read the file; nothing in it is ever executed, and no array is made before its size is known.

        Raises:
            ArgumentError: there is no readable file at `path`.
            FormatError: it is no zip file of these arrays, or larger than `MOST_BYTES`.
        """
        if not path.is_file():
            raise ArgumentError("path", quoted(str(path)), "a file of recordings that exists")
        try:
            stream = path.open("rb")
        except OSError as error:
            raise ArgumentError("path", f"{quoted(str(path))} ({error.strerror})", "a file that can be read") from None
        with stream:
            arrays = _arrays(path.name, stream)
        _check_shapes(path.name, arrays)
        header = parsed(path.name, str(arrays["header"]).encode(errors="replace"))
        guesses, renormed = ({a: arrays[f"{name}_{a}"] for a in AHEAD} for name in ("guess", "renormed"))
        return cls(dict(header.values), arrays["tokens"], arrays["chosen"], guesses, renormed)


def _arrays(file: str, stream: BinaryIO) -> dict[str, Array]:
    """All arrays of the archive."""
    try:
        with zipfile.ZipFile(stream) as archive:
            return {name: _array(file, archive, name) for name in NAMES}
    except FormatError:
        raise
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise FormatError(file, "archive", quoted(str(error)), "a sound zip file of arrays") from None


def _array(file: str, archive: zipfile.ZipFile, name: str) -> Array:
    """One array of the archive, whose header has to ask for just the bytes that follow it."""
    try:
        member = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise FormatError(file, f"array {name}", "missing", f"there, with {', '.join(NAMES)}") from None
    if member.file_size > MOST_BYTES:
        raise FormatError(file, f"array {name}", f"{member.file_size} bytes", f"at most {MOST_BYTES}")
    with archive.open(member) as stream:
        content = stream.read(MOST_BYTES + 1)
    data = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(data)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = read(data)
    except (ValueError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise FormatError(file, f"array {name}", quoted(str(error)), "an array of numpy") from None
    kind = "U" if name == "header" else "u1"
    size = math.prod(shape) * dtype.itemsize
    if not (dtype.kind == kind or dtype == kind) or columns_first or len(content) - data.tell() != size:
        given = f"{quoted(str(dtype))} {shape} in {len(content) - data.tell()} bytes"
        allowed = "text, once" if name == "header" else "uint8, as many as its shape says"
        raise FormatError(file, f"array {name}", given, allowed)
    return np.frombuffer(content, dtype, offset=data.tell()).reshape(shape)


def _check_shapes(file: str, arrays: dict[str, Array]) -> None:
    """Refuse arrays that do not belong together."""
    passages, length = (*arrays["tokens"].shape, 0, 0)[:2]
    layers = (*arrays["chosen"].shape, 0, 0)[1]
    wanted = {"header": (), "tokens": (passages, length), "chosen": (passages, layers, length, 2)}
    for ahead in AHEAD:
        for name in ("guess", "renormed"):
            wanted[f"{name}_{ahead}"] = (passages, max(0, layers - ahead), length, GUESSED)
    for name, shape in wanted.items():
        if arrays[name].shape != shape:
            allowed = " x ".join(map(str, shape)) or "one text"
            raise FormatError(file, f"shape of array {name}", arrays[name].shape, allowed)


def requests(chosen: Array, guesses: Array, count: int) -> list[Request]:
    """The requests of T passes: `chosen` is layers × T × 2, `guesses` (layers − 1) × T × at least `count`."""
    last = len(chosen) - 1
    return [
        Request(
            layer,
            tuple(chosen[layer, token].tolist()),
            tuple(guesses[layer, token, :count].tolist()) if layer < last else (),
        )
        for token in range(chosen.shape[1])
        for layer in range(len(chosen))
    ]
