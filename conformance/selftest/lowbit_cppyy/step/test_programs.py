"""Programs of other orders than those that lowbit writes: a compiled step has the bits of the operations, or none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from step_runs import compiled, edge, edge_answers, operations

from lowbit.errors import NotDeclaredError
from lowbit.model.program import BEGIN, END, Line, Program
from lowbit.model.step import Step, block, step_of
from lowbit.model.weights import LlamaWeights
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.step.source import StepSource

pytestmark = pytest.mark.toolchain

EPSILON = (("epsilon", 1e-3),)
LLAMA = block(edge("narrow").config, 0, ["attention_norm", "feed_forward_norm"])
LINES = {line.out or line.kind: line for line in LLAMA}
ATTENTION, FEED_FORWARD = LLAMA[1:-7], LLAMA[-5:-1]


def norm(out: str, source: str, gain: str) -> Line:
    return Line("norm", out, (source,), gain, EPSILON)


def add(out: str, *inputs: str) -> Line:
    return Line("add", out, inputs)


def scale(out: str, source: str) -> Line:
    return Line("scale", out, (source,), settings=(("factor", 0.3),))


def reading(lines: Program, **names: str) -> Program:
    """The lines with other inputs in place of those named."""
    return tuple(replace(line, inputs=tuple(names.get(name, name) for name in line.inputs)) for line in lines)


def renamed(lines: Program, old: str, new: str) -> Program:
    """The lines with another name for a value."""
    return tuple(replace(line, out=new if line.out == old else line.out) for line in reading(lines, **{old: new}))


NORMED, MIDDLE_NORMED = (norm("normed", BEGIN, "attention_norm"), norm("middle_normed", BEGIN, "feed_forward_norm"))
SUMS = add("middle", BEGIN, "attention"), add(END, "middle", "feed_forward")
SHARED = reading(FEED_FORWARD, middle_normed="normed")
HEADS_NORMED = [norm(f"{name}_turned", f"{name}_rotated", f"{name}_norm") for name in ("query", "key")]
MOVED = Line("product", "moved", (BEGIN,), "output")

COMPILED: dict[str, Program] = {
    "parts side by side with one norm": (NORMED, *ATTENTION, *SHARED, *SUMS),
    "a sum before the other part": (NORMED, *ATTENTION, SUMS[0], *SHARED, SUMS[1]),
    "a norm of a norm": (norm("first", BEGIN, "feed_forward_norm"), *reading(LLAMA[:1], x="first"), *LLAMA[1:]),
    "queries rotated before there are keys": (*LLAMA[:2], LLAMA[4], *LLAMA[2:4], *LLAMA[5:]),
    "values first": (NORMED, *reversed(ATTENTION[:3]), *LLAMA[4:]),
    "one gain for both norms": tuple(
        replace(line, parameter="attention_norm") if line.kind == "norm" else line for line in LLAMA
    ),
    "queries of another name": renamed(renamed(LLAMA, "query", "q"), "query_rotated", "turned"),
    "heads normed behind the rotation": (
        *LLAMA[:6],
        *HEADS_NORMED,
        *reading(LLAMA[6:], query_rotated="query_turned", key_rotated="key_turned"),
    ),
    "one part scaled": (*LLAMA[:-1], scale("scaled", "feed_forward"), add(END, "middle", "scaled")),
    "a part normed and scaled": (
        *(*LLAMA[:-1], norm("last", "feed_forward", "attention_norm"), scale("scaled", "last")),
        add(END, "middle", "scaled"),
    ),
    "the stream itself projected, scaled and added": (
        *(MOVED, scale("scaled", "moved"), add("early", BEGIN, "scaled")),
        *reading(LLAMA, x="early"),
    ),
    "the stream itself projected and added": (MOVED, add("early", BEGIN, "moved"), *reading(LLAMA, x="early")),
}
REFUSED: dict[str, tuple[Program, str]] = {
    "two norms side by side": ((NORMED, MIDDLE_NORMED, *ATTENTION, *FEED_FORWARD, *SUMS), "query.*overwritten already"),
    "the stream of before a sum": (
        (NORMED, *ATTENTION, SUMS[0], MIDDLE_NORMED, *FEED_FORWARD, SUMS[1]),
        "middle_normed.*overwritten already",
    ),
    "a sum of its own": (
        (NORMED, *ATTENTION, *SHARED, add("both", "attention", "feed_forward"), add(END, BEGIN, "both")),
        "both = add.*does not add another value",
    ),
    "a sum the other way round": ((*LLAMA[:-1], add(END, "feed_forward", "middle")), "does not add another value"),
    "the stream twice": ((*LLAMA[:-1], add(END, "middle", "middle")), "does not add another value"),
    "the other side first": ((*LLAMA[:-5], LLAMA[-4], LLAMA[-5], *LLAMA[-3:]), "swiglu.*in this order"),
    "another side": (
        tuple(replace(line, inputs=line.inputs[::-1]) if line.kind == "swiglu" else line for line in LLAMA),
        "swiglu.*in this order",
    ),
    "a bias outside of attention": (
        (
            *LLAMA[:-2],
            replace(LLAMA[-2], out="plain"),
            Line("bias", "feed_forward", ("plain",), "query_bias"),
            LLAMA[-1],
        ),
        "feed_forward = bias",
    ),
    "a sum beside the norm of its stream": (
        (
            *(MOVED, NORMED, Line("product", "more", ("normed",), "output"), add("early", BEGIN, "more")),
            *reading(LLAMA[1:], normed="moved", x="early"),
        ),
        "early = add.*normed directly before",
    ),
    "a factor of the stream": (
        (*LLAMA[:-1], scale("scaled", "middle"), add(END, "middle", "scaled")),
        "scaled = scale",
    ),
    "a factor of a factor": (
        (*LLAMA[:-1], scale("once", "feed_forward"), scale("twice", "once"), add(END, "middle", "twice")),
        "once = scale.*does not scale what a sum then adds",
    ),
    "a factor of queries": (
        (*LLAMA[:6], scale("scaled", "query_rotated"), *reading(LLAMA[6:], query_rotated="scaled")),
        "scaled = scale",
    ),
    "a factor of what is read again": (
        (
            *(NORMED, *ATTENTION, scale("scaled", "attention"), add("middle", BEGIN, "scaled")),
            *(add("more", "middle", "attention"), *reading(LLAMA[-6:], middle="more")),
        ),
        "more = add.*overwritten already",
    ),
    "a scaled sum the other way round": (
        (*LLAMA[:-1], scale("scaled", "feed_forward"), add(END, "scaled", "middle")),
        "scaled = scale",
    ),
    "keys that are no heads of keys": (reading(LLAMA, key_rotated="value"), "append"),
}


def with_gains() -> LlamaWeights:
    """A small model in which no two norms are alike."""
    weights, rng = edge("narrow"), np.random.default_rng(5)
    d, hidden = weights.config.head_dim, weights.config.hidden

    def gain(size: int) -> Any:
        return rng.normal(1, 0.4, size).astype(np.float32)

    layers = [
        replace(
            layer,
            attention_norm=gain(hidden),
            feed_forward_norm=gain(hidden),
            query_norm=gain(d),
            key_norm=gain(d),
            query_bias=gain(hidden),
        )
        for layer in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


@pytest.fixture
def weights(request: pytest.FixtureRequest) -> LlamaWeights:
    """A model whose blocks have this program."""
    given = with_gains()
    return replace(given, layers=tuple(replace(layer, program=request.param) for layer in given.layers))


@pytest.mark.parametrize("weights", COMPILED.values(), ids=COMPILED, indirect=True)
def test_it_has_the_bits_of_the_operations(weights: LlamaWeights) -> None:
    """Prompts, single tokens and batches, in two threads."""
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, weights)
        for own, other in zip(edge_answers(compiled(backend, decoder)), edge_answers(decoder), strict=True):
            np.testing.assert_array_equal(own, other)


def test_a_block_without_a_second_norm_is_compiled() -> None:
    """It has a program of its own, beside the weights that the program reads, and no others."""
    given = edge("narrow")
    program = COMPILED["parts side by side with one norm"]
    layers = tuple(replace(layer, program=program, feed_forward_norm=None) for layer in given.layers)
    with CppyyBackend(threads=2) as backend:
        decoder = operations(backend, replace(given, layers=layers))
        for own, other in zip(edge_answers(compiled(backend, decoder)), edge_answers(decoder), strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize(("weights", "reason"), REFUSED.values(), ids=REFUSED, indirect=["weights"])
def test_it_is_refused(weights: LlamaWeights, reason: str) -> None:
    """A sound program that would not have these bits; the error names the line."""
    with pytest.raises(NotDeclaredError, match=reason):
        print(StepSource(step_of(weights), TABLES["plain"]).source)


ENDS: dict[str, Callable[[Program], Program]] = {
    "another line behind the head": lambda last: (*last, norm("scaled", "logits", "norm")),
    "no norm": lambda last: last[1:],
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_another_end_is_refused(end: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the blocks is not compiled line by line."""
    own = step_of(edge("narrow"))
    last = end(own.last)
    monkeypatch.setattr(Step, "last", property(lambda step: last))
    with pytest.raises(NotDeclaredError, match="at the end of the step"):
        print(StepSource(own, TABLES["plain"]).source)
