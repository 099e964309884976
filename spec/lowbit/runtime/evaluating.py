"""Evaluating models on a text in other processes, one window per task.

Windows are independent. A process with a window opens the models itself, quantises them if requested, and keeps them
for its next window. The main process opens no weights: it cuts the text into windows, stores each result as it arrives
(`lowbit.system.records`), and adds them up in the order of the text. So whatever the order of arrival, the sums are
those of `lowbit.model.perplexity` and `lowbit.model.comparison` to the bit, on processors and libraries of one kind.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowbit.backend import registry
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.model.comparison import Comparison, Measured, Window, measure, pieces, together
from lowbit.model.config import LlamaConfig, check_meant
from lowbit.model.perplexity import Perplexity, Protocol, check_text, score, total
from lowbit.model.weights import Progress
from lowbit.runtime.comparing import decoders_of
from lowbit.runtime.language_model import LanguageModel, load
from lowbit.runtime.options import Options
from lowbit.runtime.placement import Account
from lowbit.runtime.stored import open_model
from lowbit.system.records import ALLOWED, Kept, Parts
from lowbit.system.tasks import Executor, check_there
from lowbit.text import quoted

ACCOUNTS = "models"
"""The part of a record that says how the models were run."""
MOST = 2**63
"""A bound on the magnitude of sums over a window."""


@dataclass(frozen=True)
class Models:
    """The models that a process opens.

    Attributes:
        paths: of the models, the same on every machine.
        configs: the shapes of the intended models.
        backend: the name of the backend that runs them.
        options: how they are run.
        gptq_version: as `open_model` takes it.
        context: likewise.
    """

    paths: tuple[Path, ...]
    configs: tuple[LlamaConfig, ...] = field(hash=False)
    backend: str
    options: Options
    gptq_version: Version | None = None
    context: int | None = None

    def opened(self) -> tuple[LanguageModel, ...]:
        """The models, which stay open for as long as this process uses them.

        Raises:
            FormatError: a path has another model here.
            UnavailableError: it has none, or the backend cannot run here.
            LowbitError: as `load`.
        """
        for path in self.paths:
            check_there(path)
        found = _opened(self)
        for model, meant in zip(found, self.configs, strict=True):
            check_meant(model.name, model.config, meant)
        return found

    def call(self) -> dict[str, Any]:
        """Everything that determines the numbers of a window, as JSON."""
        options = [repr(self.options), self.gptq_version, self.context]
        return {
            "version": version("lowbit"),
            "models": [_identity(path) for path in self.paths],
            "backend": self.backend,
            "options": hashlib.sha256(repr(options).encode()).hexdigest(),
        }


@lru_cache(maxsize=1)
def _opened(models: Models) -> tuple[LanguageModel, ...]:
    """Models, opened once in each process."""
    engine = registry.load(models.backend)
    stored = [
        open_model(path, identified=engine.keeps_steps, gptq_version=models.gptq_version, context=models.context)
        for path in models.paths
    ]
    return tuple(load(each, engine, models.options) for each in stored)


def _identity(path: Path) -> str:
    """A digest of the names, sizes and times of the files of a model, in hexadecimal digits."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    known = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return hashlib.sha256(repr((str(path), known)).encode()).hexdigest()


@dataclass(frozen=True)
class Piece:
    """A window of a text.

    Attributes:
        number: from 0 on.
        tokens: of the window.
        first: the index of the first scored token.
    """

    number: int
    tokens: tuple[int, ...]
    first: int = 1

    def __str__(self) -> str:
        return f"window {self.number}"


@dataclass(frozen=True)
class Found:
    """The result of a process for a window.

    Attributes:
        result: JSON.
        accounts: how the models were run.
    """

    result: Any
    accounts: tuple[Account, ...]


@dataclass(frozen=True)
class Scoring:
    """Score the tokens of a window."""

    models: Models

    def __call__(self, piece: Piece, threads: int) -> Found:
        (model,) = self.models.opened()
        return Found(list(score(model.decoder, piece.tokens, piece.first)), (model.account(),))

    def fits(self, result: Any) -> bool:
        """Whether JSON has the form of a result."""
        return _numbers(result) and result != []


@dataclass(frozen=True)
class Measuring:
    """Compare two models on a window."""

    models: Models

    def __call__(self, piece: Piece, threads: int) -> Found:
        a, b = self.models.opened()
        found = measure(decoders_of(a, b), piece.tokens)
        window = [found.window.count, *found.window.losses, found.window.divergence, found.window.agreed]
        return Found([window, found.streams], (a.account(), b.account()))

    def fits(self, result: Any) -> bool:
        """Whether JSON has the form of a result."""
        if not isinstance(result, list) or len(result) != 2 or not _numbers(result[0], 5):
            return False
        layers = [] if result[1] is None else result[1]
        if not isinstance(layers, list) or not all(isinstance(layer, list) for layer in layers):
            return False
        return all(_numbers(pair, 2) for layer in layers for pair in layer)


@dataclass(frozen=True)
class Evaluation:
    """How the windows of a text are evaluated, and where their results are kept.

    Attributes:
        executor: runs the tasks.
        models: that read the text.
        keep: the file of the results; None for none.
    """

    executor: Executor
    models: Models
    keep: Path | None = None

    def perplexity(
        self, tokens: Sequence[int], window: int, protocol: Protocol, bos: int | None, progress: Progress
    ) -> tuple[Perplexity, Account]:
        """The perplexity of a model, and how it was run; arguments and errors as `lowbit.model.perplexity.perplexity`.

        Raises:
            ArgumentError: as there; results of another command in the file.
            UnavailableError: processes or machines fail repeatedly; a machine lacks the model.
        """
        check_text(self.models.configs[0], len(tokens), window, bos, protocol)
        windows = enumerate(protocol.pieces(tokens, window, bos))
        parts = [Piece(number, tuple(piece), first) for number, (piece, first, _) in windows]
        results, (account,) = self._results(Scoring(self.models), parts, progress)
        return total(tuple(each) for each in results), account

    def compare(
        self, tokens: Sequence[int], window: int, bos: int | None, progress: Progress
    ) -> tuple[Comparison, tuple[Account, Account]]:
        """The comparison of two models, and how they were run; arguments as `lowbit.model.comparison.compare`.

        Raises:
            ArgumentError: a logit is not finite; results of another command in the file.
            UnavailableError: as `perplexity`.
        """
        parts = [Piece(number, tuple(piece)) for number, piece in enumerate(pieces(tokens, window, bos))]
        results, (a, b) = self._results(Measuring(self.models), parts, progress)
        return together([_measured(*each) for each in results]), (a, b)

    def _results(
        self, work: Scoring | Measuring, parts: Sequence[Piece], progress: Progress
    ) -> tuple[list[Any], tuple[Account, ...]]:
        """The results of all windows in order: those that were kept, and the others, computed now."""
        text = hashlib.sha256(repr([(each.tokens, each.first) for each in parts]).encode()).hexdigest()
        kept = Kept(self.keep, {"command": type(work).__name__.lower(), **self.models.call(), "text": text})
        if kept.results and not _sound(kept.results, work):
            raise ArgumentError("--keep", f"{quoted(str(self.keep))}, whose results are damaged", ALLOWED)
        left = [each for each in parts if str(each.number) not in kept.results]
        progress(len(parts) - len(left), len(parts))
        for done, (part, found) in enumerate(self.executor.run(work, left), len(parts) - len(left) + 1):
            kept.results.setdefault(ACCOUNTS, [[dict(each.fields), each.sentence] for each in found.accounts])
            kept.add(str(part.number), found.result)
            progress(done, len(parts))
        accounts = tuple(Account(fields, sentence) for fields, sentence in kept.results[ACCOUNTS])
        return [kept.results[str(each.number)] for each in parts], accounts


def _numbers(value: Any, count: int | None = None) -> bool:
    """Whether JSON is a list of numbers, of a given length if any."""
    return (
        isinstance(value, list)
        and (count is None or len(value) == count)
        and all(type(each) in (int, float) and abs(each) < MOST for each in value)  # NaN is not
    )


def _sound(results: Parts, work: Scoring | Measuring) -> bool:
    """Whether everything in a file has the expected form: no part of it is trusted unchecked."""
    accounts = results.get(ACCOUNTS)
    if not isinstance(accounts, list) or len(accounts) != len(work.models.paths):
        return False
    for each in accounts:
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], dict) and isinstance(each[1], str)):
            return False
    return all(work.fits(result) for name, result in results.items() if name != ACCOUNTS)


def _measured(window: Sequence[Any], streams: Iterable[Iterable[Iterable[float]]] | None) -> Measured:
    """The measurements of a window from JSON."""
    count, of_a, of_b, divergence, agreed = window
    sums = None if streams is None else tuple(tuple((one, other) for one, other in layer) for layer in streams)
    return Measured(Window(count, (of_a, of_b), divergence, agreed), sums)
