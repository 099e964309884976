"""llama.cpp and ik_llama.cpp through the functions of their own interface: ``python bench/engine_llama.py FILE OUT
TYPE`` writes a file of another type.

The likeliest token is found by numpy, as in lowbit.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from engines import FTYPES, Setting, Stepwise


class LlamaCpp(Stepwise):
    """A model and a context of one of the two.

    Args:
        setting: of the run.
        module: of Python that has the functions.
        flash: whether attention is computed by its flash kernel.
        repacked: whether matrices may be laid out anew for this processor when they are loaded; None for the default.
    """

    def __init__(self, setting: Setting, module: str, flash: bool, repacked: bool | None = None) -> None:
        self._api = api = import_module(module)
        silent(api)
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        if repacked is not None:
            assign(model, {"use_extra_bufts": repacked, "repack_tensors": repacked})
        self._model = api.llama_model_load_from_file(str(setting.file).encode(), model)
        if not self._model:
            raise RuntimeError(f"the model {setting.file.name} was not loaded")
        context = api.llama_context_default_params()
        context.n_ctx, context.n_seq_max = setting.length * setting.sequences, setting.sequences
        context.n_batch, context.n_ubatch = setting.length, min(setting.length, 512)
        context.n_threads = context.n_threads_batch = setting.threads
        assign(context, {"flash_attn_type": int(flash), "flash_attn": flash})
        self._context = api.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("no context was made")
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(setting.length, 0, 1)

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        self._clear()
        token = self._next(prompt, 0)
        yield token
        for number in range(count - 1):
            token = self._next([token], len(prompt) + number)
            yield token

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        self._clear()
        tokens = []
        for sequence, prompt in enumerate(prompts):
            self._read([(token, place, sequence) for place, token in enumerate(prompt)])
            tokens.append(self._likeliest(len(prompt) - 1))
        start = time.perf_counter()
        for number in range(count):
            places = [len(prompt) + number for prompt in prompts]
            self._read(list(zip(tokens, places, range(len(prompts)), strict=True)))
            tokens = [self._likeliest(place) for place in range(len(prompts))]
        return time.perf_counter() - start

    def nats(self, window: list[int]) -> float:
        self._clear()
        self._read([(token, place, 0) for place, token in enumerate(window)])
        total = 0.0
        for row, token in enumerate(window[1:]):
            scores = self._logits(row).astype(np.float64)
            total += float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[token])
        return total

    def _clear(self) -> None:
        if hasattr(self._api, "llama_kv_cache_clear"):
            self._api.llama_kv_cache_clear(self._context)
        else:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _next(self, read: list[int], start: int) -> int:
        self._read([(token, start + place, 0) for place, token in enumerate(read)], last=True)
        return self._likeliest(len(read) - 1)

    def _read(self, rows: list[tuple[int, int, int]], *, last: bool = False) -> None:
        """Read tokens, each with its place and its sequence; the logits of all are wanted, or of the last."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, place, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, place, 1
            batch.logits[n] = not last or n == len(rows) - 1
            batch.seq_id[n][0] = sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _likeliest(self, row: int) -> int:
        return int(self._logits(row).argmax())

    def _logits(self, row: int) -> Any:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))


def assign(settings: Any, values: dict[str, Any]) -> None:
    """Set the fields that these settings have: the two projects call the same by different names."""
    for name, value in values.items():
        if hasattr(settings, name):
            setattr(settings, name, value)


_KEPT: list[Any] = []


def silent(api: Any) -> None:
    """Drop what a library logs, where it can be asked to."""
    if hasattr(api, "llama_log_set"):
        _KEPT.append(api.llama_log_callback(lambda level, text, data: None))
        api.llama_log_set(_KEPT[-1], None)


def write_as(file: Path, out: Path, ftype: int) -> None:
    """Write a GGUF file of another type, by llama.cpp's own quantiser."""
    api = import_module("llama_cpp")
    silent(api)
    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = ftype, True
    partial = out.with_name(f".{out.name}.partial")
    if api.llama_model_quantize(str(file).encode(), str(partial).encode(), ctypes.byref(settings)):
        raise SystemExit("llama_model_quantize failed")
    partial.replace(out)


if __name__ == "__main__":
    write_as(Path(sys.argv[1]), Path(sys.argv[2]), FTYPES[sys.argv[3]])
