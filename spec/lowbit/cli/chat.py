"""``lowbit chat``: a conversation with a model, by its chat template."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from lowbit.cli.options import (
    BackendOption,
    BitsOption,
    ContextOption,
    ContractOption,
    DeviceMemoryOption,
    DeviceOptions,
    ExpertsBitsOption,
    GPTQOption,
    GroupOption,
    MinPOption,
    ModelOption,
    SeedOption,
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
from lowbit.cli.progress import changing_bar
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.chat import Message
from lowbit.runtime import load
from lowbit.text import cleaned

YOU = "> "
MOST_CHARACTERS = 2**20
"""Of a message."""


def chat(
    message: Annotated[
        str | None,
        typer.Option("--message", help="Answer this one message. By default messages are read from standard input."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="The maximum number of tokens of an answer.")] = 256,
    model: ModelOption = None,
    backend: BackendOption = None,
    bits: BitsOption = None,
    group_size: GroupOption = None,
    experts_bits: ExpertsBitsOption = None,
    gptq_version: GPTQOption = None,
    context: ContextOption = None,
    contract: ContractOption = "float32",
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    device_memory: DeviceMemoryOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object for each piece of an answer, and one for the answer.")
    ] = False,
) -> None:
    """Talk to a model that has a chat template: each line of input is a message, until the input ends."""
    check_integer("--tokens", tokens, least=1)
    sampling, stops = sampling_of(temperature, top_k, top_p, min_p, seed), stops_of(stop)
    plan = chosen(bits, group_size, experts_bits)
    messages = [] if system is None else [Message("system", system)]
    with ExitStack() as stack:
        engine = stack.enter_context(loaded_backend(backend, model))
        options = options_for(engine, plan, DeviceOptions(device_memory), contract)
        stored = opened(model, gptq_version, context, identified=engine.keeps_steps)
        if stored.tokenizer.chat is None:
            sentence = f"{stored.name} has no chat template; continue a text with lowbit generate"
            raise ArgumentError("--model", stored.name, "a model with a chat template", sentence)
        with changing_bar() as report:
            ready = stack.enter_context(load(stored, engine, options, report))
        for text in iter([message]) if message is not None else _typed():
            messages.append(Message("user", text))
            pieces = []
            for piece in ready.answer(messages, tokens, sampling=sampling, until=stops):
                pieces.append(piece)
                _show(piece, as_json)
            messages.append(Message("assistant", "".join(pieces)))
            if as_json:
                print(json.dumps({"message": asdict(messages[-1])}), flush=True)
            else:
                print()


def _typed() -> Iterator[str]:
    """The messages on standard input: its non-empty lines.

    Raises:
        ArgumentError: bytes that are not text.
    """
    while True:
        if sys.stdin.isatty():
            print(YOU, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline(MOST_CHARACTERS)
        except UnicodeDecodeError as error:
            raise ArgumentError("message", "undecodable", f"text in {error.encoding.upper()}") from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _show(piece: str, as_json: bool) -> None:
    """Print a piece of an answer at once."""
    if as_json:
        if piece:
            print(json.dumps({"text": piece}), flush=True)
        return
    print(cleaned(piece) if sys.stdout.isatty() else piece, end="", flush=True)
