"""Perplexity by llama.cpp's protocol, computed by llama.cpp and by lowbit, window by window.

Both read the same file (SmolLM2-135M in Q4_1) and the same text. llama.cpp gives the logits of each window, and their
losses are added up as its program ``perplexity`` does: of the second half of each window, its first position excepted.

Both need not have the same numbers, because llama.cpp rounds what its products read to codes of 8 bits, and lowbit does
not. So two more rows take the difference away, one on each side: llama.cpp reads the same weights as float32, which it
multiplies in float32; and lowbit rounds what its products read as llama.cpp does. Needs cyllama, a wheel that holds
llama.cpp for CPUs::

    pip install "lowbit[cppyy]" cyllama==0.2.18
    cd bench
    python -m experiments llama.cpp

Source: ``tools/perplexity/perplexity.cpp`` of llama.cpp.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from experiments.measuring import PUBLISHED, WINDOW
from experiments.running import Experiment, Row
from lowbit import backend as registry
from lowbit.arrays import F32
from lowbit.formats.fetch import fetch, read_text
from lowbit.model.block import Linear
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix
from lowbit.model.perplexity import PROTOCOLS, negative_log_likelihood, perplexity
from lowbit.runtime import BackendLinears, load, open_model

PACKAGE = "cyllama"
FLOAT32, PRODUCTS = 0, 0
"""Of llama.cpp's types of numbers, and of its ways to compute attention."""
TEXT, MOST, QUICK = "lcet10", 9, 1
"""The text, and how many of its windows are read: each is compared by itself, and 9 score 2,295 tokens."""
PROTOCOL = replace(PROTOCOLS["llama.cpp"], least=1)
"""Of one window; the program itself asks for a text of two."""


def rows(quick: bool) -> list[Row]:
    """llama.cpp with its keys and values in float16, as is its default, in float32, and on the weights in float32; and
    lowbit, as it is and with the activations of llama.cpp."""
    count = QUICK if quick else MOST
    engines = {
        "llama.cpp": by_llama_cpp,
        "llama.cpp, float32 cache": partial(by_llama_cpp, wide=True),
        "llama.cpp, float32 cache and weights": by_llama_cpp_in_floats,
        "lowbit": by_lowbit,
        "lowbit, activations in Q8_1": by_lowbit_in_q8,
    }
    return [
        Row({"model": PUBLISHED, "engine": engine}, partial(measured, measure, count))
        for engine, measure in engines.items()
    ]


def windows(tokens: Sequence[int], count: int) -> list[list[int]]:
    """The first windows of a text, by the protocol; the model has no BOS."""
    pieces = [piece for piece, _, _ in PROTOCOL.pieces(tokens[: WINDOW * count], WINDOW, None)]
    return pieces


def measured(measure: Any, count: int) -> dict[str, Any]:
    """The losses of each window."""
    tokens = open_model(fetch(PUBLISHED)).tokenizer.encode(read_text(fetch(TEXT)), begin=False)
    pieces = windows(tokens, count)
    found: dict[str, Any] = measure(pieces)
    return found | {"counts": [len(piece) - WINDOW // 2 - 1 for piece in pieces]}


def by_lowbit(pieces: list[list[int]]) -> dict[str, Any]:
    """By the compiled step of cppyy, float32 products."""
    with load(fetch(PUBLISHED), "cppyy") as model:
        return {"nats": [round(model.perplexity(piece, WINDOW, protocol=PROTOCOL).nll, 6) for piece in pieces]}


def by_lowbit_in_q8(pieces: list[list[int]]) -> dict[str, Any]:
    """The same with what each product reads rounded to blocks of Q8_1, as llama.cpp's products on a CPU have it."""
    exact = BackendLinears(registry.load("cppyy"))

    def linear(matrix: Matrix) -> Linear:
        multiply = exact(matrix)
        return lambda x: multiply(in_blocks(x))

    decoder = Decoder(open_model(fetch(PUBLISHED)).weights, linear)
    return {"nats": [round(perplexity(decoder, piece, WINDOW, protocol=PROTOCOL).nll, 6) for piece in pieces]}


def in_blocks(x: F32) -> F32:
    """The numbers that blocks of 32 codes of 8 bits with a scale in float16 stand for.

    >>> in_blocks(np.full((1, 32), 127.4, np.float32))[0, 0]
    np.float32(127.37207)
    """
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0))
    found: F32 = (codes * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)
    return found


def by_llama_cpp(pieces: list[list[int]], *, wide: bool = False, path: Path | None = None) -> dict[str, Any]:
    """By llama.cpp on the CPU; with it whether its tokenizer gives the same tokens, and its version."""
    model = LlamaCpp(path or fetch(PUBLISHED), wide=wide)
    own, given = model.tokens(read_text(fetch(TEXT))), [token for piece in pieces for token in piece]
    half = WINDOW // 2
    nats = [negative_log_likelihood(model.logits(piece, half)[:-1], piece[half + 1 :]) for piece in pieces]
    told = {"same_tokens": own[: len(given)] == given, "version": version(PACKAGE), "commit": model.commit}
    return {"nats": [round(each, 6) for each in nats], **told}


class LlamaCpp:
    """A model in llama.cpp.

    Args:
        path: of a GGUF file.
        wide: keep keys and values in float32, and compute attention by products of them; otherwise as llama.cpp does by
            default.
    """

    def __init__(self, path: Path, *, wide: bool) -> None:
        from cyllama.llama import llama_cpp  # a package that few environments have

        class Model(llama_cpp.LlamaModel):  # type: ignore[misc]  # of any type where the package is not installed
            """With what the package's own `get_logits_ith` asks a model for, and release 0.2.18 forgot."""

            n_vocab = property(lambda self: self.get_vocab().n_vocab)

        llama_cpp.disable_logging()
        options = llama_cpp.LlamaContextParams()
        options.n_ctx = options.n_batch = options.n_ubatch = WINDOW
        options.n_threads = options.n_threads_batch = 1
        if wide:
            options.type_k = options.type_v = FLOAT32
            options.flash_attn_type = PRODUCTS
        self.model = Model(str(path), llama_cpp.LlamaModelParams())
        self.context = llama_cpp.LlamaContext(self.model, options)
        self.batch = llama_cpp.LlamaBatch(n_tokens=WINDOW, embd=0, n_seq_max=1)
        self.commit: str = llama_cpp.ggml_commit()

    def tokens(self, text: str) -> list[int]:
        """Of a text, with BOS where the model has one."""
        found: list[int] = self.model.get_vocab().tokenize(text, True, False)
        return found

    def logits(self, piece: list[int], first: int) -> F32:
        """Of the tokens of a window from `first` on, read from nothing."""
        self.context.kv_cache_clear()
        self.batch.reset()
        for place, token in enumerate(piece):
            self.batch.add(token, place, [0], place >= first)
        self.context.decode(self.batch)
        return np.array([self.context.get_logits_ith(place) for place in range(first, len(piece))], np.float32)


def by_llama_cpp_in_floats(pieces: list[list[int]]) -> dict[str, Any]:
    """By llama.cpp in float32: keys, values, and weights, which are those that the file's blocks stand for."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "floats.gguf"
        write_in_floats(fetch(PUBLISHED), path)
        return by_llama_cpp(pieces, wide=True, path=path)


def write_in_floats(source: Path, target: Path) -> None:
    """Copy a file of GGUF with every tensor as float32; its values stay as they are."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


EXPERIMENT = Experiment("llama.cpp", "Perplexity by llama.cpp's protocol, by llama.cpp and by lowbit.", rows)
