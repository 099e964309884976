"""A whole model against a second one, written from the formulas in N × K, by loops, from the published weights."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import CONFIG, Published, published, write

from lowbit.arrays import F32, F64
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear, load
from lowbit.backend.reference import ReferenceLinear
from lowbit.contract.rounding import Arithmetic, one_loop
from lowbit.errors import ArgumentError
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.block import plain_linear
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.generation import Step, first_difference, generate, generate_batch
from lowbit.model.matrices import select_columns, shape_of, to_float
from lowbit.model.perplexity import perplexity
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import GatedWeights, LlamaWeights, matrices, weight_bytes
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import BackendLinears

PROMPT = [5, 99, 7, 7, 200, 31, 12]


@pytest.fixture(scope="module")
def model() -> Published:
    return published(seed=4)


@pytest.fixture(scope="module")
def weights(model: Published, tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    return read_llama(open_gguf(write(tmp_path_factory.mktemp("decoder") / "m.gguf", model)))


@pytest.fixture(scope="module")
def decoder(weights: LlamaWeights) -> Decoder:
    return Decoder(weights, BackendLinears(load("reference")))


def second_model(model: Published, tokens: Sequence[int]) -> F64:
    """Logits of every position in float64, T × vocabulary, without a cache and with a sum for each head."""
    config, tensors = model.config, {name: weights.astype(float) for name, weights in model.tensors.items()}
    head_dim, half = config.head_dim, config.head_dim // 2
    epsilon = float(np.float32(config.rms_epsilon))

    def norm(x: F64, gain: F64) -> F64:
        return np.stack([row / math.sqrt(float(row @ row) / len(row) + epsilon) * gain for row in x])

    def turned(row: F64, position: int) -> F64:
        result = row.copy()
        for i in range(half):
            angle = position * config.rope_base ** (-i / half)
            a, b = row[i], row[i + half]
            result[i] = a * math.cos(angle) - b * math.sin(angle)
            result[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return result

    def attention(x: F64, block: str) -> F64:
        q, k, v = (x @ tensors[f"{block}.attn_{name}"].T for name in "qkv")
        mixed = np.zeros((len(x), config.heads * head_dim))
        for h in range(config.heads):
            mine = slice(h * head_dim, (h + 1) * head_dim)
            j = h * config.kv_heads // config.heads
            shared = slice(j * head_dim, (j + 1) * head_dim)
            for t in range(len(x)):
                query = turned(q[t, mine], t)
                powers = np.exp([query @ turned(k[u, shared], u) / math.sqrt(head_dim) for u in range(t + 1)])
                mixed[t, mine] = powers / powers.sum() @ v[: t + 1, shared]
        projected: F64 = mixed @ tensors[f"{block}.attn_output"].T
        return projected

    x = tensors["token_embd"][list(tokens)]
    for i in range(config.layers):
        block = f"blk.{i}"
        x = x + attention(norm(x, tensors[f"{block}.attn_norm"]), block)
        inner = norm(x, tensors[f"{block}.ffn_norm"])
        gate, up = inner @ tensors[f"{block}.ffn_gate"].T, inner @ tensors[f"{block}.ffn_up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{block}.ffn_down"].T
    logits: F64 = norm(x, tensors["output_norm"]) @ tensors.get("output", tensors["token_embd"]).T
    return logits


# The decoder.


def test_logits_of_every_position(model: Published, decoder: Decoder) -> None:
    """Prefill gives the second model's logits, as far as float32 linear layers allow."""
    logits = decoder.logits(decoder.hidden(PROMPT, decoder.new_state()))
    expected = second_model(model, PROMPT)
    assert float(np.abs(expected).max()) > 1.0
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_an_untied_head_and_other_shapes(tmp_path: Path) -> None:
    """Multi-head attention, one layer, an output matrix of its own, heads wider than the residual stream."""
    config = LlamaConfig(1, 32, 64, 3, 3, 32, CONFIG.vocabulary, 16, 500.0, 1e-3)
    model = published(seed=5, config=config, tied=False)
    path = write(
        tmp_path / "u.gguf", model, metadata={"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    )
    decoder = Decoder(read_llama(open_gguf(path)), BackendLinears(load("numpy")))
    np.testing.assert_allclose(next_logits(decoder, PROMPT), second_model(model, PROMPT)[-1], rtol=0, atol=2e-5)


def test_token_by_token_and_in_pieces(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is filled one token at a time, or in pieces of a long prompt, ends in the same place."""
    whole = decoder.hidden(PROMPT, decoder.new_state())
    state = decoder.new_state(capacity=1)
    single = np.concatenate([decoder.hidden([token], state) for token in PROMPT])
    np.testing.assert_allclose(single, whole, rtol=0, atol=1e-5)
    monkeypatch.setattr("lowbit.model.decoder.PREFILL_TOKENS", 3)
    done: list[tuple[int, int]] = []
    pieces = decoder.hidden(PROMPT, decoder.new_state(), lambda *work: done.append(work))
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-5)
    assert done == [(3, 14), (6, 14), (9, 14), (12, 14), (13, 14), (14, 14)]


def test_a_batch_is_its_sequences(weights: LlamaWeights, decoder: Decoder) -> None:
    """Sequences of several lengths, a token of each at a time: the hidden states of each alone, and its tokens."""
    prompts = [PROMPT, PROMPT[:1], PROMPT[2:5]]
    states = [decoder.new_state(1) for _ in prompts]
    alone = [decoder.new_state() for _ in prompts]
    for prompt, *own in zip(prompts, states, alone, strict=True):
        for state in own:
            decoder.hidden(prompt, state)
    for tokens in ([3, 1, 4], [1, 5, 9]):
        together = decoder.hidden_batch(tokens, states)
        single = [decoder.hidden([token], state)[0] for token, state in zip(tokens, alone, strict=True)]
        np.testing.assert_allclose(together, single, rtol=0, atol=1e-5)
    answers = generate_batch(decoder, prompts, 5)
    assert answers == [[step.token for step in generate(decoder, prompt, 5)] for prompt in prompts]
    first = answers[0][1]
    ended = [answer[: answer.index(first) + 1] if first in answer else answer for answer in answers]
    assert generate_batch(decoder, prompts, 5, stop=[first]) == ended
    for tokens, own, message in (
        ([], [], "number of tokens is 0"),
        ([1], states, "number of tokens is 1; allowed: one for each of 3 states"),
        ([1, 1], [states[0], states[0]], "states is one of them twice"),
        ([1, 9999], states[:2], r"tokens\[0\] is 9999"),
    ):
        with pytest.raises(ArgumentError, match=message):
            decoder.hidden_batch(tokens, own)
    with pytest.raises(ArgumentError, match="count is 99; allowed: at most 58 after a prompt of 7"):
        generate_batch(decoder, prompts, 99)


def test_greedy_generation(model: Published, decoder: Decoder) -> None:
    """Each token is the argmax of the second model after all tokens before it."""
    steps = list(generate(decoder, PROMPT, 8))
    read = list(PROMPT)
    for step in steps:
        expected = second_model(model, read)[-1]
        assert step.token == int(np.argmax(expected))
        np.testing.assert_allclose(step.logits, expected, rtol=0, atol=2e-5)
        read.append(step.token)


def test_a_generation_never_moves_its_cache(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has room for the prompt and all tokens from the start: growing copies all of it, in the midst."""
    asked, make = list[int](), decoder.new_state

    def new_state(capacity: int) -> object:
        asked.append(capacity)
        return make(capacity)

    monkeypatch.setattr(decoder, "new_state", new_state)
    steps = list(generate(decoder, PROMPT, 50))
    assert (asked, len(steps)) == ([len(PROMPT) + 49], 50)
    assert generate_batch(decoder, [PROMPT, PROMPT[:2]], 4)
    next_logits(decoder, PROMPT)
    assert asked[1:] == [len(PROMPT) + 3, 2 + 3, len(PROMPT)]


def test_generation_stops_and_is_forced(decoder: Decoder) -> None:
    """A stop token is the last; forced tokens are read instead of the chosen ones; tokens come one by one."""
    free = [step.token for step in generate(decoder, PROMPT, 6)]
    stop = free[2]
    stopped = [step.token for step in generate(decoder, PROMPT, 6, stop=(stop,))]
    assert stopped == free[: free.index(stop) + 1]
    forced = list(generate(decoder, PROMPT, 3, forced=[1, 2]))
    np.testing.assert_allclose(forced[2].logits, next_logits(decoder, [*PROMPT, 1, 2]), rtol=0, atol=1e-5)
    assert next(generate(decoder, PROMPT, 50)).token == free[0]


def test_equal_logits_go_to_the_lowest_token(weights: LlamaWeights) -> None:
    """Greedy choice among equals does not depend on anything."""
    tied = Decoder(weights, lambda matrix: lambda x: np.ones((len(x), shape_of(matrix)[1]), np.float32))
    assert [step.token for step in generate(tied, PROMPT, 2)] == [0, 0]


def test_the_first_difference_of_two_runs() -> None:
    """Two runs that part at step 1: which tokens, both logits of each run, and the two gaps."""

    def step(*logits: float) -> Step:
        return Step(int(np.argmax(logits)), np.array(logits, np.float32))

    first = [step(1, 0), step(0.5, 0.25), step(0, 1)]
    second = [step(2, 0), step(0.5, 0.75), step(1, 0)]
    difference = first_difference(first, second)
    assert difference is not None
    assert (difference.position, difference.tokens) == (1, (0, 1))
    assert difference.logits == ((0.5, 0.25), (0.5, 0.75))
    assert difference.gaps == (0.25, 0.25)
    assert first_difference(first[:1], second[:1]) is None


def test_bad_arguments_are_named(decoder: Decoder) -> None:
    """Tokens outside the vocabulary, none, more than the context, a count that does not fit."""
    state, context = decoder.new_state(), decoder.config.context
    with pytest.raises(ArgumentError, match="number of tokens is 0; allowed: 1 to 64"):
        decoder.hidden([], state)
    with pytest.raises(ArgumentError, match="number of tokens is 65"):
        decoder.hidden([0] * (context + 1), state)
    with pytest.raises(ArgumentError, match=r"tokens\[1\] is 10000; allowed: an integer from 0 to"):
        decoder.hidden([0, 10000], state)
    with pytest.raises(ArgumentError, match="count is 0"):
        next(generate(decoder, PROMPT, 0))
    with pytest.raises(ArgumentError, match="count is 59; allowed: at most 58 after a prompt of 7 tokens"):
        next(generate(decoder, PROMPT, 59))
    with pytest.raises(ArgumentError, match="number of forced tokens is 1; allowed: at least 2"):
        next(generate(decoder, PROMPT, 3, forced=[1]))
    assert len(list(generate(decoder, PROMPT, context - len(PROMPT) + 1))) == 58


def test_weights_that_overflow_are_an_error_and_not_a_number(weights: LlamaWeights) -> None:
    """Weights as only a damaged file has them end in words, not in a NaN that is argmax'ed."""
    huge = Decoder(weights, lambda matrix: lambda x: x @ (to_float(matrix) * np.float32(1e30)))
    with pytest.raises(ArgumentError, match="a logit is not finite"):
        next(generate(huge, PROMPT, 1))


# Perplexity.


def test_perplexity_by_its_definition(model: Published, decoder: Decoder) -> None:
    """Windows of 5 over 13 tokens, the last short; the first of each is not scored."""
    tokens = np.random.default_rng(6).integers(0, CONFIG.vocabulary, 13).tolist()
    nll, count = 0.0, 0
    for start in (0, 5, 10):
        window = tokens[start : start + 5]
        for row, follower in zip(second_model(model, window), window[1:], strict=False):
            nll -= row[follower] - math.log(np.exp(row).sum())
            count += 1
    done: list[tuple[int, int]] = []
    result = perplexity(decoder, tokens, 5, progress=lambda *work: done.append(work))
    assert result.count == count == 4 + 4 + 2
    assert result.nll == pytest.approx(nll, abs=1e-4)
    assert result.value == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert done[-1] == (13, 13)
    assert done == sorted(done)


def test_with_bos_every_token_is_scored(model: Published, decoder: Decoder) -> None:
    """BOS goes before each window and predicts its first token; a window of one token is enough."""
    tokens = [3, 50, 9]
    nll = 0.0
    for window in ([3, 50], [9]):
        for row, follower in zip(second_model(model, [1, *window]), window, strict=False):
            nll -= row[follower] - math.log(np.exp(row).sum())
    result = perplexity(decoder, tokens, 2, bos=1)
    assert result.count == 3
    assert result.nll == pytest.approx(nll, abs=1e-4)


def test_a_last_window_of_one_token_scores_nothing(decoder: Decoder) -> None:
    """Without BOS nothing predicts it, and the sum is that of the windows before."""
    assert perplexity(decoder, [3, 50, 9], 2) == perplexity(decoder, [3, 50], 2)


def test_windows_that_cannot_be_scored_are_named(decoder: Decoder) -> None:
    """Too short a window or text, a window beyond the context."""
    with pytest.raises(ArgumentError, match="window is 1; allowed: an integer from 2 to 64"):
        perplexity(decoder, [1, 2, 3], 1)
    with pytest.raises(ArgumentError, match="window is 64; allowed: an integer from 1 to 63"):
        perplexity(decoder, [1, 2, 3], 64, bos=1)
    with pytest.raises(ArgumentError, match="number of tokens is 1; allowed: at least 2"):
        perplexity(decoder, [1], 2)


# On a backend.


class FourBitsOnly(Backend):
    """A backend that declares 4 bits with a minimum, and nothing else."""

    name = "four"

    def capabilities(self) -> Capabilities:
        limits = {"bits": (4,), "convention": ("minimum",)}
        declared = Declaration(limits, arithmetic=Arithmetic("factored", "float64", one_loop))
        return Capabilities({"linear.qgemv": declared, "linear.qgemm": declared})

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return ReferenceLinear(matrix)


def test_what_a_backend_does_not_declare_is_counted(weights: LlamaWeights, decoder: Decoder) -> None:
    """The 8-bit head is dequantised, multiplied by numpy and reported; the logits are the same."""
    account = BackendLinears(FourBitsOnly())
    partial = Decoder(weights, account)
    assert account.prepared == 7 * CONFIG.layers
    assert dict(account.float_matrices) == {"backend four does not declare linear.qgemv for bits 8": 1}
    taken = sum(matrix.nbytes for name, matrix in matrices(weights) if name != "head")
    assert account.read_bytes == taken + 4 * CONFIG.hidden * CONFIG.vocabulary
    np.testing.assert_allclose(next_logits(partial, PROMPT), next_logits(decoder, PROMPT), rtol=0, atol=1e-5)


def test_one_token_goes_through_qgemv_and_more_through_qgemm(weights: LlamaWeights) -> None:
    """Decode uses the kernel that is made for it."""
    calls = []

    class Counting(ReferenceLinear):
        def _qgemv(self, x: F32, out: F32) -> None:
            calls.append("qgemv")
            super()._qgemv(x, out)

        def _qgemm(self, x: F32, out: F32) -> None:
            calls.append("qgemm")
            out[:] = x @ to_float(matrix)

    class CountingBackend(FourBitsOnly):
        def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
            return Counting(matrix)

    matrix = weights.layers[0].query
    assert isinstance(matrix, QuantizedMatrix)
    linear = BackendLinears(CountingBackend())(matrix)
    x = np.random.default_rng(7).standard_normal((3, CONFIG.hidden)).astype(np.float32)
    many, one = linear(x), linear(x[:1])
    assert calls == ["qgemm", "qgemv"]
    np.testing.assert_allclose(one, many[:1], rtol=0, atol=1e-5)


def test_the_backends_agree(weights: LlamaWeights, decoder: Decoder) -> None:
    """numpy and the reference give the same tokens and nearly the same logits."""
    account = BackendLinears(load("numpy"))
    other = Decoder(weights, account)
    assert not account.float_matrices
    a, b = list(generate(decoder, PROMPT, 6)), list(generate(other, PROMPT, 6))
    assert first_difference(a, b) is None
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.logits, y.logits, rtol=0, atol=2e-5)


def test_a_quantised_matrix_needs_a_backend(weights: LlamaWeights) -> None:
    """The plain linear layer multiplies by float32 only: there is no kernel by default."""
    with pytest.raises(ArgumentError, match="matrix is quantised"):
        plain_linear(weights.head)


# Weights.


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_uniform_plan(weights: LlamaWeights, bits: int) -> None:
    """Every linear layer of the blocks gets the new width and groups; embedding, head and norms stay."""
    done: list[tuple[int, int]] = []
    again = planned(weights, Plan.uniform(bits, 48), lambda *work: done.append(work))
    for name, matrix in matrices(again):
        if name != "head":
            assert isinstance(matrix, QuantizedMatrix)
            assert (matrix.bits, matrix.group_size, matrix.convention) == (bits, 48, "minimum")
    assert again.head is weights.head
    assert again.embedding is weights.embedding
    assert done == [(1, 2), (2, 2)]
    before, after = (to_float(model.layers[1].linears()["feed_forward.down"]) for model in (weights, again))
    step = np.ptp(before) / (2**bits - 1)
    assert 0 < float(np.abs(before - after).max()) <= step


def test_weight_bytes(weights: LlamaWeights) -> None:
    """Q4_1 is 20 bytes for 32 weights, Q8_0 34; a zero-point of 8 bits that need not be stored costs one more."""
    queries, keys = CONFIG.heads * CONFIG.head_dim, CONFIG.kv_heads * CONFIG.head_dim
    block = CONFIG.hidden * (2 * queries + 2 * keys + 3 * CONFIG.feed_forward)
    size = weight_bytes(weights)
    assert size.blocks == CONFIG.layers * block * 20 // 32
    assert size.head == CONFIG.hidden * CONFIG.vocabulary * 35 // 32
    assert size.total == size.blocks + size.head


def test_columns_move_whole(weights: LlamaWeights) -> None:
    """Selecting columns of a quantised matrix selects those of its weights, to the bit."""
    order = np.array([5, 0, 63, 5])
    for matrix in (weights.layers[0].query, to_float(weights.layers[0].query)):
        np.testing.assert_array_equal(to_float(select_columns(matrix, order)), to_float(matrix)[:, order])


BAD_CONFIGS = [
    ({"layers": 0}, "layers is 0"),
    ({"kv_heads": 3}, "heads is 4; allowed: a multiple of the 3"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({"rope_base": 0.0}, "rope_base is 0.0"),
    ({"rms_epsilon": float("inf")}, "rms_epsilon is inf"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CONFIGS)
def test_configs_that_no_model_has(change: dict[str, float], message: str) -> None:
    """A number that cannot be is named when the config is made."""
    with pytest.raises(ArgumentError, match=message):
        LlamaConfig(**(vars(CONFIG) | change))


def test_weights_that_do_not_fit_their_config(weights: LlamaWeights) -> None:
    """A missing block, a matrix of another shape, a weight that is not finite."""
    with pytest.raises(ArgumentError, match="number of layers is 1; allowed: 2"):
        replace(weights, layers=weights.layers[:1])
    part = weights.layers[0].feed_forward
    assert isinstance(part, GatedWeights)
    swapped = replace(weights.layers[0], feed_forward=replace(part, gate=part.down))
    with pytest.raises(ArgumentError, match=r"shape of layers\[0\].feed_forward.gate is \(96, 64\); allowed: 64 x 96"):
        replace(weights, layers=(swapped, weights.layers[1]))
    broken = to_float(weights.head).copy()
    broken[3, 4] = np.nan
    with pytest.raises(ArgumentError, match=r"head\[3, 4\] is nan"):
        replace(weights, head=broken)
