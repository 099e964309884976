"""``lowbit bench``: time backends side by side, each with the verdict of the suite on the same build.

Exit status: 0 every backend that was named was measured at every problem, and what was measured passed the suite; 1
one was not, or did not pass, or nothing was measured; 2 a wrong argument, a backend that does not exist, or a problem
whose inputs cannot be made here.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lowbit.backend.declarations import LIMITS
from lowbit.backend.registry import check_function
from lowbit.backend.registry import names as installed
from lowbit.certification import LEAST_DEADLINE
from lowbit.contract.checks import check_choice, check_integer
from lowbit.contract.operation import IMPLIED
from lowbit.contract.signature import INPUTS
from lowbit.errors import ArgumentError
from lowbit.system.interrupts import deferred
from lowbit.system.threads import usable_processors
from lowbit_bench import report
from lowbit_bench.comparison import Plan, compared
from lowbit_bench.inputs import OWN, PRESETS, PRODUCTS, Problem, options_of, problem, shape_of
from lowbit_bench.layers import OTHERS, STORED_CACHES, other_problem, sizes_of, types_of
from lowbit_bench.sizes import CONTEXT, MODELS
from lowbit_bench.targets import Target, libraries
from lowbit_conformance.cli.conformance import run
from lowbit_conformance.cli.functions import function_target
from lowbit_conformance.isolation.targets import check_target
from lowbit_conformance.report.files import check_writable
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE

VERDICTS = ("quick", "full", "none")
NOT_TIMED = ("reference",)
"""Left out by default: the specification is not written for speed."""
PASSED, FAILED, REFUSED = 0, 1, 2


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
    op: Annotated[
        str, typer.Option("--op", "--operation", help="The operation, such as linear.gemv or attention.attend.")
    ] = "linear.qgemv",
    format: Annotated[str, typer.Option(help="The format of the stored arrays, such as q4_k or gptq-v2.")] = "",
    activations: Annotated[
        str, typer.Option(help="The type of the activations; for linear.gemm_cast, their format.")
    ] = "",
    result: Annotated[
        str,
        typer.Option(help="The type of the result; by default that of the activations, for linear.gemm_cast float32."),
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the format, such as bits=4; repeatable.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="What a --function handles, for the suite: bits=4,8 or columns=*64 or rows=128..4096; repeatable. "
            "By default the options that are timed."
        ),
    ] = None,
    arrays: Annotated[
        str, typer.Option(help="The library whose arrays a --function takes: numpy, torch or jax.")
    ] = "numpy",
    device: Annotated[
        str,
        typer.Option(help="The device of these arrays, as their library names it: cpu, cuda:0 for torch, gpu for jax."),
    ] = "cpu",
    shape: Annotated[list[str] | None, typer.Option(help="K x N of a matrix, such as 4096x11008; repeatable.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help=f"Sizes of a model. Products: {', '.join(PRESETS)}; other operations: {', '.join(MODELS)}."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="The number of tokens (rows of activations); repeatable.")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(help="The number of tokens attended to; repeatable.")] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="The number of threads of each backend and of the memory reader; by default as many as may be used."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="The number of rounds in which nothing else runs.")] = 20,
    verdict: Annotated[
        str,
        typer.Option(
            help="The part of the suite that judges each backend: quick (a few cases of each clause), full or none."
        ),
    ] = "quick",
    deadline: Annotated[
        float | None,
        typer.Option(
            min=LEAST_DEADLINE,
            help="The maximum number of seconds for one call or for preparing one matrix, and for loading a backend.",
            show_default=f"{DEADLINE:g} for a call, {LOADING_DEADLINE:g} for loading",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY",
            help="A folder for bench.json, and for pictures and bench.html where matplotlib is installed.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Time backends side by side, against the speed of memory, with the verdict of the suite.

    Exit status: 0 every backend that was named was measured and passed, 1 one was not, 2 a wrong argument.
    """
    check_choice("--op", op, (*PRODUCTS, *OTHERS))
    check_choice("--verdict", verdict, VERDICTS)
    check_integer("--rounds", rounds, 1, 10_000)
    usable = usable_processors()
    count = usable if threads is None else threads
    check_integer("--threads", count, 1, usable)
    activations, result = defaults(op, activations, result)
    types, options, batches = (format, activations, result), options_of(option or []), batches_of(batch or [])
    if op in PRODUCTS:
        if context:
            sentence = f"--context is not possible: {op} is a product with a matrix"
            raise ArgumentError("--context", context[0], "none", sentence)
        problems = products_of(op, types, options, shape or [], preset, batches or [1])
    else:
        problems = others_of(op, types, options, shape or [], preset, batches, context or [])
    limits = [*limits_by_default(problems[0], limit or []), *(limit or [])]
    claimed = Claimed(op, types, limits, arrays, device)
    if not function and (limit or arrays != "numpy" or device != "cpu"):
        given = "--limit, --arrays and --device"
        raise ArgumentError(given, "given", "only with --function", f"{given} describe a --function; give one")
    functions = functions_of(function or [], claimed)
    named = [*targets_of(names or [], library or [], command or []), *functions]
    folder = folder_of(out)
    targets = named or [Target("backend", name, name) for name in installed() if name not in NOT_TIMED]
    answer = compared(targets, problems, Plan(count, rounds, deadline))
    quick, judged = verdict == "quick", targets if verdict != "none" else []
    found = list(verdicts(answer, judged, claimed, quick=quick, deadline=deadline))
    answer["verdicts"] = {name: text for name, text, _ in found}
    answer["repeat"] = {name: line for name, _, line in found if line}
    with deferred():  # an interrupt leaves each file whole or not written
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        written = list(report.write(answer, folder)) if folder is not None else []
    if as_json:
        print(json.dumps(answer))
    else:
        report.show(answer, Console())
        for path in written:
            Console().print(f"written: {path}", markup=False, highlight=False, emoji=False, soft_wrap=True)
    raise typer.Exit(status_of(answer, [each.shown for each in named]))


def status_of(answer: Mapping[str, Any], named: Sequence[str]) -> int:
    """The exit status."""
    if any(not each["name"] for each in answer["absent"]):
        return REFUSED
    missing = any(each["name"] in named for each in answer["absent"])
    return FAILED if missing or answer["repeat"] or not answer["problems"] else PASSED


def folder_of(out: str | None) -> Path | None:
    """The folder of the results. Its creation is tested before anything is measured; no empty folder is left.

    Raises:
        ArgumentError: it cannot be created, or its files cannot be written.
    """
    if out is None:
        return None
    try:
        if not out:
            raise FileNotFoundError
        made = [each for each in (Path(out), *Path(out).parents) if not each.exists()]
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("--out", repr(out), f"a folder that can be made ({error.strerror or 'no name'})") from None
    try:
        for name in report.FILES:
            check_writable("--out", Path(out) / name)
    finally:
        with suppress(OSError):  # another process has put something there
            for each in made:
                each.rmdir()
    return Path(out)


# **The backends.**


@dataclass(frozen=True)
class Claimed:
    """The claim of plain functions.

    Attributes:
        operation: its id.
        types: format, activations and result.
        limits: as for ``lowbit conformance --limit``.
        arrays: the library of their arrays.
        device: the device of these arrays.
    """

    operation: str
    types: "Types"
    limits: Sequence[str]
    arrays: str
    device: str

    def target(self, function: str) -> tuple[tuple[str, ...], tuple[str, str]]:
        """How the command line names a function, and how another process is told of it."""
        format, activations, result = self.types
        known = LIMITS.get(self.operation, ())  # the specification's own products have only one type
        types = {"format": format or None, "activations": activations, "result": result}
        named = {name: each for name, each in types.items() if name in known}
        return function_target(function, self.operation, named, self.limits, self.arrays, self.device)


def functions_of(functions: Sequence[str], claimed: Claimed) -> list[Target]:
    """Plain functions.

    Raises:
        ArgumentError: there is no such module, or a limit, library or device has another form.
    """
    for each in functions:
        check_function(each)
    return [Target("function", claimed.target(each)[1][1], each) for each in dict.fromkeys(functions)]


def targets_of(names: Sequence[str], paths: Sequence[str], commands: Sequence[str]) -> list[Target]:
    """Backends by name, libraries and programs, each once.

    Raises:
        ArgumentError: no installed package offers a name.
        UnavailableError: there is no such file.
    """
    found = [Target("backend", name, name) for name in dict.fromkeys(names)]
    found += [Target("command", each, each) for each in dict.fromkeys(commands)]
    found += libraries(paths, [each.shown for each in found])
    for each in found:
        check_target("name" if each.kind == "backend" else each.kind, each.name)
    return found


def limits_by_default(problem: Problem, given: Sequence[str]) -> Iterator[str]:
    """The limits of a function from the timed options, except given ones, and the type of its inputs."""
    named = {each.partition("=")[0] for each in given}
    if INPUTS in LIMITS.get(problem.operation, ()) and problem.activations != IMPLIED[INPUTS] and INPUTS not in named:
        yield f"{INPUTS}={problem.activations}"
    for name, value in problem.options if problem.operation not in STORED_CACHES else ():
        if name not in named:
            yield f"{name}={value}"


# **The problems.**


def batches_of(given: Sequence[int]) -> list[int]:
    """The numbers of tokens, each once."""
    for each in given:
        check_integer("--batch", each, 1, 65536)
    return list(dict.fromkeys(given))


def defaults(op: str, activations: str, result: str) -> tuple[str, str]:
    """The types of activations and result, with the operation's defaults."""
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
            sentence = "--preset and --shape exclude each other; give one of them"
            raise ArgumentError("--preset", repr(preset), "none", sentence)
    chosen = PRESETS[preset] if preset is not None else [shape_of(each) for each in shapes] or PRESETS["llama-7b"][1:2]
    if op not in OWN and not types[0]:
        raise ArgumentError("--format", "not given", "a format", f"--op {op} needs --format, the format of the matrix")
    every = [problem(op, each, batch, *types, options) for each in chosen for batch in batches]
    return list(dict.fromkeys(every))


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
        sentence = f"--shape is not possible: {op} has the sizes of a model; choose one with --preset"
        raise ArgumentError("--shape", shapes[0], "none", sentence)
    for context in contexts:
        check_integer("--context", context, 1, 2**20)
    for name, given in (("batch", batches), ("context", contexts)):
        if given and name not in sizes_of(op):
            raise ArgumentError(f"--{name}", given[0], "none", f"--{name} is not possible: {op} has no such size")
    sizes = [(context, batch) for batch in batches or [1] for context in contexts or [CONTEXT]]
    return list(dict.fromkeys(other_problem(op, preset or "llama-7b", *each, *types, options) for each in sizes))


# **The verdicts.**


def verdicts(
    answer: Mapping[str, Any], targets: Sequence[Target], claimed: Claimed, *, quick: bool, deadline: float | None
) -> Iterator[tuple[str, str, str]]:
    """For each measured backend its name, the suite's verdict with the id of the report, and, if it did not pass, the
    command that repeats it."""
    timed = {row["backend"] for each in answer["problems"] for row in each["rows"]}
    op = claimed.operation
    settings = {"seeds": 1, "first_seed": 0, "ops": [op], "profiles": [], "case": None, "model": None, "quick": quick}
    for target in targets:
        if target.shown in timed:
            judged = (target.name,) if target.kind == "backend" else (f"--{target.kind}", target.name)
            words = claimed.target(target.shown)[0] if target.kind == "function" else (*judged, "--op", op)
            shown = ("--function", target.shown) if target.kind == "function" else judged
            found = run(shown, settings, deadline, judged=judged)
            more = ["--seeds", "1", *["--quick"] * quick, *(["--deadline", f"{deadline:g}"] if deadline else [])]
            line = "" if found.tally.verdict == "passed" else shlex.join(["lowbit", "conformance", *words, *more])
            yield target.shown, f"{found.tally.verdict}{' (quick)' if quick else ''} {found.id[:8]}", line
