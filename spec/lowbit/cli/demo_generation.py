"""The texts of ``lowbit demo``: what each certified backend generates, compared with the first one's.

Tokens and logits are compared with those of the first backend. What the specification says of them is checked on the
head: some of its columns, multiplied by the same hidden state, must lie within the bound that the backend declares.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit.arrays import F64
from lowbit.backend import registry
from lowbit.backend.base import Backend
from lowbit.cli.demo_certification import lacking
from lowbit.cli.progress import changing_bar, progress_bar
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.model.decoder import AnyDecoder
from lowbit.model.generation import Difference, Step, first_difference
from lowbit.model.matrices import select_columns
from lowbit.model.weights import LlamaWeights, weight_bytes
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import LanguageModel, Options, StoredModel, load
from lowbit.text import cleaned, one_line, quoted

HEAD_COLUMNS = 32  # the columns of the head's product that the specification also computes


@dataclass(frozen=True)
class Variant:
    """A model in one quantisation."""

    name: str
    weights: LlamaWeights


@dataclass(frozen=True)
class Continuation:
    """The continuation by one backend.

    Attributes:
        backend: its name.
        text: the continuation.
        tokens_per_second: without the first token, whose time includes reading the prompt.
        read_bytes: bytes of prepared weights that it reads for each token.
        agreement: how the tokens compare with the first backend's, and the head with the specification, in words.
    """

    backend: str
    text: str
    tokens_per_second: float
    read_bytes: int
    agreement: str


def continuations(
    variant: Variant, backends: Sequence[str], loaded: StoredModel, prompt: str, count: int, options: Options
) -> list[Continuation]:
    """The continuation by each backend that declares this quantisation.

    Args:
        variant: the weights.
        backends: their names; the others are compared with the first that declares this quantisation.
        loaded: the model, for its tokenizer.
        prompt: the text to continue.
        count: how many tokens are generated.
        options: how the model is run: one layer at a time.
    """
    ids, said = loaded.tokenizer.encode(prompt), []
    baseline: tuple[str, list[Step]] | None = None
    for name in backends:
        with registry.load(name) as backend:
            if lacking(backend, variant.weights):
                continue
            model, steps, seconds = generated(variant.weights, backend, options, ids, count)
            if baseline is None:
                baseline, agreement = (name, steps), f"{count} tokens, with which the others are compared"
            else:
                agreement = compare(baseline, steps, model, backend, variant.weights, ids, loaded)
            agreement += f"; {head_check(model.decoder, variant.weights, backend, ids, steps)}"
            text = loaded.tokenizer.decode(step.token for step in steps)
            read_bytes = model.account().fields["weight_bytes"]["read_per_token"]
            said.append(Continuation(name, text, (count - 1) / seconds, read_bytes, agreement))
    return said


def generated(
    weights: LlamaWeights, backend: Backend, options: Options, ids: list[int], count: int
) -> tuple[LanguageModel, list[Step], float]:
    """A model on a backend, the steps of a greedy continuation, and the seconds of all but the first."""
    with changing_bar() as report:
        model = load(weights, backend, options, report)
    steps, start = [], 0.0
    with progress_bar(f"{backend.name}: generating") as progress:
        for step in model.generate(ids, count):
            steps.append(step)
            start = start or time.perf_counter()
            progress(len(steps), count)
        return model, steps, time.perf_counter() - start


def show_text(console: Console, prompt: str, text: str) -> None:
    """A prompt and its continuation."""
    console.print(Text.assemble((cleaned(prompt), "dim"), (cleaned(text), "bold"), "\n"), highlight=False)


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
        return f"all {len(steps)} tokens equal those of {name}; logits at most {apart:.1e} apart"
    read = [*ids, *(step.token for step in steps[: difference.position])]
    words = [loaded.tokenizer.decode([token]) for token in difference.tokens]
    (_, _), (other, own) = difference.logits
    return (
        f"token {difference.position + 1} is {quoted(words[1])}, that of {name} is {quoted(words[0])}: "
        f"logits {own:.5f} and {other:.5f}; "
        f"{_head_bound(difference, read, model.decoder, backend, weights)}"
    )


def head_check(decoder: AnyDecoder, weights: LlamaWeights, backend: Backend, ids: list[int], steps: list[Step]) -> str:
    """How far the last step's highest logits are from the specification's product with the same input, in words."""
    x = decoder.hidden([*ids, *(step.token for step in steps[:-1])], decoder.new_state())[-1:]
    columns = np.argsort(steps[-1].logits)[-HEAD_COLUMNS:]
    found = _specified(x, columns, backend, weights)
    if found is None:
        return "the head is not quantised, so the specification has no product of it"
    expected, limit = found
    used = float(np.max(np.abs(decoder.logits(x)[0, columns] - expected) / limit))
    return (
        f"the head's {len(columns)} highest logits use {used:.1%} of the bound on their distance to the specification"
    )


def _specified(
    x: F64, columns: npt.NDArray[np.integer], backend: Backend, weights: LlamaWeights
) -> tuple[F64, F64] | None:
    """Some columns of the head's product by the reference, and the bound that the backend declares for each.

    None if the head is not quantised, or the backend declares no bound for it.
    """
    declared = backend.capabilities().operations.get("linear.qgemv")
    if not isinstance(weights.head, QuantizedMatrix) or declared is None or declared.arithmetic is None:
        return None
    if declared.lacks(weights.head.parameters):
        return None
    some, given = select_columns(weights.head, columns), x[0].astype(np.float32)
    assert isinstance(some, QuantizedMatrix)
    expected = qgemv(given, some)
    return expected, linear_bound(given, some, declared.arithmetic, expected).limit


def _head_bound(
    difference: Difference, read: list[int], decoder: AnyDecoder, backend: Backend, weights: LlamaWeights
) -> str:
    """The bound on the error that the head's product alone adds to the two logits, in words."""
    x = decoder.hidden(read, decoder.new_state())[-1:]
    found = _specified(x, np.array(difference.tokens), backend, weights)
    if found is None:
        return "the head is not quantised, so no bound is declared for it"
    return f"the head's product alone may err by {float(found[1].max()):.1e}, and the layers before it add to that"


def show_continuations(console: Console, variant: Variant, prompt: str, said: Sequence[Continuation]) -> None:
    """A table of what the backends generated, and the text."""
    sizes = weight_bytes(variant.weights)
    stored = f"{sizes.blocks / 1e6:.1f} MB in the layers, {sizes.head / 1e6:.1f} MB in the head"
    console.print(f"[bold]Generation, {variant.name}[/]: {stored}", soft_wrap=True)
    table = Table("backend", show_lines=True)
    table.add_column("tokens/s", justify="right")
    table.add_column("MB read per token", justify="right")
    table.add_column("compared with the first backend and with the specification")
    for each in said:
        speed, read = f"{each.tokens_per_second:.1f}", f"{each.read_bytes / 1e6:.1f}"
        table.add_row(Text(one_line(each.backend)), speed, read, Text(one_line(each.agreement)))
    console.print(table)
    if said:
        show_text(console, prompt, said[-1].text)
