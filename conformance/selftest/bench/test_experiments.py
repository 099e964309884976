"""The experiments behind the pages *Results*: rows are kept, numbers are of the committed models, quick forms run."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import (
    encoder,
    groups,
    heads,
    keys,
    llama_cpp,
    mixed,
    ngram,
    qigen,
    routing,
    running,
    scores,
    uptraining,
)
from experiments.measuring import DENSE, GQA, SPARSE, losses, subject
from experiments.ngram import NGrams
from experiments.running import RESULTS, Experiment, Row, run
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from lowbit_docs import results
from mixtral.recall import guesses_recall, lru_by_layer
from mixtral.recordings import GUESSED, Recordings

from lowbit.attention.pooling import pool
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import to_float
from lowbit.quantization.gptq import layer_error

MODULES = {each.EXPERIMENT.name: each for each in (ngram, qigen, encoder, keys, heads, uptraining, mixed)}


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def numbered(measure: Callable[[int], dict[str, Any]]) -> Experiment:
    return Experiment("some", "Three rows.", lambda quick: [Row({"row": n}, partial(measure, n)) for n in range(3)])


def test_finished_rows_are_kept(tmp_path: Path) -> None:
    """After an interrupt only what is missing is measured; `fresh` measures everything, and quick rows are apart."""
    seen: list[int] = []

    def measure(number: int, ends: int | None = None) -> dict[str, Any]:
        if number == ends:
            raise KeyboardInterrupt
        seen.append(number)
        return {"nats": [float(number)], "counts": [1]}

    with pytest.raises(KeyboardInterrupt):
        run(numbered(partial(measure, ends=2)), tmp_path)
    assert [row["settings"]["row"] for row in read(tmp_path / "some.json")["rows"]] == [0, 1]
    run(numbered(measure), tmp_path)
    assert seen == [0, 1, 2]
    assert [row["nats"] for row in read(tmp_path / "some.json")["rows"]] == [[0.0], [1.0], [2.0]]
    run(numbered(measure), tmp_path, fresh=True)
    run(numbered(measure), tmp_path, quick=True)
    assert seen == [0, 1, 2] * 3


def test_each_row_says_when_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are kept stay with their run; what two runs have in common stands once in the file."""
    dates = iter(["2026-01-01", "2026-01-02", "2026-01-02"])
    monkeypatch.setattr(running, "stamp", lambda: {"date": next(dates)})

    def measure(number: int, ends: int) -> dict[str, Any]:
        if number == ends:
            raise KeyboardInterrupt
        return {"nats": [0.0], "counts": [1]}

    for ends in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(numbered(partial(measure, ends=ends)), tmp_path)
    told = read(run(numbered(partial(measure, ends=3)), tmp_path))
    assert [run["date"] for run in told["runs"]] == ["2026-01-01", "2026-01-02"]
    assert [row["run"] for row in told["rows"]] == [0, 1, 1]


def test_the_page_names_the_rows_of_each_run() -> None:
    """By what all rows of a run have and no other row has; a file of one run needs no names."""
    run = {"machine": {"cpu": "Abacus"}, "versions": {"numpy": "2.0"}}
    told = {"runs": [run | {"date": "2026-01-01"}, run | {"date": "2026-01-02"}]}
    places = [(0, "none", 8), (0, "norm", 8), (1, "pair", 8), (1, "pair", 16)]
    rows = [{"run": number, "settings": {"order": order, "block": block}} for number, order, block in places]
    said = results.measured(told | {"rows": rows})
    assert said.startswith("Measured on 2026-01-01, Abacus, numpy 2.0 (2 rows); ")
    assert said.endswith("2026-01-02, Abacus, numpy 2.0 (2 rows: order pair).")
    alone = results.measured({"runs": told["runs"][:1], "rows": rows[:2]})
    assert alone == "Measured on 2026-01-01, Abacus, numpy 2.0."
    assert "rows: model dense-1)" in results.measured(read(RESULTS / "ksort.json"))


@pytest.mark.parametrize(
    "experiment",
    [ngram, qigen, encoder, keys, scores, heads, mixed, routing],
    ids=lambda each: str(each.EXPERIMENT.name),
)
def test_the_quick_form_runs(experiment: Any, tmp_path: Path) -> None:
    """On little text, through the same code as the long form: what each row measured is finite and above 0."""
    rows = read(run(experiment.EXPERIMENT, tmp_path, quick=True))["rows"]
    assert len(rows) == len(experiment.EXPERIMENT.rows(True))
    parts = ("nats", "errors", "entropy_bits")  # of losses, of matrices, of the experts of layers
    values = np.array([value for row in rows for part in parts for value in row.get(part, [])])
    assert values.size >= len(rows) - (experiment is scores)  # its row of channels has none of them
    assert np.isfinite(values).all() and (values > 0).all()


def test_the_quick_form_of_a_timing_runs(tmp_path: Path) -> None:
    """Each number of heads is timed, and its cache is in proportion to it."""
    (row,) = read(run(groups.EXPERIMENT, tmp_path, quick=True))["rows"]
    assert [each["cache_bytes"] for each in row["groups"]] == [2 * 4 * 16 * 128 * heads for heads in groups.GROUPS]
    assert all(0 < each["quartiles"][0] <= each["median"] <= each["quartiles"][1] for each in row["groups"])


@pytest.mark.parametrize("name", MODULES)
def test_the_kept_results_are_whole(name: str) -> None:
    """Each row of the experiment is there once, on at least 16,384 tokens, and the tables can be made of them."""
    told = read(RESULTS / f"{name}.json")
    assert not told["quick"] and min(sum(row["counts"]) for row in told["rows"]) >= 16384
    assert [row["settings"] for row in told["rows"]] == [dict(row.settings) for row in MODULES[name].rows(False)]
    for title, columns, lines, widths in results.TABLES[name](told["rows"]):
        assert title and lines and {len(line) for line in lines} == {len(columns)} == {len(widths)}


@pytest.mark.parametrize("module", [scores, llama_cpp, groups, routing])
def test_kept_results_of_few_tokens_are_whole(module: Any) -> None:
    """Their rows are about single windows, or about time."""
    told = read(RESULTS / f"{module.EXPERIMENT.name}.json")
    assert not told["quick"]
    assert [row["settings"] for row in told["rows"]] == [dict(row.settings) for row in module.rows(False)]
    for title, columns, lines, widths in results.TABLES[module.EXPERIMENT.name](told["rows"]):
        assert title and lines and {len(line) for line in lines} == {len(columns)} == {len(widths)}


def test_llama_cpp_in_floats_has_the_losses_of_its_protocol() -> None:
    """In every window, within what float32 sums in two orders explain; its tokens are the same."""
    rows = read(RESULTS / "llama.cpp.json")["rows"]
    theirs, ours = (results.of(rows, engine=e) for e in ("llama.cpp, float32 cache and weights", "lowbit"))
    assert theirs["same_tokens"] and theirs["counts"] == ours["counts"]
    np.testing.assert_allclose(theirs["nats"], ours["nats"], rtol=1e-5)


@pytest.mark.parametrize("model", [*DENSE, *GQA, *SPARSE])
def test_the_kept_results_are_of_the_committed_models(model: str) -> None:
    """The first windows give the losses that are kept."""
    kept, it = losses_of(model), subject(model, False)
    found = losses(Decoder(it.weights), it.windows[:2])
    np.testing.assert_allclose(found["nats"], kept[:2], rtol=1e-6)  # float32 products in any order
    assert len(kept) == len(it.windows)


def losses_of(model: str) -> list[float]:
    """The losses of a model's windows, as they are kept."""
    as_it_is = {name: ("heads", {"model": name, "kv_heads": 8}) for name in DENSE}
    as_it_is |= {name: ("uptraining", {"model": name}) for name in GQA}
    as_it_is |= {name: ("mixed", {"model": name, "attention": 16, "experts": 16}) for name in SPARSE}
    file, settings = as_it_is[model]
    row = results.of(read(RESULTS / f"{file}.json")["rows"], **settings)
    nats: list[float] = row["points"][0]["nats"] if "points" in row else row["nats"]
    return nats


def test_the_recall_that_is_kept_is_that_of_the_recording() -> None:
    """Measured again: a cache of two slots, and guesses one layer ahead."""
    kept, found = results.of(read(RESULTS / "routing.json")["rows"], model="mixtral"), Recordings.load()
    assert kept["cache_by_layer"]["lru_k2"] == pytest.approx(lru_by_layer(found, 2), abs=1e-4)
    guesses = [guesses_recall(found, 1, count) for count in range(1, GUESSED + 1)]
    assert kept["guesses"]["1"] == pytest.approx(guesses, abs=1e-4)


# **The parts.**


def test_the_encoder_is_that_of_its_file() -> None:
    """A sentence in other words lies nearer than one about something else: the model was trained for that."""
    it = encoder.loaded()
    means = []
    for text in ("The cat sat on the mat.", "A cat was sitting on a rug.", "Interest rates rose in March."):
        mean = it(encoder.marked(encoder.tokens_of(text))).mean(axis=0)
        means.append(mean / np.linalg.norm(mean))
    assert means[0] @ means[1] > 0.6 > 0.3 > means[0] @ means[2]


def test_the_inputs_of_the_encoder_are_those_of_its_matrices() -> None:
    """The results of a matrix have the squared norm that its inputs say."""
    it, seen = encoder.subject(True), list[tuple[str, Any]]()
    encoder.loaded()(encoder.windows("lcet10", encoder.QUICK_WINDOW, 1)[0], lambda *given: seen.append(given))
    assert [name for name, _ in seen] == list(it.matrices)
    for name, x in seen:
        squared = np.sum((x.astype(np.float64) @ it.matrices[name]) ** 2)
        weights, square = it.matrices[name], it.measured[encoder.source_of(name)]
        assert layer_error(weights, np.zeros_like(weights), square) == pytest.approx(squared, rel=1e-9)


def test_an_n_gram_model_is_a_distribution() -> None:
    """Probabilities add up to 1 after contexts that were seen and that were not."""
    model = NGrams(3, [b"abracadabra"])
    for context in (b"", b"a", b"ab", b"zz"):
        assert sum(model.probability(context, byte) for byte in range(256)) == pytest.approx(1, abs=1e-12)
    assert model.nats(b"abracadabra") < model.nats(b"zyxwvutsrqp")


def test_keys_are_turned_back_and_forth() -> None:
    """Turned keys are turned back, and a block that holds the whole head stores the same numbers in any order."""
    config, rng = subject(DENSE[0], True).weights.config, np.random.default_rng(0)
    turned, some = keys.turner(config), rng.standard_normal((5, config.kv_heads, config.head_dim))
    np.testing.assert_allclose(turned(turned(some, 7, -1), 7, 1), some, atol=1e-13)
    sizes = rng.random((config.kv_heads, config.head_dim))
    sorted_ = keys.Keys(np.stack([keys.permuting(size) for size in sizes]), None, config.head_dim)
    plain = keys.Keys(np.stack([np.eye(config.head_dim)] * config.kv_heads), None, config.head_dim)
    np.testing.assert_array_equal(sorted_.stored(some, 0), plain.stored(some, 0))
    assert keys.moved(some, sorted_) == 0
    halves = keys.Keys(sorted_.matrix, None, config.head_dim // 2)
    assert (halves.stored(some, 0) != keys.Keys(plain.matrix, None, config.head_dim // 2).stored(some, 0)).any()


def test_stored_keys_that_are_the_keys_leave_attention_as_it_is() -> None:
    """No divergence then; it grows with the error, and is that of two distributions where two tokens are seen."""
    rng = np.random.default_rng(0)
    queries, keys_, noise = rng.standard_normal((3, 6, 4))
    assert scores.divergence(queries, keys_, keys_) == 0
    assert 0 < scores.divergence(queries, keys_, keys_ + 0.1 * noise) < scores.divergence(queries, keys_, keys_ + noise)
    one = np.array([[0.0], [1.0]])
    own, other = np.array([0.5, 0.5]), np.array([1, np.e]) / (1 + np.e)
    expected = np.sum(own * np.log(own / other)) / 2  # the first token sees only itself
    assert scores.divergence(one, np.zeros((2, 1)), one) == pytest.approx(expected, rel=1e-12)


def test_an_order_by_keys_over_queries_looks_at_both() -> None:
    """A channel that the queries do not read is the largest, whatever the keys hold."""
    config = subject(DENSE[0], True).weights.config
    rng = np.random.default_rng(0)
    queries, held = (rng.standard_normal((5, heads_, config.head_dim)) for heads_ in (config.heads, config.kv_heads))
    queries[..., 3] *= 1e-6
    seen, unused = keys.Seen(queries, held), np.zeros((config.hidden, config.hidden), np.float32)
    for size in keys.sizes(config, unused, seen, None, keys.BALANCED):
        assert size.argmax() == 3
    for size, head in zip(keys.sizes(config, unused, seen, None, "calibrated"), held.swapaxes(0, 1), strict=True):
        np.testing.assert_allclose(size, np.sqrt(np.mean(head**2, axis=0)), rtol=1e-6)


def test_a_file_of_floats_holds_the_values_of_its_source(tmp_path: Path) -> None:
    """Metadata and values are the same; every tensor is float32."""
    source, target = tmp_path / "source.gguf", tmp_path / "floats.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    values = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    writer.add_tensor("w", quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama_cpp.write_in_floats(source, target)
    given, made = GGUFReader(source), GGUFReader(target)
    assert [made.fields[name].contents() for name in given.fields if name[:5] != "GGUF."] == [
        field.contents() for name, field in given.fields.items() if name[:5] != "GGUF."
    ]
    (tensor,), (own,) = made.tensors, given.tensors
    assert tensor.tensor_type == GGMLQuantizationType.F32
    np.testing.assert_array_equal(tensor.data, dequantize(own.data, own.tensor_type))


def test_heads_are_pooled_by_the_chapter() -> None:
    """Keys and values are those of `pool`; with as many heads as before nothing changes."""
    weights = subject(DENSE[0], True).weights
    new = heads.pooled(weights, 2, "mean")
    for layer, old in zip(new.layers, weights.layers, strict=True):
        np.testing.assert_array_equal(layer.key, pool(to_float(old.key), 8, 2))
        np.testing.assert_array_equal(layer.value, pool(to_float(old.value), 8, 2))
    assert new.config.kv_heads == 2
    unpooled = heads.pooled(weights, 8, "first")
    np.testing.assert_array_equal(unpooled.layers[3].key, to_float(weights.layers[3].key))


@pytest.mark.whole
def test_a_wider_code_loses_less() -> None:
    """Errors of layers fall with every bit, and GPTQ's are below those of rounding to the nearest."""
    it, squares = subject(DENSE[0], True), qigen.inputs_of_layers(DENSE[0], True)

    def error(method: Any, bits: int) -> float:
        new = qigen.quantised(it, method, False, bits, 64)
        pairs = zip(it.weights.layers, new.layers, squares, strict=True)
        return float(np.mean([each for one, other, of in pairs for each in qigen.layer_errors(one, other, of)]))

    assert error("rtn", 8) < error("rtn", 4) < error("rtn", 2)
    assert error("gptq", 3) < error("rtn", 3)
