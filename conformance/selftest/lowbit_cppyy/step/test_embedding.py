"""Tokens that one call generates: their rows are decoded in C++, with the bits of the specification's, whatever the
format of the embedding is; and they end where they should."""

from dataclasses import replace

import numpy as np
import pytest
from step_runs import ANY, DIVIDED, EMBEDDINGS, compiled, embedded_in, model, operations

from lowbit.errors import ArgumentError
from lowbit.model.decoder import Decoder
from lowbit.model.generation import Step, chosen, generate, generate_batch
from lowbit.model.sampling import GREEDY, Sampling
from lowbit.model.weights import LlamaWeights
from lowbit.quantization.affine import quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.step.decoder import CompiledDecoder
from lowbit_cppyy.step.embedding import described, of_codes, of_floats, of_stored

pytestmark = pytest.mark.toolchain


def own_and_plain(backend: CppyyBackend, weights: LlamaWeights) -> tuple[CompiledDecoder, Decoder]:
    plain = operations(backend, weights)
    return compiled(backend, plain), plain


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that end early for any reason but time, however slow this machine is, and with any number of tokens."""
    monkeypatch.setattr("lowbit_cppyy.step.decoder.TURN", 10**12)
    monkeypatch.setattr("lowbit_cppyy.step.decoder.MOST_CHOICES", 10**4)


def assert_same(ours: list[Step], theirs: list[Step]) -> None:
    assert [step.token for step in ours] == [step.token for step in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_rows_of_every_format_have_the_bits_of_the_specification(name: str) -> None:
    """40 tokens, of which C++ chooses all but the first and reads all but the last.

    One call does it, or two: kernels of some processors fold powers of two into activations. A call ends where an
    activation is too small for them, and the next one uses others.
    """
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, embedded_in(name))
        theirs = list(generate(plain, [1, 2], 41, sampling=ANY))
        assert_same(list(generate(own, [1, 2], 41, sampling=ANY)), theirs)
        assert len({step.token for step in theirs}) > 30
        state = own.new_state()
        own.hidden([1, 2], state)
        ours = own.follow(theirs[0].token, state, ANY, 3, 40)
        if len(ours) < 40:
            ours += own.follow(ours[-1].token, state, ANY, 3 + len(ours), 40 - len(ours))
        assert_same(ours, theirs[1:])
        assert len(state) == 42


def test_a_format_without_rows_in_cpp_gives_one_token_a_call() -> None:
    """Python decodes them."""
    weights = embedded_in("iq3_s")
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, weights)
        assert_same(list(generate(own, [1], 6, sampling=ANY)), list(generate(plain, [1], 6, sampling=ANY)))
        assert len(own.follow(1, own.new_state(), ANY, 1, 5)) == 1
    assert not described(weights.embedding, weights.config).complete


def test_arrays_and_factors() -> None:
    """An embedding in memory, and one that a Gemma scales."""
    for name in ("llama", "gemma3", "granite", "sparse"):
        weights = model(name)
        in_memory = replace(weights, embedding=np.array(weights.embedding, np.float32))
        with CppyyBackend(threads=2) as backend:
            for each in (weights, in_memory):
                own, plain = own_and_plain(backend, each)
                assert_same(list(generate(own, [3], 12, sampling=ANY)), list(generate(plain, [3], 12, sampling=ANY)))
                assert len(own.follow(3, own.new_state(), ANY, 1, 5)) == 5


def test_arrays_that_are_not_as_they_should_be_are_left_to_python() -> None:
    """Of another shape or type, or with a gap between their rows: C++ would read outside of them."""
    config = model("llama").config
    tokens, hidden = config.vocabulary, config.hidden
    rows = np.zeros((tokens, hidden), np.float32)
    assert of_floats(rows, config).complete
    for wrong in (rows[:-1], rows[:, ::2], np.asfortranarray(rows), rows.astype(np.float64), rows.astype(">f4")):
        assert not of_floats(wrong, config).complete
    blocks = np.zeros((tokens, hidden // 32 * 18), np.uint8)
    assert of_stored("q4_0", blocks, config).complete
    for wrong in (blocks[:-1], blocks[:, :-18], blocks.view(np.int8), np.asfortranarray(blocks)):
        assert not of_stored("q4_0", wrong, config).complete
    own = {"bits": 4, "group_size": 32, "convention": "minimum"}
    made = quantize(rows.T.copy(), bits=4, group_size=32)
    words, scales, zeros = made.words, made.scales, made.zeros
    assert of_codes((words, scales, zeros), own, config).complete
    integers = words, scales.astype(np.int32), zeros.astype(np.int32)
    numbers = words, scales, zeros.astype(np.uint8)
    for parts in ((words[1:], scales, zeros), (words, scales[1:], zeros), integers, numbers):
        assert not of_codes(parts, own, config).complete


def test_calls_end_where_generation_ends() -> None:
    """At a token that stops, at the number of tokens, at the end of the context, and with the logits' memory."""
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, model("llama"))
        tokens = [step.token for step in generate(plain, [1], 30, sampling=ANY)]
        stop = tokens[11]
        first = tokens.index(stop)
        for decoder in (own, plain):
            found = [step.token for step in generate(decoder, [1], 30, sampling=ANY, stop=[stop, -3, 2**70])]
            assert found == tokens[: first + 1]
        state = own.new_state()
        assert [step.token for step in own.follow(tokens[0], state, ANY, 1, 1)] != []
        assert len(state) == 1
        context = own.config.context
        assert len(own.follow(1, state, GREEDY, 2, context + 5)) == context - 1 and len(state) == context
        with pytest.raises(ArgumentError, match="number of tokens"):
            own.follow(1, state, GREEDY, context, 1)
        with pytest.raises(ArgumentError, match="most"):
            own.follow(1, own.new_state(), GREEDY, 1, 0)


@pytest.mark.parametrize(("name", "most"), (("MOST_LOGITS", 3 * 4 * 265 + 1), ("MOST_CHOICES", 3)))
def test_the_memory_of_one_call_is_bounded(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary, a call gives the tokens whose logits fit; of a small one, a number of tokens."""
    monkeypatch.setattr(f"lowbit_cppyy.step.decoder.{name}", most)
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, model("llama"))
        assert len(own.follow(1, own.new_state(), ANY, 1, 20)) == 3
        assert_same(list(generate(own, [3], 12, sampling=ANY)), list(generate(plain, [3], 12, sampling=ANY)))


def test_a_call_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token that it computes."""
    monkeypatch.setattr("lowbit_cppyy.step.decoder.TURN", 0)
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, model("llama"))
        assert len(own.follow(1, own.new_state(), ANY, 1, 20)) == 1
        assert_same(list(generate(own, [3], 12, sampling=ANY)), list(generate(plain, [3], 12, sampling=ANY)))


def test_a_token_that_cannot_be_read_ends_generation_where_it_is_chosen() -> None:
    """Its row is not finite. All tokens before it are given first, and the error is that of the operations."""
    weights = model("llama")
    rows = np.array(weights.embedding, np.float32)
    rows[100:110] = np.nan
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, replace(weights, embedding=rows))
        (ours, said), (theirs, expected) = _before_error(own), _before_error(plain)
        assert_same(ours, theirs)
        assert said == expected and len(ours) > 3


def _before_error(decoder: CompiledDecoder | Decoder) -> tuple[list[Step], str]:
    found: list[Step] = []
    with pytest.raises(ArgumentError) as error:
        for step in generate(decoder, [1], 200, sampling=ANY):
            found.append(step)
    return found, str(error.value)


def test_a_row_that_powers_of_two_would_round() -> None:
    """Other kernels read such a token; the tokens before it are given first."""
    weights = model("llama")
    rows = np.array(weights.embedding, np.float32)
    rows[50:120] *= np.float32(1e-35)
    with CppyyBackend(threads=2) as backend:
        own, plain = own_and_plain(backend, replace(weights, embedding=rows))
        theirs = list(generate(plain, [1], 40, sampling=ANY))
        assert_same(list(generate(own, [1], 40, sampling=ANY)), theirs)
        assert any(50 <= step.token < 120 for step in theirs)


def test_forced_tokens_are_read_one_by_one() -> None:
    """Since they are not the chosen ones."""
    forced = [5, 7, 200, 3, 3]
    with CppyyBackend(threads=1) as backend:
        own, plain = own_and_plain(backend, model("llama"))
        assert_same(list(generate(own, [1], 6, forced=forced)), list(generate(plain, [1], 6, forced=forced)))


def test_a_follow_is_the_choice_after_reading() -> None:
    """The first token of a call, as the parts of the specification choose it."""
    with CppyyBackend(threads=1) as backend:
        own, _ = own_and_plain(backend, model("llama"))
        first = own.follow(4, own.new_state(), ANY, 9, 3)[0]
        expected = chosen(own, own.hidden([4], own.new_state()), ANY, 9)
        assert first.token == expected.token
        np.testing.assert_array_equal(first.logits, expected.logits)


@pytest.mark.parametrize("name", ("llama", "gemma3", "sparse", "mixed"))
def test_sequences_that_go_on_together_are_those_of_the_operations(name: str) -> None:
    """Of several lengths; some stop, so that the others go on without them."""
    prompts = [[1], [7, 1], [3, 4, 5, 6, 9], [200]]
    for threads in (1, 3):
        with CppyyBackend(threads=threads) as backend:
            own, plain = own_and_plain(backend, model(name))
            for how in (GREEDY, ANY, Sampling(temperature=0.7, top_k=30, top_p=0.9, min_p=0.02, seed=8)):
                theirs = generate_batch(plain, prompts, 14, sampling=how)
                assert generate_batch(own, prompts, 14, sampling=how) == theirs
                stop = [theirs[0][2], theirs[2][5]]
                ours = generate_batch(own, prompts, 14, sampling=how, stop=stop)
                assert ours == generate_batch(plain, prompts, 14, sampling=how, stop=stop)
                assert len(ours[0]) < 14


def test_many_sequences_go_on_together() -> None:
    """So many that threads divide the sequences."""
    prompts = [[number] for number in range(DIVIDED)]
    with CppyyBackend(threads=2) as backend:
        own, plain = own_and_plain(backend, model("odd"))
        assert generate_batch(own, prompts, 4, sampling=ANY) == generate_batch(plain, prompts, 4, sampling=ANY)


def test_a_call_of_several_sequences_ends_with_one_of_them() -> None:
    """At a token that stops, at the end of a context, or at the number of tokens. States have all but the last."""
    with CppyyBackend(threads=1) as backend:
        own, _ = own_and_plain(backend, model("llama"))
        places = [(1, 0), (1, 5)]

        def follow(most: int, stop: list[int], read: int = 0) -> tuple[list[list[int]], list[int]]:
            states = [own.new_state(), own.new_state()]
            if read:
                own.hidden([2] * read, states[1])
            return own.follow_batch([3, 4], states, ANY, places, most, stop), [len(each) for each in states]

        tokens, lengths = follow(9, [])
        assert [len(each) for each in tokens] == [2] * 9 and lengths == [9, 9]
        stop = tokens[4][1]
        first = next(number for number, each in enumerate(tokens) if stop in each)
        assert follow(9, [stop])[0] == tokens[: first + 1]
        context = own.config.context
        assert len(follow(9, [], context - 3)[0]) == 3
        with pytest.raises(ArgumentError, match="number of tokens"):
            follow(1, [], context)
        with pytest.raises(ArgumentError, match="sequence"):
            own.follow_batch([3], [own.new_state()], ANY, [(1, -1)])
        with pytest.raises(ArgumentError, match="number of places"):
            own.follow_batch([3], [own.new_state()], ANY, places)
