"""``lowbit generate``, ``lowbit logits`` and ``lowbit perplexity``: run a model on a backend."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.backend.base import Backend
from lowbit.cli.executors import ClusterOption, KeepOption, ProcessesOption, executor_of
from lowbit.cli.options import (
    BackendOption,
    BitsOption,
    BuffersOption,
    CalibrationOption,
    CalibrationOptions,
    CalibrationTokensOption,
    ColdOption,
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
    MemoryOption,
    MethodOption,
    MinPOption,
    ModelOption,
    PrefetchOption,
    PromptOption,
    SeedOption,
    StepOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    asked_version,
    called,
    chosen,
    file_of,
    loaded_backend,
    opened,
    options_for,
    sampling_of,
    stops_of,
)
from lowbit.cli.progress import changing_bar, note, progress_bar
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import DEFAULT_MODEL, DEFAULT_TEXT, TABLE, read_text
from lowbit.formats.tokenizer import Tokenizer, until
from lowbit.linear.elementary import softmax
from lowbit.model.decoder import Step
from lowbit.model.perplexity import DEFAULT_PROTOCOL, PROTOCOLS, check_text
from lowbit.runtime import LanguageModel, Options, StoredModel, load
from lowbit.runtime.evaluating import Evaluation, Models
from lowbit.text import cleaned, json_number, quoted

Show = Callable[[str, int], None]
"""Called with a piece of text, and with the number of tokens so far."""


def generate(
    prompt: PromptOption,
    tokens: Annotated[int, typer.Option("--tokens", help="The maximum number of tokens to generate.")] = 64,
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
    step: StepOption = "auto",
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    device_memory: DeviceMemoryOption = None,
    buffers: BuffersOption = None,
    memory: MemoryOption = None,
    prefetch: PrefetchOption = None,
    keys: KeysOption = None,
    cold_experts: ColdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt, until --tokens are generated or the model ends the text."""
    check_integer("--tokens", tokens, least=1)
    sampling, stops = sampling_of(temperature, top_k, top_p, min_p, seed), stops_of(stop)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    reading = CalibrationOptions(plan, calibration, calibration_tokens)
    device = DeviceOptions(device_memory, buffers, memory, prefetch, keys, cold_experts)
    with ExitStack() as stack:
        engine = stack.enter_context(loaded_backend(backend, model))
        options = options_for(engine, plan, device, contract, step)
        stored = opened(model, gptq_version, context, identified=engine.keeps_steps)
        options = reading.added(options, stored)
        tokenizer = stored.tokenizer
        ids = _encoded(stored, prompt)
        if tokens > (most := stored.config.context - len(ids) + 1):  # the last token is not read
            raise ArgumentError("--tokens", tokens, f"at most {most} after a prompt of {len(ids)} tokens")
        ready = stack.enter_context(_loaded(stored, engine, _with_room(options, len(ids) + tokens - 1)))
        start = time.perf_counter()
        with progress_bar("reading the prompt") as progress:
            answers = ready.generate(ids, tokens, sampling=sampling, progress=progress)
            first = next(answers)
        prompted = time.perf_counter()
        with _collected(tokens) if as_json else nullcontext(_print_piece) as show:
            answer, text = _text_of(chain([first], answers), tokenizer, ids, stops, show)
        done = time.perf_counter()
        account = ready.account()
    speed = (len(answer) - 1) / (done - prompted) if len(answer) > 1 else None
    ended = answer[-1] in tokenizer.stop
    stopped = text != tokenizer.decode(answer, special=False, after=ids)
    drawn = sampling.temperature > 0
    if as_json:
        result = dict(account.fields) | {
            "sampling": asdict(sampling) if drawn else None,
            "prompt": prompt,
            "prompt_tokens": ids,
            "tokens": answer,
            "text": text,
            "ended": ended,
            "stopped": stopped,
            "prompt_seconds": prompted - start,
            "tokens_per_second": speed,
        }
        print(json.dumps(result))
        return
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    made = f"{len(answer)} token{'s' * (len(answer) > 1)}"
    print()
    why = "a text of --stop came" if stopped else "the model ended the text" if ended else "as many as --tokens allows"
    seeded = f", drawn with --seed {sampling.seed}" if drawn else ""
    note(f"{made}{rate}{seeded}, {why}; {account.sentence}")


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
        ids = _encoded(stored, prompt)
        ready = stack.enter_context(_loaded(stored, engine, _with_room(options, len(ids))))
        with progress_bar("reading the prompt") as progress:
            scores = ready.logits(ids, progress).astype(np.float64)
        account = ready.account()
    probabilities = softmax(scores)
    order = np.argsort(-scores, kind="stable")[:top]  # of equals, the lowest token first
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
        options = _with_room(options, max(1, min(window, len(ids))) + (bos is not None))
        if executor is None:
            ready = stack.enter_context(_loaded(stored, engine, options))
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


# **Small parts.**


def _with_room(options: Options, context: int) -> Options:
    """The options of a device that makes room for `context` tokens; those of others stay as they are."""
    if options.device is None:
        return options
    return replace(options, device=replace(options.device, context=context))


def _loaded(stored: StoredModel, backend: Backend, options: Options) -> LanguageModel:
    """The model on the backend."""
    with changing_bar() as report:
        return load(stored, backend, options, report)


def _encoded(model: StoredModel, prompt: str) -> list[int]:
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise ArgumentError("--prompt", repr(prompt), "a text of at least one token")
    if len(ids) > model.config.context:
        raise ArgumentError("--prompt", f"{len(ids)} tokens", f"at most {model.config.context}, the model's context")
    return ids


def _calibrated_on(options: Options, ids: Sequence[int]) -> bool:
    """Whether a calibration text begins as this one does."""
    text = None if options.plan is None else options.plan.text
    return text is not None and all(one == other for one, other in zip(text.tokens, ids, strict=False))


@contextmanager
def _collected(count: int) -> Iterator[Show]:
    """Show how many of `count` tokens are there."""
    with progress_bar("generating") as progress:
        yield lambda piece, tokens: progress(tokens, count)


def _print_piece(piece: str, tokens: int) -> None:
    """Print a piece of text at once. A terminal obeys control characters, so it gets none; a file keeps them."""
    print(cleaned(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def _text_of(
    steps: Iterable[Step], tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], show: Show
) -> tuple[list[int], str]:
    """The tokens of all steps and their text, of which each piece is shown as soon as it is known."""
    answer: list[int] = []
    text: list[str] = []

    def tokens() -> Iterator[int]:
        for step in steps:
            answer.append(step.token)
            yield step.token

    for piece in until(tokenizer.stream(tokens(), special=False, after=prompt), stops):
        text.append(piece)
        show(piece, len(answer))
    return answer, "".join(text)
