"""Shards and index of checkpoint directories: no damaged one does worse than an error of one line."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import INDEX, Published, copied, crafted, published, shapes, shard, write

from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint


@pytest.fixture(scope="module")
def model() -> Published:
    return published()


@pytest.fixture(scope="module")
def folder(model: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "tiny", model)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def listed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "outside": (
        lambda m: m | {"model.norm.weight": "../other.safetensors"},
        r"'\.\./other\.safetensors'; allowed: the",
    ),
    "absolute": (lambda m: m | {"model.norm.weight": "/tmp/x.safetensors"}, "allowed: the name of a .safetensors file"),
    "backslash": (lambda m: m | {"model.norm.weight": "..\\x.safetensors"}, "allowed: the name of a .safetensors file"),
    "hidden": (lambda m: m | {"model.norm.weight": ".x.safetensors"}, "allowed: the name of a .safetensors file"),
    "no file": (lambda m: m | {"model.norm.weight": "model-3.safetensors"}, "it must be a file of the directory"),
    "another file": (lambda m: m | {"model.norm.weight": "config.json"}, "allowed: the name of a .safetensors file"),
    "too long": (
        lambda m: m | {"model.norm.weight": 243 * "a" + "ü.safetensors"},
        "allowed: the name of a .safetensors",
    ),
    "a number": (lambda m: m | {"model.norm.weight": 5}, "allowed: the name of a .safetensors file"),
    "the wrong shard": (lambda m: m | {"model.norm.weight": FIRST}, f"'model.norm.weight'; allowed: in {FIRST}"),
    "a tensor too many": (lambda m: m | {"model.extra": FIRST}, "tensor 'model.extra' is missing"),
    "a tensor too few": (
        lambda m: {k: v for k, v in m.items() if k != "model.norm.weight"},
        "allowed: the tensors that",
    ),
    "empty": (lambda m: {}, "shape of the model is"),
    "no object": (lambda m: ["a"], "weight_map is"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_lies(name: str, folder: Path, tmp_path: Path) -> None:
    """An index leads nowhere else, and says of every tensor where it is."""
    change, message = INDEXES[name]
    content = json.dumps({"weight_map": change(listed(folder)["weight_map"])}).encode()
    with pytest.raises(FormatError, match=message) as caught:
        open_checkpoint(copied(folder, tmp_path, {INDEX: content}))
    assert str(caught.value).isprintable()


def test_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    """A folder that is none, or lacks a part, is told apart in words; two answers to one question are refused."""
    for path, message in ((tmp_path / "nowhere", "a checkpoint directory"), (folder / INDEX, "a checkpoint directory")):
        with pytest.raises(ArgumentError, match=message):
            open_checkpoint(path)
    path = copied(folder, tmp_path)
    (path / SECOND).unlink()
    with pytest.raises(FormatError, match=f"shard '{SECOND}' is missing; it must be a file of the directory"):
        open_checkpoint(path)
    (path / SECOND).symlink_to(SECOND)
    with pytest.raises(FormatError, match=f"shard '{SECOND}' is no plain file; allowed: a file of the directory"):
        open_checkpoint(path)
    (path / SECOND).unlink()
    (path / INDEX).unlink()
    with pytest.raises(ArgumentError, match=r"a directory that holds model\.safetensors or model\.safetensors\.index"):
        open_checkpoint(path)
    (path / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"a directory that holds config\.json"):
        open_checkpoint(path)
    os.mkfifo(path / "config.json")  # reading it would wait for ever
    with pytest.raises(ArgumentError, match=r"a directory that holds config\.json"):
        open_checkpoint(path)
    (tmp_path / "both").mkdir()
    both = copied(folder, tmp_path / "both")
    (both / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="either"):
        open_checkpoint(both)


def entry(kind: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "nothing": b"",
    "a length alone": struct.pack("<Q", 2**63),
    "a long header": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": crafted(b"[" * 100_000),
    "a hole": crafted({"a": entry("F16", [2], 2, 6)}, bytes(6)),
    "an overlap": crafted({"a": entry("F16", [2], 0, 4), "b": entry("F16", [2], 2, 6)}, bytes(6)),
    "too little data": crafted({"a": entry("F16", [2], 0, 4)}, bytes(3)),
    "too much data": crafted({"a": entry("F16", [2], 0, 4)}, bytes(5)),
    "a shape that lies": crafted({"a": entry("F16", [3], 0, 4)}, bytes(4)),
    "an enormous shape": crafted({"a": entry("F16", [2**62, 2**62], 0, 4)}, bytes(4)),
    "a negative shape": crafted({"a": entry("F16", [-1, -2], 0, 4)}, bytes(4)),
    "another type": crafted({"a": entry("F64", [1], 0, 8)}, bytes(8)),
    "codes": crafted({"a": entry("I32", [1], 0, 4)}, bytes(4)),
    "an unknown type": crafted({"a": entry("Q4_1", [1], 0, 4)}, bytes(4)),
    "a name to be escaped": crafted({"a\n\x1b[2J": entry("I32", [1], 0, 4)}, bytes(4)),
    "many dimensions": crafted({"a": entry("F16", [1] * 10_000, 0, 2)}, bytes(2)),
    "an extra tensor": crafted({"a": entry("F16", [0, 7], 0, 0)}),
}
TWICE = json.dumps({"a": entry("F16", [2], 0, 4)})[:-1] + ", " + json.dumps({"a": entry("F16", [2], 0, 4)})[1:]
NAMED = {
    "a tensor twice": (crafted(TWICE.encode(), bytes(4)), "content is .*'a'.*; allowed: JSON"),
    "ranges that overlap": (
        HEADERS["an overlap"],
        r"tensor 'b' is \[2, 6\]; allowed: 4 or more, behind the data of 'a'",
    ),
    "the same range": (
        crafted({name: entry("F16", [2], 0, 4) for name in "ab"}, bytes(4)),
        r"tensor 'b' is \[0, 4\]; allowed: 4 or more, behind the data of 'a'",
    ),
    "a file that ends": (HEADERS["too little data"], r"tensor 'a' is \[0, 4\]; allowed: inside the 3 bytes of data"),
}


@pytest.mark.parametrize("length", [0, 2**23 + 1, 2**39], ids=str)
def test_a_sparse_shard_is_not_searched_for_a_header(length: int, folder: Path, tmp_path: Path) -> None:
    """The length of a header is looked at before the library maps the file and reads that much of it."""
    copy = copied(folder, tmp_path, {FIRST: struct.pack("<Q", length)})
    os.truncate(copy / FIRST, 2**40)
    with pytest.raises(FormatError, match=f"{FIRST}: length of the header is {length}; allowed: 2 to 8388608 bytes"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", HEADERS)
def test_a_shard_that_is_none(name: str, folder: Path, tmp_path: Path) -> None:
    """Whatever the header claims, it is refused in a line that names the file."""
    with pytest.raises(FormatError) as caught:
        open_checkpoint(copied(folder, tmp_path, {FIRST: HEADERS[name]}))
    assert str(caught.value).startswith(FIRST) and str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", NAMED)
def test_tensors_that_share_bytes_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    """So is one that stands twice in a header, or whose data the file does not have."""
    content, message = NAMED[name]
    with pytest.raises(FormatError, match=f"^{FIRST}: .*{message}"):
        open_checkpoint(copied(folder, tmp_path, {FIRST: content}))


@pytest.mark.parametrize("kind", ["a missing tensor", "an extra tensor", "a transposed tensor", "a vector as a matrix"])
def test_a_table_that_is_not_the_models(kind: str, model: Published, tmp_path: Path) -> None:
    """Each is refused before weights are read: the shards hold nothing but zeros of the right size."""
    held, name = dict(model.tensors), "model.layers.1.self_attn.v_proj.weight"
    held = {key: weights.reshape(shapes(model.config)[key]) for key, weights in held.items()}
    types = dict(model.types) | {"extra": "F16"}
    if kind == "a missing tensor":
        del held[name]
    elif kind == "an extra tensor":
        held["extra"] = np.zeros((1, 1), np.float32)
    elif kind == "a transposed tensor":
        held[name] = held[name].T
    else:
        held["model.norm.weight"] = held["model.norm.weight"].reshape(1, -1)
    path = write(tmp_path / "m", model, 1)
    (path / "model.safetensors").write_bytes(shard(held, types))
    expected = {"a missing tensor": f"tensor '{name}' is missing", "an extra tensor": "tensor is 'extra'"}
    with pytest.raises(FormatError, match=expected.get(kind, "shape of tensor")):
        open_checkpoint(path)


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000])
def test_numbers_that_are_not_finite(bits: int, tmp_path: Path) -> None:
    """An infinity or NaN is named when its tensor is read, in each of the three types."""
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj")):
        made = published(seed=seed)
        at = f"model.layers.0.self_attn.{name}.weight"
        made.tensors[at].reshape(-1)[3:4].view(np.uint32)[:] = bits
        source = open_checkpoint(write(tmp_path / name, made))
        with pytest.raises(FormatError, match=f"a number in tensor '{at}' is -?(inf|nan); allowed: finite"):
            source.layer(0)


def test_a_file_that_changes_after_it_was_opened(model: Published, tmp_path: Path) -> None:
    """Tensors are read and not mapped, so a shard cut or replaced under the reader is an error and not a fault."""
    path = write(tmp_path / "m", model)
    source, data = open_checkpoint(path), (path / FIRST).read_bytes()
    (path / FIRST).write_bytes(data[:-4000])
    with pytest.raises(FormatError, match="file is changed since it was opened"):
        source.layer(0)
    (path / FIRST).unlink()
    with pytest.raises(ArgumentError, match="which does not exist; allowed: a plain file"):
        source.layer(0)
    os.mkfifo(path / FIRST)  # opening it would wait for ever
    with pytest.raises(ArgumentError, match="which is neither a plain file nor a directory; allowed: a plain file"):
        source.layer(0)


def test_truncated_anywhere(folder: Path, tmp_path: Path) -> None:
    """A shard that ends early is refused, wherever it ends."""
    data = (folder / FIRST).read_bytes()
    path = copied(folder, tmp_path, {FIRST: b""})
    for length in (*range(0, 400, 7), *range(400, len(data), 2999), len(data) - 1):
        (path / FIRST).write_bytes(data[:length])
        with pytest.raises(FormatError, match=FIRST):
            open_checkpoint(path)
