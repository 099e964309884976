"""``lowbit tune``: search for the fastest kernels on this machine, and keep the outcome."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.quantization.affine import CONVENTIONS
from lowbit.quantization.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import PURPOSES, Purpose, Recipe
from lowbit_cppyy.runtime.hardware import processor_name
from lowbit_cppyy.runtime.processor import MOST_THREADS, choose_table, choose_threads
from lowbit_cppyy.runtime.toolchain import check_toolchain
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.tuning.choices import PANEL
from lowbit_cppyy.tuning.search import Location

if TYPE_CHECKING:  # these import numpy and the bridge to the compiler, which other commands do not need
    from lowbit_cppyy.tuning.stopwatch import Problem
    from lowbit_cppyy.tuning.tune import Tuned

SHOWN = 12


def tune(
    bits: Annotated[int, typer.Option(help="Width of a code: 2, 3, 4 or 8.")] = 4,
    group: Annotated[int, typer.Option(help="Rows of a group; 0 for whole columns.")] = 128,
    shape: Annotated[str, typer.Option(help="Rows x columns of the matrix.")] = "4096x11008",
    isa: Annotated[str | None, typer.Option(help="Instruction set; the best by default.")] = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads; by default that of the backend.")] = None,
    purpose: Annotated[list[str] | None, typer.Option(help="Only this purpose; repeatable.")] = None,
    scales: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
    convention: Annotated[str, typer.Option(help="minimum or zero_point.")] = "zero_point",
    every: Annotated[bool, typer.Option("--all", help="All widths of codes.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the outcome for the backend to use.")] = True,
    figure: Annotated[
        Path | None, typer.Option(help="Plot predictions against measurements in this SVG or PNG file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Search for the fastest kernels on this machine (QIGen, Algorithm 4), and keep them for the backend cppyy.

    From then on the outcome decides in which order sums are added, so the last bits of results may change.
    """
    for name in purpose or ():
        check_choice("--purpose", name, PURPOSES)
    purposes = [each for each in PURPOSES if not purpose or each in purpose]
    if isa is not None:
        check_choice("--isa", isa, tuple(TABLES))
    if threads is not None:
        check_integer("--threads", threads, 1, MOST_THREADS)
    check_choice("--bits", bits, BITS)
    layouts = [layout_of(width, group, shape, scales, convention) for width in (BITS if every else (bits,))]
    if figure:
        check_drawing(figure)
    check_toolchain()
    table, count = choose_table(isa), choose_threads(threads)
    run = Run(keep, Console(stderr=as_json))
    try:
        for layout in layouts:
            run.run(layout, purposes, table.name, count)
    finally:  # also after an interrupt: finished searches are shown and already kept
        if run.documents and figure:
            from lowbit_cppyy.tuning.figure import save

            save(run.documents, figure)
        if as_json:
            complete = len(run.documents) == len(layouts) * len(purposes)
            print(json.dumps({"machine": processor_name(), "complete": complete, "searches": run.documents}))


def layout_of(bits: int, group: int, shape: str, scales: str, convention: str) -> PanelLayout:
    """The layout of a matrix with these options, in panels of the default width.

    Raises:
        ArgumentError: wrong sizes, scales or convention.
    """
    sizes = re.fullmatch(r"([1-9][0-9]{0,5})[x×]([1-9][0-9]{0,5})", shape)
    if not sizes:
        raise ArgumentError("--shape", repr(shape[:40]), "rows x columns, such as 4096x11008")
    rows, columns = int(sizes[1]), int(sizes[2])
    if rows % CODES_PER_UNIT[bits]:
        raise ArgumentError("rows of --shape", rows, f"a multiple of {CODES_PER_UNIT[bits]} for {bits} bits")
    check_integer("--group", group, 0, rows)
    check_choice("--scales", scales, outcomes.SCALES)
    check_choice("--convention", convention, CONVENTIONS)
    stated: Any = {"scales": scales, "convention": convention}  # checked above
    return PanelLayout(bits, rows, columns, group or rows, panel=PANEL, **stated)


def check_drawing(figure: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured."""
    from importlib.util import find_spec

    if figure.suffix not in (".svg", ".png"):
        raise ArgumentError("--figure", repr(figure.name), "a file name that ends in .svg or .png")
    if not figure.absolute().parent.is_dir():
        raise ArgumentError("--figure", repr(str(figure)), "a file in a folder that exists")
    if find_spec("matplotlib") is None:
        raise UnavailableError("--figure", "matplotlib is not installed", "install lowbit with the extra bench")


class Run:
    """The searches of one command; each is shown and kept as soon as it finishes.

    Args:
        keep: whether outcomes are written.
        console: where tables go.
    """

    def __init__(self, keep: bool, console: Console) -> None:
        self.keep, self.console = keep, console
        self.documents: list[dict[str, Any]] = []

    def run(self, layout: PanelLayout, purposes: list[Purpose], isa: str, threads: int) -> None:
        """One search for each purpose; the search for one row of x decides the panel of the others."""
        from lowbit_cppyy.tuning.stopwatch import Problem

        table = TABLES[isa]
        key = outcomes.Key.of("vector", layout, table)
        if self.keep:
            outcomes.check_place(key)
        decided = outcomes.read(key)
        for purpose in purposes:
            panel = decided.panel if decided and purpose != "vector" else layout.panel
            tuned = self.search(Problem(replace(layout, panel=panel), table, purpose, threads))
            document = tuned.document()
            if self.keep:
                document["kept"] = tuned.keep().name
            if purpose == "vector":
                decided = tuned.found.chosen
            self.documents.append(document)
            self.console.print(*shown(tuned), sep="\n")

    def search(self, problem: "Problem") -> "Tuned":
        """One search, with its progress on standard error."""
        from lowbit_cppyy.tuning.tune import tune

        columns = TextColumn("{task.description:40}"), BarColumn(), TimeElapsedColumn()
        terminal = Console(stderr=True)
        with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_interactive) as progress:
            bar = progress.add_task("")

            def watch(step: str, done: int, total: int) -> None:
                words = f"{problem.layout.bits} bits, {problem.purpose}: {step}"
                progress.update(bar, description=words, completed=done, total=total)

            return tune(problem, watch)


def shown(tuned: "Tuned") -> list[Any]:
    """A search as a heading, a table and a sentence, 80 columns wide."""
    problem, found, layout = tuned.problem, tuned.found, tuned.problem.layout
    heading = (
        f"\n[bold]{layout.bits} bits, {problem.purpose}[/]: {layout.rows} × {layout.columns} in groups of "
        f"{layout.group_size}, {problem.table.name}, {problem.threads} thread(s); "
        f"η = {problem.table.registers}; {len(found.trials)} kernels tried in {tuned.seconds:.0f} s"
    )
    table = Table("kernel", box=None, padding=(0, 1, 0, 0))
    for column in ("live", "reg", "eq.4", "instr", "cycles", "cache", "memory"):
        table.add_column(column, justify="right")
    ranked = sorted(found.trials, key=lambda recipe: _rank(tuned, recipe))
    shown = ranked[:SHOWN] + [recipe for recipe in ranked[SHOWN:] if recipe in (found.default, found.chosen)]
    for recipe in shown:
        table.add_row(*_row(tuned, recipe), style="bold" if recipe == found.chosen else "")
    return [heading, table, _sentence(tuned)]


def _rank(tuned: "Tuned", recipe: Recipe) -> tuple[float, float]:
    return -(tuned.rate(recipe, "memory") or 0.0), -(tuned.rate(recipe, "cache") or 0.0)


def _row(tuned: "Tuned", recipe: Recipe) -> list[str]:
    predicted = tuned.prediction(recipe)
    name = recipe.name.split("_", 3)[3]  # activations, codes and scales are the same for all
    locations: tuple[Location, Location] = ("cache", "memory")
    rates = [tuned.rate(recipe, location) for location in locations]
    numbers = [f"{predicted.live}", f"{predicted.registers}", f"{predicted.equation_4}"]
    numbers += [f"{predicted.instructions:.2f}", f"{predicted.cycles:.2f}"]
    return [name, *numbers, *(f"{rate:.1f}" if rate else "" for rate in rates)]


def _sentence(tuned: "Tuned") -> str:
    found = tuned.found
    said = "GB/s of codes, scales and zeros. "
    if found.chosen == found.default:
        return said + f"The default stays: the fastest is {found.faster:.2f} times as fast."
    return said + f"Chosen: {tuned.kernel(found.chosen)}, {found.faster:.2f} times as fast as the default."
