"""Engines that continue a text with a whole model: lowbit and those beside which it is measured."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.runtime import Contract, Options, StoredModel, load
from lowbit.runtime.language_model import StepChoice
from lowbit_cppyy.backend import CppyyBackend

NAMES: dict[StepChoice, str] = {"compiled": "", "operations": ", step by operations", "formulas": ", products only"}


@dataclass(frozen=True)
class Continued:
    """The tokens after a prompt; the seconds to the first of them, and of all that follow it."""

    tokens: list[int]
    first: float
    after: float


class Generator(ABC):
    """A model that is loaded and continues prompts, greedily."""

    name: str

    @abstractmethod
    def continued(self, prompt: list[int], count: int) -> Continued:
        """Compute `count` tokens after a prompt."""


class Stepwise(Generator):
    """A generator that is asked for each token, and that continues several sequences at once."""

    @abstractmethod
    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield `count` tokens after a prompt, each computed when it is asked for."""

    @abstractmethod
    def rounds(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of `count` rounds, in each of which every sequence gets a token; the prompts were read before."""

    def continued(self, prompt: list[int], count: int) -> Continued:
        start = time.perf_counter()
        tokens = self.tokens(prompt, count)
        found = [next(tokens)]
        first = time.perf_counter()
        found += tokens
        return Continued(found, first - start, time.perf_counter() - first)


class Lowbit(Stepwise):
    """`lowbit generate --backend cppyy`, with a step that is compiled, or operation by operation, or with products only
    and the formulas of the specification between them; and by one of the contracts of linear layers."""

    def __init__(self, model: StoredModel, threads: int, isa: str | None, contract: Contract, step: StepChoice) -> None:
        backend = CppyyBackend(isa=isa, threads=threads)
        self.model = load(model, backend, Options(contract=contract, step=step))
        best = (backend.capabilities().details or {})["instruction set"]
        self.name = f"lowbit {best} {contract}{NAMES[step]}"

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        return (step.token for step in self.model.generate(prompt, count, stop=()))

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        decoder: Any = self.model.decoder
        states = [decoder.new_state(len(each) + count) for each in prompts]
        ends = [decoder.logits(decoder.hidden(each, state)[-1:]) for each, state in zip(prompts, states, strict=True)]
        tokens = [int(each[0].argmax()) for each in ends]
        start = time.perf_counter()
        for _ in range(count):
            tokens = decoder.logits(decoder.hidden_batch(tokens, states)).argmax(axis=1).tolist()
        return time.perf_counter() - start


class LlamaCpp(Stepwise):
    """llama.cpp through the functions of its own interface; the likeliest token is found by numpy, as in lowbit."""

    name = "llama.cpp"

    def __init__(self, file: Path, threads: int, length: int, sequences: int = 1) -> None:
        import llama_cpp

        self._api, self._quiet = llama_cpp, llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = length * sequences, length, min(length, 512)
        context.n_seq_max = sequences
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        token = self._next(prompt)
        yield token
        for _ in range(count - 1):
            token = self._next([token])
            yield token

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        batch = self._api.llama_batch_init(max(len(prompts), *map(len, prompts)), 0, 1)
        try:
            tokens = []
            for sequence, prompt in enumerate(prompts):
                self._fill(batch, [(token, place, sequence) for place, token in enumerate(prompt)])
                tokens.append(self._likeliest(len(prompt) - 1))
            start = time.perf_counter()
            for number in range(count):
                places = [len(prompt) + number for prompt in prompts]
                self._fill(batch, list(zip(tokens, places, range(len(prompts)), strict=True)))
                tokens = [self._likeliest(place) for place in range(len(prompts))]
            return time.perf_counter() - start
        finally:
            self._api.llama_batch_free(batch)

    def _fill(self, batch: Any, rows: list[tuple[int, int, int]]) -> None:
        """Read tokens, each with its place and its sequence; all their logits are wanted."""
        batch.n_tokens = len(rows)
        for n, (token, place, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, place, 1, 1
            batch.seq_id[n][0] = sequence
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _next(self, read: list[int]) -> int:
        given = (self._api.llama_token * len(read))(*read)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(given, len(read))):
            raise RuntimeError("llama_decode failed")
        return self._likeliest(-1)

    def _likeliest(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


class OpenVino(Generator):
    """OpenVINO GenAI, which reads the GGUF file itself. By default it casts activations to 8 bits and computes in
    bfloat16 where the processor has it; with ``exact`` it does neither."""

    def __init__(self, file: Path, threads: int, exact: bool) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._api = openvino.Tensor, openvino_genai
        plain = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
        settings = {"INFERENCE_NUM_THREADS": threads, "CACHE_DIR": ""} | (plain if exact else {})
        # Its other way of attention keeps the prompts that it has read, and here the same prompt comes again.
        self._pipeline = openvino_genai.LLMPipeline(str(file), "CPU", ATTENTION_BACKEND="SDPA", **settings)
        self.name = f"OpenVINO GenAI{' float32' if exact else ''}"

    def continued(self, prompt: list[int], count: int) -> Continued:
        settings = self._api.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True)
        settings.do_sample, settings.apply_chat_template = False, False
        given = self._tensor(np.array([prompt], np.int64))
        times = []
        going_on = self._api.StreamingStatus.RUNNING

        class Clock(self._api.StreamerBase):  # type: ignore[misc, name-defined]  # of a library without types
            def write(self, token: object) -> object:
                times.append(time.perf_counter())
                return going_on

            def end(self) -> None: ...

        start = time.perf_counter()
        found = self._pipeline.generate(given, settings, Clock())
        return Continued(list(found.tokens[0]), times[0] - start, times[-1] - times[0])


def beside(file: Path, threads: int, length: int, sequences: int = 1) -> tuple[list[Generator], dict[str, str]]:
    """The engines of others that can run here, and why the rest cannot."""
    makers: dict[str, Callable[[], Generator]] = {
        "llama.cpp": lambda: LlamaCpp(file, threads, length, sequences),
        "OpenVINO GenAI": lambda: OpenVino(file, threads, exact=False),
        "OpenVINO GenAI float32": lambda: OpenVino(file, threads, exact=True),
    }
    found, absent = list[Generator](), dict[str, str]()
    for name, make in makers.items():
        try:
            found.append(make())
        except (ImportError, OSError, AttributeError, RuntimeError) as failure:
            absent[name] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200]}"
    return found, absent
