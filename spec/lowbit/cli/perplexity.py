"""``lowbit perplexity``: how well a model predicts a text."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.executors import ClusterOption, KeepOption, ProcessesOption, executor_of
from lowbit.cli.options import (
    BackendOption,
    BitsOption,
    CalibrationOption,
    CalibrationOptions,
    CalibrationTokensOption,
    ContextOption,
    ContractOption,
    DeviceMemoryOption,
    DeviceOptions,
    ExpertsBitsOption,
    ExpertsGroupOption,
    GPTQOption,
    GroupOption,
    JsonOption,
    KeysOption,
    MethodOption,
    ModelOption,
    asked_version,
    called,
    chosen,
    file_of,
    loaded_backend,
    opened,
    options_for,
)
from lowbit.cli.progress import note, progress_bar
from lowbit.cli.running import loaded_model, with_room
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.formats.fetch import DEFAULT_MODEL, DEFAULT_TEXT, TABLE, read_text
from lowbit.model.perplexity import DEFAULT_PROTOCOL, PROTOCOLS, check_text
from lowbit.runtime import Options
from lowbit.runtime.evaluating import Evaluation, Models
from lowbit.text import json_number


def perplexity(
    text: Annotated[
        Path | None,
        typer.Option("--text", help=f"A text file in UTF-8. By default {TABLE[DEFAULT_TEXT].file} is fetched."),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", help="The number of tokens in a window; by default the protocol's."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="How many tokens of the text are used.")] = 2048,
    protocol: Annotated[
        str,
        typer.Option(
            "--protocol",
            help=f"How tokens are counted, by lowbit's own protocol or another: {spoken(tuple(PROTOCOLS))}.",
        ),
    ] = DEFAULT_PROTOCOL,
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
    contract: ContractOption = "float32",
    device_memory: DeviceMemoryOption = None,
    keys: KeysOption = None,
    processes: ProcessesOption = None,
    cluster: ClusterOption = None,
    keep: KeepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the perplexity of a text, by the protocol of your choice."""
    counting = PROTOCOLS[check_choice("--protocol", protocol, tuple(PROTOCOLS))]
    asked, window = window, counting.window if window is None else window
    check_integer("--window", window, least=1)
    check_integer("--tokens", tokens, least=1)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    reading = CalibrationOptions(plan, calibration, calibration_tokens)
    executor = executor_of(processes, cluster, keep)
    with ExitStack() as stack:
        engine = stack.enter_context(loaded_backend(backend, model))
        options = options_for(engine, plan, DeviceOptions(device_memory, keys=keys), contract)
        path = file_of(text, DEFAULT_TEXT)
        words = read_text(path)
        file = file_of(model, DEFAULT_MODEL)
        stored = opened(file, gptq_version, context, identified=engine.keeps_steps)
        options = reading.added(options, stored)
        bos = stored.tokenizer.bos
        ids = stored.tokenizer.encode(words, begin=False)[:tokens]
        with nullcontext() if asked is None else called("window", "--window"):  # before any weight is read
            check_text(stored.config, len(ids), window, bos, counting)
        options = with_room(options, max(1, min(window, len(ids))) + (bos is not None))
        if executor is None:
            ready = stack.enter_context(loaded_model(stored, engine, options))
        start = time.perf_counter()
        with progress_bar("measuring perplexity") as progress:
            if executor is None:
                result, account = ready.perplexity(ids, window, progress, protocol=counting), ready.account()
            else:
                version = asked_version(gptq_version)
                models = Models((file.absolute(),), (stored.config,), engine.name, options, version, context)
                evaluation = Evaluation(executor, models, keep)
                result, account = evaluation.perplexity(ids, window, counting, bos, progress)
        seconds = time.perf_counter() - start
    if as_json:
        answer = dict(account.fields) | {
            "text": path.name,
            "protocol": protocol,
            "window": window,
            "tokens": len(ids),
            "scored": result.count,
            "nll": result.nll,
            "perplexity": json_number(result.value),
            "seconds": seconds,
        }
        print(json.dumps(answer))
        return
    beyond = f"beyond float64: e to the power of {result.nll / result.count:.4f}"
    print(f"{result.value:.4f}" if isfinite(result.value) else beyond)
    if _calibrated_on(options, ids):
        note("the model was calibrated on this text, so the perplexity of other texts is higher")
    note(
        f"{result.count} of the first {len(ids)} tokens of {path.name} scored, windows of {window}, protocol {protocol}"
    )
    note(account.sentence)


def _calibrated_on(options: Options, ids: Sequence[int]) -> bool:
    """Whether a calibration text begins as this one does."""
    text = None if options.plan is None else options.plan.text
    return text is not None and all(one == other for one, other in zip(text.tokens, ids, strict=False))
