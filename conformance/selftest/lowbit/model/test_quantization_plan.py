"""Plans with GPTQ: the chapter's codes, on what a block sees behind the quantised blocks before it."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_gguf
from quantized_copies import same
from tiny_checkpoint import write

from lowbit.arrays import F64
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.calibration import CalibrationText, Streams
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.quantization_plan import Plan, Quantization, planned
from lowbit.model.weights import LlamaWeights, in_memory
from lowbit.quantization import gptq
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import open_model

TOKENS = tuple(int(each) for each in np.random.default_rng(0).integers(0, 250, 60))
TEXT = CalibrationText(TOKENS, 24)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    return open_model(tiny_gguf.write(tmp_path_factory.mktemp("model") / "a.gguf")).weights


def by_the_chapter(matrix: Matrix, hessian: F64 | None, bits: int) -> QuantizedMatrix:
    assert hessian is not None
    found = gptq.quantize(
        to_float(matrix), hessian, bits=bits, group_size=16, convention="minimum", scale_dtype="float16"
    )
    return found.matrix


def test_the_codes_are_those_of_the_chapter(weights: LlamaWeights) -> None:
    """Every matrix of every block, with the bits of its part; the streams go through quantised blocks."""
    plan, done = Plan(Quantization(3, 16, "gptq"), Quantization(4, 16, "gptq"), text=TEXT), list[tuple[int, int]]()
    found = planned(weights, plan, lambda *work: done.append(work))
    streams = Streams.of(weights.config, weights.embedding, TOKENS, 24)
    for number, (layer, made) in enumerate(zip(weights.layers, found.layers, strict=True)):
        seen, linears = streams.seen(number, layer), made.linears()
        for name, matrix in layer.linears().items():
            expected = by_the_chapter(matrix, seen.hessian(name), 3 if name.startswith("feed_forward.") else 4)
            assert same(linears[name], expected), (number, name)
        streams = streams.through(number, made)
    assert done == [(number, len(weights.layers)) for number in range(1, len(weights.layers) + 1)]
    assert found.head is weights.head and str(plan).endswith("groups of 16, by gptq")


def test_a_part_can_be_rounded_to_the_nearest(weights: LlamaWeights) -> None:
    """Beside one that GPTQ quantises; a part without a method stays as it is."""
    plan = Plan(Quantization(4, 16), Quantization(4, 16, "gptq"), Quantization(8, 16), TEXT)
    found, first = planned(weights, plan), weights.layers[0]
    assert same(
        found.layers[0].linears()["feed_forward.up"], plan("feed_forward.up", first.linears()["feed_forward.up"])
    )
    assert same(found.head, plan("head", weights.head)) and isinstance(found.head, QuantizedMatrix)
    kept = planned(weights, replace(plan, experts=None)).layers[0].linears()
    assert kept["feed_forward.up"] is first.linears()["feed_forward.up"]
    assert isinstance(kept["query"], QuantizedMatrix)


def test_an_expert_without_tokens_is_rounded_to_the_nearest(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With two tokens at most four of the experts of a block see one."""
    weights = in_memory(open_checkpoint(write(tmp_path_factory.mktemp("sparse") / "tiny")))
    text = CalibrationText(TOKENS[:1], 4)
    plan, nearest = Plan.uniform(3, 16, "gptq", text), Quantization(3, 16)
    found, layer = planned(weights, plan).layers[0].linears(), weights.layers[0]
    seen = Streams.of(weights.config, weights.embedding, text.tokens, 4).seen(0, layer)
    unseen = [name for name in layer.linears() if "experts" in name and seen.hessian(name) is None]
    assert unseen
    for name in unseen:
        assert same(found[name], nearest(to_float(layer.linears()[name])))
    assert found["feed_forward.router"] is layer.linears()["feed_forward.router"]


def test_texts_and_plans_that_do_not_go_together(weights: LlamaWeights) -> None:
    """Each is refused before a matrix is read."""
    both = Quantization(4, 16, "gptq")
    for plan, message in (
        (Plan(both, both), "calibration text is none; allowed: a text where a part is quantised by gptq"),
        (Plan.uniform(4, 16, text=TEXT), "calibration text is 60 tokens"),
        (Plan(both, both, both, TEXT), "method of the head is gptq; allowed: nearest or hqq"),
        (Plan(both, both, text=CalibrationText(TOKENS, 10**6)), "window of the calibration text is 1000000"),
    ):
        with pytest.raises(ArgumentError, match=message):
            planned(weights, plan)
    for tokens, window, message in (((), 4, "tokens of the calibration text is 0"), ((1,), 0, "window of the calib")):
        with pytest.raises(ArgumentError, match=message):
            CalibrationText(tokens, window)
