"""``lowbit generate``, ``lowbit logits`` and ``lowbit perplexity``: a model file, a backend, and what comes of them."""

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.backend import base as registry
from lowbit.cli.loading import DEFAULT_GROUP_SIZE, LoadedModel, chosen, contract_of, file_of, load_model
from lowbit.cli.on_device import (
    BuffersOption,
    ColdOption,
    DeviceMemoryOption,
    DeviceOptions,
    KeysOption,
    MemoryOption,
    PrefetchOption,
    made_ready,
)
from lowbit.cli.progress import progress_bar
from lowbit.contract.checks import check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.config import ARCHITECTURES as KINDS
from lowbit.formats.fetch import DEFAULT_MODEL, DEFAULT_TEXT, TABLE, read_text
from lowbit.formats.gguf.architectures import ARCHITECTURES
from lowbit.formats.tokenizer import Tokenizer
from lowbit.linear.elementary import softmax
from lowbit.model.decoder import Step, next_logits
from lowbit.model.decoder import generate as generate_steps
from lowbit.model.perplexity import perplexity as measure
from lowbit.model.quantization_plan import METHODS
from lowbit.text import cleaned, one_line, quoted

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help=f"A GGUF file of architecture {spoken(list(ARCHITECTURES))}, or a directory with config.json and "
        f"safetensors of model type {spoken(list(KINDS))}; without it {TABLE[DEFAULT_MODEL].file}, fetched.",
    ),
]
BackendOption = Annotated[str, typer.Option("--backend", help="A name that `lowbit backends` lists.")]
PromptOption = Annotated[str, typer.Option("--prompt", help="The text to continue.")]
BitsOption = Annotated[
    int | None, typer.Option("--bits", help="Quantise the linear layers anew; without it they are as stored.")
]
GroupOption = Annotated[
    int | None, typer.Option("--group-size", help=f"With --bits: weights a group; without it {DEFAULT_GROUP_SIZE}.")
]
ExpertsBitsOption = Annotated[
    int | None,
    typer.Option("--experts-bits", help="Bits of the experts (or the dense feed-forward part), if other than --bits."),
]
ExpertsGroupOption = Annotated[
    int | None, typer.Option("--experts-group-size", help="Weights a group there, if other than --group-size.")
]
MethodOption = Annotated[str | None, typer.Option("--method", help=f"How: {spoken(METHODS)}; without it {METHODS[0]}.")]
ContractOption = Annotated[
    str,
    typer.Option(
        "--contract",
        help="float32, or integer: activations of linear layers cast to BFP16, faster and less exact.",
    ),
]
StepsOption = Annotated[
    bool,
    typer.Option(
        "--steps",
        help="What lies between linear layers on the backend too, as far as it is declared: in float32, and faster.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def generate(
    prompt: PromptOption,
    tokens: Annotated[int, typer.Option("--tokens", help="The most tokens to generate.")] = 64,
    model: ModelOption = None,
    backend: BackendOption = "numpy",
    bits: BitsOption = None,
    group_size: GroupOption = None,
    experts_bits: ExpertsBitsOption = None,
    experts_group_size: ExpertsGroupOption = None,
    method: MethodOption = None,
    contract: ContractOption = "float32",
    steps: StepsOption = False,
    device_memory: DeviceMemoryOption = None,
    buffers: BuffersOption = None,
    memory: MemoryOption = None,
    prefetch: PrefetchOption = None,
    keys: KeysOption = None,
    cold_experts: ColdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt: always the likeliest token, until N tokens or the end of the text."""
    check_integer("--tokens", tokens, least=1)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    device = DeviceOptions(device_memory, buffers, memory, prefetch, keys, cold_experts)
    with ExitStack() as stack:
        engine = stack.enter_context(registry.load(backend))
        settings = device.settings(engine)
        loaded = load_model(file_of(model, DEFAULT_MODEL))
        tokenizer = loaded.tokenizer
        ids = _encoded(loaded, prompt)
        if tokens > (most := loaded.config.context - len(ids) + 1):  # the last token is not read
            raise ArgumentError("--tokens", tokens, f"at most {most} after a prompt of {len(ids)} tokens")
        context, by = len(ids) + tokens - 1, contract_of(contract)
        ready = stack.enter_context(
            made_ready(loaded, engine, plan, by, steps=steps, settings=settings, context=context)
        )
        start = time.perf_counter()
        with progress_bar("reading the prompt") as progress:
            answers = generate_steps(ready.decoder, ids, tokens, stop=tokenizer.stop, progress=progress)
            first = next(answers)
        prompted = time.perf_counter()
        collect = _collect if as_json else _print_as_it_comes
        answer = collect(chain([first], answers), tokenizer, tokens)
        done = time.perf_counter()
        described, account = ready.describe(), ready.account()
    speed = (len(answer) - 1) / (done - prompted) if len(answer) > 1 else None
    ended = answer[-1] in tokenizer.stop
    if as_json:
        result = described | {
            "prompt": prompt,
            "prompt_tokens": ids,
            "tokens": answer,
            "text": tokenizer.decode(answer),
            "ended": ended,
            "prompt_seconds": prompted - start,
            "tokens_per_second": speed,
        }
        print(json.dumps(result))
        return
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    made, whom = f"{len(answer)} token{'s' * (len(answer) > 1)}", "the model" if ended else "--tokens"
    _note(f"{made}{rate}, ended by {whom}; {account}")


def logits(
    prompt: PromptOption,
    top: Annotated[int, typer.Option("--top", help="How many of the highest to show.")] = 10,
    model: ModelOption = None,
    backend: BackendOption = "numpy",
    bits: BitsOption = None,
    group_size: GroupOption = None,
    experts_bits: ExpertsBitsOption = None,
    experts_group_size: ExpertsGroupOption = None,
    method: MethodOption = None,
    device_memory: DeviceMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """The highest logits of the token that would follow a prompt."""
    check_integer("--top", top, least=1)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    with ExitStack() as stack:
        engine = stack.enter_context(registry.load(backend))
        settings = DeviceOptions(device_memory).settings(engine)
        loaded = load_model(file_of(model, DEFAULT_MODEL))
        tokenizer = loaded.tokenizer
        check_integer("--top", top, 1, loaded.config.vocabulary)
        ids = _encoded(loaded, prompt)
        ready = stack.enter_context(made_ready(loaded, engine, plan, settings=settings, context=len(ids)))
        with progress_bar("reading the prompt") as progress:
            scores = next_logits(ready.decoder, ids, progress).astype(np.float64)
        described, account = ready.describe(), ready.account()
    probabilities = softmax(scores)
    order = np.argsort(-scores, kind="stable")[:top]  # of equals, the lowest token first
    rows = [
        {
            "token": int(token),
            "text": tokenizer.decode([int(token)]),
            "logit": float(scores[token]),
            "probability": float(probabilities[token]),
        }
        for token in order
    ]
    if as_json:
        print(json.dumps(described | {"prompt": prompt, "prompt_tokens": ids, "top": rows}))
        return
    table = Table("token", "text", "logit", "probability")
    for row in rows:
        table.add_row(
            str(row["token"]), Text(quoted(str(row["text"]))), f"{row['logit']:.5f}", f"{row['probability']:.5f}"
        )
    Console().print(table)
    _note(account)


def perplexity(
    text: Annotated[
        Path | None,
        typer.Option("--text", help=f"A text file in UTF-8; without it {TABLE[DEFAULT_TEXT].file}, fetched."),
    ] = None,
    window: Annotated[int, typer.Option("--window", help="Tokens a window.")] = 512,
    tokens: Annotated[int, typer.Option("--tokens", help="The first N tokens of the text are used.")] = 2048,
    model: ModelOption = None,
    backend: BackendOption = "numpy",
    bits: BitsOption = None,
    group_size: GroupOption = None,
    experts_bits: ExpertsBitsOption = None,
    experts_group_size: ExpertsGroupOption = None,
    method: MethodOption = None,
    contract: ContractOption = "float32",
    device_memory: DeviceMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """The perplexity of a text, over windows that do not overlap."""
    check_integer("--window", window, least=1)
    check_integer("--tokens", tokens, least=1)
    plan = chosen(bits, group_size, experts_bits, experts_group_size, method)
    path = file_of(text, DEFAULT_TEXT)
    words = read_text(path)
    with ExitStack() as stack:
        engine = stack.enter_context(registry.load(backend))
        settings = DeviceOptions(device_memory).settings(engine)
        loaded = load_model(file_of(model, DEFAULT_MODEL))
        tokenizer = loaded.tokenizer
        ids = tokenizer.encode(words, begin=False)[:tokens]
        context, by = max(1, min(window, len(ids))) + (tokenizer.bos is not None), contract_of(contract)
        ready = stack.enter_context(made_ready(loaded, engine, plan, by, settings=settings, context=context))
        start = time.perf_counter()
        with progress_bar("measuring perplexity") as progress:
            result = measure(ready.decoder, ids, window, bos=tokenizer.bos, progress=progress)
        seconds = time.perf_counter() - start
        described, account = ready.describe(), ready.account()
    if as_json:
        answer = described | {
            "text": path.name,
            "window": window,
            "tokens": len(ids),
            "scored": result.count,
            "nll": result.nll,
            "perplexity": result.value,
            "seconds": seconds,
        }
        print(json.dumps(answer))
        return
    print(f"{result.value:.4f}")
    _note(f"{result.count} of the first {len(ids)} tokens of {path.name} scored, windows of {window}")
    _note(account)


# **Small parts.**


def _encoded(model: LoadedModel, prompt: str) -> list[int]:
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise ArgumentError("--prompt", repr(prompt), "a text of at least one token")
    if len(ids) > model.config.context:
        raise ArgumentError("--prompt", f"{len(ids)} tokens", f"at most {model.config.context}, the model's context")
    return ids


def _collect(steps: Iterable[Step], tokenizer: Tokenizer, count: int) -> list[int]:
    """The tokens of all steps."""
    answer: list[int] = []
    with progress_bar("generating") as progress:
        for step in steps:
            answer.append(step.token)
            progress(len(answer), count)
    return answer


def _print_as_it_comes(steps: Iterable[Step], tokenizer: Tokenizer, count: int) -> list[int]:
    """The tokens of all steps, their text printed as soon as it is known."""
    answer: list[int] = []

    def tokens() -> Iterator[int]:
        for step in steps:
            answer.append(step.token)
            yield step.token

    shown = cleaned if sys.stdout.isatty() else str  # a terminal obeys control characters; a file keeps them
    for piece in tokenizer.stream(tokens()):
        print(shown(piece), end="", flush=True)
    print()
    return answer


def _note(sentence: str) -> None:
    """Something about the answer, where it cannot be mistaken for the answer; on a terminal in lines of its width."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 2**30
    sentence = f"lowbit: {one_line(sentence)}"
    print(textwrap.fill(sentence, width, subsequent_indent="  ", break_on_hyphens=False), file=sys.stderr)
