"""``lowbit generate``: continue a prompt."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from typing import Annotated

import typer

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
    chosen,
    loaded_backend,
    opened,
    options_for,
    sampling_of,
    stops_of,
)
from lowbit.cli.progress import note, progress_bar
from lowbit.cli.running import encoded, loaded_model, with_room
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.tokenizer import Tokenizer, until
from lowbit.model.generation import Step
from lowbit.text import cleaned

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
        ids = encoded(stored, prompt)
        if tokens > (most := stored.config.context - len(ids) + 1):  # the last token is not read
            raise ArgumentError("--tokens", tokens, f"at most {most} after a prompt of {len(ids)} tokens")
        ready = stack.enter_context(loaded_model(stored, engine, with_room(options, len(ids) + tokens - 1)))
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


@contextmanager
def _collected(count: int) -> Iterator[Show]:
    """Show how many of `count` tokens have been generated."""
    with progress_bar("generating") as progress:
        yield lambda piece, tokens: progress(tokens, count)


def _print_piece(piece: str, tokens: int) -> None:
    """Print a piece of text at once. A terminal obeys control characters, so it gets none; a file keeps them."""
    print(cleaned(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def _text_of(
    steps: Iterable[Step], tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], show: Show
) -> tuple[list[int], str]:
    """The tokens of all steps and their text; each piece of text is shown as soon as it is known."""
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
