"""The program of a step: what it says of each architecture, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from step_runs import GEMMA, GRANITE, LLAMA, model
from tiny_gguf import published, write
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.program import BEGIN, END, FORMS, Line
from lowbit.model.step import Step, block, check, step_of, widths

NORMS = ("attention_norm", "feed_forward_norm")
BIASES = ("query_bias", "key_bias", "value_bias")
GEMMA_VECTORS = (*NORMS, "query_norm", "key_norm", "attention_post_norm", "feed_forward_post_norm")


def kinds(program: tuple[Line, ...]) -> list[str]:
    return [line.kind for line in program]


def test_each_architecture_has_its_program() -> None:
    """Llama; Qwen2 with biases; Gemma 3 with more norms, windows and two bases; Mixtral with experts; Granite with
    factors."""
    llama = block(LLAMA, 0, NORMS)
    attention = ["norm", *["product"] * 3, "rotate", "rotate", "append", "attend", "product", "add"]
    assert kinds(llama) == [*attention, "norm", "product", "product", "swiglu", "product", "add"]
    assert [line.parameter for line in block(LLAMA, 0, (*NORMS, *BIASES)) if line.kind == "bias"] == list(BIASES)
    local, full = block(GEMMA, 0, GEMMA_VECTORS), block(GEMMA, 2, GEMMA_VECTORS)
    assert kinds(local).count("norm") == 6 and "geglu" in kinds(local)
    assert {line.setting("base") for line in local if line.kind == "rotate"} == {GEMMA.local_rope_base}
    assert [line.setting("window") for program in (local, full) for line in program if line.kind == "attend"] == [
        4,
        None,
    ]
    sparse = block(replace(LLAMA, routing=Routing(5, 2)), 0, NORMS)
    assert kinds(sparse)[len(attention) :] == ["norm", "gate", "experts", "add"]
    granite = block(GRANITE, 0, NORMS)
    assert [line for line in map(str, granite) if "scale" in line] == [
        "mixed = attend_shaped(query_rotated; head_dim 16, scale 0.0625)",
        "attention_scaled = scale(attention; factor 0.22)",
        "middle = add(x, attention_scaled)",
        "feed_forward_scaled = scale(feed_forward; factor 0.22)",
        "result = add(middle, feed_forward_scaled)",
    ]


def test_a_step_ends_with_what_the_logits_need() -> None:
    """A factor comes before a soft cap; without them there is the head alone."""

    def ends(divisor: float, cap: float | None) -> list[str]:
        return [str(line) for line in Step(replace(LLAMA, logit_divisor=divisor, logit_cap=cap), ()).last[1:]]

    assert ends(1.0, None) == ["logits = product(hidden; head)"]
    assert ends(1.0, 3.0) == ["plain_logits = product(hidden; head)", "logits = soft_cap(plain_logits; cap 3)"]
    assert ends(8.0, None) == ["plain_logits = product(hidden; head)", "logits = scale(plain_logits; factor 0.125)"]
    assert ends(8.0, 3.0) == [
        "plain_logits = product(hidden; head)",
        "scaled_logits = scale(plain_logits; factor 0.125)",
        "logits = soft_cap(scaled_logits; cap 3)",
    ]


@pytest.mark.parametrize("name", ("llama", "qwen2", "gemma3", "granite", "mixed", "sparse"))
def test_every_program_is_sound(name: str) -> None:
    """Its values are written before they are read, and once; sizes close; every line is of a kind that is described."""
    weights = model(name)
    step = step_of(weights)
    assert sum(len(run) for run, _ in step.alike) == len(step.blocks) == weights.config.layers
    for program in step.blocks:
        written = [BEGIN]
        for line in program:
            assert line.kind in FORMS and set(line.inputs) <= set(written) and line.out not in written
            written += [line.out] if line.out else []
        assert widths(program, weights.config)[END] == weights.config.hidden


EPSILON = (("epsilon", 1e-5),)
HEADS = (("head_dim", LLAMA.head_dim),)
TURN = (*HEADS, ("base", LLAMA.rope_base))
CHOICE = (("top_k", 2), ("softmax", "after"), ("activation", "silu"))
SPARSE = replace(LLAMA, routing=Routing(5, 2))
SHAPED = replace(LLAMA, score_cap=5.0, sinks=True)
UNIT: Any = Line("swiglu", "inner", ("gate", "up"))
UNSOUND: dict[str, tuple[LlamaConfig, int, Line, str]] = {
    "not written": (LLAMA, 0, Line("norm", "normed", ("y",), "attention_norm", EPSILON), "reads it, not y"),
    "written twice": (LLAMA, 2, Line("product", "query", ("normed",), "key"), "no other line writes, not query"),
    "no such matrix": (LLAMA, 1, Line("product", "query", ("normed",), "output_"), "a matrix among query, key"),
    "no such vector": (LLAMA, 0, Line("norm", "normed", ("x",), "query_bias_", EPSILON), "a vector among attention"),
    "no gain as long": (LLAMA, 0, Line("bias", "normed", ("x",), "key_bias"), "a vector for 64 columns, not one of 32"),
    "no end": (LLAMA, -1, Line("add", "end", ("middle", "feed_forward")), "allowed: result, 64 wide"),
    "keys that ask": (
        LLAMA,
        7,
        Line("attend", "mixed", ("key_rotated",), None, HEADS),
        r"\[64\] columns wide, not \[32\]",
    ),
    "no such kind": (LLAMA, -3, replace(UNIT, kind="gelu"), "a kind among embed, norm"),
    "two inputs": (LLAMA, 0, Line("norm", "normed", ("x", "x"), "attention_norm", EPSILON), "1 value to read"),
    "no parameter": (LLAMA, 0, Line("norm", "normed", ("x",), None, EPSILON), "allowed: a parameter"),
    "a parameter": (LLAMA, -1, Line("add", "result", ("x", "feed_forward"), "head"), "allowed: no parameter"),
    "no setting": (LLAMA, 0, Line("norm", "normed", ("x",), "attention_norm"), "the setting epsilon"),
    "a misspelt setting": (
        LLAMA,
        7,
        Line("attend", "mixed", ("query_rotated",), None, (*HEADS, ("windw", 4))),
        "head_dim or window, once, not windw",
    ),
    "an odd name": (
        LLAMA,
        0,
        Line("norm", "a = 1; b", ("x",), "attention_norm", EPSILON),
        "underscores, not 'a = 1; b'",
    ),
    "a setting twice": (LLAMA, 0, Line("norm", "normed", ("x",), "attention_norm", EPSILON * 2), "once, not epsilon"),
    "no gain": (
        LLAMA,
        0,
        Line("norm", "normed", ("x",), "attention_norm", (("epsilon", 0.0),)),
        "epsilon a fin",
    ),
    "a word": (
        LLAMA,
        0,
        Line("norm", "normed", ("x",), "attention_norm", (("epsilon", "0.1"),)),
        "epsilon a fin",
    ),
    "no word": (
        SPARSE,
        -2,
        Line("experts", "feed_forward", ("middle_normed", "scores"), "feed_forward.experts", (*CHOICE, ("biases", 3))),
        "biases of the type str",
    ),
    "one expert": (
        SPARSE,
        1,
        Line("product", "query", ("normed",), "feed_forward.experts[0].gate"),
        "a matrix among query, key, value, output or feed_forward.router",
    ),
    "another router": (SPARSE, -3, Line("gate", "scores", ("middle_normed",), "query"), "feed_forward.router"),
    "an append with a value": (LLAMA, 6, Line("append", "y", ("key_rotated", "value")), "no value to write"),
    "a sum without": (LLAMA, -1, Line("add", "", ("middle", "feed_forward")), "a value to write"),
    "other heads": (LLAMA, 7, Line("attend", "mixed", ("query_rotated",), None, (("head_dim", 8),)), "head_dim 16, as"),
    "another window": (
        LLAMA,
        7,
        Line("attend", "mixed", ("query_rotated",), None, (*HEADS, ("window", 4))),
        "window None, as",
    ),
    "another unit": (LLAMA, -3, Line("geglu", "inner", ("gate", "up")), "swiglu, as the configuration says"),
    "another attention": (LLAMA, 7, Line("attend_shaped", "mixed", ("query_rotated",), None, HEADS), "attend, as"),
    "another base": (
        LLAMA,
        4,
        Line("rotate", "query_rotated", ("query",), None, (*HEADS, ("base", 3.0))),
        "a base and a scaling of the configuration",
    ),
    "heads of another number": (
        LLAMA,
        4,
        Line("rotate_sorted", "query_rotated", ("query",), "key_order", (*TURN, ("heads", 2))),
        "heads 4",
    ),
    "another cap": (
        SHAPED,
        7,
        Line("attend_shaped", "mixed", ("query_rotated",), "sinks", (*HEADS, ("cap", 6.0))),
        "cap 5.0, as",
    ),
    "no sinks": (
        SHAPED,
        7,
        Line("attend_shaped", "mixed", ("query_rotated",), None, (*HEADS, ("cap", 5.0))),
        "the parameter sinks",
    ),
    "more experts": (
        SPARSE,
        -2,
        Line(
            "experts", "feed_forward", ("middle_normed", "scores"), "feed_forward.experts", (("top_k", 3), *CHOICE[1:])
        ),
        "top_k 2, as",
    ),
    "another softmax": (
        SPARSE,
        -2,
        Line(
            "experts",
            "feed_forward",
            ("middle_normed", "scores"),
            "feed_forward.experts",
            (CHOICE[0], ("softmax", "before"), CHOICE[2]),
        ),
        "softmax after, as",
    ),
    "experts elsewhere": (
        SPARSE,
        -2,
        Line("experts", "feed_forward", ("middle_normed", "scores"), "experts", CHOICE),
        "the parameter feed_forward.experts",
    ),
    "experts of a dense model": (
        LLAMA,
        -1,
        Line("experts", "result", ("middle_normed", "feed_forward"), "feed_forward.experts", CHOICE),
        "experts of a configuration with experts",
    ),
}


@pytest.mark.parametrize(("config", "place", "line", "message"), UNSOUND.values(), ids=UNSOUND)
def test_a_program_that_is_not_sound_is_refused(config: LlamaConfig, place: int, line: Line, message: str) -> None:
    """The message shows the line, and what is allowed there."""
    program = list(block(config, 0, NORMS))
    program[place] = line
    with pytest.raises(ArgumentError, match=message):
        check(tuple(program), config)


def test_a_vector_that_a_line_reads_is_given() -> None:
    """The message names the block, the vector and the line."""
    weights = model("llama")
    program = tuple(
        replace(line, parameter="attention_post_norm") if line.parameter == "feed_forward_norm" else line
        for line in block(weights.config, 1, NORMS)
    )
    layers = (*weights.layers[:-1], replace(weights.layers[-1], program=program))
    with pytest.raises(
        ArgumentError, match=rf"layers\[{len(layers) - 1}\].attention_post_norm is missing.*norm\(middle"
    ):
        step_of(replace(weights, layers=layers))


def test_a_block_with_its_own_program_needs_no_other_vectors() -> None:
    """Two parts side by side that share one norm, as in Cohere: without a second norm only with this program."""
    weights = model("llama")
    own = [replace(layer, feed_forward_norm=None) for layer in weights.layers]
    with pytest.raises(ArgumentError, match="feed_forward_norm"):
        replace(weights, layers=tuple(own))
    program = tuple(
        replace(line, inputs=tuple("normed" if name == "middle_normed" else name for name in line.inputs))
        for line in block(weights.config, 0, NORMS)
        if line.out != "middle_normed"
    )
    parallel = replace(weights, layers=tuple(replace(layer, program=program) for layer in own))
    assert step_of(parallel).blocks == (program,) * weights.config.layers


def test_the_command_shows_it(tmp_path: Path) -> None:
    """In lines of at most 80 columns, and as JSON."""
    file = write(tmp_path / "m.gguf", published(0))
    shown = CliRunner().invoke(app, ["step", "show", "--model", str(file)])
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.split()[:3] == ["query", "=", "product(normed;"] for line in lines)
    told = json.loads(CliRunner().invoke(app, ["step", "show", "--model", str(file), "--json"]).stdout)
    assert [block["blocks"] for block in told["blocks"]] == [[0, 2]]
    assert [line["kind"] for line in told["last"]] == ["norm", "product"]
    assert told["blocks"][0]["widths"]["gate"] == 96
