"""The small Mixtral of bench/mixtral: its directory, a second forward pass that reads it, and its recorded routings."""

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixtral.following import SIMULATED, Plan, Row, changed, pairs, passes
from mixtral.loading import MODEL, load_model
from mixtral.paper import COLUMNS, Column, expert_bytes, implied_gb
from mixtral.paper import LAYERS as LAYERS_8X7B
from mixtral.recall import cached, guesses_recall, shares, together
from mixtral.record import Recorder
from mixtral.recordings import AHEAD, FILE, GUESSED, Recordings
from mixtral.table2 import FULL, in_order, run
from mixtral.table2 import RESULT as TABLE
from tokenizers import Tokenizer

from lowbit.arrays import F16, F64, Array
from lowbit.model.decoder import Decoder
from lowbit.model.weights import LlamaWeights, SparseWeights
from lowbit.moe.offload import Arrangement, Offload

TRAINING = MODEL.parent / "training.json"
LAYERS, EXPERTS, HIDDEN, INNER = 16, 8, 64, 128
CONFIG: dict[str, Any] = json.loads((MODEL / "config.json").read_text("utf-8"))
INDEX: dict[str, Any] = json.loads((MODEL / "model.safetensors.index.json").read_text("utf-8"))


@cache
def weights() -> LlamaWeights:
    return load_model()


@cache
def recordings() -> Recordings:
    return Recordings.load()


# The directory.


def shard(path: Path) -> dict[str, F16]:
    """The tensors of a safetensors file, by the description of the format alone."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors = {}
    for name, told in header.items():
        assert told["dtype"] == "F16", name
        first, last = told["data_offsets"]
        tensors[name] = np.frombuffer(data[first:last], np.float16).reshape(told["shape"])
    return tensors


@cache
def tensors() -> dict[str, F16]:
    return {name: array for file in sorted(MODEL.glob("*.safetensors")) for name, array in shard(file).items()}


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes that a Mixtral checkpoint of these numbers has."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (256, HIDDEN),
        "lm_head.weight": (256, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{layer}.block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER)), ("w3", (INNER, HIDDEN))):
                shapes[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return shapes


def test_the_directory_is_a_whole_mixtral_checkpoint_under_8_mb() -> None:
    """Every tensor under its usual name and shape, finite, in the shard that the index says; nothing else there."""
    assert {name: array.shape for name, array in tensors().items()} == expected_shapes()
    assert all(np.isfinite(array).all() for array in tensors().values())
    files = sorted(MODEL.glob("*.safetensors"))
    assert len(files) >= 2
    assert INDEX["weight_map"] == {name: file.name for file in files for name in shard(file)}
    assert INDEX["metadata"]["total_size"] == sum(array.nbytes for array in tensors().values())
    named = {"config.json", "model.safetensors.index.json", "tokenizer.json", *(file.name for file in files)}
    assert {file.name for file in MODEL.iterdir()} == named
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 8_000_000
    assert CONFIG["architectures"] == ["MixtralForCausalLM"] and CONFIG["model_type"] == "mixtral"


def test_the_weights_are_those_that_the_training_wrote() -> None:
    """The record of the training names the files by their sums, and says where and how long it ran."""
    told = json.loads(TRAINING.read_text("utf-8"))
    for name, file in told["files"].items():
        assert hashlib.sha256((MODEL / name).read_bytes()).hexdigest() == file["sha256"], name
    assert 0 < told["seconds"] < 30 * 60 and told["threads"] <= 2 and told["machine"]
    assert max(told["validation_bits_per_byte"].values()) < 2.5


@given(st.text())
def test_the_tokenizer_gives_bytes_and_the_text_back(text: str) -> None:
    """Any text: its tokens are its bytes in UTF-8, and decoded they are the text."""
    tokens = tokenizer().encode(text).ids
    assert tokens == list(text.encode())
    assert tokenizer().decode(tokens) == text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


# A second forward pass, from the tensors of the file alone.


def second_forward(tokens: list[int]) -> F64:
    """Logits of every position, float64, by complex rotation, without a cache, one token's experts at a time."""
    heads, kv_heads, dim = (CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    count, half = len(tokens), dim // 2
    turn = np.exp(1j * np.arange(count)[:, None] * CONFIG["rope_theta"] ** (-np.arange(half) / half))

    def tensor(name: str) -> F64:
        return tensors()[f"{name}.weight"].astype(np.float64)

    def norm(rows: F64, name: str) -> F64:
        root = np.sqrt((rows**2).mean(axis=1, keepdims=True) + CONFIG["rms_norm_eps"])
        normed: F64 = rows / root * tensor(name)
        return normed

    def turned(rows: F64) -> F64:
        plane = (rows[:, :half] + 1j * rows[:, half:]) * turn
        return np.hstack([plane.real, plane.imag])

    x = tensor("model.embed_tokens")[tokens]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (y @ tensor(f"{layer}.self_attn.{name}_proj").T for name in "qkv")
        mixed = []
        for head in range(heads):
            own, shared = slice(head * dim, (head + 1) * dim), head * kv_heads // heads
            key = slice(shared * dim, (shared + 1) * dim)
            scores = np.exp(turned(q[:, own]) @ turned(k[:, key]).T / math.sqrt(dim)) * np.tri(count)
            mixed.append(scores / scores.sum(axis=1, keepdims=True) @ v[:, key])
        x = x + np.hstack(mixed) @ tensor(f"{layer}.self_attn.o_proj").T
        y = norm(x, f"{layer}.post_attention_layernorm")
        scores = y @ tensor(f"{layer}.block_sparse_moe.gate").T
        for row in range(count):
            best = sorted(range(EXPERTS), key=lambda e: -scores[row, e])[:2]
            powers = np.exp(scores[row, best])
            for expert, power in zip(best, powers / powers.sum(), strict=True):
                w1, w2, w3 = (
                    tensor(f"{layer}.block_sparse_moe.experts.{expert}.{name}") for name in ("w1", "w2", "w3")
                )
                a = w1 @ y[row]
                x[row] += power * (w2 @ (a / (1 + np.exp(-a)) * (w3 @ y[row])))
    logits: F64 = norm(x, "model.norm") @ tensor("lm_head").T
    return logits


def test_the_decoder_agrees_with_a_second_forward_pass() -> None:
    """The reference decoder on the directory gives the second one's logits, so names, layouts and order are right."""
    tokens = recordings().tokens[0, :24].tolist()
    decoder = Decoder(weights())
    logits = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
    expected = second_forward(tokens)
    assert float(np.abs(expected).max()) > 3
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_the_model_has_learned() -> None:
    """A passage that was not trained on costs under 2.6 bits a byte; a guess from byte frequencies alone about 4.5."""
    tokens = recordings().tokens[0].tolist()
    decoder = Decoder(weights())
    logits = decoder.logits(decoder.hidden(tokens, decoder.new_state())).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    chances = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    bits = -chances[np.arange(len(tokens) - 1), tokens[1:]].mean() / math.log(2)
    assert bits < 2.6


# The recordings.


def test_the_recordings_are_whole_small_and_of_these_weights() -> None:
    """Shapes, ids and sums; every pair and every list of guesses is of distinct experts."""
    told = recordings()
    passages, length = told.tokens.shape
    assert told.tokens.size >= 2000 and FILE.stat().st_size < 1_000_000
    assert told.chosen.shape == (passages, LAYERS, length, 2)
    for kind in (told.guesses, told.renormed):
        for ahead in AHEAD:
            assert kind[ahead].shape == (passages, LAYERS - ahead, length, GUESSED)
    for array in (told.chosen, *told.guesses.values(), *told.renormed.values()):
        assert array.dtype == np.uint8 and array.max() < EXPERTS
        ordered = np.sort(array, axis=-1)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(MODEL.glob("*.safetensors"))}
    assert told.header["weights"] == sums


def test_every_layer_uses_every_expert() -> None:
    """No expert of any layer is idle: each has at least a tenth of an even share, and none has half of everything."""
    used = np.array(shares(recordings()))
    assert used.shape == (LAYERS, EXPERTS)
    assert used.min() > 0.1 / EXPERTS and used.max() < 0.5


@pytest.mark.parametrize("passage", [0, -1])
def test_a_prefix_recorded_anew_is_the_recording(passage: int) -> None:
    """The model reads the first tokens again: the same experts and guesses wherever scores are not nearly tied."""
    count, told = 40, recordings()
    recorder = Recorder(weights())
    recorder.read(told.tokens[passage, :count].tolist())
    assert agreement(recorder, 0, recorder.experts(), told.chosen[passage, :, :count]) > 0.99
    for ahead in AHEAD:
        again = recorder.guesses(ahead, renormed=False)
        assert agreement(recorder, ahead, again, told.guesses[ahead][passage, :, :count]) > 0.99
        renormed, kept = recorder.guesses(ahead, renormed=True), told.renormed[ahead][passage, :, :count]
        assert (renormed == kept).all(axis=-1).mean() > 0.99


def agreement(recorder: Recorder, ahead: int, again: Array, kept: Array) -> float:
    """Asserts that the two are equal wherever neighbouring scores lie further apart than float32 could move them, and
    answers how much of the recording that is."""
    clear = []
    for layer in range(len(kept)):
        part = weights().layers[layer + ahead].feed_forward
        assert isinstance(part, SparseWeights)
        scores = -np.sort(-(recorder.gate_inputs(layer) @ part.router), axis=1)
        gaps = (scores[:, :-1] - scores[:, 1:])[:, : kept.shape[-1]].min(axis=1)
        clear.append(gaps > 1e-4)
    where = np.stack(clear)
    assert (again[where] == kept[where]).all()
    return float(where.mean())


def test_the_routing_is_not_chance() -> None:
    """What ran before runs again more often than drawing would have it, and guesses find more than drawn ones, both by
    over ten standard deviations of drawing."""
    needed = recordings().chosen.size
    for slots in (2, 6):
        found = together(one for layer in range(LAYERS) for one in cached(recordings(), layer, slots, "lru"))
        assert found > slots / EXPERTS + 10 / math.sqrt(needed)
    for ahead in AHEAD:
        for count in (1, 2, 4):
            assert guesses_recall(recordings(), ahead, count) > count / EXPERTS + 10 / math.sqrt(needed)


# Table 2 in virtual time.


def test_table_2_in_virtual_time_has_the_papers_order() -> None:
    """In each of the eight columns of the paper, on its machines and with its memory, full is faster than without
    pre-loading, that than without a cache, and that than naive; and no cell copies more than its link carries."""
    columns = json.loads(TABLE.read_text("utf-8"))["columns"]
    assert {(column["machine"], column["bits"]) for column in columns} == {
        (machine.name, bits) for machine in COLUMNS for bits in (2, 3)
    }
    for column in columns:
        assert all(in_order(column, full) for full in FULL), column["machine"]
        for row in column["rows"]:
            assert row["seconds"] >= row["link_seconds"] and row["peak_bytes"] <= column["preset"]["memory"]
            assert row["residual_seconds"] == pytest.approx(1 / row["paper"] - row["seconds"], abs=1e-3)


def test_the_paper_implies_faster_links_than_it_has() -> None:
    """Why nothing can be fitted: in every column the last two rows differ by too little time for what they copy."""
    for column in COLUMNS:
        for bits in (2, 3):
            assert implied_gb(column, bits) > column.machine.link.bandwidth / 1e9


@pytest.mark.parametrize("row", SIMULATED[:6], ids=lambda row: row.name)
def test_a_cell_is_simulated_again(row: Row) -> None:
    """A few tokens on one machine: the engine copies what `lowbit.moe.offload` says, and the link takes its time."""
    column, plan = COLUMNS[2], Plan(tokens=2, warm=2, pairs=1)
    cell = run(column, 2, row, recordings(), plan)
    copied = 0
    machine = Offload(Arrangement(LAYERS_8X7B, EXPERTS, column.slots, memory=row.memory))
    asked = passes(recordings(), pairs(recordings())[0], row.guesses)
    for position in range(plan.warm + plan.tokens):
        if row.whole:
            machine = Offload(machine.arrangement)
        events = [event for request in changed(asked[position], row, position) for event in machine.step(request)]
        copied += (position >= plan.warm) * sum(event.kind in ("load", "stage") for event in events)
    assert cell["copied_bytes"] == copied * expert_bytes(2) // plan.tokens
    assert cell["seconds"] > cell["link_seconds"] > 0
    if not row.cached:
        assert copied == plan.tokens * LAYERS_8X7B * (EXPERTS if row.whole else 2)


@pytest.mark.parametrize("machine", COLUMNS[2:], ids=lambda column: column.name)
def test_the_order_of_the_rows_is_that_of_a_run(machine: Column) -> None:
    """The engine of today, on few tokens: each row of the paper's memory is faster than the one below it."""
    plan = Plan(tokens=2, warm=2, pairs=1)
    full, _, *others = (run(machine, 2, row, recordings(), plan)["seconds"] for row in SIMULATED[:5])
    assert full < others[0] < others[1] < others[2]
