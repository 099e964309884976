"""GGUF files of tiny random models of every kind against their logits by the code of ``transformers``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_families import converted

from lowbit.attention.rope import linear_scaling, yarn_scaling
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.gguf.architectures import ARCHITECTURES
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.block import Linear
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.step import Step, block
from lowbit.model.weights import in_memory
from lowbit.rewriting.source import KINDS, open_source
from lowbit.tensor_formats.stored import Stored

DATA = Path(__file__).parents[1] / "checkpoint" / "data"
LIMIT = 1e-5
"""Of the largest logit, as for the directories."""
CONTEXTS = {"phi3-long": 40}
"""Of models whose rotation depends on the length of the text: that of the texts that they read."""
DIRECTORIES = (
    "gemma2",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "smollm3-usual",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3-partial",
    "phi3-short",
    "phi3-long",
)


def as_floats(matrix: Matrix) -> Linear:
    """A product with the numbers of a matrix, however it is stored."""
    numbers = to_float(matrix)
    return lambda x: x @ numbers


@pytest.mark.parametrize("name", DIRECTORIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every token, of the same weights as in the directory.

    A file of Gemma 2 gives no divisor of its scores; the tiny model has that of the largest one.
    """
    monkeypatch.setitem(ARCHITECTURES, "gemma2", replace(ARCHITECTURES["gemma2"], largest=3))
    file = open_gguf(converted(DATA / name, tmp_path / "m.gguf"), CONTEXTS.get(name))
    with np.load(DATA / name / "expected.npz") as held:
        tokens, expected = [int(token) for token in held["tokens"]], held["logits"]
    weights = read_llama(file)
    limit = 1.5 if name.startswith("gpt-oss") else weights.config.activation_limit  # a file does not say it
    weights = replace(weights, config=replace(weights.config, activation_limit=limit))
    decoder = Decoder(weights, as_floats)
    found = decoder.logits(decoder.hidden(tokens, decoder.new_state()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT * float(np.abs(expected).max()))


def test_the_context_decides_between_the_lists(tmp_path: Path) -> None:
    """The usual context is that of the first training; a longer one takes the long factors."""
    path = converted(DATA / "phi3-long", tmp_path / "m.gguf")
    for context, length, first in ((None, 16, 1.0), (16, 16, 1.0), (17, 17, 2.0), (256, 256, 2.0)):
        config = open_gguf(path, context).config
        assert config.context == length and config.rope_scaling is not None
        assert config.rope_scaling.factors[0] == first
        expected = open_checkpoint(DATA / "phi3-long", context=context).config.rope_scaling
        assert expected is not None and config.rope_scaling.factors == expected.factors
        assert config.rope_scaling.magnitude == pytest.approx(expected.magnitude, rel=1e-7)  # float32 in the file
    with pytest.raises(ArgumentError, match="context is 257; allowed: an integer from 1 to 256"):
        open_gguf(path, 257).config  # noqa: B018  # the property is what raises


def test_older_keys_say_the_same(tmp_path: Path) -> None:
    """A window of 0 is none, and a number says which layers are full as a list does."""
    path = converted(DATA / "phi3", tmp_path / "m.gguf", attention__sliding_window=0)
    assert open_gguf(path).config.window is None
    for given in (4, [True, True, True, False, True]):
        path = converted(DATA / "olmo3", tmp_path / "m.gguf", attention__sliding_window_pattern=given)
        assert open_gguf(path).config.full_every == 4
    path = converted(DATA / "olmo3", tmp_path / "m.gguf", attention__sliding_window_pattern=[True] * 5)
    config = open_gguf(path).config
    assert config.full_every is None and config.is_local(3)
    assert open_gguf(converted(DATA / "olmo2", tmp_path / "m.gguf")).config.local_rope_base is None


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    """The rules by which metadata scale a rotation, with all of their numbers."""
    given: dict[str, Any] = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    config = open_gguf(converted(DATA / "olmo2", tmp_path / "m.gguf", **given)).config
    assert config.rope_scaling == linear_scaling(8, 4.0)
    given |= {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 32}
    given |= {"rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 0.5}
    config = open_gguf(converted(DATA / "olmo2", tmp_path / "m.gguf", **given)).config
    assert config.rope_scaling == yarn_scaling(8, 5000.0, 4.0, 32, 0.5, 16.0)


def test_every_architecture_can_be_rewritten() -> None:
    """Each has the name that directories have for it."""
    assert KINDS.keys() == ARCHITECTURES.keys()


def test_scores_of_the_largest_gemma(tmp_path: Path) -> None:
    """Only a model of as many layers as the largest has another divisor."""
    assert (ARCHITECTURES["gemma2"].largest, ARCHITECTURES["gemma3"].largest) == (46, 62)
    config = open_gguf(converted(DATA / "gemma2", tmp_path / "m.gguf", final_logit_softcapping=0.0)).config
    assert (config.score_scale, config.score_cap, config.logit_cap) == (None, 2.0, None)


def test_absent_factors_of_granite(tmp_path: Path) -> None:
    """Scores have the usual factor, which a file may also give as 0; the others are 1, and add no line."""
    for scale in (None, 0.0):
        given: dict[str, Any] = {"attention__scale": scale, "embedding_scale": None, "residual_scale": None}
        config = open_gguf(converted(DATA / "granite", tmp_path / "m.gguf", **given, logit_scale=1.0)).config
        assert (config.score_scale, config.embedding_scale, config.residual_scale) == (None, 1.0, 1.0)
        program = Step(config, (block(config, 0, ["attention_norm", "feed_forward_norm"]),))
        assert {"scale", "attend_shaped"}.isdisjoint(line.kind for line in (*program.blocks[0], *program.last))


def test_stacked_experts_are_not_rewritten(tmp_path: Path) -> None:
    """The error says why, for a file and for a directory."""
    for path in (converted(DATA / "gpt-oss", tmp_path / "m.gguf"), DATA / "gpt-oss-mxfp4"):
        with pytest.raises(ArgumentError, match="stacked in a few tensors, which are not rewritten"):
            open_source(path)


def test_coded_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    """Those of a directory and of a file hold the same numbers, each in the bytes of its own format."""
    file = read_llama(open_gguf(converted(DATA / "gpt-oss-mxfp4", tmp_path / "m.gguf")))
    folder = in_memory(open_checkpoint(DATA / "gpt-oss-mxfp4"))
    for ours, theirs in zip(file.layers, folder.layers, strict=True):
        for name, matrix in ours.linears().items():
            other = theirs.linears()[name]
            np.testing.assert_array_equal(to_float(matrix), to_float(other))
            if ".experts" in name:
                assert isinstance(matrix, Stored) and isinstance(other, Stored)
                assert (matrix.format, other.format) == ("gguf-mxfp4", "mxfp4")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmo3", {"rope__scaling__yarn_attn_factor": 1.5}, r"yarn_attn_factor is 1\.5; allowed: 1\.0"),
    ("olmo3", {"rope__scaling__yarn_ext_factor": 0.0}, r"yarn_ext_factor is 0\.0; allowed: 1\.0"),
    ("olmo3", {"rope__scaling__original_context_length": None}, "original_context_length is missing"),
    ("olmo3", {"rope__scaling__factor": 0.0}, r"factor is 0\.0"),
    ("olmo3", {"attention__sliding_window_pattern": [True, False, True, True, False]}, "sliding_window_pattern is "),
    ("olmo3", {"attention__sliding_window_pattern": [True] * 4}, "for each of 5 layers whether it is local"),
    ("olmo3", {"attention__sliding_window_pattern": 0}, "full_every is 0"),
    ("olmo2", {"rope__dimension_count": 6}, "dimension_count is 6; allowed: 8"),
    (
        "gpt-oss",
        {"expert_count": 5},
        r"shape of tensor 'blk\.0\.ffn_gate_exps\.weight' is .*allowed: 3 dimensions",
    ),
    ("gpt-oss", {"expert_used_count": None}, "expert_used_count is missing"),
    ("gpt-oss", {"attention__sliding_window": None}, "sliding_window is missing"),
    *(
        ("granite", {key: number}, rf"granite\.{key.replace('__', '.')} is {number}; allowed: a number from 2\^-32")
        for key in ("embedding_scale", "attention__scale", "residual_scale", "logit_scale")
        for number in (-0.5, float("nan"), float("inf"), 2.0**40)
    ),
    *(
        ("granite", {key: 0.0}, rf"granite\.{key} is 0\.0; allowed: a number from 2\^-32 to 2\^32")
        for key in ("embedding_scale", "residual_scale", "logit_scale")
    ),
    ("granite", {"logit_scale": None}, r"granite\.logit_scale is missing"),
    ("granite", {"rope__scaling__finetuned": False}, r"granite\.rope\.scaling\.finetuned is False; allowed: True"),
    ("phi3", {"rope__dimension_count": 5}, "channels is 5; allowed: an even number"),
    ("phi3", {"rope__dimension_count": 10}, "channels is 10"),
    (
        "phi3",
        {"attention__head_count_kv": 1},
        r"shape of tensor 'blk\.0\.attn_qkv\.weight' is .*allowed: 2 dimensions",
    ),
    ("phi3-long", {"rope__scaling__attn_factor": None}, "attn_factor is missing"),
    ("phi3-long", {"rope__scaling__original_context_length": None}, "original_context_length is missing"),
    ("phi3-long", {"rope__scaling__type": "yarn"}, "type is 'yarn'; allowed: 'none' or 'longrope'"),
    ("phi3-long", {"rope__dimension_count": 8}, "number of factors .*is 3; allowed: 4"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSED, ids=[f"{n} {name}" for n, (name, _, _) in enumerate(REFUSED)]
)
def test_what_is_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A number that is missing, out of range, or means another model, is named in one line."""
    with pytest.raises(FormatError, match=message) as caught:
        read_llama(open_gguf(converted(DATA / name, tmp_path / "m.gguf", **change)))
    assert "\n" not in str(caught.value)
