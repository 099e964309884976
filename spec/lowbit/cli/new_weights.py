"""``lowbit new-weights``: write a checkpoint directory of random weights of any shape, for measurements."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.backend.whole_model import spoken_bytes
from lowbit.cli.progress import progress_bar
from lowbit.contract.checks import check_choice, check_integer
from lowbit.formats.checkpoint.config import ROUTED
from lowbit.formats.checkpoint.random import SHAPES, total_bytes, write_random
from lowbit.model.config import LlamaConfig, Routing
from lowbit.text import one_line

Number = Annotated[int | None, typer.Option(help="Replaces the value of the model that --like names.")]


def new_weights(
    directory: Annotated[Path, typer.Argument(help="A new or empty directory, or one that an interrupted run left.")],
    like: Annotated[str, typer.Option(help=f"The model whose shape is used: {', '.join(SHAPES)}.")] = next(
        iter(SHAPES)
    ),
    layers: Number = None,
    hidden: Number = None,
    feed_forward: Number = None,
    heads: Number = None,
    kv_heads: Number = None,
    head_dim: Number = None,
    vocabulary: Number = None,
    context: Number = None,
    experts: Number = None,
    top_k: Number = None,
    seed: Annotated[int, typer.Option(help="The seed of the random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Write random weights in the shape of a published model, or in any other, as a checkpoint directory in float16.

    After an interrupt, the same command resumes where it stopped. Routing over random weights is about even; that of
    trained models is not.
    """
    check_choice("--like", like, tuple(SHAPES))
    numbers = {"layers": layers, "hidden": hidden, "feed_forward": feed_forward, "heads": heads, "kv_heads": kv_heads}
    numbers |= {"head_dim": head_dim, "vocabulary": vocabulary, "context": context, "experts": experts, "top_k": top_k}
    config = changed(SHAPES[like], {name: number for name, number in numbers.items() if number is not None})
    with progress_bar(f"writing {directory.absolute().name}") as progress:
        write_random(directory, config, seed, progress=progress)
    answer = {"directory": str(directory), "seed": seed, "bytes": total_bytes(config), "config": asdict(config)}
    told = one_line(f"{directory}: {spoken_bytes(total_bytes(config))} of random weights")
    print(json.dumps(answer) if as_json else told)


def changed(config: LlamaConfig, numbers: dict[str, int]) -> LlamaConfig:
    """A shape with some of its numbers, or of those of its routing, replaced.

    Raises:
        ArgumentError: a number that is not possible for a model.
    """
    for name, number in numbers.items():
        check_integer(f"--{name.replace('_', '-')}", number, 1, 2**31)
    routed: dict[str, Any] = {name: number for name, number in numbers.items() if name in ROUTED}
    others: dict[str, Any] = {name: number for name, number in numbers.items() if name not in ROUTED}
    return replace(config, **others, routing=replace(config.routing or Routing(1, 1), **routed))
