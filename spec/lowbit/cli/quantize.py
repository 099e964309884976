"""``lowbit quantize``: write a model with quantised matrices as a directory or GGUF file that other tools load.

The JSON answer is one object.

===================== =================================================================================================
field                 holds
===================== =================================================================================================
``source``            the name of the file or directory that was read
``directory``         the directory or file that was written
``format``            its layout
``method``            ``rtn``, ``gptq`` or ``hqq``
``bits``              ``attention`` and ``experts``
``group_size``        weights in a group
``symmetric``         whether every zero is the middle of the codes
``act_order``         whether groups may be other than runs of rows
``block_size``        GPTQ's block; ``null`` where it is a group
``recipe``            of HQQ: ``ruled``, or a version of its package; ``null`` for other methods
``calibration``       ``text``, ``tokens`` and ``window``; ``null`` without calibration
``bytes``             of all tensors
``resumed``           the number of blocks that an interrupted run had finished
``mean_error``        the mean of the relative errors of the matrices: norm of the error over norm of the weights
``matrices``          of each matrix its ``bits``, its relative ``error``, the ``digest`` of its float32 numbers and,
                      with calibration, whether it was ``calibrated``; an expert that no token was sent to is not
===================== =================================================================================================
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.backend.whole_model import spoken_bytes
from lowbit.cli.executors import executor_of
from lowbit.cli.options import (
    DEFAULT_GROUP_SIZE,
    DEFAULT_TOKENS,
    DEFAULT_WINDOW,
    GPTQOption,
    JsonOption,
    asked_version,
    check_needless,
    first_tokens,
)
from lowbit.cli.progress import changing_bar, note
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import DEFAULT_TEXT, TABLE
from lowbit.quantization.gptq import DAMPING
from lowbit.quantization.hqq_published import RECIPES
from lowbit.rewriting.apart import Apart
from lowbit.rewriting.journal import check_destination
from lowbit.rewriting.layouts import LAYOUTS, layout_of
from lowbit.rewriting.methods import METHODS, Rounding
from lowbit.rewriting.quantizing import Request
from lowbit.rewriting.quantizing import quantize as carried_out
from lowbit.rewriting.source import Source, open_source
from lowbit.system.records import RESUME
from lowbit.text import one_line

SourceArgument = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A GGUF file or a checkpoint directory, quantised or not.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="The directory or file to write, which must not exist.")]


def quantize(
    source: SourceArgument,
    out: OutOption,
    method: Annotated[str, typer.Option("--method", help=f"How to quantise: {spoken(METHODS)}.")] = METHODS[0],
    bits: Annotated[int, typer.Option("--bits", help="Bits of a weight: 2, 3, 4 or 8.")] = 4,
    group_size: Annotated[
        int, typer.Option("--group-size", help="The number of weights in a group.")
    ] = DEFAULT_GROUP_SIZE,
    layout: Annotated[str, typer.Option("--format", help=f"The layout to write: {spoken(list(LAYOUTS))}.")] = next(
        iter(LAYOUTS)
    ),
    attention_bits: Annotated[
        int | None, typer.Option("--attention-bits", help="Bits of the matrices of attention; by default as --bits.")
    ] = None,
    experts_bits: Annotated[
        int | None,
        typer.Option(
            "--experts-bits", help="Bits of the experts (or of the dense feed-forward part); by default as --bits."
        ),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Make every zero the middle of the codes (rtn and gptq).")
    ] = False,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="With gptq: round the most important inputs first.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help=f"With gptq: a text in UTF-8. By default {TABLE[DEFAULT_TEXT].file}."),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            "--calibration-tokens",
            help=f"With gptq: the maximum number of tokens of the text to read; {DEFAULT_TOKENS} by default.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", help=f"With gptq: the number of tokens read together; {DEFAULT_WINDOW} by default."),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(
            "--damping",
            help=f"With gptq: the fraction of the Hessian's mean diagonal to add to it; {DAMPING} by default.",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            help="With gptq: the number of rows in a block, such as the authors' 128. The ranges of its groups are "
            "taken before the errors in the block are applied. By default a block is a group, and every range is taken "
            "after all earlier errors are applied.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option("--recipe", help=f"With hqq: lowbit's ruling or a version of HQQ's package: {spoken(RECIPES)}."),
    ] = RECIPES[0],
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            help="The number of processes that quantise blocks, or the matrices of one block. By default this process "
            "does the work.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Quantise blocks, or parts of one, on a Ray cluster: its address, HOST:PORT or auto."
        ),
    ] = None,
    gptq_version: GPTQOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantise a model into a directory or a GGUF file for other tools; after an interrupt the same command resumes."""
    chosen, by = layout_of(layout), check_choice("--method", method, METHODS)
    seen = Calibration(by, calibration, calibration_tokens, window, damping)
    has_minima = chosen.is_file and by != "hqq" and not symmetric
    zeros = {"real_zeros": chosen.has_real_zeros, "has_minima": has_minima}
    solved = check_choice("--recipe", recipe, RECIPES)
    rounding = Rounding(by, group_size, symmetric, act_order, seen.part, block_size, solved, **zeros)
    of_attention, of_experts = (bits if each is None else each for each in (attention_bits, experts_bits))
    request = Request(rounding, chosen, of_attention, of_experts)
    request.check()
    check_destination(out, is_file=chosen.is_file)
    executor = executor_of(processes, cluster)
    opened = opened_source(source, gptq_version)
    blocks = None if executor is None else Apart(executor, source, asked_version(gptq_version))
    text, request = seen.read(opened, request)
    with interrupts_told(out), changing_bar() as report:
        told = carried_out(opened, out, request, report, blocks)
    _print(_answer(opened, out, request, text, told), as_json)


class Calibration:
    """The options of calibration, which apply only to GPTQ.

    Raises:
        ArgumentError: one that does not apply, or a wrong number.
    """

    def __init__(
        self, method: str, text: Path | None, tokens: int | None, window: int | None, damping: float | None
    ) -> None:
        given = {"--calibration": text, "--calibration-tokens": tokens, "--window": window, "--damping": damping}
        check_needless(given, method == "gptq", "--method gptq")
        for option, number in (("--calibration-tokens", tokens), ("--window", window)):
            if number is not None:
                check_integer(option, number, least=1)
        if damping is not None and not 0 <= damping < float("inf"):
            raise ArgumentError("--damping", damping, "a finite number of at least 0")
        self.text, self.window, self.is_needed = text, window, method == "gptq"
        self.tokens = tokens
        self.part = DAMPING if damping is None else damping

    def read(self, source: Source, request: Request) -> tuple[Path | None, Request]:
        """The file of the text, and the request with its tokens; unchanged for other methods.

        Raises:
            LowbitError: the text cannot be read or fetched.
        """
        if not self.is_needed:
            return None, request
        text, tokens, window = calibration_of(source, self.text, self.tokens, self.window)
        return text, replace(request, tokens=tokens, window=window)


def calibration_of(
    source: Source, text: Path | None, tokens: int | None, window: int | None
) -> tuple[Path, tuple[int, ...], int]:
    """The file of a calibration text, its first tokens, and the tokens of a window; None stands for the defaults.

    Raises:
        LowbitError: the text cannot be read or fetched.
    """
    file, ids = first_tokens(source.tokenizer, text, DEFAULT_TEXT, tokens)
    return file, ids, min(DEFAULT_WINDOW, source.config.context) if window is None else window


def opened_source(path: Path, gptq_version: str | None) -> Source:
    """The model to rewrite; prints remarks on how it is read.

    Raises:
        LowbitError: it cannot be read, or a directory cannot describe it.
    """
    found = open_source(path, asked_version(gptq_version))
    for remark in found.remarks:
        note(remark)
    return found


@contextmanager
def interrupts_told(out: Path) -> Iterator[None]:
    """Say how to resume if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"{out.name} is not finished; {RESUME}")
        raise


def _answer(source: Source, out: Path, request: Request, text: Path | None, told: dict[str, Any]) -> dict[str, Any]:
    matrices = told["matrices"]
    seen = {"text": text.name, "tokens": len(request.tokens), "window": request.window} if text else None
    return {
        "source": source.name,
        "directory": str(out),
        "format": request.layout.name,
        "method": request.rounding.method,
        "bits": {"attention": request.attention_bits, "experts": request.experts_bits},
        "group_size": request.rounding.group_size,
        "symmetric": request.rounding.symmetric,
        "act_order": request.rounding.act_order,
        "block_size": request.rounding.block_size,
        "recipe": request.rounding.recipe if request.rounding.method == "hqq" else None,
        "calibration": seen,
        "bytes": told["bytes"],
        "resumed": told["resumed"],
        "mean_error": sum(each["error"] for each in matrices.values()) / len(matrices),
        "matrices": matrices,
    }


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    bits = answer["bits"]
    told = f"{bits['experts']} bits"
    if bits["attention"] != bits["experts"]:
        told = f"{bits['attention']} bits in attention and {bits['experts']} elsewhere"
    print(
        one_line(
            f"{answer['directory']}: {spoken_bytes(answer['bytes'])} in layout {answer['format']}; "
            f"{len(answer['matrices'])} matrices in {told}, groups of {answer['group_size']}, by {answer['method']}; "
            f"mean relative error {answer['mean_error']:.4f}"
        )
    )
    missed = [name for name, each in answer["matrices"].items() if not each.get("calibrated", True)]
    if missed:
        note(f"{len(missed)} matrices saw no token of the calibration and were rounded to the nearest: {missed[0]} …")
    resumed_told(answer["resumed"])


def resumed_told(blocks: int) -> None:
    """Say how many blocks an interrupted run had finished, if any."""
    if blocks:
        note(f"{blocks} blocks were there from an interrupted run")
