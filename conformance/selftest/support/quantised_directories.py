"""Directories that other tools have quantised (``lowbit/formats/checkpoint/quantised``), and changed copies of them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
from paths import SUPPORT

from lowbit.arrays import Array
from lowbit.formats.checkpoint.tensors import CODED

DATA = SUPPORT.parent / "lowbit/formats/checkpoint/quantised"
MODELS = sorted(path.name for path in DATA.iterdir() if (path / "expected.npz").exists())
Q = "model.layers.0.self_attn.q_proj"
"""A module that every one of them has."""


def copied(
    name: str, folder: Path, config: dict[str, Any] | None = None, tensors: Mapping[str, Array | None] | None = None
) -> Path:
    """A directory with some fields of its quantisation changed, and some tensors: None takes one away."""
    folder.mkdir()
    described = json.loads((DATA / name / "config.json").read_text())
    described["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(described))
    if not tensors:
        shutil.copy(DATA / name / "model.safetensors", folder)
        return folder
    changed = {key: array for key, array in {**held_by(name), **tensors}.items() if array is not None}
    (folder / "model.safetensors").write_bytes(written(changed))
    return folder


def written(tensors: Mapping[str, Array]) -> bytes:
    """A file of these tensors, by the definition of the file."""
    header, data = dict[str, Any](), b""
    for key, array in tensors.items():
        kind = next(each for each, dtype in TYPES.items() if dtype == array.dtype)
        header[key] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    return tiny_checkpoint.crafted(header, data)


TYPES = {each: np.dtype(dtype) for each, dtype in CODED.items()} | {"I64": np.dtype(np.int64)}


def held_by(name: str) -> dict[str, Array]:
    """The tensors of a directory, by the definition of the file."""
    content = (DATA / name / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    found = {}
    for key, place in header.items():
        begin, last = place["data_offsets"]
        array = np.frombuffer(content[end + begin : end + last], TYPES[place["dtype"]])
        found[key] = array.reshape(place["shape"])
    return found
