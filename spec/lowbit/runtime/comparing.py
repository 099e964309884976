"""Two models on one backend and one text (`lowbit.model.comparison`): open both, check that they can be compared.

Two models can be compared if they tokenise the text identically. Both run layer by layer with the specification's
float64 formulas between their products, so that only the weights differ and the stream after each block is visible.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from lowbit.backend.base import Backend
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import Report, silent
from lowbit.model.comparison import Comparison, Pair, compare
from lowbit.model.decoder import Decoder
from lowbit.model.weights import Progress
from lowbit.runtime.language_model import LanguageModel, load
from lowbit.runtime.options import Options
from lowbit.runtime.placement import Account
from lowbit.runtime.stored import StoredModel, part_of

Measure = Callable[[Sequence[int], int, int | None, Progress], tuple[Comparison, tuple[Account, Account]]]
"""Takes the tokens of a text, the tokens of a window, the BOS token, and the progress callback."""

BY_FORMULAS = Options(step="formulas", by_layer=True)


@dataclass(frozen=True)
class Compared:
    """The comparison of two models.

    Attributes:
        comparison: the numbers.
        tokens: how many tokens of the text were used.
        accounts: how A and B were run.
    """

    comparison: Comparison
    tokens: int
    accounts: tuple[Account, Account]


def compare_models(
    models: tuple[StoredModel, StoredModel],
    backend: Backend,
    text: str,
    *,
    most_tokens: int,
    window: int,
    report: Report = silent,
    elsewhere: Measure | None = None,
) -> Compared:
    """Compare two models on the beginning of a text.

    Args:
        models: A, the baseline, and B.
        backend: multiplies by the matrices of both.
        text: what they read.
        most_tokens: the largest number of tokens of the text to use.
        window: tokens of a window.
        report: called while models are read and compared.
        elsewhere: measures all windows instead of this process, which then reads no weights.

    Raises:
        LowbitError: models that tokenise the text differently; a wrong window; too little memory.
    """
    ids = shared_tokens(models, text)[:most_tokens]
    bos = models[0].tokenizer.bos
    check_window(models, len(ids), window)
    if elsewhere is not None:
        found, accounts = elsewhere(ids, window, bos, part_of(report, "comparing"))
        return Compared(found, len(ids), accounts)
    with ExitStack() as opened:
        a, b = (opened.enter_context(load(model, backend, BY_FORMULAS, report)) for model in models)
        found = compare(decoders_of(a, b), ids, window, bos=bos, progress=part_of(report, "comparing"))
        return Compared(found, len(ids), (a.account(), b.account()))


def shared_tokens(models: tuple[StoredModel, StoredModel], text: str) -> list[int]:
    """The tokens of a text, which must be the same for both models.

    Raises:
        ArgumentError: they differ, or the vocabularies have different sizes.
    """
    a, b = models
    if a.config.vocabulary != b.config.vocabulary:
        sentence = (
            f"{a.name} has a vocabulary of {a.config.vocabulary} tokens and {b.name} one of {b.config.vocabulary}; "
            "only models with the same vocabulary can be compared"
        )
        raise ArgumentError("B", b.name, "a model with the vocabulary of A", sentence)
    ids, others = (model.tokenizer.encode(text, begin=False) for model in models)
    if ids != others or a.tokenizer.bos != b.tokenizer.bos:
        what = "different tokens of the text" if ids != others else "sequences that begin differently"
        sentence = f"{a.name} and {b.name} make {what}; only models with the same tokenizer can be compared"
        raise ArgumentError("B", b.name, "a model with the tokenizer of A", sentence)
    return ids


def check_window(models: tuple[StoredModel, StoredModel], tokens: int, window: int) -> None:
    """Refuse a window that does not fit, or a text too short to score a token, before any weight is read."""
    begins = models[0].tokenizer.bos is not None
    shortest = 1 if begins else 2
    check_integer("window", window, shortest, min(model.config.context for model in models) - begins)
    if tokens < shortest:
        raise ArgumentError("number of tokens", tokens, f"at least {shortest}")


def decoders_of(*models: LanguageModel) -> Pair:
    """The decoders of two models that run by `BY_FORMULAS`."""
    a, b = (model.decoder for model in models)
    assert isinstance(a, Decoder) and isinstance(b, Decoder)  # BY_FORMULAS runs a model this way
    return a, b
