"""``lowbit kernel time``: where the time of a token goes, part by part of the compiled step."""

import json
import time
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from lowbit.cli.options import ContractOption, DeviceOptions, JsonOption, KeysOption, ModelOption, opened, options_for
from lowbit.cli.running import loaded_model
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.model.decoder import Decoder
from lowbit.model.sampling import GREEDY

if TYPE_CHECKING:  # these import the bridge to the compiler, which other commands do not need
    from lowbit_cppyy.step.source import Part
    from lowbit_cppyy.step.timing import TimedStep

WARM = 4  # tokens that are not timed


def time_token(
    model: ModelOption = None,
    threads: Annotated[int | None, typer.Option(help="Number of threads; by default that of the backend.")] = None,
    isa: Annotated[str | None, typer.Option(help="Instruction set; the best by default.")] = None,
    after: Annotated[int, typer.Option(help="The number of tokens before those that are timed.")] = 128,
    tokens: Annotated[int, typer.Option(help="The number of tokens that are timed.")] = 64,
    contract: ContractOption = "float32",
    keys: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time the parts of a model's compiled step, while it generates tokens.

    A part is what threads do between two waits. Its time and its wait are means of all threads, in milliseconds for a
    token; its bytes are those of the matrices, keys and values that it reads.
    """
    from lowbit_cppyy.backend import CppyyBackend

    check_integer("--after", after, least=1)
    check_integer("--tokens", tokens, least=1)
    stored = opened(model)
    with CppyyBackend(isa=isa, threads=threads) as backend:
        options = options_for(backend, None, DeviceOptions(keys=keys), contract, "operations")
        with loaded_model(stored, backend, options) as held:
            if after + WARM + tokens > held.decoder.config.context:
                most = held.decoder.config.context - after - WARM
                raise ArgumentError("--tokens", tokens, f"at most {most}, so that they fit the model's context")
            decoder = cast(Decoder, held.decoder)  # one that runs operations
            answer = {"model": stored.name, "contract": contract} | measured(backend.timed(decoder), after, tokens)
    if as_json:
        print(json.dumps(answer))
        return
    show(answer, Console())


def measured(timed: "TimedStep", after: int, tokens: int) -> dict[str, Any]:
    """The times of a token after `after` others, as a JSON object; all in milliseconds.

    Args:
        timed: the step.
        after: tokens before.
        tokens: the number of tokens whose times are averaged.
    """
    decoder = timed.decoder
    state = decoder.new_state(after + WARM + tokens)
    decoder.hidden([number % decoder.config.vocabulary for number in range(after)], state)
    token, position, start = 0, after, 0.0
    for count in (WARM, tokens):
        end = position + count
        timed.begin()
        start = time.perf_counter()
        while position < end:
            steps = decoder.follow(token, state, GREEDY, position + 1, end - position)
            token, position = steps[-1].token, position + len(steps)
    whole = 1e3 * (time.perf_counter() - start) / tokens
    seconds = 1e3 * timed.seconds / tokens
    parts = [
        {
            "blocks": part.blocks,
            "part": told(part),
            "ms": round(float(own[:, 0].mean()), 5),
            "wait_ms": round(float(own[:, 1].mean()), 5),
            "bytes": timed.bytes_of(part, after + WARM + tokens // 2),
        }
        for part, own in zip(timed.parts, seconds, strict=True)
    ]
    outside = whole - float(seconds.sum(axis=(0, 2)).mean())
    return {
        "threads": seconds.shape[1],
        "after": after,
        "tokens": tokens,
        "ms": round(whole, 5),
        "outside_ms": round(outside, 5),
        "parts": parts,
    }


def told(part: "Part") -> str:
    """The kinds of a part's lines, products with the names of their matrices."""
    from lowbit_cppyy.step.phases import lines_of

    lines = lines_of(part.phase)
    matrices = ", ".join(str(line.parameter).rpartition(".")[2] for line in lines if line.kind == "product")
    kinds = dict.fromkeys(line.kind for line in lines)
    return ", ".join(f"product by {matrices}" if kind == "product" else kind for kind in kinds)


def show(answer: dict[str, Any], console: Console) -> None:
    """The answer as a table of at most 80 columns."""
    threads = "1 thread" if answer["threads"] == 1 else f"{answer['threads']} threads"
    console.print(
        f"{answer['model']}, {threads}, {answer['contract']}: {answer['ms']:.3f} ms for a token after "
        f"{answer['after']} others, mean of {answer['tokens']}",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("part")
    for column in ("blocks", "ms", "wait ms", "MB", "GB/s"):
        table.add_column(column, justify="right")
    for part in answer["parts"]:
        mega = f"{part['bytes'] / 1e6:.2f}" if part["bytes"] else ""
        speed = f"{part['bytes'] / part['ms'] / 1e6:.1f}" if part["bytes"] and part["ms"] else ""
        table.add_row(part["part"], str(part["blocks"]), f"{part['ms']:.3f}", f"{part['wait_ms']:.3f}", mega, speed)
    sums = [sum(part[name] for part in answer["parts"]) for name in ("ms", "wait_ms", "bytes")]
    table.add_row("outside the step", "", f"{answer['outside_ms']:.3f}")
    table.add_row("all", "", f"{sums[0] + answer['outside_ms']:.3f}", f"{sums[1]:.3f}", f"{sums[2] / 1e6:.2f}")
    console.print(table, highlight=False)
