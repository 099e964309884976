"""Decoders with compiled steps: small models of every kind, and what they answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from stored_runs import some_stored
from tiny_gguf import CONFIG, published, write

from lowbit.arrays import F32
from lowbit.attention.rope import llama3_scaling
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.block import FORMULAS
from lowbit.model.caches import Keys
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.decoder import AnyDecoder, Decoder
from lowbit.model.generation import generate, generate_batch
from lowbit.model.matrices import Embedding, Matrix, select_columns, shape_of, to_float
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.sampling import Sampling
from lowbit.model.weights import GatedWeights, LayerWeights, LlamaWeights, SparseWeights, in_memory, vector_sizes
from lowbit.moe.routing import Softmax
from lowbit.quantization.affine import QuantizedMatrix, quantize
from lowbit.runtime.elementwise import on_backend
from lowbit.runtime.linears import BackendLinears, Contract
from lowbit.tensor_formats.stored import Stored, quantized
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.step.decoder import CompiledDecoder
from lowbit_cppyy.stored.formats import GGUF

LLAMA = replace(CONFIG, context=600)
ODD = LlamaConfig(2, 96, 160, 4, 2, 40, 265, 128, 500.0, 1e-3)  # a head is no whole chunk, a matrix no whole panel
SCALED = replace(LLAMA, rope_scaling=llama3_scaling(LLAMA.head_dim, LLAMA.rope_base, 8.0, 1.0, 4.0, 32))
UNROTATED = replace(LLAMA, layers=4, unrotated=(1, 2))
# Blocks of 256 weights.
WIDE = replace(CONFIG, context=128, hidden=256, feed_forward=512, heads=4, kv_heads=1, head_dim=64)
GEMMA = replace(
    CONFIG,
    context=128,
    layers=3,
    head_dim=32,
    window=4,
    full_every=3,
    local_rope_base=100.0,
    activation="gelu",
    embedding_scale=8.0,
)
GRANITE = replace(LLAMA, embedding_scale=12.0, score_scale=1 / LLAMA.head_dim, residual_scale=0.22, logit_divisor=1.7)
FORMATS = {
    "mixed": ("q4_k", "q6_k", "q5_0", "q8_0"),
    "act-order": ("gptq-v2",),
    "floats": ("bfloat16", "float16", "float32"),
}
"""Of the matrices of a model, in turns; so q, k and v, and gate and up, may lie in different formats."""

EDGES = {
    "smallest": LlamaConfig(1, 8, 8, 1, 1, 8, 1, 3, 500.0, 1e-3),
    "narrow": LlamaConfig(2, 24, 40, 4, 1, 6, 5, 9, 500.0, 1e-3, window=1),
    "ragged": LlamaConfig(1, 72, 136, 4, 2, 66, 267, 70, 500.0, 1e-3, window=3),
    "routed": LlamaConfig(2, 16, 24, 2, 2, 4, 3, 7, 500.0, 1e-3, routing=Routing(3, 3, "before")),
    "shaped": replace(
        LlamaConfig(2, 24, 40, 4, 1, 6, 5, 9, 500.0, 1e-3, window=2, full_every=2, activation="clamped"),
        activation_limit=0.5,
        score_scale=0.3,
        score_cap=2.0,
        sinks=True,
        logit_cap=5.0,
    ),
    "biased": LlamaConfig(
        2, 16, 24, 4, 2, 4, 5, 7, 500.0, 1e-3, routing=Routing(3, 2), activation="clamped", sinks=True
    ),
    "factors": LlamaConfig(
        2, 24, 40, 4, 1, 6, 5, 9, 500.0, 1e-3, embedding_scale=3.0, residual_scale=0.6, logit_divisor=0.7, logit_cap=3.0
    ),
    "factors of experts": LlamaConfig(2, 16, 24, 2, 2, 4, 3, 7, 500.0, 1e-3, Routing(3, 2), residual_scale=0.22),
}
"""Models of sizes at which something ends: one of each, no multiple of a vector or a panel, a window of one token; and
two of the kinds of Gemma 2 and GPT-OSS, with all that shapes scores and all biases, and two with Granite's factors."""

MODELS = (
    "llama",
    "odd",
    "scaled",
    "unrotated",
    "qwen3",
    "qwen2",
    "gemma3",
    "granite",
    "q4_0",
    *FORMATS,
    "sparse",
    "sparse before",
    "sparse mixed",
)
DATA = Path(__file__).parents[1] / "lowbit/formats/checkpoint/data"
DIRECTORIES = sorted(path for path in DATA.iterdir() if (path / "expected.npz").exists())
"""Tiny directories of every kind of model."""
DIVIDED = 67
"""Tokens of a prompt whose rows two threads divide (``divides_rows`` of ``cpp/step.h``)."""
PROMPTS = (1, 3, 11, DIVIDED)


@cache
def model(name: str) -> LlamaWeights:
    """A model by name."""
    if name == "sparse mixed":
        return in_turns(sparse("after", model("odd")), ("q4_0", "float16"))
    if name.startswith("sparse"):
        return sparse("before" if name.endswith("before") else "after", model("llama"))
    others = {"odd": ODD, "gemma3": GEMMA, "granite": GRANITE, "scaled": SCALED, "unrotated": UNROTATED}
    others |= dict.fromkeys(FORMATS, WIDE)
    config = others.get(name, LLAMA)
    kind = GGMLQuantizationType.Q4_0 if name == "q4_0" else GGMLQuantizationType.Q4_1
    architecture = name if name in ("qwen2", "qwen3", "gemma3") else "llama"
    lengths = {f"{architecture}.attention.{what}_length": config.head_dim for what in ("key", "value")}
    with TemporaryDirectory() as folder:
        made = published(3, config, kind, architecture=architecture)
        file = write(Path(folder) / "m.gguf", made, metadata=lengths)
        weights = replace(read_llama(open_gguf(file)), config=config)  # a file cannot say everything
    if name not in FORMATS:
        return weights
    turn = iter(range(100))

    def stored(_: str, matrix: Matrix) -> Matrix:
        rows, columns = shape_of(matrix)
        whole = columns % 32 == 0  # the head is not, and GPTQ packs 32 columns of zeros
        return some_stored(FORMATS[name][next(turn) % len(FORMATS[name])] if whole else "q8_0", rows, columns)

    changed = weights.changed(stored)
    gains = ("attention_norm", "feed_forward_norm")  # small, because the matrices are not
    layers = [
        replace(each, **{name: getattr(each, name) * np.float32(1e-3) for name in gains}) for each in changed.layers
    ]
    return replace(changed, layers=tuple(layers))


EMBEDDINGS = (*GGUF, "float32", "float16", "bfloat16", "2 bits", "3 bits", "4 bits", "8 bits")
"""The formats of embeddings whose rows C++ decodes. Groups of codes are short at the end in two of them."""
ANY = Sampling(temperature=1e6, seed=5)
"""Draws every token with nearly the same probability."""


def embedded_in(name: str, tokens: int = 265) -> LlamaWeights:
    """A model of 256 channels whose embedding is in a format of `EMBEDDINGS`, or in another."""
    weights = model("mixed")
    numbers = np.ascontiguousarray(np.asarray(weights.embedding)[:tokens].T)
    made: dict[str, Callable[[], QuantizedMatrix]] = {
        "2 bits": lambda: quantize(numbers, bits=2, group_size=32, scale_dtype="float16"),
        "3 bits": lambda: quantize(numbers, bits=3, group_size=96, convention="zero_point"),
        "4 bits": lambda: quantize(numbers, bits=4, group_size=48),
        "8 bits": lambda: quantize(numbers, bits=8, group_size=256, convention="zero_point", scale_dtype="float16"),
    }
    embedding = Embedding.of(made[name]() if name in made else some_stored(name, *numbers.shape))
    config = replace(weights.config, vocabulary=tokens)
    return replace(weights, config=config, embedding=embedding, head=select_columns(weights.head, np.arange(tokens)))


def directory(folder: Path) -> LlamaWeights:
    """A model of `DIRECTORIES`, with all matrices in 4 bits."""
    weights = planned(in_memory(open_checkpoint(folder)), Plan.uniform(4, 8))
    return replace(weights, head=quantize(np.ascontiguousarray(to_float(weights.head)), bits=4, group_size=8))


def in_turns(weights: LlamaWeights, formats: Sequence[str]) -> LlamaWeights:
    """A sparse model in which the last matrices of experts, whose answers are added, lie in these formats in turns."""

    def stored(experts: SparseWeights) -> SparseWeights:
        made = [replace(each, down=in_format(each.down, name)) for each, name in zip(experts.experts, cycle(formats))]
        return replace(experts, experts=tuple(made))

    layers = [
        replace(each, feed_forward=stored(each.feed_forward))
        for each in weights.layers
        if isinstance(each.feed_forward, SparseWeights)
    ]
    return replace(weights, layers=tuple(layers))


def in_format(matrix: Matrix, name: str) -> Stored:
    """A matrix in a format, or in float16."""
    by_columns = np.ascontiguousarray(to_float(matrix).T)
    if name == "float16":
        columns, rows = by_columns.shape
        return Stored(name, rows, columns, (by_columns.astype(np.float16),))
    return quantized(by_columns, name)


def sparse(softmax: Softmax, dense: LlamaWeights) -> LlamaWeights:
    """A model with five experts in each layer, of which a token runs two."""
    rng = np.random.default_rng(7)
    config = replace(dense.config, routing=Routing(5, 2, softmax))

    def matrix(rows: int, columns: int) -> Matrix:
        numbers: F32 = rng.normal(scale=1 / 8, size=(rows, columns)).astype(np.float32)
        return quantize(numbers, bits=4, group_size=32)

    def experts() -> SparseWeights:
        wide, narrow = (config.hidden, config.feed_forward), (config.feed_forward, config.hidden)
        made = [GatedWeights(matrix(*wide), matrix(*wide), matrix(*narrow)) for _ in range(5)]
        return SparseWeights(rng.normal(size=(config.hidden, 5)).astype(np.float32), tuple(made))

    layers = tuple(replace(layer, feed_forward=experts()) for layer in dense.layers)
    return LlamaWeights(config, dense.embedding, layers, dense.norm, dense.head)


@cache
def edge(name: str) -> LlamaWeights:
    """One of `EDGES`, with random weights in short groups."""
    config, rng = EDGES[name], np.random.default_rng(11)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(rows: int, columns: int) -> Matrix:
        numbers: F32 = rng.normal(scale=rows**-0.5, size=(rows, columns)).astype(np.float32)
        return quantize(numbers, bits=4, group_size=min(rows, 8))

    def gated() -> GatedWeights:
        wide, narrow = (config.hidden, config.feed_forward), (config.feed_forward, config.hidden)
        return GatedWeights(matrix(*wide), matrix(*wide), matrix(*narrow))

    def feed_forward() -> GatedWeights | SparseWeights:
        if config.routing is None:
            return gated()
        router = rng.normal(size=(config.hidden, config.routing.experts)).astype(np.float32)
        return SparseWeights(router, tuple(gated() for _ in range(config.routing.experts)))

    def layer() -> LayerWeights:
        query, key, value = (matrix(config.hidden, width) for width in (queries, keys, keys))
        gain = np.ones(config.hidden, np.float32)
        endings = ("sinks", "bias") if name == "biased" else ("sinks",)
        sizes = {each: size for each, size in vector_sizes(config).items() if each.endswith(endings)}
        own: dict[str, Any] = {each: rng.normal(size=size).astype(np.float32) for each, size in sizes.items()}
        return LayerWeights(gain, query, key, value, matrix(queries, config.hidden), gain, feed_forward(), **own)

    embedding = rng.normal(size=(config.vocabulary, config.hidden)).astype(np.float32)
    layers = tuple(layer() for _ in range(config.layers))
    head = matrix(config.hidden, config.vocabulary)
    return LlamaWeights(config, embedding, layers, np.ones(config.hidden, np.float32), head)


def edge_answers(decoder: Decoder | CompiledDecoder) -> list[F32]:
    """Logits of sequences as long as the context and the capacity of their states, which grow from one or not at all;
    and the hidden states of a batch in which one sequence is empty and one is filled to its end."""
    config, rng = decoder.config, np.random.default_rng(13)
    found: list[F32] = []

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, config.vocabulary, count)]

    for capacity, first in ((1, 1), (config.context, config.context), (config.context, 1), (1, config.context - 1)):
        state: Any = decoder.new_state(capacity)
        found.append(decoder.logits(decoder.hidden(tokens(first), state)))
        found += [decoder.logits(decoder.hidden(tokens(1), state)) for _ in range(config.context - first)]
    states: list[Any] = [decoder.new_state(capacity) for capacity in (1, config.context, 2)]
    decoder.hidden(tokens(config.context - 1), states[1])
    decoder.hidden(tokens(1), states[2])
    found.append(decoder.hidden_batch(tokens(3), states).astype(np.float32))
    return found


def operations(
    backend: CppyyBackend, weights: LlamaWeights, contract: Contract = "float32", keys: Keys | None = None
) -> Decoder:
    """The decoder that runs one operation of the backend after the other."""
    steps = on_backend(backend, weights.config, FORMULAS, keys=keys)
    return Decoder(weights, BackendLinears(backend, contract), ops=steps.ops)


def logits(decoder: AnyDecoder, prompt: int, count: int) -> F32:
    """Of `count` tokens that follow a prompt of `prompt` tokens, forced along one sequence."""
    rng = np.random.default_rng(prompt)
    tokens: Sequence[int] = [int(token) for token in rng.integers(0, decoder.config.vocabulary, prompt + count)]
    steps = generate(decoder, tokens[:prompt], count, forced=tokens[prompt:])
    return np.stack([step.logits for step in steps])


def answers(decoder: Decoder | CompiledDecoder) -> list[F32]:
    """The logits of tokens after prompts of several lengths, the last long enough for two threads to divide it, the
    hidden states of batches, and tokens that are drawn."""
    states: list[Any] = [decoder.new_state(3) for _ in range(3)]
    for state, prompt in zip(states, ([5], [7, 1, 3], [4, 4]), strict=True):
        decoder.hidden(prompt, state)
    batches = [decoder.hidden_batch(tokens, states).astype(np.float32) for tokens in ([1, 2, 3], [0, 9, 8])]
    many = min(DIVIDED, decoder.config.context)
    prompts = [logits(decoder, prompt, count) for prompt, count in ((1, 3), (3, 1), (11, 2), (many, 1))]
    drawn = generate_batch(decoder, [[5], [7, 1], [3]], 4, sampling=ANY)
    return [*prompts, *batches, np.array(drawn, np.float32)]


def compiled(backend: CppyyBackend, decoder: Decoder) -> CompiledDecoder:
    """The same decoder with a compiled step."""
    made = backend.compiled(decoder)
    assert isinstance(made, CompiledDecoder)
    return made
