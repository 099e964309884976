"""The program of a step: what it says of each architecture, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from step_runs import GEMMA, GRANITE, LLAMA, model
from tiny_gguf import published, write
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.model.config import Routing
from lowbit.model.step import BEGIN, END, OPERATIONS, Line, Step, block, check, step_of, widths

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
            assert line.kind in OPERATIONS and set(line.inputs) <= set(written) and line.out not in written
            written += [line.out] if line.out else []
        assert widths(program, weights.config)[END] == weights.config.hidden


@pytest.mark.parametrize(
    ("place", "line", "message"),
    (
        (0, Line("norm", "normed", ("y",), "attention_norm"), "written before the line reads it, not y"),
        (2, Line("product", "query", ("normed",), "key"), "a value that no other line writes, not query"),
        (1, Line("product", "query", ("normed",), "output_"), r"values \[0\] columns wide, not \[64\]"),
        (0, Line("norm", "normed", ("x",), "query_bias_"), "a vector for 64 columns, not one of 0"),
        (14, Line("add", "end", ("middle", "feed_forward")), "allowed: result, 64 wide"),
        (7, Line("attend", "mixed", ("key_rotated",)), r"values \[64\] columns wide, not \[32\]"),
    ),
    ids=("not written", "written twice", "no such matrix", "no such vector", "no end", "keys that ask"),
)
def test_a_program_that_is_not_sound_is_refused(place: int, line: Line, message: str) -> None:
    """The message shows the line, and what is allowed there."""
    program = list(block(LLAMA, 0, NORMS))
    place = len(program) - 1 if line.out == "end" else place
    program[place] = line
    with pytest.raises(ArgumentError, match=message):
        check(tuple(program), LLAMA)


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
