"""Mutated model files, caches and recordings, for `fuzzing`."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
import tiny_gguf
from fuzzing import Attempt, check_text
from mutations import Tree, mangled, mutated, nested, spelled

from lowbit.cli import inspection
from lowbit.formats.checkpoint.quantized_file import Origin, read_matrices, write_quantized
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tokenizer import read_tokenizer
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.quantization.affine import quantize
from lowbit.runtime.inspection import inspect

QUANTISED = Path(__file__).parents[1] / "lowbit" / "formats" / "checkpoint" / "quantised"
TEXT = "hello  12 naïve\n" + "a" * 40
NAMES = ("../model.safetensors", "/etc/passwd", "a/../b.safetensors", ".safetensors", "x\0.safetensors", "\ud800")
PARTS: tuple[Tree, ...] = (
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": "a", "Regex": "(a+)+$"}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"String": "a"}, "behavior": "MergedWithNext", "invert": True},
    {"type": "Sequence", "decoy": [], "pretokenizers": [{"type": "Whitespace"}], "normalizers": [], "decoders": []},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": "(a|a)*b"}, "content": ""},
    {"type": "Prepend", "prepend": "\0"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "never", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": False},
    {"type": "Digits", "individual_digits": True},
    {"type": "Strip", "content": "a", "start": 1, "stop": 1},
    {"type": "Fuse"},
    {"type": "ByteFallback"},
    {"type": "NFC"},
    {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 3, "decoders": [{"type": "Fuse"}] * 3},
    nested(50, {}),
)


def checkpoint(folder: Path) -> Attempt:
    """A directory of which one JSON file is mutated: what it describes is opened, read and used."""
    whole = tiny_checkpoint.write(folder / "model")
    (whole / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    (whole / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
    files = {path.name: json.loads(path.read_text()) for path in sorted(whole.glob("*.json"))}

    def attempt(chance: random.Random) -> str:
        name = chance.choice(["tokenizer.json", *files])
        tree = mutated(files[name], chance, chance.choice((1, 1, 2)))
        if name == "tokenizer.json" and isinstance(tree, dict) and chance.randrange(2):
            tree[chance.choice(("normalizer", "pre_tokenizer", "decoder", "post_processor"))] = chance.choice(PARTS)
        if name.endswith("index.json") and isinstance(tree.get("weight_map"), dict) and not chance.randrange(3):
            tree["weight_map"][chance.choice(list(files))] = chance.choice(NAMES)
        (whole / name).write_bytes(spelled(tree, chance))
        try:
            model = open_checkpoint(whole)
            tokenizer = read_tokenizer(model)
            tokens = tokenizer.encode(TEXT)
            tokenizer.decode(tokens)
            "".join(tokenizer.stream(tokens))
            model.layer(0)
        finally:
            (whole / name).write_text(json.dumps(files[name]))
        return "read"

    return attempt


def shards(folder: Path) -> Attempt:
    """A directory of which one file of weights is mutated: its header, or any byte."""
    whole = tiny_checkpoint.write(folder / "model")
    path = sorted(whole.glob("*.safetensors"))[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def attempt(chance: random.Random) -> str:
        if chance.randrange(3):
            path.write_bytes(tiny_checkpoint.crafted(spelled(mutated(header, chance), chance), data))
        else:
            path.write_bytes(mangled(content[: 8 + length], chance) + data)
        model = open_checkpoint(whole)
        model.layer(0)
        return "read"

    return attempt


def gguf(folder: Path) -> Attempt:
    """A GGUF file with bytes changed, most of them in its header."""
    path = folder / "model.gguf"
    content = tiny_gguf.write(folder / "whole.gguf").read_bytes()
    header = content.index(b"blk.1.attn_q.weight") + 200

    def attempt(chance: random.Random) -> str:
        end = chance.choice((64, 600, header, len(content)))
        path.write_bytes(mangled(content[:end], chance) + content[end:])
        model = open_gguf(path)
        tokenizer = gguf_tokenizer.read_tokenizer(model)
        tokens = tokenizer.encode(TEXT)
        tokenizer.decode(tokens)
        read_llama(model)
        return "read"

    return attempt


def inspected(folder: Path) -> Attempt:
    """A GGUF file, and a GPTQ directory of which the configuration or the header is mutated, as they are described."""
    file, whole = folder / "model.gguf", folder / "model"
    content = tiny_gguf.write(folder / "whole.gguf").read_bytes()
    config = tiny_checkpoint.DENSE | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}}
    layout = {"qweight": ("I32", [4, 8]), "qzeros": ("I32", [2, 1]), "scales": ("F16", [2, 8]), "g_idx": ("I32", [32])}
    header, data = tiny_checkpoint.empty({f"layers.0.q_proj.{name}": each for name, each in layout.items()})
    whole.mkdir()

    def attempt(chance: random.Random) -> str:
        tree, table = config, header
        match chance.randrange(3):
            case 0:
                end = chance.choice((64, 600, len(content) // 2))
                file.write_bytes(mangled(content[:end], chance) + content[end:])
                return described(file)
            case 1:
                tree = mutated(config, chance)
            case 2:
                table = mutated(header, chance)
        (whole / "config.json").write_bytes(spelled(tree, chance))
        (whole / "model.safetensors").write_bytes(tiny_checkpoint.crafted(spelled(table, chance), data))
        return described(whole)

    def described(path: Path) -> str:
        found = inspect(path)
        json.dumps(inspection.described(found), allow_nan=False)
        for line in inspection.told(found):
            check_text(line)
        return "read"

    return attempt


def prequantised(folder: Path) -> Attempt:
    """A directory that a tool quantised, of which the configuration, the header, or bytes of weights are mutated."""
    whole = folder / "model"
    whole.mkdir()
    found: dict[str, tuple[Tree, Tree, bytes]] = {}
    for source in sorted(QUANTISED.glob("*/model.safetensors")):
        content = source.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        config = json.loads((source.parent / "config.json").read_text())
        found[source.parent.name] = config, json.loads(content[8:end]), content[end:]

    def attempt(chance: random.Random) -> str:
        config, header, data = found[chance.choice(list(found))]
        match chance.randrange(4):
            case 0:
                config = mutated(config, chance)
            case 1:
                header = mutated(header, chance)
            case _:
                begin = chance.randrange(len(data))
                wrong = chance.randbytes(min(chance.choice((1, 4, 64)), len(data) - begin))
                data = data[:begin] + wrong + data[begin + len(wrong) :]
        (whole / "config.json").write_bytes(spelled(config, chance))
        (whole / "model.safetensors").write_bytes(tiny_checkpoint.crafted(spelled(header, chance), data))
        model = open_checkpoint(whole, chance.choice((None, None, None, "v1", "v2")))
        for number in range(model.config.layers):
            model.layer(number)
        assert model.head is not None
        return "read"

    return attempt


def quantized(folder: Path) -> Attempt:
    """A file of the cache of quantised checkpoints, whose sums say what it holds."""
    path, origin = folder / "block.safetensors", Origin("a" * 64, "block 0")
    weights = np.arange(64, dtype=np.float32).reshape(8, 8)
    matrix = quantize(weights, bits=4, group_size=8, scale_dtype="float16")
    write_quantized(path, {"matrix": matrix, "norm": weights[0].copy()}, origin)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    account = json.loads(header["__metadata__"]["lowbit"])

    def attempt(chance: random.Random) -> str:
        changed: dict[str, Any] = json.loads(json.dumps(header))
        match chance.randrange(4):
            case 0:
                changed = mutated(changed, chance)
            case 1 | 2:
                text = spelled(mutated(account, chance), chance)
                changed["__metadata__"]["lowbit"] = text.decode(errors="surrogateescape")
            case 3:
                path.write_bytes(mangled(content, chance))
                read_matrices(path, origin)
                return "read"
        path.write_bytes(tiny_checkpoint.crafted(json.dumps(changed).encode(), data))
        read_matrices(path, origin)
        return "read"

    return attempt
