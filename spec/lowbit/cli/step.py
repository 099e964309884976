"""``lowbit step``: the program of a model's step."""

import json
import math
from dataclasses import asdict

import typer

from lowbit.attention.rope_scaling import Scaling
from lowbit.cli.options import JsonOption, ModelOption, opened
from lowbit.model.program import FORMS, Line, Program, Setting
from lowbit.model.step import Step, step_of, widths
from lowbit.model.weights import in_memory

WIDTH = 80

step = typer.Typer(help="Show what a decoder does for a token, as a program.", no_args_is_help=True)


@step.callback()
def main() -> None:
    """Show what a decoder does for a token, as a program."""


@step.command()
def show(model: ModelOption = None, as_json: JsonOption = False) -> None:
    """Show the step of a model: its operations in order, with the values that they read and write."""
    stored = opened(model)
    program = step_of(in_memory(stored.layered))
    if as_json:
        print(json.dumps({"model": stored.name, **described(program)}))
        return
    print("\n".join(told(stored.name, program)))


def described(step: Step) -> dict[str, object]:
    """A step for a JSON answer: the lines of each part, and the blocks that share them."""

    def lines(program: Program) -> list[dict[str, object]]:
        return [asdict(line) | {"settings": {name: _setting(each) for name, each in line.settings}} for line in program]

    blocks = [
        {"blocks": [run.start, run.stop], "lines": lines(program), "widths": widths(program, step.config)}
        for run, program in step.alike
    ]
    return {"first": lines(step.first), "blocks": blocks, "last": lines(step.last)}


def _setting(given: Setting) -> object:
    """A setting for JSON, which has no infinity: the factor of an unrotated pair becomes null."""
    if not isinstance(given, Scaling):
        return given
    return asdict(given) | {"factors": [factor if math.isfinite(factor) else None for factor in given.factors]}


def told(name: str, step: Step) -> list[str]:
    """A step for people: a line for each operation, and the width of its result.

    >>> from lowbit.model.config import LlamaConfig
    >>> from lowbit.model.step import block
    >>> config = LlamaConfig(2, 64, 128, 4, 2, 16, 100, 32, 10000.0, 1e-5)
    >>> program = block(config, 0, ["attention_norm", "feed_forward_norm"])
    >>> for line in told("a model", Step(config, (program, program)))[:5]:
    ...     print(line)
    The step of a model. On the right: the columns of a value with T rows.
    <BLANKLINE>
    x = embed(tokens; embedding, scale 1)                                         64
    <BLANKLINE>
    blocks 0 to 1, one after the other:
    """
    config = step.config
    shown = [f"The step of {name}. On the right: the columns of a value with T rows.", ""]
    shown += [_line(line, config.hidden) for line in step.first]
    for run, program in step.alike:
        known = widths(program, config)
        many = f"blocks {run.start} to {run.stop - 1}, one after the other:" if len(run) > 1 else f"block {run.start}:"
        shown += ["", many, *(_line(line, known.get(line.out), "  ") for line in program)]
    norm, *head = step.last
    shown += ["", _line(norm, config.hidden), *(_line(line, config.vocabulary) for line in head), ""]
    kinds = {line.kind for program in (step.first, *step.blocks, step.last) for line in program}
    shown += ["Operations:"]
    rows = [(kind, form.operation or "-", form.said) for kind, form in FORMS.items() if kind in kinds]
    longest, wide = (max(len(row[column]) for row in rows) for column in (0, 1))
    return shown + [f"  {kind:{longest}} {operation:{wide}} {said}" for kind, operation, said in rows]


def _line(line: Line, width: int | None, indent: str = "") -> str:
    left = f"{indent}{line}"
    return f"{left:{WIDTH - 8}} {width:>7}" if width is not None else left
