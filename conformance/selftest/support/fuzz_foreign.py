"""What libraries and programs of other languages say, mutated, for `fuzzing`."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import Attempt, check_text
from mutations import FLOATS, INTEGERS, SHAPES, TEXTS, mutated, spelled

from lowbit.backend.wire import Tree, as_json
from lowbit.tensor_formats.stored import Stored
from lowbit_foreign.abi import Kind
from lowbit_foreign.command import CommandBackend
from lowbit_foreign.declared import read_text
from lowbit_foreign.flat import Results, flatten

DECLARED: Tree = {
    "name": "mine",
    "version": "1.0",
    "operations": {
        "packing.pack": {"limits": {"bits": [2, 4]}},
        "linear.qgemv": {
            "limits": {"convention": ["minimum"], "bits": [4]},
            "arithmetic": {
                "form": "factored",
                "accumulator": "float32",
                "roundings": {"rows": 1, "groups": 0.5, "constant": 2},
            },
        },
        "linear.gemv": {
            "limits": {"format": ["q4_0"], "columns": {"multiple": 8, "least": 8, "most": 64}},
            "arithmetic": {
                "form": "dequantised",
                "accumulator": "float16",
                "roundings": "any_order",
                "weights": "float16",
                "promotion": 128,
            },
        },
        "attention.softmax": {"arithmetic": {"form": "direct", "accumulator": "float32", "roundings": "any_order"}},
        "offload.engine": {},
    },
    "concurrent": False,
    "alignment": 64,
    "overread": 16,
    "profiles": [],
    "details": {"compiler": "cc"},
    "prepare": True,
}


def declared(folder: Path) -> Attempt:
    """Capabilities in JSON."""

    def attempt(chance: random.Random) -> str:
        said = read_text(spelled(mutated(DECLARED, chance, chance.choice((1, 1, 2))), chance), "library x")
        check_text(said.name)
        said.capabilities.operations.get("linear.qgemv")
        return "read"

    return attempt


class Saying:
    """A child process that answers with what it is told."""

    alive, pid = True, 0

    def __init__(self) -> None:
        self.line = b""

    def exchange(self, line: bytes, seconds: float | None = None) -> bytes:
        """The line that was put here."""
        return self.line

    def end(self, grace: float = 0.0) -> None:
        """Nothing ends."""


def lines(folder: Path) -> Attempt:
    """A program's answers to a request."""
    arguments = {"codes": np.zeros((8, 1), np.uint8), "bits": 4}
    answers: list[Callable[[int], Tree]] = [
        lambda id: {"id": id, "result": as_json(np.zeros((1, 1), np.uint32))},
        lambda id: {"id": id, "result": [1, {"scalar": "<f4", "value": 0.5}, {"float": "nan"}, None]},
        lambda id: {"id": id, "error": {"kind": "argument", "message": "codes is 3"}},
        lambda id: {"id": id, "error": {"kind": "not declared", "message": "bits 3"}},
        lambda id: {"id": id, "error": {"kind": "failed", "message": "out of memory"}},
    ]

    def attempt(chance: random.Random) -> str:
        backend, child = CommandBackend("mine"), Saying()
        backend._child = child  # type: ignore[assignment]  # a process without one
        child.line = spelled(mutated(chance.choice(answers)(1), chance), chance)
        try:
            backend.answer("run", "packing.pack", arguments)
        except RuntimeError as error:
            check_text(str(error))
            return type(error).__name__
        return "value"

    return attempt


SIZES: list[list[Any]] = [[], [2], [1], [9], *(shape for shape in SHAPES if all(type(size) is int for size in shape))]
PATHS = ("result", "result.0", "result.1", "result.0.0", "result.block", "result.mantissa", "result.exponent", "nbytes")


def results(folder: Path) -> Attempt:
    """Requests of a library for memory, in which it then writes what it likes."""

    def attempt(chance: random.Random) -> str:
        given = Results(chance.choice((0, 16, 4096)))
        for path in PATHS[: chance.randrange(len(PATHS))]:
            path = path if chance.randrange(5) else chance.choice((*TEXTS[:12], "result" + ".0" * 2000, path))
            kind = chance.choice(list(Kind)) if chance.randrange(9) else chance.choice(INTEGERS)
            shape: list[Any] = chance.choice(
                ([], [2], [1], [9], *(s for s in SHAPES if all(type(n) is int for n in s)))
            )
            try:
                given.request(path, kind, chance.randrange(13), tuple(shape))
            except ValueError as error:
                check_text(str(error))
                continue
            _, array = given._parts[path]
            match chance.randrange(4):
                case 0:
                    array.reshape(-1).view(np.uint8)[:] = chance.randrange(256)
                case 1:
                    array.reshape(-1)[:1] = np.asarray(chance.choice((1, 2, 100, -1))).astype(array.dtype)
                case 2 if array.dtype == np.float64:
                    array[...] = chance.choice(FLOATS)
                case 3 if array.dtype == np.uint8:
                    text = chance.choice((b"bfp.Format", b"os.path", b"text"))
                    array[...] = np.resize(np.frombuffer(text, np.uint8), array.shape)
        return outcome(given)

    return attempt


def outcome(given: Results) -> str:
    """What the result of a library is read as."""
    try:
        given.value()
    except ValueError as error:
        if type(error) is ValueError:
            check_text(str(error))
        return "ArgumentError" if type(error).__name__ == "ArgumentError" else "ValueError"
    return "value"


def stored(folder: Path) -> Attempt:
    """A stored matrix as a library gives it back, part by part, with parts left out, of other kinds and contents."""
    blocks = np.zeros((1, 18), np.uint8)
    entries = flatten("result", Stored("q4_0", 32, 1, (blocks,)))
    texts = ("gptq-v2", "q4_0", "formats.Stored", "bfp.Format", "", "\x1b")

    def attempt(chance: random.Random) -> str:
        given, rooms = Results(0), []
        for path, kind, dtype, content in entries:
            if chance.randrange(12) == 0:
                continue
            if isinstance(content, str):
                content = chance.choice(texts) if chance.randrange(12) == 0 else content
                content = np.frombuffer(content.encode(), np.uint8)
            elif kind is Kind.INTEGER and chance.randrange(8) == 0:
                content = chance.choice((0, -1, 1, 64, 2**40))
            shape = [content] if kind is Kind.LIST else list(np.shape(content))
            if chance.randrange(16) == 0:
                kind, dtype, shape = chance.choice(list(Kind)), chance.randrange(21), chance.choice(SIZES)
            try:
                given.request(path, kind, dtype, tuple(shape))
            except ValueError as error:
                check_text(str(error))
                continue
            rooms.append((given._parts[path], content))
        for (kind, array), content in rooms:
            if kind is not Kind.LIST:
                with suppress(ValueError, OverflowError):  # what does not fit into the memory that it asked for
                    array[...] = content
        return outcome(given)

    return attempt
