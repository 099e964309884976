"""``lowbit kernel``: print kernels, and the C++ of a step; only ``--assembly`` needs a compiler."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lowbit import theorems
from lowbit.cli.options import ModelOption, opened
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import UnavailableError
from lowbit.kernels.program import Advance, Comment, Instruction, Loop, Step, live_registers
from lowbit.model.step import step_of
from lowbit.model.weights import in_memory
from lowbit.quantization.packing import BITS
from lowbit_cppyy.cli.token_time import time_token
from lowbit_cppyy.cli.tune import layout_of
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel, kernel_source
from lowbit_cppyy.codegen.lowering import Compilable
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import PURPOSES, Purpose
from lowbit_cppyy.step.source import StepSource
from lowbit_cppyy.stored.formats import structure_of
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.linear import PANEL
from lowbit_cppyy.stored.recipe import default_recipe as default_stored
from lowbit_cppyy.stored.recipe import purposes_of
from lowbit_cppyy.tuning.choices import default_recipe
from lowbit_cppyy.tuning.prediction import Prediction, predict, words_of_a_group

app = typer.Typer(help="Show the generated kernels: their names, programs and C++.", no_args_is_help=True)
app.command("time")(time_token)

Name = Annotated[str | None, typer.Argument(help="A kernel's name, by the grammar of `lowbit_cppyy.codegen.kernels`.")]
Bits = Annotated[int, typer.Option(help="Without a name: width of a code.")]
Group = Annotated[int, typer.Option(help="Rows of a group; 0 for whole columns.")]
Isa = Annotated[str, typer.Option(help="Without a name: instruction set.")]
PurposeName = Annotated[str, typer.Option("--purpose", help="Without a name: the default kernel for this purpose.")]
ScaleType = Annotated[str, typer.Option(help="Without a name: float16 or float32.")]
ZeroKind = Annotated[str, typer.Option(help="Without a name: minimum or zero_point.")]
FormatName = Annotated[
    str | None, typer.Option("--format", help="The kernel for a stored matrix of this format, such as q4_k.")
]
StepIsa = Annotated[str, typer.Option("--isa", help="The instruction set in whose namespace the step is.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

ROWS, COLUMNS = 4096, 11008


@app.command()
def show(
    name: Name = None,
    bits: Bits = 4,
    group: Group = 128,
    isa: Isa = "avx2",
    purpose: PurposeName = "vector",
    scales: ScaleType = "float16",
    convention: ZeroKind = "zero_point",
    format: FormatName = None,
    whole: Annotated[bool, typer.Option("--prelude", help="Include the functions that it calls.")] = False,
    assembly: Annotated[bool, typer.Option(help="Print the assembly of the command c++, not of cppyy.")] = False,
) -> None:
    """Print a kernel's C++, by its name or by choices."""
    kernel: Compilable = _kernel(name, _layout(bits, group, scales, convention), isa, purpose)
    if format is not None:
        kernel = _stored(format, bits, isa, purpose)
    if assembly:
        _print(assembly_of(kernel), "gas")
    else:
        _print(kernel_source(kernel) if whole else kernel.source, "cpp")
    for line in proved(kernel.name):
        print(line, file=sys.stderr)


@app.command("step")
def show_step(model: ModelOption = None, isa: StepIsa = "avx2") -> None:
    """Print the C++ of a model's step, each line of its program as a comment before the calls that run it."""
    check_choice("--isa", isa, tuple(TABLES))
    _print(StepSource(step_of(in_memory(opened(model).layered)), TABLES[isa]).source, "cpp")


def proved(name: str) -> Iterator[str]:
    """Which theorems hold for a kernel by certificates of earlier proofs, and how to prove the others."""
    for each in theorems.of_kernel(name):
        kind = each.theorem.partition("/")[0]
        yield (
            f"{kind}: proved, {each.proof}" if each.holds else f"{kind}: no proof is kept; lowbit prove {each.theorem}"
        )


@app.command()
def program(
    name: Name = None,
    bits: Bits = 4,
    group: Group = 128,
    isa: Isa = "avx2",
    purpose: PurposeName = "vector",
    scales: ScaleType = "float16",
    convention: ZeroKind = "zero_point",
    format: FormatName = None,
    as_json: AsJson = False,
) -> None:
    """Print a kernel's program in the vocabulary of `lowbit.kernels.vector`, its registers and its instructions."""
    if format is not None:
        _show_stored_program(_stored(format, bits, isa, purpose), as_json)
        return
    kernel = _kernel(name, _layout(bits, group, scales, convention), isa, purpose)
    layout = _layout(kernel.recipe.bits, group, kernel.recipe.scales, kernel.recipe.convention)
    words = dict(words_of_a_group(kernel.recipe, layout, kernel.program))
    predicted = predict(kernel.recipe, layout, kernel.table)
    lines = list(program_lines(kernel.program.body))
    if as_json:
        answer = {"kernel": kernel.name, "program": lines, "words_of_a_group": words, "predicted": vars(predicted)}
        print(json.dumps(answer))
        return
    _print("\n".join(lines) + "\n", "text")
    print(f"\n{kernel.name}, groups of {layout.group_size}:")
    print("\n".join(_told(predicted, kernel.table.registers)))
    print("words of a group: " + ", ".join(f"{count} {word}" for word, count in sorted(words.items())))


@app.command("list")
def list_kernels(
    bits: Annotated[int | None, typer.Option(help="Only this width of codes.")] = None,
    isa: Annotated[str | None, typer.Option(help="Only this instruction set.")] = None,
    group: Group = 128,
    scales: ScaleType = "float16",
    convention: ZeroKind = "zero_point",
    as_json: AsJson = False,
) -> None:
    """List the default kernel of every instruction set, width and purpose."""
    if bits is not None:
        check_choice("--bits", bits, BITS)
    if isa is not None:
        check_choice("--isa", isa, tuple(TABLES))
    found: list[dict[str, str | float]] = []
    for table in [TABLES[isa]] if isa else TABLES.values():
        for width in BITS if bits is None else (bits,):
            layout = _layout(width, group, scales, convention)
            for purpose in PURPOSES:
                kernel = Kernel(default_recipe(purpose, layout, table), table)
                predicted = vars(predict(kernel.recipe, layout, table))
                found.append({"purpose": purpose, "kernel": kernel.name} | predicted)
    if as_json:
        print(json.dumps({"kernels": found}))
        return
    shown = Table("purpose", "kernel", box=None, padding=(0, 1, 0, 0))
    for column in ("reg", "instr"):
        shown.add_column(column, justify="right")
    for each in found:
        instructions = f"{each['instructions']:.2f}"
        shown.add_row(str(each["purpose"]), str(each["kernel"]), f"{each['registers']}", instructions)
    Console().print(shown)


# Helpers of the commands.


def _layout(bits: int, group: int, scales: str, convention: str) -> PanelLayout:
    check_choice("--bits", bits, BITS)
    check_integer("--group", group, 0, ROWS)
    return layout_of(bits, group, f"{ROWS}x{COLUMNS}", scales, convention)


def _kernel(name: str | None, layout: PanelLayout, isa: str, purpose: str) -> Kernel:
    """The kernel with a name, or the default for these choices."""
    if name is not None:
        return kernel_of(name)
    table, chosen = _chosen(isa, purpose)
    return Kernel(default_recipe(chosen, layout, table), table)


def _stored(format: str, bits: int, isa: str, purpose: str) -> StoredKernel:
    """The default kernel for a stored matrix; `bits` is for formats of several widths."""
    structure = structure_of(format, bits)
    table, chosen = _chosen(isa, purpose, purposes_of(structure))
    return StoredKernel(default_stored(structure, table, chosen, PANEL), table)


def _chosen(isa: str, purpose: str, purposes: Sequence[Purpose] = PURPOSES) -> tuple[InstructionSet, Purpose]:
    check_choice("--isa", isa, tuple(TABLES))
    check_choice("--purpose", purpose, purposes)
    return TABLES[isa], next(each for each in PURPOSES if each == purpose)


def _show_stored_program(kernel: StoredKernel, as_json: bool) -> None:
    lines, live = list(program_lines(kernel.program.body)), live_registers(kernel.program)
    if as_json:
        print(json.dumps({"kernel": kernel.name, "program": lines, "live_registers": live}))
        return
    _print("\n".join(lines) + "\n", "text")
    print(f"\n{kernel.name}: {live} values live at once; there are {kernel.table.registers} registers")


def _told(predicted: Prediction, registers: int) -> Iterator[str]:
    """The prediction in words; `lowbit_cppyy.tuning.prediction` defines the counts."""
    yield f"{predicted.live} values live at once; {predicted.registers} of them need a register; there are {registers}"
    yield f"equation 4 as printed, for one code at a time: {predicted.equation_4} registers"
    yield f"{predicted.instructions:.2f} instructions for a register of products, {predicted.cycles:.2f} cycles or more"
    yield f"{predicted.bytes_per_code:.3f} bytes read for each code, scales and zeros included"


def program_lines(steps: tuple[Step, ...], indent: str = "") -> Iterator[str]:
    """A program as text, a line for each step."""
    for step in steps:
        if isinstance(step, Loop):
            yield f"{indent}for {step.index} in 0 … {step.count}:"
            yield from program_lines(step.body, indent + "    ")
        elif isinstance(step, Advance):
            yield f"{indent}{step.pointer} += {step.step}"
        elif isinstance(step, Comment):
            yield f"{indent}# {step.text}"
        else:
            yield indent + _instruction(step)


def _instruction(step: Instruction) -> str:
    call = f"{step.word} {', '.join(map(str, step.arguments))}"
    return f"{step.target} = {call}" if step.target else call


def _print(text: str, language: str) -> None:
    """Print with colours to a terminal, and otherwise as plain text."""
    if sys.stdout.isatty():
        from rich.syntax import Syntax

        Console().print(Syntax(text, language, background_color="default"))
    else:
        sys.stdout.write(text)


def assembly_of(kernel: Compilable) -> str:
    """The instructions that the system's C++ compiler generates for a kernel.

    Raises:
        UnavailableError: there is no C++ compiler, or it does not support these instructions.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        raise UnavailableError("assembly", "there is no command c++", "install a C++ compiler (g++)")
    with tempfile.TemporaryDirectory() as folder, as_file(files("lowbit_cppyy") / "cpp") as headers:
        source = Path(folder) / "kernel.cpp"
        kept = f"extern const lowbit::MicroKernel kept = lowbit::{kernel.table.name}::{kernel.name};\n"
        source.write_text(f'#include "{headers}/activations.h"\n{kernel_source(kernel)}{kept}', "utf-8")
        options = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-S", "-o", "-", str(source)]
        done = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it failed"])[-1][:200]
        raise UnavailableError("assembly", f"{compiler} said: {reason}", "install a newer compiler")
    return "\n".join(_body(done.stdout.splitlines(), kernel.name)) + "\n"


def _body(lines: list[str], name: str) -> Iterator[str]:
    """The lines of one function, without directives."""
    inside = False
    for line in lines:
        if line.endswith(":") and name in line and not line.startswith("."):
            inside = True
        if inside and ".cfi_endproc" in line:
            return
        if inside and not line.lstrip().startswith((".cfi", ".p2align")):
            yield line.expandtabs()
