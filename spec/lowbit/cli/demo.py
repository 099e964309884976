"""``lowbit demo``: from real weights to certified kernels, in one run.

Four steps, each with its table: the verdict of the conformance suite on each backend, with this model's own shapes
and weights among the cases; what each backend says after the same prompt, and how fast; what each width costs in
bytes and in perplexity. Nothing is compared that has not been certified in the same run.
"""

import json
import math
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowbit.backend import base as registry
from lowbit.backend.base import Backend
from lowbit.backend.linears import build
from lowbit.cli.loading import LoadedModel, file_of, load_model, progress_bar
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.formats import fetch as data
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.model.decoder import Decoder, Difference, Step, first_difference, generate
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import LlamaWeights, linear_shapes, matrices, requantize, select_columns, weight_bytes
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.system.interpreters import python_command, python_environment
from lowbit.text import cleaned, one_line, quoted

PROMPT = "Alice was beginning to get very tired of"
GROUP_SIZES = (64, 128)
WIDTHS = (4, 3, 2)
WINDOW = 256
CERTIFIED = ("affine.quantize", "affine.dequantize", "linear.qgemv", "linear.qgemm")  # what a model below rests on
BASELINE = "reference"  # the backend that the others are compared with: the specification


@dataclass(frozen=True)
class Variant:
    """A model in one quantisation."""

    name: str
    weights: LlamaWeights


@dataclass(frozen=True)
class Continuation:
    """What one backend said.

    Attributes:
        backend: its name.
        text: the continuation.
        tokens_per_second: after the first token, whose time is that of reading the prompt.
        read_bytes: bytes of weights that it reads for each token, as it has prepared them.
        agreement: how the tokens compare with the baseline's, in words.
    """

    backend: str
    text: str
    tokens_per_second: float
    read_bytes: int
    agreement: str


def demo(
    model: Annotated[Path | None, typer.Option(help="A GGUF file; SmolLM2-135M-Instruct is fetched without.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text for the perplexity; alice29.txt without.")] = None,
    prompt: Annotated[str, typer.Option(help="What the backends continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens each backend generates.")] = 16,
    text_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text are scored.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Certify every backend on a real model, then let it generate, and compare."""
    console = Console(stderr=as_json)
    path = file_of(model, data.DEFAULT_MODEL)
    if path.is_dir():  # which the conformance suite does not read
        raise ArgumentError("--model", path.name, "a GGUF file")
    passage = data.read_text(file_of(text, data.DEFAULT_TEXT))
    loaded = load_model(path)
    console.print(f"\n[bold]{escape(one_line(path.name))}[/]: {_shape(loaded)}\n")

    verdicts = [certify(name, path) for name in usable_backends(console, loaded.weights)]
    show_verdicts(console, verdicts)
    certified = [verdict["backend"] for verdict in verdicts if verdict["verdict"] == "passed"]

    generated = {}
    for variant in generating_variants(loaded.weights):
        said = continuations(variant, certified, loaded, prompt, tokens)
        show_continuations(console, variant, prompt, said)
        generated[variant.name] = [asdict(each) for each in said]

    measured = perplexities(loaded, passage, text_tokens, console)
    if as_json:
        answer = {"model": path.name, "conformance": verdicts, "generation": generated, "perplexity": measured}
        print(json.dumps(answer))
    raise typer.Exit(0 if len(certified) == len(verdicts) else 1)


# **Conformance.** The specification knows nothing of the suite; the command that the suite adds is called like any
# other program.


def usable_backends(console: Console, weights: LlamaWeights) -> list[str]:
    """The names of the backends that can run here and hold the model's matrices; for the others why not is printed."""
    names = []
    for name in registry.names():
        try:
            with registry.load(name) as backend:
                if missing := lacking(backend, weights):
                    raise missing
            names.append(name)
        except (UnavailableError, NotDeclaredError) as error:
            console.print(f"[yellow]not shown:[/] {escape(str(error))}")
    return sorted(names, key=lambda name: (name != BASELINE, name))


def lacking(backend: Backend, weights: LlamaWeights) -> NotDeclaredError | None:
    """What of a model's matrices a backend does not declare a product by; None if it declares all."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if declared is None:
        return NotDeclaredError(backend.name, "linear.qgemv")
    for _, matrix in matrices(weights):
        if isinstance(matrix, QuantizedMatrix) and (missing := declared.lacks(matrix.parameters)):
            return NotDeclaredError(backend.name, "linear.qgemv", missing)
    return None


def certify(name: str, model: Path) -> dict[str, Any]:
    """The verdict of ``lowbit conformance NAME --model FILE`` as its JSON says it."""
    command = python_command("-m", "lowbit", "conformance", name, "--seeds", "1")
    command += [argument for operation in CERTIFIED for argument in ("--op", operation)]
    command += ["--model", str(model), "--json"]
    done = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        reason = f"it ended with status {done.returncode}"
        raise UnavailableError("the conformance suite", reason, "run `lowbit conformance` to see why")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        reason = "its answer is not JSON"
        raise UnavailableError("the conformance suite", reason, "run `lowbit conformance` to see why") from error
    return answer


def show_verdicts(console: Console, verdicts: list[dict[str, Any]]) -> None:
    console.print("[bold]Conformance, with this model's own shapes and weights among the cases[/]")
    table = Table("backend", "operation")
    for column in ("passed", "declared", "specified", "bound used"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        style = "green" if verdict["verdict"] == "passed" else "red"
        for row in verdict["operations"]:
            share = row["bound_used"]
            if not row["declared"]:
                continue
            counts = (str(row[key]) for key in ("passed", "declared", "specified"))
            table.add_row(Text(one_line(verdict["backend"]), style), row["operation"], *counts, share)
        table.add_section()
    console.print(table)
    for verdict in verdicts:
        if verdict["verdict"] != "passed":
            name = escape(one_line(verdict["backend"]))
            console.print(f"[red]{name}: {verdict['verdict']}[/], so it is not compared below")


# **Generation.** Every certified backend continues the same prompt, and its tokens are compared with the baseline's.


def generating_variants(weights: LlamaWeights) -> list[Variant]:
    """The model as stored, and re-quantised to 4 bits in each group size that its shortest column can hold."""
    shortest = min(rows for rows, _ in linear_shapes(weights.config).values())
    sizes = [size for size in GROUP_SIZES if size <= shortest]
    return [Variant("as stored", weights), *(requantized(weights, 4, size) for size in sizes)]


def requantized(weights: LlamaWeights, bits: int, group_size: int) -> Variant:
    name = f"re-quantised: {bits} bits, groups of {group_size}"
    with progress_bar(name) as progress:
        return Variant(name, requantize(weights, bits=bits, group_size=group_size, progress=progress))


def continuations(
    variant: Variant, backends: list[str], loaded: LoadedModel, prompt: str, count: int
) -> list[Continuation]:
    """What each backend says, the baseline first; one that does not declare this quantisation is left out."""
    ids, said = loaded.tokenizer.encode(prompt), []
    baseline: tuple[str, list[Step]] | None = None
    for name in backends:
        with registry.load(name) as backend:
            if lacking(backend, variant.weights):
                continue
            with progress_bar(f"{name}: preparing") as progress:
                decoder, linears = build(variant.weights, backend, progress)
            with progress_bar(f"{name}: generating") as progress:
                steps, seconds = timed_steps(decoder, ids, count, progress)
            if baseline is None:
                baseline, agreement = (name, steps), f"({count} tokens)"
            else:
                agreement = compare(baseline, steps, decoder, backend, variant.weights, ids, loaded)
            text = loaded.tokenizer.decode(step.token for step in steps)
            said.append(Continuation(name, text, (count - 1) / seconds, linears.read_bytes, agreement))
    return said


def timed_steps(decoder: Decoder, ids: list[int], count: int, progress: Any) -> tuple[list[Step], float]:
    """The steps of a greedy continuation, and the seconds that all but the first took."""
    steps, start = [], 0.0
    for step in generate(decoder, ids, count):
        steps.append(step)
        start = start or time.perf_counter()
        progress(len(steps), count)
    return steps, time.perf_counter() - start


def compare(
    baseline: tuple[str, list[Step]],
    steps: list[Step],
    decoder: Decoder,
    backend: Backend,
    weights: LlamaWeights,
    ids: list[int],
    loaded: LoadedModel,
) -> str:
    """How the tokens compare with the baseline's: all equal, or the first difference with its logits and bound."""
    name, expected = baseline
    difference = first_difference(expected, steps)
    if difference is None:
        apart = max(float(np.max(np.abs(a.logits - b.logits))) for a, b in zip(expected, steps, strict=True))
        return f"all {len(steps)} tokens equal; logits at most {apart:.1e} apart"
    read = [*ids, *(step.token for step in steps[: difference.position])]
    words = [loaded.tokenizer.decode([token]) for token in difference.tokens]
    (_, _), (other, own) = difference.logits
    return (
        f"token {difference.position + 1} is {quoted(words[1])}, {name} says {quoted(words[0])}: "
        f"logits {own:.5f} and {other:.5f}; "
        f"{_head_bound(difference, read, decoder, backend, weights)}"
    )


def _head_bound(
    difference: Difference, read: list[int], decoder: Decoder, backend: Backend, weights: LlamaWeights
) -> str:
    """The bound on the two logits that the head's product alone explains, in words."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if not isinstance(weights.head, QuantizedMatrix) or declared is None or declared.arithmetic is None:
        return "the head is not quantised, so no bound is declared for it"
    x = decoder.hidden(read, decoder.new_state())[-1].astype(np.float32)
    two = select_columns(weights.head, np.array(difference.tokens))
    assert isinstance(two, QuantizedMatrix)
    bound = linear_bound(x, two, declared.arithmetic, qgemv(x, two))
    return f"the head's product alone may err by {float(bound.limit.max()):.1e}, the layers below add to it"


def show_continuations(console: Console, variant: Variant, prompt: str, said: list[Continuation]) -> None:
    sizes = weight_bytes(variant.weights)
    stored = f"{sizes.blocks / 1e6:.1f} MB in the layers, {sizes.head / 1e6:.1f} MB in the head"
    console.print(f"[bold]Generation, {variant.name}[/]: {stored}", soft_wrap=True)
    table = Table("backend", show_lines=True)
    table.add_column("tokens/s", justify="right")
    table.add_column("MB read a token", justify="right")
    table.add_column("compared with the specification")
    for each in said:
        speed, read = f"{each.tokens_per_second:.1f}", f"{each.read_bytes / 1e6:.1f}"
        table.add_row(Text(one_line(each.backend)), speed, read, Text(one_line(each.agreement)))
    console.print(table)
    if said:
        text = Text.assemble((cleaned(prompt), "dim"), (cleaned(said[-1].text), "bold"), "\n")
        console.print(text, highlight=False)


# **Perplexity** of each width, on the same tokens, by the numpy backend.


def perplexities(loaded: LoadedModel, passage: str, count: int, console: Console) -> list[dict[str, Any]]:
    """Perplexity as stored and re-quantised to each width in groups of 64, shown as a table with bars."""
    tokens = loaded.tokenizer.encode(passage, begin=False)[:count]
    bos, rows = loaded.tokenizer.bos, list[dict[str, Any]]()
    window = min(WINDOW, loaded.weights.config.context - (bos is not None))
    with registry.load("numpy") as backend:
        for bits in (0, *WIDTHS):
            variant = requantized(loaded.weights, bits, 64) if bits else Variant("as stored", loaded.weights)
            decoder, _ = build(variant.weights, backend)
            with progress_bar(f"perplexity, {variant.name}") as progress:
                result = perplexity(decoder, tokens, window, bos=bos, progress=progress)
            size = weight_bytes(variant.weights)
            rows.append({"weights": variant.name, "bytes": size.blocks, "perplexity": result.value})
    show_perplexities(console, rows, len(tokens), window)
    return rows


def show_perplexities(console: Console, rows: list[dict[str, Any]], count: int, window: int) -> None:
    console.print(f"[bold]Perplexity[/] on {count} tokens in windows of {window}, numpy backend")
    table = Table("weights")
    table.add_column("MB", justify="right")
    table.add_column("perplexity", justify="right")
    table.add_column("its logarithm", width=16)
    most = max(math.log(row["perplexity"]) for row in rows)
    for row in rows:
        bar = Bar(most, 0, math.log(row["perplexity"]), width=16)
        table.add_row(row["weights"], f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.2f}", bar)
    console.print(table)
    console.print("[dim]The file's weights have been through 4 bits before: re-quantised means twice.[/]")


def _shape(loaded: LoadedModel) -> str:
    config = loaded.weights.config
    return (
        f"{config.layers} layers, hidden {config.hidden}, {config.heads} query and {config.kv_heads} key-value heads, "
        f"vocabulary {config.vocabulary}"
    )
