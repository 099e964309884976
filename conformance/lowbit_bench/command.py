"""``lowbit bench``: time backends side by side, each with the verdict of the suite on the same build.

Exit status: 0 something was measured, 1 nothing was, 2 a wrong argument.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lowbit.backend.registry import names as installed
from lowbit.certification import LEAST_DEADLINE
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.system.interrupts import deferred
from lowbit.system.threads import usable_processors
from lowbit_bench import report
from lowbit_bench.comparison import Plan, compared
from lowbit_bench.inputs import OWN, PRESETS, PRODUCTS, Problem, options_of, problem, shape_of
from lowbit_bench.layers import OTHERS, other_problem, types_of
from lowbit_bench.sizes import CONTEXT, MODELS
from lowbit_bench.targets import Target
from lowbit_conformance.cli.conformance import run
from lowbit_conformance.cli.functions import function_target
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE

VERDICTS = ("quick", "full", "none")
NOT_TIMED = ("reference",)
"""Left out by default: the specification is not written for speed."""


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names that `lowbit backends` lists, or module:Class; by default all that can run here."),
    ] = None,
    library: Annotated[list[str] | None, typer.Option(help="A library that implements lowbit.h; repeatable.")] = None,
    command: Annotated[list[str] | None, typer.Option(help="A program that answers line by line; repeatable.")] = None,
    function: Annotated[
        list[str] | None, typer.Option(help="A plain function module:function of the --op; repeatable.")
    ] = None,
    op: Annotated[str, typer.Option(help="The operation, such as linear.gemv or attention.attend.")] = "linear.qgemv",
    format: Annotated[str, typer.Option(help="The format of what is stored, such as q4_k or gptq-v2.")] = "",
    activations: Annotated[str, typer.Option(help="Their type; for linear.gemm_cast, their format.")] = "",
    result: Annotated[str, typer.Option(help="The type of the result; by default that of activations.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="An option of the format, such as bits=4.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="K x N of a matrix, such as 4096x11008; repeatable.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help=f"Sizes of a model. Products: {', '.join(PRESETS)}; other operations: {', '.join(MODELS)}."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Tokens, the rows of activations; repeatable.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens that are attended to; repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(help="By default as many as this process may use.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds in which nothing else runs.")] = 20,
    verdict: Annotated[str, typer.Option(help="The suite's run: quick, full or none.")] = "quick",
    deadline: Annotated[
        float | None,
        typer.Option(
            min=LEAST_DEADLINE,
            help="Seconds that one call, or preparing one matrix, may take, and that loading a backend may take.",
            show_default=f"{DEADLINE:g} for a call, {LOADING_DEADLINE:g} for loading",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for bench.json, and for pictures and bench.html where matplotlib is installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Time backends side by side, with the speed of memory and the verdict of the suite."""
    check_choice("--op", op, (*PRODUCTS, *OTHERS))
    check_choice("--verdict", verdict, VERDICTS)
    check_integer("--rounds", rounds, 1, 10_000)
    count = usable_processors() if threads is None else threads
    check_integer("--threads", count, 1, 1024)
    activations, result = defaults(op, activations, result)
    types, options, batches = (format, activations, result), options_of(option or []), batch or [1]
    for each in batches:
        check_integer("--batch", each, 1, 65536)
    if op in PRODUCTS:
        if context:
            raise ArgumentError("--context", context[0], f"leaving it out, since {op} is a product with a matrix")
        problems = products_of(op, types, options, shape or [], preset, batches)
    else:
        problems = others_of(op, types, options, shape or [], preset, batches, context or [CONTEXT])
    named = {"format": format or None, "activations": activations, "result": result}
    functions = [function_target(each, op, named, [], "numpy", "cpu") for each in function or []]
    targets = [Target("backend", name, name) for name in names or []]
    targets += [Target("library", os.path.abspath(each), Path(each).name) for each in library or []]
    targets += [Target("command", each, each) for each in command or []]
    targets += [
        Target("function", judged[1], each) for each, (_, judged) in zip(function or [], functions, strict=True)
    ]
    targets = targets or [Target("backend", name, name) for name in installed() if name not in NOT_TIMED]
    answer = compared(targets, problems, Plan(count, rounds, deadline))
    answer["verdicts"] = (
        {} if verdict == "none" else dict(verdicts(answer, targets, op, quick=verdict == "quick", deadline=deadline))
    )
    with deferred():  # an interrupt leaves each file whole or not written
        written = list(report.write(answer, out)) if out is not None else []
    if as_json:
        print(json.dumps(answer))
    else:
        report.show(answer, Console())
        for path in written:
            Console().print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if answer["problems"] else 1)


def defaults(op: str, activations: str, result: str) -> tuple[str, str]:
    """The types of activations and result, with the defaults of the operation."""
    if op == "linear.gemm_cast":
        return activations or "q8_0", result or "float32"
    activations = activations or (types_of(op)[0] if op in OTHERS else "float32")
    return activations, result or activations


Types = tuple[str, str, str]
"""Format, activations and result."""


def products_of(
    op: str,
    types: Types,
    options: Mapping[str, int],
    shapes: Sequence[str],
    preset: str | None,
    batches: Sequence[int],
) -> list[Problem]:
    """Every shape of a product with every batch.

    Raises:
        ArgumentError: one of them is wrong.
    """
    if preset is not None:
        check_choice("--preset", preset, tuple(PRESETS))
        if shapes:
            raise ArgumentError("--preset", repr(preset), "leaving it out, since --shape is given")
    chosen = PRESETS[preset] if preset is not None else [shape_of(each) for each in shapes] or PRESETS["llama-7b"][1:2]
    if op not in OWN and not types[0]:
        raise ArgumentError("--format", "not given", f"the format of the matrix, since --op is {op}")
    return [problem(op, each, batch, *types, options) for each in chosen for batch in batches]


def others_of(
    op: str,
    types: Types,
    options: Mapping[str, int],
    shapes: Sequence[str],
    preset: str | None,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> list[Problem]:
    """Every batch of another operation with every context, where it has them.

    Raises:
        ArgumentError: one of them is wrong.
    """
    if shapes:
        raise ArgumentError("--shape", shapes[0], f"leaving it out: {op} has the sizes of a model, --preset")
    for context in contexts:
        check_integer("--context", context, 1, 2**20)
    sizes = [(context, batch) for batch in batches for context in contexts]
    return list(dict.fromkeys(other_problem(op, preset or "llama-7b", *each, *types, options) for each in sizes))


# **The verdicts.**


def verdicts(
    answer: Mapping[str, Any], targets: Sequence[Target], op: str, *, quick: bool, deadline: float | None
) -> Iterator[tuple[str, str]]:
    """For each backend that was measured, the suite's verdict on the operation and the id of the report."""
    timed = {row["backend"] for each in answer["problems"] for row in each["rows"]}
    settings = {"seeds": 1, "first_seed": 0, "ops": [op], "profiles": [], "case": None, "model": None, "quick": quick}
    for target in targets:
        if target.shown in timed:
            named = (target.name,) if target.kind == "backend" else (f"--{target.kind}", target.name)
            shown = ("--function", target.shown) if target.kind == "function" else named
            found = run(shown, settings, deadline, judged=named)
            yield target.shown, f"{found.tally.verdict}{' (quick)' if quick else ''} {found.id[:8]}"
