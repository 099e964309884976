"""``lowbit demo``: from real weights to certified kernels, in one run.

Three parts, each with its table: the verdict of the conformance suite on each backend, with this model's own shapes and
weights among the cases; what each certified backend generates after the same prompt, and how fast; what each width
costs in bytes and in perplexity. A backend is compared only if it was certified in the same run.
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
from lowbit.cli.options import file_of, opened
from lowbit.cli.progress import changing_bar, progress_bar
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.formats import fetch as data
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.model.decoder import Difference, Step, first_difference
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import LlamaWeights, linear_shapes, matrices, select_columns, weight_bytes
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import LanguageModel, Options, StoredModel, load
from lowbit.system.interpreters import python_command, python_environment
from lowbit.text import cleaned, one_line, quoted

PROMPT = "Alice was beginning to get very tired of"
GROUP_SIZES = (64, 128)
WIDTHS = (4, 3, 2)
WINDOW = 256
CERTIFIED = ("affine.quantize", "affine.dequantize", "linear.qgemv", "linear.qgemm")  # what a model below rests on
BY_LAYER = Options(by_layer=True)  # by the products that have been certified, also where a backend could run it whole
BASELINE = "reference"  # the specification, with which the others are compared


@dataclass(frozen=True)
class Variant:
    """A model in one quantisation."""

    name: str
    weights: LlamaWeights


@dataclass(frozen=True)
class Continuation:
    """What one backend generated.

    Attributes:
        backend: its name.
        text: the continuation.
        tokens_per_second: without the first token, whose time is that of reading the prompt.
        read_bytes: bytes of prepared weights that it reads for each token.
        agreement: how the tokens compare with the baseline's, in words.
    """

    backend: str
    text: str
    tokens_per_second: float
    read_bytes: int
    agreement: str


def demo(
    model: Annotated[Path | None, typer.Option(help="A GGUF file; by default SmolLM2-135M-Instruct.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text for the perplexity; by default alice29.txt.")] = None,
    prompt: Annotated[str, typer.Option(help="The text that the backends continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens each backend generates.")] = 16,
    text_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text are used.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Certify every backend on a real model, generate with each, and compare."""
    console = Console(stderr=as_json)
    path = file_of(model, data.DEFAULT_MODEL)
    if path.is_dir():
        sentence = f"--model {path.name} is a directory; the demo certifies backends on a GGUF file"
        raise ArgumentError("--model", path.name, "a GGUF file", sentence)
    passage = data.read_text(file_of(text, data.DEFAULT_TEXT))
    loaded = opened(path)
    console.print(f"\n[bold]{escape(one_line(path.name))}[/]: {_shape(loaded)}\n")

    verdicts = [certify(name, path) for name in usable_backends(console, loaded.weights)]
    show_verdicts(console, verdicts)
    certified = [verdict["backend"] for verdict in verdicts if verdict["verdict"] == "passed"]

    generated = {}
    for variant in generating_variants(loaded.weights):
        said = continuations(variant, certified, loaded, prompt, tokens)
        show_continuations(console, variant, prompt, said)
        generated[variant.name] = [asdict(each) for each in said]

    measuring = next((name for name in registry.DEFAULT_ORDER if name in certified), None)
    measured = perplexities(loaded, passage, text_tokens, console, measuring)
    if as_json:
        answer = {"model": path.name, "conformance": verdicts, "generation": generated, "perplexity": measured}
        print(json.dumps(answer))
    raise typer.Exit(0 if len(certified) == len(verdicts) else 1)


# **Conformance.** The specification does not import the suite; its command is run like any other program.


def usable_backends(console: Console, weights: LlamaWeights) -> list[str]:
    """The names of the backends that can run here and take the model's matrices; for the others, prints why not."""
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
    """The first matrix of a model by which a backend does not declare a product, as an error; None if there is none."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if declared is None:
        return NotDeclaredError(backend.name, "linear.qgemv")
    for _, matrix in matrices(weights):
        if isinstance(matrix, QuantizedMatrix) and (missing := declared.lacks(matrix.parameters)):
            return NotDeclaredError(backend.name, "linear.qgemv", missing)
    return None


def certify(name: str, model: Path) -> dict[str, Any]:
    """The JSON answer of ``lowbit conformance NAME --model FILE``."""
    command = python_command("-m", "lowbit", "conformance", name, "--seeds", "1")
    command += [argument for operation in CERTIFIED for argument in ("--op", operation)]
    command += ["--model", str(model), "--json"]
    done = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        reason = f"it ended with status {done.returncode}"
        raise UnavailableError("the conformance suite", reason, f"run `lowbit conformance {name}` to see why")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        reason = "its answer is not JSON"
        remedy = f"run `lowbit conformance {name}` to see why"
        raise UnavailableError("the conformance suite", reason, remedy) from error
    return answer


def show_verdicts(console: Console, verdicts: list[dict[str, Any]]) -> None:
    console.print("[bold]Conformance, with this model's own shapes and weights among the cases[/]")
    table = Table("backend", "operation")
    for column in ("passed", "declared", "specified", "bound used"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        style = "green" if verdict["verdict"] == "passed" else "red"
        for row in verdict["operations"]:
            if not row["declared"]:
                continue
            counts = (str(row[key]) for key in ("passed", "declared", "specified"))
            table.add_row(Text(one_line(verdict["backend"]), style), row["operation"], *counts, row["bound_used"])
        table.add_section()
    console.print(table)
    for verdict in verdicts:
        if verdict["verdict"] != "passed":
            name = escape(one_line(verdict["backend"]))
            console.print(f"[red]{name}: {verdict['verdict']}[/], so it is not compared below")


# **Generation.** Every certified backend continues the same prompt, and its tokens are compared with the baseline's.


def generating_variants(weights: LlamaWeights) -> list[Variant]:
    """The model as stored, and re-quantised to 4 bits in each group size that fits its shortest column."""
    shortest = min(rows for rows, _ in linear_shapes(weights.config).values())
    sizes = [size for size in GROUP_SIZES if size <= shortest]
    return [Variant("as stored", weights), *(requantized(weights, 4, size) for size in sizes)]


def requantized(weights: LlamaWeights, bits: int, group_size: int) -> Variant:
    name = f"re-quantised: {bits} bits, groups of {group_size}"
    with progress_bar(name) as progress:
        return Variant(name, planned(weights, Plan.uniform(bits, group_size), progress))


def continuations(
    variant: Variant, backends: list[str], loaded: StoredModel, prompt: str, count: int
) -> list[Continuation]:
    """What each backend generates, the baseline first; one that does not declare this quantisation is left out."""
    ids, said = loaded.tokenizer.encode(prompt), []
    baseline: tuple[str, list[Step]] | None = None
    for name in backends:
        with registry.load(name) as backend:
            if lacking(backend, variant.weights):
                continue
            with changing_bar() as report:
                model = load(variant.weights, backend, BY_LAYER, report)
            with progress_bar(f"{name}: generating") as progress:
                steps, seconds = timed_steps(model, ids, count, progress)
            if baseline is None:
                baseline, agreement = (name, steps), f"({count} tokens)"
            else:
                agreement = compare(baseline, steps, model, backend, variant.weights, ids, loaded)
            text = loaded.tokenizer.decode(step.token for step in steps)
            read_bytes = model.account().fields["weight_bytes"]["read_per_token"]
            said.append(Continuation(name, text, (count - 1) / seconds, read_bytes, agreement))
    return said


def timed_steps(model: LanguageModel, ids: list[int], count: int, progress: Any) -> tuple[list[Step], float]:
    """The steps of a greedy continuation, and the seconds of all but the first."""
    steps, start = [], 0.0
    for step in model.generate(ids, count):
        steps.append(step)
        start = start or time.perf_counter()
        progress(len(steps), count)
    return steps, time.perf_counter() - start


def compare(
    baseline: tuple[str, list[Step]],
    steps: list[Step],
    model: LanguageModel,
    backend: Backend,
    weights: LlamaWeights,
    ids: list[int],
    loaded: StoredModel,
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
        f"token {difference.position + 1} is {quoted(words[1])}, that of {name} is {quoted(words[0])}: "
        f"logits {own:.5f} and {other:.5f}; "
        f"{_head_bound(difference, read, model, backend, weights)}"
    )


def _head_bound(
    difference: Difference, read: list[int], model: LanguageModel, backend: Backend, weights: LlamaWeights
) -> str:
    """The bound on the error that the head's product alone adds to the two logits, in words."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if not isinstance(weights.head, QuantizedMatrix) or declared is None or declared.arithmetic is None:
        return "the head is not quantised, so no bound is declared for it"
    x = model.decoder.hidden(read, model.decoder.new_state())[-1].astype(np.float32)
    two = select_columns(weights.head, np.array(difference.tokens))
    assert isinstance(two, QuantizedMatrix)
    bound = linear_bound(x, two, declared.arithmetic, qgemv(x, two))
    return f"the head's product alone may err by {float(bound.limit.max()):.1e}, and the layers before it add to that"


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


# **Perplexity** of each width, on the same tokens, by the first certified backend of the default order.


def perplexities(
    loaded: StoredModel, passage: str, count: int, console: Console, name: str | None
) -> list[dict[str, Any]]:
    """Perplexity as stored and re-quantised to each width in groups of 64; shows a table with bars."""
    tokens = loaded.tokenizer.encode(passage, begin=False)[:count]
    bos, rows = loaded.tokenizer.bos, list[dict[str, Any]]()
    window = min(WINDOW, loaded.weights.config.context - (bos is not None))
    with registry.load(name) as backend:
        for bits in (0, *WIDTHS):
            variant = requantized(loaded.weights, bits, 64) if bits else Variant("as stored", loaded.weights)
            model = load(StoredModel(loaded.name, variant.weights, loaded.tokenizer), backend, BY_LAYER)
            with progress_bar(f"perplexity, {variant.name}") as progress:
                result = model.perplexity(tokens, window, progress)
            size = weight_bytes(variant.weights)
            rows.append({"weights": variant.name, "bytes": size.blocks, "perplexity": result.value})
    show_perplexities(console, rows, len(tokens), window, backend.name)
    return rows


def show_perplexities(console: Console, rows: list[dict[str, Any]], count: int, window: int, backend: str) -> None:
    console.print(f"[bold]Perplexity[/] on {count} tokens in windows of {window}, by the backend {backend}")
    table = Table("weights")
    table.add_column("MB", justify="right")
    table.add_column("perplexity", justify="right")
    table.add_column("its logarithm", width=16)
    most = max(math.log(row["perplexity"]) for row in rows)
    for row in rows:
        bar = Bar(most, 0, math.log(row["perplexity"]), width=16)
        table.add_row(row["weights"], f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.2f}", bar)
    console.print(table)
    console.print("[dim]The weights of the file are quantised already; re-quantising rounds them again.[/]")


def _shape(loaded: StoredModel) -> str:
    config = loaded.weights.config
    return (
        f"{config.layers} layers, hidden {config.hidden}, {config.heads} query and {config.kv_heads} key-value heads, "
        f"vocabulary {config.vocabulary}"
    )
