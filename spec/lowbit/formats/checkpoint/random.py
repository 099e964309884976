r"""Random weights: a checkpoint directory of any shape, to measure with.

The cost of offloading depends on shapes, bytes and which experts are needed, not on the values of the weights. So a
model of the shape of Mixtral 8x7B can be measured without the published one: `write_random` makes it in the format in
which such models are published, so that everything from reading on is the same.

**The numbers** are normal, in float16, each tensor from a generator of its own, seeded by the seed and the tensor's
name: the content of a tensor depends on neither the order of writing nor the shards. A matrix of K inputs has standard
deviation :math:`K^{-1/2}`, which preserves the size of activations; the two whose results are added to the residual
stream, :math:`W_o` and the experts' :math:`W_2`, are divided by :math:`\sqrt{2\,\mathrm{layers}}`, so that the stream
keeps its size through any number of blocks and no activation overflows float16. Gains are 1. Routing over such weights
is nearly uniform, which is *not* how trained models route: recall, and anything that depends on it, cannot be measured
on them.

**Shard by shard.** One shard is in memory at a time. It is written under a temporary name and renamed. The index,
without which the directory cannot be read, comes last. The same call after an interrupt keeps the shards that exist and
makes the others. A directory that holds other files is refused.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F16
from lowbit.backend.whole_model import spoken_bytes
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.checkpoint.config import written_config
from lowbit.formats.checkpoint.names import EMBEDDING, Shape, tensor_shapes
from lowbit.formats.checkpoint.reader import CONFIG
from lowbit.formats.checkpoint.tensors import INDEX, MOST_INDEX_BYTES, read_header, write_tensors
from lowbit.formats.checkpoint.tokenizer import FILE as TOKENIZER
from lowbit.formats.checkpoint.tokenizer import byte_tokenizer
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.weights import Progress
from lowbit.system.scratch import PREFIX, sweep, workplace
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import quoted

SHAPES = {
    "mixtral-8x7b": LlamaConfig(
        layers=32,
        hidden=4096,
        feed_forward=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=32000,
        context=32768,
        rope_base=1e6,
        rms_epsilon=1e-5,
        routing=Routing(experts=8, top_k=2),
    ),
}
"""Shapes of published models by name."""

VERSION = 1
ABOUT = "lowbit.json"
"""The file that says which call wrote a directory."""
SHARD_BYTES = 2**30
CHUNK = 2**22
"""How many numbers a thread draws at a time."""
MOST_THREADS = 16
MOST_EXPERTS = MOST_INDEX_BYTES // 2**10
"""The most experts of all layers: each has three tensors, each layer seven more, of 100 bytes in an index that can be
read."""
ADDING = ("self_attn.o_proj", ".w2.", "mlp.down_proj")
"""The matrices whose result is added to the stream."""


# **The numbers.**


def random_tensor(name: str, shape: Shape, seed: int, layers: int) -> F16:
    """One tensor: float16, the same for the same name, shape, seed and number of layers.

    >>> random_tensor("model.norm.weight", (3,), seed=0, layers=1)
    array([1., 1., 1.], dtype=float16)
    """
    result = np.ones(shape, np.float16)
    if len(shape) == 1:
        return result
    flat = result.reshape(-1)
    generator = np.random.default_rng([seed, *hashlib.sha256(name.encode()).digest()])
    scale = np.float32(deviation(name, shape, layers))
    for start in range(0, flat.size, CHUNK):
        part = generator.standard_normal(min(CHUNK, flat.size - start), np.float32)
        flat[start : start + CHUNK] = part * scale
    return result


def deviation(name: str, shape: Shape, layers: int) -> float:
    """Standard deviation of a matrix that is stored N × K."""
    if name == EMBEDDING:
        return 1.0
    adding = any(part in name for part in ADDING)
    return float((shape[1] * (2 * layers if adding else 1)) ** -0.5)


# **The directory.**


def total_bytes(config: LlamaConfig) -> int:
    """Bytes of the weights of such a model in float16."""
    return 2 * sum(prod(shape) for _, shape in tensor_shapes(config, tied=False))


def write_random(
    folder: Path,
    config: LlamaConfig,
    seed: int,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint directory of random weights, or the rest of one that was interrupted.

    A vocabulary of 256 or more gets a tokenizer whose first 256 tokens are the bytes.

    Args:
        folder: where; new, empty, or begun by the same call.
        config: its shape; Mixtral's or Mistral's.
        seed: at least 0.
        shard_bytes: a shard is closed when it holds at least this number.
        progress: called after each shard, with bytes.

    Raises:
        ArgumentError: a shape that such a directory cannot describe, or a folder with other contents.
        UnavailableError: too little disk space, or a folder that cannot be written.
    """
    check_integer("seed", seed, 0, 2**63 - 1)
    check_integer("shard_bytes", shard_bytes, least=1)
    about = {"version": VERSION, "seed": seed, "shard_bytes": shard_bytes, "config": asdict(config)}
    texts = {ABOUT: _as_json({"random weights": about}), CONFIG: _as_json(written_config(config))}
    texts |= {TOKENIZER: byte_tokenizer()} if config.vocabulary >= 256 else {}
    experts = 1 if config.routing is None else config.routing.experts
    if config.layers * experts > MOST_EXPERTS:
        given = f"{config.layers} layers" + ("" if config.routing is None else f" of {experts} experts")
        raise ArgumentError("shape", given, f"at most {MOST_EXPERTS} in all, whose names an index can hold")
    if folder.exists() and not folder.is_dir():
        raise ArgumentError("directory", quoted(str(folder)), "a directory, or a name that is free")
    try:
        _check_room(folder, total_bytes(config))
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        _write_all(folder, config, seed, list(_shards(config, shard_bytes)), texts, progress)
    except OSError as error:
        reason = f"{folder}: {error.strerror or error}"
        raise UnavailableError("a folder for new weights", reason, "name a folder that you can write to") from error


def _check_room(folder: Path, total: int) -> None:
    """Refuse a disk with too little space for the files that do not exist yet."""
    there = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(place).free) < total - there:
        reason = f"{spoken_bytes(total - there)} are needed and {place} has {spoken_bytes(free)}"
        raise UnavailableError("disk space for new weights", reason, "free disk space, or ask for fewer layers")


def _shards(config: LlamaConfig, shard_bytes: int) -> Iterator[dict[str, Shape]]:
    """The tensors in order, divided into shards."""
    shard, held = dict[str, Shape](), 0
    for name, shape in tensor_shapes(config, tied=False):
        shard[name] = shape
        held += 2 * prod(shape)
        if held >= shard_bytes:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


def _write_all(
    folder: Path,
    config: LlamaConfig,
    seed: int,
    shards: list[dict[str, Shape]],
    texts: dict[str, bytes],
    progress: Progress | None,
) -> None:
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total, done = total_bytes(config), 0
    texts[INDEX] = _as_json({"metadata": {"total_size": total}, "weight_map": weight_map})
    kept = _kept(folder, dict(zip(files, shards, strict=True)), texts)
    _write_text(folder, ABOUT, texts)
    for file, shard in zip(files, shards, strict=True):
        if file not in kept:
            write_tensors(folder / file, _made(shard, seed, config.layers), {"format": "pt"})
        done += 2 * sum(prod(shape) for shape in shard.values())
        if progress is not None:
            progress(done, total)
    for file in texts:  # the index last
        _write_text(folder, file, texts)


def _write_text(folder: Path, file: str, texts: dict[str, bytes]) -> None:
    with workplace(folder) as place:
        (part := place / file).write_bytes(texts[file])
        part.replace(folder / file)


def _made(shard: dict[str, Shape], seed: int, layers: int) -> dict[str, F16]:
    """The tensors of a shard, on all processors."""
    threads = min(MOST_THREADS, usable_processors())
    made = side_by_side(lambda named: random_tensor(named[0], named[1], seed, layers), shard.items(), threads)
    return dict(zip(shard, made, strict=True))


def _kept(folder: Path, shards: dict[str, dict[str, Shape]], texts: dict[str, bytes]) -> set[str]:
    """The existing shards; refuses any file in the folder that this call would not write."""
    found = [path for path in folder.iterdir() if not path.name.startswith(PREFIX)]
    for path in sorted(found, key=lambda path: (path.name != ABOUT, path.name)):
        if path.name in shards:
            is_ours = (folder / ABOUT).exists() and _holds(path, shards[path.name])
        else:
            is_ours = path.name in texts and path.is_file() and path.read_bytes() == texts[path.name]
        if not is_ours:
            allowed = "an empty directory, or one begun with the same shape and seed"
            raise ArgumentError("directory", f"{quoted(str(folder))} with another {quoted(path.name)}", allowed)
    return {path.name for path in found if path.name in shards}


def _holds(path: Path, shard: dict[str, Shape]) -> bool:
    """Whether a file is a shard of these tensors, in which case it is complete."""
    try:
        return {name: place.shape for name, place in read_header(path, ("F16",)).table.items()} == shard
    except (ArgumentError, FormatError):
        return False


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
