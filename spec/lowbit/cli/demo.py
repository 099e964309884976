"""``lowbit demo``: from real weights to certified kernels, in one run.

Each step announces how long it takes. The first one certifies each backend for one profile and shows a text, within a
minute. The others end with a table: the verdict of the conformance suite on each backend, with this model's own shapes
and weights among the cases; what each backend generates after the same prompt, and how fast; what each width costs in
bytes and in perplexity. Nothing is compared that has not been certified in the same run. At the end a page and a plot
hold all of it (`demo_report`).

The reference does not multiply whole models here, which takes it minutes: it computes what the suite compares with, and
some columns of the head for every text. ``--reference`` lets it take part like the others.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowbit.arrays import F64
from lowbit.backend import base as registry
from lowbit.backend.base import Backend
from lowbit.backend.linears import build
from lowbit.cli.demo_report import conformance_page, made_folder, write_report
from lowbit.cli.loading import LoadedModel, file_of, load_model, progress_bar
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.formats import fetch as data
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.model import elementwise
from lowbit.model.block import FORMULAS
from lowbit.model.decoder import Decoder, Difference, Step, first_difference, generate
from lowbit.model.perplexity import perplexity
from lowbit.model.weights import LlamaWeights, linear_shapes, matrices, requantize, select_columns, weight_bytes
from lowbit.quantization.affine import QuantizedMatrix, matrix_parameters
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.threads import side_by_side, usable_processors
from lowbit.text import cleaned, one_line, quoted

PROMPT = "Alice was beginning to get very tired of"
GROUP_SIZES = (64, 128)
WIDTHS = (4, 3, 2)
WINDOW = 256
TEXT_TOKENS = 1024
PROFILE = "lowbit-1.0/qgemv-4"  # the profile of the first step
PRODUCTS = ("affine.quantize", "affine.dequantize", "linear.qgemv", "linear.qgemm")
CERTIFIED = (*PRODUCTS, "attention.attend")  # what a model below rests on
SPECIFICATION = "reference"  # the backend that is the specification itself
BASELINE = ("reference", "numpy")  # those whose tokens the others are compared with, the first that takes part
HEAD_COLUMNS = 32  # of the head's product, computed by the specification too
FULL_MODEL = 135e6  # weights of the model that the expected seconds were measured with
SECONDS = {"profile": 8.0, "certify": 25.0, "generate": 8.0, "requantise": 5.0, "measure": 8.0}
"""What a step takes for one backend, model or width, on two processors that do nothing else."""


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
        tokens_per_second: after the first token, whose time is that of reading the prompt.
        read_bytes: bytes of weights that it reads for each token, as it has prepared them.
        agreement: how the tokens compare with the baseline's, and the head with the specification, in words.
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
    text_tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text are scored.")] = TEXT_TOKENS,
    out: Annotated[Path, typer.Option(help="The folder for the report and the plot.")] = Path("lowbit-demo"),
    reference: Annotated[bool, typer.Option("--reference", help="Also run the reference: takes minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Certify every backend on a real model, then let it generate, and compare."""
    console = Console(stderr=as_json)
    path = file_of(model, data.DEFAULT_MODEL)
    if path.is_dir():  # which the conformance suite does not read
        raise ArgumentError("--model", path.name, "a GGUF file")
    passage = data.read_text(file_of(text, data.DEFAULT_TEXT))
    loaded = load_model(path)
    folder = made_folder(out)
    console.print(f"\n[bold]{escape(one_line(path.name))}[/]: {_shape(loaded)}\n")
    steps = Steps(console, sum(rows * columns for rows, columns in _all_shapes(loaded.weights)) / FULL_MODEL)
    names = [name for name in usable_backends(console, loaded.weights) if reference or name != SPECIFICATION]

    steps.begin(f"Certify {', '.join(names)} for {PROFILE}, and generate a text", SECONDS["profile"] * len(names))
    with_profile = certified_for_profile(names, console)
    if with_profile:
        show_first_text(console, loaded, with_profile[-1], prompt, tokens)

    steps.begin("Run all cases of the suite for the model's operations", SECONDS["certify"] * len(names))
    verdicts = side_by_side(
        lambda name: certify(name, path, folder / conformance_page(name)), names, usable_processors()
    )
    show_verdicts(console, verdicts)
    certified = [verdict["backend"] for verdict in verdicts if verdict["verdict"] == "passed"]

    generated = {}
    for variant in generating_variants(loaded.weights, steps, len(certified)):
        said = continuations(variant, certified, loaded, prompt, tokens)
        show_continuations(console, variant, prompt, said)
        generated[variant.name] = [asdict(each) for each in said]

    measured = perplexities(loaded, passage, text_tokens, console, steps, fastest(generated))
    answer: dict[str, Any] = {"model": path.name, "prompt": prompt, "conformance": verdicts}
    answer |= {"generation": generated, "perplexity": measured}
    answer["files"] = write_report(answer, folder)
    show_summary(console, answer, certified)
    if as_json:
        print(json.dumps(answer))
    raise typer.Exit(0 if len(certified) == len(verdicts) else 1)


class Steps:
    """Announces each step with the seconds that it is expected to take.

    Args:
        console: where to.
        size: the weights of the model, as a multiple of those that the expected seconds were measured with.
    """

    def __init__(self, console: Console, size: float) -> None:
        self._console, self._size, self._count = console, size, 0

    def begin(self, what: str, seconds: float) -> None:
        """Announce the next step; `seconds` is what it takes with the model that they were measured with."""
        self._count += 1
        expected = max(1, round(seconds * self._size))
        self._console.print(f"[bold]{self._count}. {escape(one_line(what))}[/] (about {expected} s on two processors)")


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
    return sorted(names, key=lambda name: (BASELINE.index(name) if name in BASELINE else len(BASELINE), name))


def lacking(backend: Backend, weights: LlamaWeights) -> NotDeclaredError | None:
    """What of a model's matrices a backend does not declare a product by; None if it declares all."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if declared is None:
        return NotDeclaredError(backend.name, "linear.qgemv")
    for _, matrix in matrices(weights):
        if isinstance(matrix, QuantizedMatrix) and (missing := declared.lacks(matrix_parameters(matrix))):
            return NotDeclaredError(backend.name, "linear.qgemv", missing)
    return None


def certified_for_profile(names: list[str], console: Console) -> list[str]:
    """The backends that the suite certifies for `PROFILE`; each answer is shown as soon as it is there."""

    def certified(name: str) -> bool:
        report = suite(name, "--profile", PROFILE)
        granted = all(certificate["certified"] for certificate in report["certificates"])
        said = f"{name}: {'certified' if granted else 'not certified'} for {PROFILE}"
        console.print(f"{one_line(said)}, {report['counts']['passed']} cases passed", markup=False, highlight=False)
        return granted

    found = side_by_side(certified, names, usable_processors())
    return [name for name, granted in zip(names, found, strict=True) if granted]


def show_first_text(console: Console, loaded: LoadedModel, name: str, prompt: str, tokens: int) -> None:
    """What one backend generates with the model as stored."""
    with registry.load(name) as backend:
        with progress_bar(f"{name}: preparing") as progress:
            decoder, _ = build(loaded.weights, backend, progress)
        with progress_bar(f"{name}: generating") as progress:
            steps, _ = timed_steps(decoder, loaded.tokenizer.encode(prompt), tokens, progress)
    text = loaded.tokenizer.decode(step.token for step in steps)
    console.print(Text.assemble((cleaned(prompt), "dim"), (cleaned(text), "bold"), "\n"), highlight=False)


def certify(name: str, model: Path, html: Path | None = None) -> dict[str, Any]:
    """The verdict of the suite on the operations that a model needs, with the model's own matrices among the cases.

    Args:
        name: the backend.
        model: a GGUF file.
        html: where the page of the report goes; None for no page.
    """
    arguments = ["--seeds", "1", *(word for operation in CERTIFIED for word in ("--op", operation))]
    return suite(name, *arguments, "--model", str(model), *(["--html", str(html)] if html else []))


def suite(name: str, *arguments: str) -> dict[str, Any]:
    """The report of ``lowbit conformance NAME`` with these arguments.

    Raises:
        UnavailableError: the command gives no report.
    """
    command = python_command("-m", "lowbit.cli", "conformance", name, "--json", *arguments)
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        reason = f"it ended with status {done.returncode} and said: {said}"
        remedy = f"run `lowbit conformance {name}` to see why"
        raise UnavailableError("the conformance suite", reason, remedy) from error
    return report


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


def generating_variants(weights: LlamaWeights, steps: Steps, backends: int) -> Iterator[Variant]:
    """The model as stored, and re-quantised to 4 bits in each group size that its shortest column can hold."""
    shortest = min(rows for rows, _ in linear_shapes(weights.config).values())
    steps.begin("Generate with the model as stored", SECONDS["generate"] * backends)
    yield Variant("as stored", weights)
    for size in (size for size in GROUP_SIZES if size <= shortest):
        steps.begin(
            f"Re-quantise to 4 bits in groups of {size}, and generate",
            SECONDS["requantise"] + SECONDS["generate"] * backends,
        )
        yield requantized(weights, 4, size)


def requantized(weights: LlamaWeights, bits: int, group_size: int) -> Variant:
    name = f"re-quantised: {bits} bits, groups of {group_size}"
    with progress_bar(name) as progress:
        return Variant(name, requantize(weights, bits=bits, group_size=group_size, progress=progress))


def continuations(
    variant: Variant, backends: list[str], loaded: LoadedModel, prompt: str, count: int
) -> list[Continuation]:
    """What each backend generates, the baseline first; one that does not declare this quantisation is left out."""
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
            agreement += f"; {head_check(decoder, variant.weights, backend, ids, steps)}"
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


def head_check(decoder: Decoder, weights: LlamaWeights, backend: Backend, ids: list[int], steps: list[Step]) -> str:
    """How far the last step's highest logits are from the specification's product with the same input, in words."""
    x = decoder.hidden([*ids, *(step.token for step in steps[:-1])], decoder.new_state())[-1:]
    columns = np.argsort(steps[-1].logits)[-HEAD_COLUMNS:]
    found = _specified(x, columns, backend, weights)
    if found is None:
        return "the head is not quantised, so the specification has no product of it"
    expected, limit = found
    share = float(np.max(np.abs(decoder.logits(x)[0, columns] - expected) / limit))
    return f"the head's {len(columns)} highest logits use {share:.0%} of the bound on what the specification computes"


def _specified(
    x: F64, columns: npt.NDArray[np.integer], backend: Backend, weights: LlamaWeights
) -> tuple[F64, F64] | None:
    """Some columns of the head's product by the reference, and the bound that the backend declares for each."""
    declared = backend.capabilities().operations.get("linear.qgemv")
    if not isinstance(weights.head, QuantizedMatrix) or declared is None or declared.arithmetic is None:
        return None
    if declared.lacks(matrix_parameters(weights.head)):
        return None
    some, given = select_columns(weights.head, columns), x[0].astype(np.float32)
    assert isinstance(some, QuantizedMatrix)
    expected = qgemv(given, some)
    return expected, linear_bound(given, some, declared.arithmetic, expected).limit


def _head_bound(
    difference: Difference, read: list[int], decoder: Decoder, backend: Backend, weights: LlamaWeights
) -> str:
    """The bound on the two logits that the head's product alone explains, in words."""
    x = decoder.hidden(read, decoder.new_state())[-1:]
    found = _specified(x, np.array(difference.tokens), backend, weights)
    if found is None:
        return "the head is not quantised, so no bound is declared for it"
    return f"the head's product alone may err by {float(found[1].max()):.1e}, the layers below add to it"


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


# **Perplexity** of each width, on the same tokens, by the fastest backend that was certified. It computes attention too
# where it declares that: the specification's own would take most of the time.


def fastest(generated: dict[str, list[dict[str, Any]]]) -> str:
    """The backend with the most tokens each second; numpy if there is none."""
    said = [(each["tokens_per_second"], each["backend"]) for variant in generated.values() for each in variant]
    return max(said)[1] if said else "numpy"


def with_attention(weights: LlamaWeights, backend: Backend) -> Decoder:
    """The model on a backend, with its attention too where the backend declares it."""
    taken = elementwise.on_backend(backend, weights.config, FORMULAS).between
    decoder, _ = build(weights, backend, None, "float32", replace(FORMULAS, attend=taken.attend, cache=taken.cache))
    return decoder


def perplexities(
    loaded: LoadedModel, passage: str, count: int, console: Console, steps: Steps, name: str
) -> list[dict[str, Any]]:
    """Perplexity as stored and re-quantised to each width in groups of 64, shown as a table."""
    tokens = loaded.tokenizer.encode(passage, begin=False)[:count]
    bos, rows = loaded.tokenizer.bos, list[dict[str, Any]]()
    window = min(WINDOW, loaded.weights.config.context - (bos is not None))
    expected = (1 + len(WIDTHS)) * SECONDS["measure"] * len(tokens) / TEXT_TOKENS + len(WIDTHS) * SECONDS["requantise"]
    steps.begin(f"Measure perplexity on {len(tokens)} tokens", expected)
    with registry.load(name) as backend:
        backend.warm_up("linear.qgemv")
        for bits in (0, *WIDTHS):
            variant = requantized(loaded.weights, bits, 64) if bits else Variant("as stored", loaded.weights)
            decoder = with_attention(variant.weights, backend)
            with progress_bar(f"perplexity, {variant.name}") as progress:
                result = perplexity(decoder, tokens, window, bos=bos, progress=progress)
            size = weight_bytes(variant.weights)
            rows.append({"weights": variant.name, "bytes": size.blocks, "perplexity": result.value})
    show_perplexities(console, rows, f"{len(tokens)} tokens in windows of {window}, backend {name}")
    return rows


def show_perplexities(console: Console, rows: list[dict[str, Any]], how: str) -> None:
    console.print(f"[bold]Perplexity[/] on {escape(one_line(how))}")
    table = Table("weights")
    table.add_column("MB", justify="right")
    table.add_column("perplexity", justify="right")
    for row in rows:
        table.add_row(row["weights"], f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.2f}")
    console.print(table)
    console.print("[dim]The file's weights have been through 4 bits before: re-quantised means twice.[/]")


# **The summary.**


def show_summary(console: Console, answer: dict[str, Any], certified: list[str]) -> None:
    """What was shown, and where the files are."""
    cases = sum(row["passed"] for verdict in answer["conformance"] for row in verdict["operations"])
    speeds = [(each["tokens_per_second"], each["backend"]) for said in answer["generation"].values() for each in said]
    first, last = answer["perplexity"][0], answer["perplexity"][-1]
    console.print("\n[bold]Summary[/]")
    lines = [f"{len(certified)} of {len(answer['conformance'])} backends certified; {cases} cases passed"]
    lines += [f"fastest: {max(speeds)[1]}, {max(speeds)[0]:.1f} tokens/s"] if speeds else []
    lines += [f"perplexity {first['perplexity']:.2f} {first['weights']}, {last['perplexity']:.2f} {last['weights']}"]
    lines += [f"report: {answer['files']['report']}"]
    plot = answer["files"].get("plot")
    lines += [f"plot: {plot}" if plot else "no plot: matplotlib is not installed; pip install 'lowbit[demo]'"]
    for line in lines:
        console.print(f"  {one_line(line)}", markup=False, highlight=False, soft_wrap=True)


def _all_shapes(weights: LlamaWeights) -> Iterator[tuple[int, int]]:
    """K and N of every matrix that the model multiplies by."""
    for _, matrix in matrices(weights):
        yield (matrix.rows, matrix.columns) if isinstance(matrix, QuantizedMatrix) else matrix.shape


def _shape(loaded: LoadedModel) -> str:
    config = loaded.weights.config
    return (
        f"{config.layers} layers, hidden {config.hidden}, {config.heads} query and {config.kv_heads} key-value heads, "
        f"vocabulary {config.vocabulary}"
    )
