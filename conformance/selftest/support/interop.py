"""What other projects read in the files that ``lowbit quantize`` and ``lowbit convert`` write.

``python interop.py`` makes tiny models with random weights, writes each in every layout, and loads the result with the
tools that own the layout. ``--model`` takes a model of yours instead. Three things are compared:

- *weights*: every matrix of the first block as the tool dequantises it;
- *tokens* of `TEXT`, where the tool has a tokenizer of its own;
- *logits* after every token of `TEXT`, as the norm of the difference over the norm of what lowbit computes in float32
  from the numbers that it reads in the same file.

**Tolerances** come from the arithmetic of the tool. They were written down before the first run, and three were
corrected after it. compressed-tensors, and GPTQModel under transformers, had the limit of float32: both dequantise to
float16, which the comparison of weights shows. GPTQModel alone had it, too, and refuses float32. llama.cpp's float
weights had one limit for all types, and inputs are rounded to the type of the weights.

- Dequantised weights are equal, except where the tool rounds its result to float16: then by `HALF` of the number.
- Logits: a product of K inputs has a relative error e, and a model of L layers has n = 7 L + 1 products, one after
  another or beside each other. Independent errors add up to √n · e, and `MARGIN` times that is allowed. In float32 e is
  √K · 2⁻²⁴. Weights that are rounded to float16 add 2⁻¹², and a model that computes in float16 adds 2⁻¹¹. llama.cpp
  rounds the inputs of a product to the type of the weights, if they are floats, and otherwise to 8 bits in blocks of
  32: the largest of 32 normal numbers is about 2.1 deviations, a step is a 127th of it, and a rounding has the
  deviation step / √12, so e is 0.005.

One wrong scale in sixteen changes a product by a quarter of its size or more, and so does a matrix in a wrong order of
rows. The wide limit of llama.cpp's products of codes stands beside two narrow ones: its float32 products of a model
without codes, and transformers with the weights as llama.cpp's own package dequantises them.
"""

import argparse
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
from interop_tools import TEXT, TOOLS, Found, of_transformers_codes
from trained_words import LLAMA3, of_bytes, of_characters, published
from typer.testing import CliRunner

from lowbit.arrays import F32
from lowbit.cli import app
from lowbit.formats.checkpoint.names import matrix_names
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.rewriting.source import Source, open_source
from lowbit.runtime.stored import open_model

MARGIN = 4.0


@dataclass(frozen=True)
class Ours:
    """A written model as lowbit reads it.

    Attributes:
        path: of the directory or file.
        source: what `open_source` makes of it.
        tokens: those of `TEXT`.
        logits: after each of them.
    """

    path: Path
    source: Source
    tokens: list[int]
    logits: F32

    @classmethod
    def read(cls, path: Path) -> "Ours":
        """Read a model and run it on `TEXT` in float32."""
        source, opened = open_source(path), open_model(path)
        decoder = Decoder(opened.weights, lambda matrix: partial(_product, to_float(matrix)))
        tokens = opened.tokenizer.encode(TEXT)
        return cls(path, source, tokens, decoder.logits(decoder.hidden(tokens, decoder.new_state())))

    def modules(self) -> Iterator[tuple[str, F32]]:
        """The matrices of the first block by the names of their modules, N × K."""
        matrices = self.source.layer(0).linears()
        for tensor, names in matrix_names(self.source.architecture, self.source.config, 0).items():
            if tensor.endswith(".gate.weight"):
                continue  # a router is no quantised matrix
            yield tensor.removesuffix(".weight"), np.concatenate([to_float(matrices[name]).T for name in names])

    def noise(self, more: float = 0.0) -> float:
        """The norm that the difference of logits may have, where a product has the relative error `more` beside that
        of float32."""
        config = self.source.config
        longest = max(config.hidden, config.feed_forward, config.heads * config.head_dim)
        return MARGIN * sqrt(7 * config.layers + 1) * (sqrt(longest) * 2.0**-24 + more)


def _product(numbers: F32, x: F32) -> F32:
    return x @ numbers


def compared(ours: Ours, found: Found) -> str:
    """Compare, and say by how much the two differ.

    Raises:
        AssertionError: weights, tokens or logits differ by more than is allowed.
    """
    told = []
    if found.weight is not None:
        worst = 0.0
        for module, numbers in ours.modules():
            theirs = found.weight(module)
            assert theirs.shape == numbers.shape, f"{module} is {theirs.shape}, not {numbers.shape}"
            errors = np.abs(theirs - numbers)
            smallest = 2.0**-25 if found.rounding else 0.0  # half of the smallest float16
            assert (errors <= found.rounding * np.abs(numbers) + smallest).all(), f"{module} differs by {errors.max()}"
            worst = max(worst, float(errors.max()))
        told.append(f"weights {'equal' if worst == 0 else f'differ by {worst:.1e}'}")
    if found.tokens is not None:
        assert found.tokens == ours.tokens, f"tokens {found.tokens}, not {ours.tokens}"
        told.append("tokens equal")
    if found.logits is not None:
        largest = float(np.abs(found.logits - ours.logits).max())
        error = float(np.linalg.norm(found.logits - ours.logits) / np.linalg.norm(ours.logits))
        allowed = ours.noise(found.noise)
        assert error <= allowed, (
            f"logits differ by {error:.2g} of their norm, {largest:.2g} at most; allowed {allowed:.2g}"
        )
        told.append(f"logits differ by {largest:.1e} at most, {error:.1e} of their norm (allowed {allowed:.1e})")
    return "; ".join(told)


# **Models and layouts.**

TINY = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256},
}
"""Of sizes that every tool can hold: groups of 64, blocks of 32."""
QWEN3_CHANNELS = 128
"""Of a head: those of all published models, because transformers 5.24 takes no others from a file of GGUF."""
KINDS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llama": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 264},
        lambda: tiny_checkpoint.TOKENIZER,
    ),
    "qwen3": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "head_dim": QWEN3_CHANNELS},
        lambda: of_bytes(published(LLAMA3)),
    ),
    "characters": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000},
        lambda: of_characters(prefix=True),
    ),
}
"""Configuration and tokenizer of each tiny model."""
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}

SYMMETRIC = ("--symmetric", "--group-size", 64)
ROUNDED: dict[str, tuple[object, ...]] = {
    "symmetric": SYMMETRIC,
    "zeros": ("--group-size", 64),
    "2 bits": ("--bits", 2, "--group-size", 32),
    "3 bits": ("--bits", 3, "--group-size", 32),
    "8 bits": ("--bits", 8, *SYMMETRIC),
    "act-order": ("--method", "gptq", "--act-order", *SYMMETRIC),
    "mixed": ("--attention-bits", 8, *SYMMETRIC),
}
"""Ways to quantise, by name: the options of ``lowbit quantize``."""
LAYOUTS_OF: dict[str, tuple[str, ...]] = {
    "symmetric": tuple(TOOLS),
    "zeros": ("gptq-v2", "awq", "compressed-tensors", "hqq", "gguf"),
    "2 bits": ("gptq-v2", "hqq", "gguf"),
    "3 bits": ("gptq-v2", "hqq", "gguf"),
    "8 bits": ("gptq-v2", "compressed-tensors", "hqq", "gguf"),
    "act-order": ("gptq-v2", "gptq-v1"),
    "mixed": ("gptq-v2", "gguf"),
}
"""The layouts that each is converted to."""


def tiny(folder: Path, kind: str) -> Path:
    """A model with random weights; llama.cpp computes in float32 only with weights that need it."""
    change, tokenizer = KINDS[kind]
    config = {**tiny_checkpoint.DENSE, **TINY, **change}
    model = tiny_checkpoint.published(config)
    if kind == "qwen3":
        norms = [f"model.layers.{layer}.self_attn.{part}_norm.weight" for layer in (0, 1) for part in "qk"]
        model.tensors |= {name: np.linspace(0.5, 1.5, QWEN3_CHANNELS, dtype=np.float32) for name in norms}
    model.tensors = {name: each * np.float32(1.0001) for name, each in model.tensors.items()}
    model.types = dict.fromkeys(model.tensors, "F32")
    path = tiny_checkpoint.write(folder, model, tokenizer=tokenizer())
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return path


def run(*arguments: object) -> None:
    """Run ``lowbit``.

    Raises:
        RuntimeError: it failed; the message says why.
    """
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exit_code:
        raise RuntimeError(f"lowbit {arguments[0]}: {result.exception}") from result.exception


def written(source: Path, folder: Path, chosen: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Write a model in every way: the way, the layout and the path of each result."""
    for way, options in ROUNDED.items():
        if way not in chosen:
            continue
        first = folder / way / "gptq-v2"
        first.parent.mkdir(parents=True)
        (first.parent / "text").write_text(TEXT * 8)
        seen = ("--calibration", first.parent / "text") if "gptq" in options else ()
        run("quantize", source, "-o", first, *options, *seen)
        for layout in LAYOUTS_OF[way]:
            path = first.parent / ("model.gguf" if layout == "gguf" else layout)
            if path != first:
                run("convert", first, "-o", path, "--format", layout)
            yield way, layout, path
    if source.is_dir():  # a file of GGUF is not converted to another
        run("convert", source, "-o", folder / "model.gguf", "--format", "gguf")
        yield "floats", "gguf", folder / "model.gguf"
    shutil.rmtree(folder)


def answer_of(tool: Callable[[Path], Found], ours: Ours) -> tuple[bool, str]:
    """Whether a tool reads a model as lowbit does, and the numbers or the reason."""
    try:
        with redirect_stdout(sys.stderr):
            return True, compared(ours, tool(ours.path))
    except Exception as error:  # whatever another project raises is its answer
        traceback.print_exc()
        return False, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
            :300
        ]


def tools_of(way: str, layout: str) -> Iterator[Callable[[Path], Found]]:
    """The tools that read a layout.

    optimum, by which transformers reads GPTQ, does not know the field that gives some matrices other bits.
    """
    yield from (tool for tool in TOOLS[layout] if not (way == "mixed" and tool is of_transformers_codes))


def main() -> int:
    """Write and read; the number of results that a tool does not read as lowbit does."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or a checkpoint directory in place of tiny ones")
    parser.add_argument("--ways", nargs="*", choices=list(ROUNDED), default=list(ROUNDED), help="by default all")
    parser.add_argument("--layouts", nargs="*", choices=list(TOOLS), default=list(TOOLS), help="by default all")
    given, wrong = parser.parse_args(), 0
    for name in (
        "torch",
        "transformers",
        "compressed-tensors",
        "gptqmodel",
        "optimum",
        "hqq",
        "gguf",
        "llama-cpp-python",
    ):
        print(name, version(name))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sources = (
            {given.model.name: given.model} if given.model else {kind: tiny(folder / kind, kind) for kind in KINDS}
        )
        for model, source in sources.items():
            for way, layout, path in written(source, folder / "written", given.ways):
                if layout not in given.layouts:
                    continue
                ours = Ours.read(path)
                for tool in tools_of(way, layout):
                    right, told = answer_of(tool, ours)
                    wrong += not right
                    name = str(tool.__doc__).rstrip(".")
                    print(f"{model}, {way}, {layout}, {name}: {'' if right else 'WRONG: '}{told}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 100))
