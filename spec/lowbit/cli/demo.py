"""``lowbit demo``: from real weights to certified kernels, in one run.

Each step announces how long it takes. The first one certifies each backend for one profile and shows a text, within a
minute. Each of the others ends with a table:

- the verdict of the conformance suite on each backend, for a few cases of each clause and for all cases that this
  model's own shapes and weights make;
- what each backend that passed both generates after the same prompt, and how fast;
- what each width costs in bytes and in perplexity.

At the end a page and a plot hold all results (`demo_report`).

The reference needs minutes to run a whole model, so it takes part only with ``--reference``. Without it, the suite
still compares every backend with the specification, and so do some columns of the head for every text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowbit.backend import registry
from lowbit.cli.demo_certification import (
    PROFILE,
    SPECIFICATION,
    certified_for_profile,
    certify,
    show_verdicts,
    usable_backends,
    verdict_lines,
)
from lowbit.cli.demo_generation import Variant, continuations, generated, show_continuations, show_text
from lowbit.cli.demo_report import REQUANTISED, conformance_page, made_folder, write_report
from lowbit.cli.options import file_of, opened
from lowbit.cli.progress import changing_bar, progress_bar
from lowbit.errors import ArgumentError
from lowbit.formats import fetch as data
from lowbit.model.matrices import shape_of
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import LlamaWeights, linear_shapes, matrices, weight_bytes
from lowbit.runtime import Options, StoredModel, load
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import json_number, one_line

PROMPT = "Alice was beginning to get very tired of"
GROUP_SIZES = (64, 128)
WIDTHS = (4, 3, 2)
WINDOW = 256
TEXT_TOKENS = 1024
BY_LAYER = Options(by_layer=True)  # use the certified products, even if a backend could run whole models
WITH_ATTENTION = Options(
    by_layer=True, step=("attention.attend",)
)  # also certified; the formulas need most of the time
FULL_MODEL = 135e6  # weights of the model for which `SECONDS` holds
SECONDS = {"profile": 8.0, "certify": 11.0, "generate": 8.0, "requantise": 2.0, "measure": 8.0}
"""The approximate seconds of a step for one backend, model or width, on two otherwise idle processors."""


def demo(
    model: Annotated[Path | None, typer.Option(help="A GGUF file; by default SmolLM2-135M-Instruct.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text for the perplexity; by default alice29.txt.")] = None,
    prompt: Annotated[str, typer.Option(help="The text that the backends continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens each backend generates.")] = 16,
    text_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text are used.")] = TEXT_TOKENS,
    out: Annotated[Path, typer.Option(help="The folder for the report and the plot.")] = Path("lowbit-demo"),
    reference: Annotated[
        bool, typer.Option("--reference", help="Also run the reference, which takes minutes.")
    ] = False,
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
    folder = made_folder(out)
    console.print(f"\n[bold]{escape(one_line(path.name))}[/]: {_shape(loaded)}\n")
    steps = Steps(console, _weight_count(loaded.weights) / FULL_MODEL)
    names = [name for name in usable_backends(console, loaded.weights) if reference or name != SPECIFICATION]

    steps.begin(f"Certify {', '.join(names)} for {PROFILE}, and generate a text", SECONDS["profile"] * len(names))
    if with_profile := certified_for_profile(names, console):
        show_first_text(console, loaded, preferred(list(with_profile)), prompt, tokens)

    steps.begin("Test the model's operations, with its own weights among the cases", SECONDS["certify"] * len(names))
    verdicts = side_by_side(
        lambda name: certify(name, path, loaded.weights.config, folder / conformance_page(name)),
        names,
        usable_processors(),
    )
    show_verdicts(console, verdicts)
    passed = [verdict["backend"] for verdict in verdicts if verdict["verdict"] == "passed"]
    certified = [name for name in passed if name in with_profile]

    texts = {}
    for variant in generating_variants(loaded.weights, steps, len(certified)):
        said = continuations(variant, certified, loaded, prompt, tokens, BY_LAYER)
        show_continuations(console, variant, prompt, said)
        texts[variant.name] = [asdict(each) for each in said]

    measured = perplexities(loaded, passage, text_tokens, console, steps, fastest(texts))
    answer: dict[str, Any] = {"model": path.name, "prompt": prompt, "profile": PROFILE, "with_profile": with_profile}
    answer |= {"conformance": verdicts, "certified": certified}
    answer |= {"generation": texts, "perplexity": measured}
    answer["files"] = write_report(answer, folder)
    show_summary(console, answer)
    if as_json:
        rows = [row | {"perplexity": json_number(row["perplexity"])} for row in measured]
        print(json.dumps(answer | {"perplexity": rows}))
    raise typer.Exit(0 if len(certified) == len(verdicts) else 1)


class Steps:
    """Announces each step, and the seconds that it is expected to take.

    Args:
        console: prints the announcements.
        size: the number of weights of the model, as a multiple of `FULL_MODEL`.
    """

    def __init__(self, console: Console, size: float) -> None:
        self._console, self._size, self._count = console, size, 0

    def begin(self, what: str, seconds: float) -> None:
        """Announce the next step, which takes `seconds` with a model of `FULL_MODEL` weights."""
        self._count += 1
        expected = max(1, round(seconds * self._size))
        self._console.print(f"[bold]{self._count}. {escape(one_line(what))}[/] (about {expected} s on two processors)")


# **Generation.** Every certified backend continues the same prompt (`demo_generation`).


def preferred(names: Sequence[str]) -> str:
    """The first of these backends in the default order; if none is in it, the first of them."""
    return next((name for name in registry.DEFAULT_ORDER if name in names), names[0])


def show_first_text(console: Console, loaded: StoredModel, name: str, prompt: str, tokens: int) -> None:
    """Show what one backend generates with the model as stored."""
    with registry.load(name) as backend:
        _, steps, _ = generated(loaded.weights, backend, BY_LAYER, loaded.tokenizer.encode(prompt), tokens)
    show_text(console, prompt, loaded.tokenizer.decode(step.token for step in steps))


def generating_variants(weights: LlamaWeights, steps: Steps, backends: int) -> Iterator[Variant]:
    """The model as stored, and re-quantised to 4 bits in each group size that fits its shortest column."""
    shortest = min(rows for rows, _ in linear_shapes(weights.config).values())
    seconds = SECONDS["generate"] * backends
    steps.begin("Generate with the model as stored", seconds)
    yield Variant("as stored", weights)
    for size in (size for size in GROUP_SIZES if size <= shortest):
        steps.begin(f"Re-quantise to 4 bits in groups of {size}, and generate", SECONDS["requantise"] + seconds)
        yield requantized(weights, 4, size)


def requantized(weights: LlamaWeights, bits: int, group_size: int) -> Variant:
    """The model, quantised again."""
    name = f"re-quantised: {bits} bits, groups of {group_size}"
    with progress_bar(name) as progress:
        return Variant(name, planned(weights, Plan.uniform(bits, group_size), progress))


# **Perplexity** of each width, on the same tokens, by the fastest certified backend. Attention also runs on it if it
# declares attention: the formulas would take most of the time.


def fastest(generated: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """The backend that generated the most tokens a second; None, for the default, if none generated any."""
    speeds = _speeds(generated)
    return max(speeds)[1] if speeds else None


def _speeds(generated: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[float, str]]:
    """Tokens a second and backend, of every text."""
    return [(each["tokens_per_second"], each["backend"]) for said in generated.values() for each in said]


def perplexities(
    loaded: StoredModel, passage: str, count: int, console: Console, steps: Steps, name: str | None
) -> list[dict[str, Any]]:
    """Perplexity as stored and re-quantised to each width in groups of 64; shows a table."""
    tokens = loaded.tokenizer.encode(passage, begin=False)[:count]
    bos, rows = loaded.tokenizer.bos, list[dict[str, Any]]()
    window = min(WINDOW, loaded.config.context - (bos is not None))
    expected = (1 + len(WIDTHS)) * SECONDS["measure"] * len(tokens) / TEXT_TOKENS + len(WIDTHS) * SECONDS["requantise"]
    steps.begin(f"Measure perplexity on {len(tokens)} tokens", expected)
    with registry.load(name) as backend:
        backend.warm_up("linear.qgemv")  # before the first bar starts a thread
        for bits in (0, *WIDTHS):
            variant = requantized(loaded.weights, bits, 64) if bits else Variant("as stored", loaded.weights)
            with changing_bar() as report:
                stored = StoredModel(loaded.name, variant.weights, loaded.tokenizer)
                model = load(stored, backend, BY_LAYER if backend.compiles_steps else WITH_ATTENTION, report)
            with progress_bar(f"perplexity, {variant.name}") as progress:
                result = model.perplexity(tokens, window, progress)
            size, taken = weight_bytes(variant.weights), model.account().fields["matrices"]
            rows.append({"weights": variant.name, "bytes": size.blocks, "perplexity": result.value})
            for reason, number in taken["by_numpy_float32"].items():
                note = f"{variant.name}: {number} matrices multiplied in float32 by numpy: {reason}"
                console.print(one_line(note), style="yellow", markup=False, highlight=False)
    show_perplexities(console, rows, f"{len(tokens)} tokens in windows of {window}, by the backend {backend.name}")
    return rows


def show_perplexities(console: Console, rows: Sequence[Mapping[str, Any]], how: str) -> None:
    """Print the table of perplexities, after `how` they were measured."""
    console.print(f"[bold]Perplexity[/] on {escape(one_line(how))}")
    table = Table("weights")
    table.add_column("MB", justify="right")
    table.add_column("perplexity", justify="right")
    for row in rows:
        table.add_row(row["weights"], f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.2f}")
    console.print(table)
    console.print(f"[dim]{REQUANTISED}[/]")


# **The summary.**


def show_summary(console: Console, answer: Mapping[str, Any]) -> None:
    """Print the results in a few lines, and the paths of the files."""
    speeds = _speeds(answer["generation"])
    first, last = answer["perplexity"][0], answer["perplexity"][-1]
    lines = verdict_lines(answer)
    lines += [f"fastest: {max(speeds)[1]}, {max(speeds)[0]:.1f} tokens/s"] if speeds else []
    lines += [f"perplexity {first['perplexity']:.2f} {first['weights']}, {last['perplexity']:.2f} {last['weights']}"]
    lines += [f"report: {answer['files']['report']}"]
    plot = answer["files"].get("plot")
    lines += [f"plot: {plot}" if plot else "no plot: matplotlib is not installed; pip install 'lowbit[demo]'"]
    console.print("\n[bold]Summary[/]")
    for line in lines:
        console.print(f"  {one_line(line)}", markup=False, highlight=False, soft_wrap=True)


def _weight_count(weights: LlamaWeights) -> int:
    """How many weights the matrices of a model have."""
    return sum(prod(shape_of(matrix)) for _, matrix in matrices(weights))


def _shape(loaded: StoredModel) -> str:
    config = loaded.config
    return (
        f"{config.layers} layers, hidden {config.hidden}, {config.heads} query and {config.kv_heads} key-value heads, "
        f"vocabulary {config.vocabulary}"
    )
