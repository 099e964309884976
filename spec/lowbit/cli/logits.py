"""``lowbit logits``: the tokens most likely to follow a prompt."""

import json
from contextlib import ExitStack
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.cli.options import (
    BackendOption,
    BitsOption,
    CalibrationOption,
    CalibrationOptions,
    CalibrationTokensOption,
    ContextOption,
    DeviceMemoryOption,
    DeviceOptions,
    ExpertsBitsOption,
    ExpertsGroupOption,
    GPTQOption,
    GroupOption,
    JsonOption,
    MethodOption,
    ModelOption,
    PromptOption,
    chosen,
    loaded_backend,
    opened,
    options_for,
)
from lowbit.cli.progress import note, progress_bar
from lowbit.cli.running import encoded, loaded_model, with_room
from lowbit.contract.checks import check_integer
from lowbit.linear.elementary import softmax
from lowbit.text import quoted


def logits(
    prompt: PromptOption,
    top: Annotated[int, typer.Option("--top", help="How many tokens to show.")] = 10,
    model: ModelOption = None,
    backend: BackendOption = None,
    bits: BitsOption = None,
    group_size: GroupOption = None,
    experts_bits: ExpertsBitsOption = None,
    experts_group_size: ExpertsGroupOption = None,
    method: MethodOption = None,
    calibration: CalibrationOption = None,
    calibration_tokens: CalibrationTokensOption = None,
    gptq_version: GPTQOption = None,
    context: ContextOption = None,
    device_memory: DeviceMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the tokens most likely to follow a prompt, with their logits and probabilities."""
    check_integer("--top", top, least=1)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    reading = CalibrationOptions(plan, calibration, calibration_tokens)
    with ExitStack() as stack:
        engine = stack.enter_context(loaded_backend(backend, model))
        options = options_for(engine, plan, DeviceOptions(device_memory))
        stored = opened(model, gptq_version, context, identified=engine.keeps_steps)
        options = reading.added(options, stored)
        tokenizer = stored.tokenizer
        check_integer("--top", top, 1, stored.config.vocabulary)
        ids = encoded(stored, prompt)
        ready = stack.enter_context(loaded_model(stored, engine, with_room(options, len(ids))))
        with progress_bar("reading the prompt") as progress:
            scores = ready.logits(ids, progress).astype(np.float64)
        account = ready.account()
    probabilities = softmax(scores)
    order = np.argsort(-scores, kind="stable")[:top]  # ties by lowest token
    rows = [
        {
            "token": int(token),
            "text": tokenizer.decode([int(token)], after=ids),
            "logit": float(scores[token]),
            "probability": float(probabilities[token]),
        }
        for token in order
    ]
    if as_json:
        print(json.dumps(dict(account.fields) | {"prompt": prompt, "prompt_tokens": ids, "top": rows}))
        return
    table = Table("token", "text", "logit", "probability")
    for row in rows:
        table.add_row(
            str(row["token"]), Text(quoted(str(row["text"]))), f"{row['logit']:.5f}", f"{row['probability']:.5f}"
        )
    Console().print(table)
    note(account.sentence)
