"""``lowbit ksort``: a model whose key channels are sorted by size, as a directory of floats.

The JSON answer is one object.

=========================== ===========================================================================================
field                       holds
=========================== ===========================================================================================
``source``, ``directory``   what was read, and what was written
``key``                     ``norm``, ``bias``, ``calibrated`` or ``keys-over-queries``
``calibration``             ``text``, ``tokens`` and ``window``; ``null`` without calibration
``kv_heads``                of a layer
``shared_order``            whether the heads of a layer have one order, because one gain norms all of them
``bytes``                   of all tensors
``resumed``                 the number of blocks that an interrupted run had finished
=========================== ===========================================================================================
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lowbit.backend.whole_model import spoken_bytes
from lowbit.cli.options import DEFAULT_TOKENS, DEFAULT_WINDOW, GPTQOption, JsonOption, check_needless
from lowbit.cli.progress import changing_bar
from lowbit.cli.quantize import (
    OutOption,
    SourceArgument,
    calibration_of,
    interrupts_told,
    opened_source,
    resumed_told,
)
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.formats.fetch import DEFAULT_TEXT, TABLE
from lowbit.quantization.coded import digest
from lowbit.rewriting.changing import write_floats
from lowbit.rewriting.journal import check_destination
from lowbit.rewriting.sorting import KEYS, READ_A_TEXT, Sorting, sorted_source
from lowbit.text import one_line

WITH_TEXT = f"--key {spoken(READ_A_TEXT)}"


def ksort(
    source: SourceArgument,
    out: OutOption,
    key: Annotated[str, typer.Option("--key", help=f"The size of a channel: {spoken(KEYS)}.")] = KEYS[0],
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", help=f"With {WITH_TEXT}: a text in UTF-8. By default {TABLE[DEFAULT_TEXT].file}."
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            "--calibration-tokens",
            help=f"With {WITH_TEXT}: the maximum number of tokens of the text to read; {DEFAULT_TOKENS} by default.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", help=f"With {WITH_TEXT}: the number of tokens read together; {DEFAULT_WINDOW} by default."
        ),
    ] = None,
    gptq_version: GPTQOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sort the key channels of a model, as the K-sort paper does; after an interrupt the same command resumes."""
    by = check_choice("--key", key, KEYS)
    given = {"--calibration": calibration, "--calibration-tokens": calibration_tokens, "--window": window}
    check_needless(given, by in READ_A_TEXT, WITH_TEXT)
    for option, number in (("--calibration-tokens", calibration_tokens), ("--window", window)):
        if number is not None:
            check_integer(option, number, least=1)
    check_destination(out)
    opened, request, text = opened_source(source, gptq_version), Sorting(by), None
    if by in READ_A_TEXT:
        text, tokens, size = calibration_of(opened, calibration, calibration_tokens, window)
        request = replace(request, tokens=tokens, window=size)
    model = sorted_source(opened, request)
    seen = digest(np.array(request.tokens, np.float32)) if request.tokens else ""
    call = {"command": "ksort", "key": by, "tokens": seen, "window": request.window}
    with interrupts_told(out), changing_bar() as report:
        told = write_floats(model, out, call, report)
    config = model.config
    answer = {
        "source": opened.name,
        "directory": str(out),
        "key": by,
        "calibration": {"text": text.name, "tokens": len(request.tokens), "window": request.window} if text else None,
        "kv_heads": config.kv_heads,
        "shared_order": "key_norm" in opened.architecture.vectors and not config.heads_normed_together,
        **told,
    }
    _print(answer, as_json)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    orders = "one order in each layer" if answer["shared_order"] else f"{answer['kv_heads']} orders in each layer"
    print(
        one_line(
            f"{answer['directory']}: {spoken_bytes(answer['bytes'])}; key channels sorted by {answer['key']}, {orders}"
        )
    )
    resumed_told(answer["resumed"])
