"""``lowbit quantize``: directories that load as what was meant, and errors in words."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import tiny_checkpoint
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFReader
from rewriting import TEXT, ends, floats, fused_in, sources_in

from lowbit.arrays import F32, F64
from lowbit.attention.rope import Scaling
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.decoder import Decoder
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LlamaWeights
from lowbit.quantization import affine, gptq
from lowbit.quantization.hqq import HqqMatrix, dequantize
from lowbit.quantization.hqq import quantize as by_solver
from lowbit.rewriting.layouts import LAYOUTS
from lowbit.runtime import open_model
from lowbit.tensor_formats.stored import Stored

GROUP = ["--group-size", 16]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources_in(tmp_path_factory.mktemp("sources"))


run, answer = partial(rewriting.run, "quantize"), partial(rewriting.answer, "quantize")


# **What is written.**


@pytest.mark.parametrize("layout", [name for name, each in LAYOUTS.items() if name != "gptq-v1" and not each.is_file])
@pytest.mark.parametrize("kind", ["gguf", "sparse", "dense"])
def test_every_layout_holds_what_affine_gives(kind: str, layout: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Matrices are those of `affine.quantize` on the source's weights; everything else is as it was."""
    found = answer(sources[kind], "-o", tmp_path / "new", "--format", layout, *GROUP)
    before, after = open_model(sources[kind]), open_model(tmp_path / "new")
    for name, values in floats(after.weights).items():
        expected = floats(before.weights)[name]
        if not name.endswith("router"):
            rounded = affine.quantize(expected, bits=4, group_size=16, convention="zero_point", scale_dtype="float16")
            expected = affine.dequantize(rounded)
            assert found["matrices"][name]["bits"] == 4
        np.testing.assert_array_equal(values, expected, err_msg=name)
    for one, other in zip(ends(after.weights), ends(before.weights), strict=True):
        np.testing.assert_array_equal(one, other)
    assert after.config == before.config
    assert after.tokenizer.encode(TEXT) == before.tokenizer.encode(TEXT)
    assert (after.tokenizer.bos, after.tokenizer.stop) == (before.tokenizer.bos, before.tokenizer.stop)
    assert after.remarks == ()
    assert {type(m) for m in after.weights.layers[0].feed_forward.linears().values()} <= {Stored, np.ndarray}


def test_gptq_is_that_of_the_chapter(sources: dict[str, Path], tmp_path: Path) -> None:
    """The first block is calibrated on the source, and the second on what the quantised first gives."""
    common = ["--method", "gptq", "--calibration", sources["text"], "--window", 32, "--calibration-tokens", 200]
    told = answer(sources["gguf"], "-o", tmp_path / "new", *common, "--act-order", *GROUP)
    before, after = open_model(sources["gguf"]), open_model(tmp_path / "new")
    tokens = before.tokenizer.encode(TEXT, begin=False)[:200]
    assert told["calibration"] == {"text": "text", "tokens": 200, "window": 32}
    partly = replace(before.weights, layers=(after.weights.layers[0], *before.weights.layers[1:]))
    for number, model in enumerate((before.weights, partly)):
        squares = hessians(model, tokens, 32)
        for name, matrix in before.weights.layers[number].linears().items():
            found = gptq.quantize(
                to_float(matrix),
                squares[f"layers[{number}].{name}"],
                bits=4,
                group_size=16,
                act_order=True,
                scale_dtype="float16",
            )
            written = to_float(after.weights.layers[number].linears()[name])
            np.testing.assert_array_equal(written, found.dequantize(), err_msg=f"{number} {name}")
    assert all(each["calibrated"] for each in told["matrices"].values())


def test_the_authors_blocks_and_recipes(sources: dict[str, Path], tmp_path: Path) -> None:
    """GPTQ with a block of several groups, and a version of HQQ's package: the numbers of the chapters."""
    seen = ["--method", "gptq", "--calibration", sources["text"], "--window", 32, "--block-size", 32]
    told = answer(sources["gguf"], "-o", tmp_path / "gptq", *seen, *GROUP)
    assert (told["block_size"], told["recipe"]) == (32, None)
    published = ["--method", "hqq", "--format", "hqq", "--recipe", "hqq-0.2.8"]
    told = answer(sources["gguf"], "-o", tmp_path / "hqq", *published, *GROUP)
    assert (told["block_size"], told["recipe"]) == (None, "hqq-0.2.8")
    before = open_model(sources["gguf"])
    squares = hessians(before.weights, before.tokenizer.encode(TEXT, begin=False), 32)
    by_gptq, by_hqq = (open_model(tmp_path / name).weights.layers[0].linears() for name in ("gptq", "hqq"))
    for name, matrix in before.weights.layers[0].linears().items():
        weights, square = to_float(matrix), squares[f"layers[0].{name}"]
        blocks = gptq.quantize(weights, square, bits=4, group_size=16, scale_dtype="float16", block_size=32)
        np.testing.assert_array_equal(to_float(by_gptq[name]), blocks.dequantize(), err_msg=name)
        solved = by_solver(weights, bits=4, group_size=16, scale_dtype="float16", recipe="hqq-0.2.8")
        np.testing.assert_array_equal(to_float(by_hqq[name]), dequantize(solved), err_msg=name)


def hessians(weights: LlamaWeights, tokens: list[int], window: int) -> dict[str, F64]:
    """X^T X of what every matrix reads, by the whole decoder."""
    names = {id(matrix): name for number, layer in enumerate(weights.layers) for name, matrix in _named(number, layer)}
    sums: dict[str, F64] = {}

    def watched(matrix: Matrix) -> Callable[[F32], F32]:
        plain, name = to_float(matrix), names.get(id(matrix), "head")

        def linear(x: F32) -> F32:
            wide = x.astype(np.float64)
            sums[name] = sums.get(name, np.zeros(())) + wide.T @ wide
            return x @ plain

        return linear

    decoder = Decoder(weights, watched)
    for start in range(0, len(tokens), window):
        decoder.hidden(tokens[start : start + window], decoder.new_state())
    return sums


def _named(number: int, layer: Any) -> list[tuple[str, Matrix]]:
    return [(f"layers[{number}].{name}", matrix) for name, matrix in layer.linears().items()]


def test_gptq_beats_rounding_where_it_was_calibrated(sources: dict[str, Path], tmp_path: Path) -> None:
    """The squared error of the outputs of the first block is smaller, matrix by matrix."""
    seen = ["--calibration", sources["text"], "--window", 32]
    answer(sources["gguf"], "-o", tmp_path / "gptq", "--method", "gptq", "--bits", 3, "--group-size", 32, *seen)
    answer(sources["gguf"], "-o", tmp_path / "rtn", "--bits", 3, "--group-size", 32)
    before = open_model(sources["gguf"])
    squares = hessians(before.weights, before.tokenizer.encode(TEXT, begin=False), 32)
    linears = {name: open_model(tmp_path / name).weights.layers[0].linears() for name in ("gptq", "rtn")}
    for name, matrix in before.weights.layers[0].linears().items():
        square = squares[f"layers[0].{name}"]
        errors = {
            method: gptq.layer_error(to_float(matrix), to_float(found[name]), square)
            for method, found in linears.items()
        }
        assert errors["gptq"] < errors["rtn"], name


def test_hqq_keeps_its_real_zeros(sources: dict[str, Path], tmp_path: Path) -> None:
    """In the layout hqq the numbers are the solver's."""
    answer(sources["dense"], "-o", tmp_path / "new", "--method", "hqq", "--format", "hqq", "--bits", 3, *GROUP)
    before, after = open_model(sources["dense"]).weights, open_model(tmp_path / "new").weights
    for name, values in floats(after).items():
        found: HqqMatrix = by_solver(floats(before)[name], bits=3, group_size=16, scale_dtype="float16")
        step = np.asarray(found.scales, np.float64).max()
        assert np.abs(values - dequantize(found)).max() <= 2**-20 * 8 * step, name


@pytest.mark.parametrize(
    ("kind", "options", "types"),
    [
        ("gguf", [], {"Q4_1"}),
        ("gguf", ["--symmetric"], {"Q4_0"}),
        ("gguf", ["--bits", 8, "--symmetric"], {"Q8_0"}),
        ("gguf", ["--method", "hqq"], {"Q5_0"}),
        ("gguf", ["--bits", 2, "--attention-bits", 8, "--symmetric"], {"Q4_0", "Q8_0"}),
        ("dense", [], {"Q4_1"}),
        ("dense", ["--bits", 3, "--symmetric"], {"Q4_0"}),
    ],
)
def test_a_file_of_gguf(
    kind: str, options: list[object], types: set[str], sources: dict[str, Path], tmp_path: Path
) -> None:
    """Its types are those that hold the codes, and all but the matrices is as it was."""
    found = answer(sources[kind], "-o", tmp_path / "new", "--format", "gguf", "--group-size", 32, *options)
    read = GGUFReader(tmp_path / "new")
    assert {
        each.tensor_type.name for each in read.tensors if each.name.startswith("blk") and len(each.shape) == 2
    } == types
    before, after = open_model(sources[kind]), open_model(tmp_path / "new")
    for one, other in zip(ends(after.weights), ends(before.weights), strict=True):
        np.testing.assert_array_equal(one, other)
    assert after.tokenizer.encode(TEXT) == before.tokenizer.encode(TEXT)
    assert (after.tokenizer.bos, after.tokenizer.stop) == (before.tokenizer.bos, before.tokenizer.stop)
    assert replace(after.config, rms_epsilon=1) == replace(before.config, rms_epsilon=1)
    for name, values in floats(after.weights).items():
        error = np.linalg.norm(values - floats(before.weights)[name]) / np.linalg.norm(floats(before.weights)[name])
        np.testing.assert_allclose(error, found["matrices"][name]["error"], rtol=1e-5)


def test_minima_are_those_of_affine(sources: dict[str, Path], tmp_path: Path) -> None:
    """Without --symmetric a group of a file of GGUF has a minimum in float16."""
    answer(sources["gguf"], "-o", tmp_path / "new", "--format", "gguf", "--bits", 3, "--group-size", 32)
    before = floats(open_model(sources["gguf"]).weights)
    for name, values in floats(open_model(tmp_path / "new").weights).items():
        expected = affine.quantize(before[name], bits=3, group_size=32, convention="minimum", scale_dtype="float16")
        np.testing.assert_array_equal(values, affine.dequantize(expected))


def test_gptq_with_minima_beats_rounding(sources: dict[str, Path], tmp_path: Path) -> None:
    """On the inputs that it was calibrated on."""
    common = ["--format", "gguf", "--bits", 3, "--group-size", 32]
    answer(sources["gguf"], "-o", tmp_path / "gptq", *common, "--method", "gptq", "--calibration", sources["text"])
    answer(sources["gguf"], "-o", tmp_path / "rtn", *common)
    before = open_model(sources["gguf"])
    squares = hessians(before.weights, before.tokenizer.encode(TEXT, begin=False), 64)
    linears = {name: open_model(tmp_path / name).weights.layers[0].linears() for name in ("gptq", "rtn")}
    for name, matrix in before.weights.layers[0].linears().items():
        square, plain = squares[f"layers[0].{name}"], to_float(matrix)
        errors = [gptq.layer_error(plain, to_float(each[name]), square) for each in linears.values()]
        assert errors[0] < errors[1], name


def test_experts_without_tokens_are_rounded_and_named(sources: dict[str, Path], tmp_path: Path) -> None:
    """One token goes to two of four experts; the others are rounded to the nearest, and the answer says so."""
    (tmp_path / "text").write_text("h")
    common = ["--method", "gptq", "--calibration", tmp_path / "text", *GROUP]
    found = answer(sources["sparse"], "-o", tmp_path / "new", *common)
    missed = [name for name, each in found["matrices"].items() if not each["calibrated"]]
    assert len(missed) == 2 * 2 * 3
    weights, before = floats(open_model(tmp_path / "new").weights), floats(open_model(sources["sparse"]).weights)
    name = missed[0]
    expected = affine.quantize(before[name], bits=4, group_size=16, convention="zero_point", scale_dtype="float16")
    np.testing.assert_array_equal(weights[name], affine.dequantize(expected))
    said = run(sources["sparse"], "-o", tmp_path / "again", *common)
    assert "12 matrices saw no token of the calibration" in said.stderr


def test_parts_may_have_other_bits(sources: dict[str, Path], tmp_path: Path) -> None:
    """Attention in 8 bits and the rest in 2, and the configuration says so."""
    common = ["--bits", 2, "--attention-bits", 8, *GROUP]
    found = answer(sources["sparse"], "-o", tmp_path / "new", *common)
    assert found["bits"] == {"attention": 8, "experts": 2}
    config = json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]
    assert config["bits"] == 2 and {"bits": 8} in config["dynamic"].values()
    layer = open_model(tmp_path / "new").weights.layers[0]
    bits = {name: dict(m.options)["bits"] for name, m in layer.linears().items() if isinstance(m, Stored)}
    assert bits["query"] == 8 and bits["feed_forward.experts[3].down"] == 2 and len(bits) == 16


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_of_gguf(architecture: str, tmp_path: Path) -> None:
    """Biases, norms of heads, gains that a directory stores less one, and windows get through."""
    config = tiny_gguf.CONFIG
    if architecture == "gemma3":
        config = replace(config, window=8, full_every=2, local_rope_base=10000.0)
    model = tiny_gguf.published(config=config, architecture=architecture, tied=architecture == "gemma3")
    source = tiny_gguf.write(tmp_path / "a.gguf", model)
    answer(source, "-o", tmp_path / "new", *GROUP, "--bits", 8)
    before, after = open_model(source), open_model(tmp_path / "new")
    assert after.config == before.config
    for name in ("attention_norm", "feed_forward_norm", "query_bias", "query_norm", "attention_post_norm"):
        expected, found = (getattr(each.weights.layers[1], name) for each in (before, after))
        assert (expected is None and found is None) or np.array_equal(expected, found), name


def test_several_matrices_in_one_tensor(tmp_path: Path) -> None:
    """Phi-3's queries, keys and values are one tensor of codes."""
    source = fused_in(tmp_path / "source")
    answer(source, "-o", tmp_path / "new", *GROUP)
    names = open_checkpoint(tmp_path / "new").packed
    assert any("qkv_proj" in name for name in names)
    before, after = open_checkpoint(source).layer(0), open_checkpoint(tmp_path / "new").layer(0)
    for name, matrix in before.linears().items():
        expected = affine.quantize(
            to_float(matrix), bits=4, group_size=16, convention="zero_point", scale_dtype="float16"
        )
        np.testing.assert_array_equal(to_float(after.linears()[name]), affine.dequantize(expected), err_msg=name)


# **What is refused.**

REFUSED: list[tuple[list[object], str]] = [
    (["--bits", 5], "--bits is 5; allowed: 2, 3, 4 or 8"),
    (["--attention-bits", 0], "--attention-bits is 0; allowed: 2, 3, 4 or 8"),
    (["--experts-bits", 0], "--experts-bits is 0; allowed: 2, 3, 4 or 8"),
    (["--method", "best"], "--method is 'best'; allowed: rtn, gptq or hqq"),
    (["--format", "exl2"], "--format is 'exl2'; allowed: gptq-v2, gptq-v1, awq,"),
    (["--format", "awq", "--bits", 8], "--bits is 8; allowed: 4"),
    (["--format", "hqq", "--attention-bits", 8], "--format is hqq with 8 and 4 bits; allowed: gptq-v2"),
    (["--format", "gptq-v1"], "gptq-v1 holds no zero of 0, which some groups have; give --symmetric"),
    (["--format", "gguf", "--bits", 8], "gguf holds codes of 8 bits only with zeros in their middle; give --symmetric"),
    (["--format", "gguf", "--group-size", 48], "group_size is 48; allowed: a divisor of its 64 rows"),
    (["--format", "gguf", "--group-size", 16], "group_size is 16; allowed: a multiple of 32"),
    (["--format", "gguf", "--method", "gptq", "--act-order"], "only with --method gptq and a layout of GPTQ"),
    (["--format", "floats"], "--format is 'floats'"),
    (["--act-order"], "--act-order is possible only with --method gptq and a layout of GPTQ"),
    (["--method", "hqq", "--symmetric"], "--symmetric is possible only with --method rtn or gptq"),
    (["--block-size", 128], "--block-size is possible only with --method gptq"),
    (["--method", "gptq", "--block-size", 100], "--block-size is 100; allowed: a multiple of the group size, 64"),
    (["--method", "gptq", "--block-size", 0], "--block-size is 0; allowed: an integer of at least 1"),
    (
        ["--method", "hqq", "--recipe", "hqq-0.1.1"],
        "--recipe is possible only with --method hqq and --format",
    ),
    (["--format", "hqq", "--recipe", "hqq-0.2.8"], "--recipe is possible only with --method hqq"),
    (["--recipe", "best"], "--recipe is 'best'; allowed: ruled, hqq-0.1.1 or hqq-0.2.8"),
    (["--group-size", 0], "--group-size is 0"),
    (["--group-size", 24, "--format", "awq"], "does not fit the layout awq: group_size is 24; allowed: a divisor"),
    (["--group-size", 24, "--method", "hqq"], "--group-size is 24; allowed: a divisor of 64"),
    (["--group-size", 96], "group_size is 96; allowed: at most its 64 rows"),
    (["--calibration", "text"], "--calibration applies only to --method gptq"),
    (["--damping", 0.1], "--damping applies only to --method gptq"),
    (["--method", "gptq", "--damping", -1], "--damping is -1.0; allowed: a finite number of at least 0"),
    (
        ["--method", "gptq", "--damping", 1e308, "--window", 32, "--calibration", "TEXT"],
        "--damping is 1e+308; allowed: a number with which the damped Hessian is finite",
    ),
    (["--method", "gptq", "--window", 0], "--window is 0"),
    (["--method", "gptq", "--window", 65, "--calibration", "TEXT"], "--window is 65; allowed: at most 64"),
    (["--gptq-version", "v1"], "GPTQ version v1 was asked for"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_arguments(arguments: list[object], message: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Each gets a line that names the option, what it was and what is allowed, and nothing is written."""
    given = [sources["text"] if each == "TEXT" else each for each in arguments]
    result = run(sources["gguf"], "-o", tmp_path / "new", *given)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--method", "gptq"], ["--method", "hqq"], ["--processes", 2]])
def test_weights_that_cannot_be_quantised_name_their_matrix(
    options: list[object], sources: dict[str, Path], tmp_path: Path
) -> None:
    """By the name that it has in what would be written, and nothing is left."""
    model = tiny_checkpoint.published(tiny_checkpoint.DENSE)
    name = "model.layers.1.mlp.up_proj"
    model.tensors[f"{name}.weight"], model.types[f"{name}.weight"] = model.tensors[f"{name}.weight"] * 1e30, "F32"
    source = tiny_checkpoint.write(tmp_path / "source", model)
    options = [*options, "--calibration", sources["text"], "--window", 32] if "gptq" in options else options
    error = run(source, "-o", tmp_path / "new", *GROUP, *options).exception
    assert isinstance(error, ArgumentError)
    assert str(error).startswith(f"{name} cannot be quantised: range of a group")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_wrong_places(sources: dict[str, Path], tmp_path: Path) -> None:
    """A destination that is taken, one in no folder, an empty text, and a source that is no model."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    (tmp_path / "empty").touch()
    for out, message in ((tmp_path / "taken", "a name that is free"), (tmp_path / "a/b", "in a folder that exists")):
        assert message in str(run(sources["gguf"], "-o", out, *GROUP).exception)
    seen = ["--method", "gptq", "--calibration", tmp_path / "empty"]
    said = str(run(sources["gguf"], "-o", tmp_path / "new", *seen, *GROUP).exception)
    assert "--calibration is 0 tokens" in said
    assert isinstance(run(tmp_path / "absent", "-o", tmp_path / "new").exception, ArgumentError)
    (tmp_path / "ready").mkdir()
    assert answer(sources["gguf"], "-o", tmp_path / "ready", *GROUP)["bytes"] > 0  # an empty directory is free


def test_a_model_that_no_directory_describes(tmp_path: Path) -> None:
    """The rotary factors of a Llama 3.1 do not say by which rule they were made."""
    config = replace(tiny_gguf.CONFIG, rope_scaling=Scaling((1.0,) * 4 + (8.0,) * 4))
    source = tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.published(config=config))
    said = str(run(source, "-o", tmp_path / "new", *GROUP).exception)
    assert "config.json does not say of a.gguf: rope_scaling" in said


def test_what_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    """One line on standard output."""
    said = run(sources["sparse"], "-o", tmp_path / "new", *GROUP, "--attention-bits", 8)
    assert said.stdout.count("\n") == 1
    assert (
        "32 matrices in 8 bits in attention and 4 elsewhere, groups of 16, by rtn; mean relative error" in said.stdout
    )


def test_quantised_sources_are_dequantised_first(tmp_path: Path) -> None:
    """A file in Q8_0 and its weights as floats give the same directory's weights."""
    model = tiny_gguf.published(kind=GGMLQuantizationType.Q8_0)
    plain = replace(model, types=dict.fromkeys(model.types, GGMLQuantizationType.F32))
    for name, each in (("coded", model), ("plain", plain)):
        answer(tiny_gguf.write(tmp_path / f"{name}.gguf", each), "-o", tmp_path / name, *GROUP)
    found = [floats(open_model(tmp_path / name).weights) for name in ("coded", "plain")]
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name])
