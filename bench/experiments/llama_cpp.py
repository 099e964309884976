"""Perplexity by llama.cpp's protocol, computed by llama.cpp and by lowbit, window by window.

Both read the same file (SmolLM2-135M in Q4_1) and the same text. llama.cpp gives the logits of each window, and their
losses are added up as its program ``perplexity`` does: of the second half of each window, its first position excepted.
Needs llama-cpp-python, which compiles llama.cpp::

    pip install "lowbit[adapters,cppyy]"
    cd bench
    python -m experiments llama.cpp

Source: ``tools/perplexity/perplexity.cpp`` of llama.cpp.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.measuring import PUBLISHED, WINDOW
from experiments.running import Experiment, Row
from lowbit import backend as registry
from lowbit.arrays import F32
from lowbit.formats.fetch import fetch, read_text
from lowbit.model.block import Linear
from lowbit.model.decoder import Decoder
from lowbit.model.perplexity import PROTOCOLS, negative_log_likelihood, perplexity
from lowbit.model.weights import Matrix
from lowbit.runtime import BackendLinears, load, open_model

TEXT, MOST, QUICK = "lcet10", 65, 1
"""The text, and how many of its windows are read: 65 score 16,575 tokens."""
PROTOCOL = replace(PROTOCOLS["llama.cpp"], least=1)
"""Of one window; the program itself asks for a text of two."""


def rows(quick: bool) -> list[Row]:
    """llama.cpp with its keys and values in float16, as is its default, and in float32; and lowbit, as it is and with
    the activations of llama.cpp."""
    count = QUICK if quick else MOST
    engines = {
        "llama.cpp": by_llama_cpp,
        "llama.cpp, float32 cache": partial(by_llama_cpp, wide=True),
        "lowbit": by_lowbit,
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


def by_llama_cpp(pieces: list[list[int]], *, wide: bool = False) -> dict[str, Any]:
    """By llama.cpp on the CPU; with it whether its tokenizer gives the same tokens."""
    import llama_cpp  # an adapter's package, which few environments have

    kind = llama_cpp.GGML_TYPE_F32 if wide else llama_cpp.GGML_TYPE_F16
    options: dict[str, Any] = {
        "n_ctx": WINDOW,
        "n_batch": WINDOW,
        "logits_all": True,
        "verbose": False,
        "n_gpu_layers": 0,
    }
    model = llama_cpp.Llama(str(fetch(PUBLISHED)), type_k=kind, type_v=kind, **options)
    own = model.tokenize(read_text(fetch(TEXT)).encode(), add_bos=True)
    given = [token for piece in pieces for token in piece]
    found, half = [], WINDOW // 2
    for piece in pieces:
        model.reset()
        model.eval(piece)
        logits = np.array(model.scores[half : WINDOW - 1], np.float32)
        found.append(round(negative_log_likelihood(logits, piece[half + 1 :]), 6))
    return {"nats": found, "same_tokens": own[: len(given)] == given, "version": llama_cpp.__version__}


EXPERIMENT = Experiment("llama.cpp", "Perplexity by llama.cpp's protocol, by llama.cpp and by lowbit.", rows)
