"""Continuing the training of a model from its weights, at a constant rate, as ``lowbit pool`` requires.

A model whose key-value heads are pooled predicts little until it is trained further; the GQA paper trains it for 5 % of
its original training. `uptrain` does that with a directory or a GGUF file and a text, and writes a directory of floats.
`Uptraining` is the same with weights in memory, for those who measure during training.

**What is trained** is every weight: embedding, matrices, norms, biases and head. The loss is the mean negative
log-likelihood of the next token over windows of the text. The optimiser is AdamW with β = (0.9, 0.95); matrices decay
by 0.1, vectors do not, and gradients are clipped to the norm 1. A model whose weights are quantised is trained from the
numbers that they stand for.

**It can be repeated.** The windows of a step are drawn from (seed, step) alone, so a training that was interrupted
continues as if it had not been. On one machine, with one number of threads and one version of torch, two runs give the
same weights.

Source: GQA (arXiv 2305.13245) §2.1, §3.1.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np

from lowbit.arrays import F32, I64, Array
from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.names import EMBEDDING, HEAD, NORM, vector_names
from lowbit.formats.fetch import Report, silent
from lowbit.model.matrices import Embedding, to_float
from lowbit.model.weights import LayerWeights, LlamaWeights, Progress
from lowbit.numbers.floats import FLOATS
from lowbit.rewriting.changing import write_floats
from lowbit.rewriting.journal import check_destination
from lowbit.rewriting.source import Derived, Source, open_source, smallest
from lowbit.system.interrupts import deferred
from lowbit.system.storage import written
from lowbit.uptraining import Course
from lowbit_torch.network import Network
from lowbit_torch.operator import torch

VERSION = 1
"""Version of the method; files of another version are not resumed."""
DECAY, CLIP, BETAS = 0.1, 1.0, (0.9, 0.95)
SAVED_EVERY = 50
"""Steps between two files from which an interrupted training resumes."""
RECENT = 20
"""Steps at both ends over which the loss is averaged."""


class Uptraining:
    """A model in training.

    Attributes:
        step: how many steps are done.
        losses: of every step, in nats a token.

    Raises:
        ArgumentError: a model that cannot be trained, such as one with experts; windows longer than its context, or
            texts no longer than a window; tokens that the model does not have.
    """

    def __init__(self, weights: LlamaWeights, texts: Sequence[I64], course: Course, *, tied: bool) -> None:
        """Begin with these weights.

        Args:
            weights: the model.
            texts: int64, tokens each; windows are drawn from each in proportion to its length.
            course: how it is trained.
            tied: whether the head is tied to the embedding.
        """
        config = weights.config
        check_integer("length", course.length, 1, config.context)
        for text in texts:
            check_integer("tokens of a text", len(text), least=course.length + 1)
            if text.min() < 0 or text.max() >= config.vocabulary:
                raise ArgumentError("token of a text", int(text.max()), f"0 to {config.vocabulary - 1}")
        self.course, self.step, self.losses, self._texts = course, 0, list[float](), list(texts)
        self._network = Network(weights, tied=tied)
        parameters = self._network.parameters.values()
        matrices, vectors = ([each for each in parameters if (each.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=course.rate, betas=BETAS, fused=True)

    def until(self, step: int, progress: Progress | None = None) -> None:
        """Train until `step` steps are done in all; `progress` is called after each."""
        while self.step < step:
            self._advance()
            if progress is not None:
                progress(self.step, step)

    def _advance(self) -> None:
        tokens = torch.from_numpy(self._drawn())
        with _deterministic():
            logits = self._network.logits(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._network.parameters.values(), CLIP)
            self._optimizer.step()
        self.losses.append(loss.item())
        self.step += 1

    def _drawn(self) -> I64:
        """The windows of this step, each with the token after it: B × (length + 1)."""
        rng, length = np.random.default_rng([self.course.seed, self.step]), self.course.length
        sizes = np.array([text.size for text in self._texts])
        pieces = []
        for _ in range(self.course.tokens // length):
            text = self._texts[rng.choice(len(sizes), p=sizes / sizes.sum())]
            start = int(rng.integers(text.size - length))
            pieces.append(text[start : start + length + 1])
        return np.stack(pieces).astype(np.int64)

    def weights(self, gain_offset: float = 0.0) -> LlamaWeights:
        """The model as it is now, rounded to the dtype of the course.

        Args:
            gain_offset: what a checkpoint of this kind subtracts from the gains of norms before it stores them.

        Raises:
            ArgumentError: a weight that the dtype does not hold, or that is not finite.
        """
        dtype = FLOATS[self.course.dtype].dtype

        def rounded(name: str, numbers: F32) -> F32:
            offset = np.float32(gain_offset if name.endswith("norm") else 0)
            with np.errstate(over="ignore"):
                found = (numbers - offset).astype(dtype).astype(np.float32) + offset
            if not np.isfinite(found).all():
                sentence = f"weights of {name} are not finite in {self.course.dtype}; take a lower rate, or float32"
                raise ArgumentError("weights", "too large", f"numbers that {self.course.dtype} holds", sentence)
            return np.ascontiguousarray(found)

        return self._network.weights(rounded)

    def save(self, path: Path, call: str) -> None:
        """Write all that `restore` needs, to a complete file or none.

        Args:
            path: of the file.
            call: a digest of all that determines the training.
        """
        state = {"call": call, "parameters": self._network.parameters, "optimizer": self._optimizer.state_dict()}
        with written(path, 0o600) as stream:
            torch.save(state | {"step": self.step, "losses": self.losses}, stream)

    def restore(self, path: Path, call: str) -> int:
        """Continue from a file of `save`, if it belongs to the same training; returns the number of completed steps."""
        try:
            kept = torch.load(path, weights_only=True)
            if kept["call"] != call:
                return 0
        except (OSError, EOFError, KeyError, TypeError, RuntimeError, UnpicklingError):
            return 0
        with torch.no_grad():
            for name, parameter in self._network.parameters.items():
                parameter.copy_(kept["parameters"][name])
        self._optimizer.load_state_dict(kept["optimizer"])
        self.step, self.losses = kept["step"], kept["losses"]
        return self.step


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True, eq=False)
class Trained(Derived):
    """A source with trained weights in place of its own."""

    weights: LlamaWeights

    @classmethod
    def of(cls, original: Source, weights: LlamaWeights) -> "Trained":
        """Everything but the weights comes from the original."""
        about = (original.tied, original.tokenizer, original.remarks)
        return cls(original.name, original.config, original.architecture, *about, original, weights)

    def layer(self, number: int) -> LayerWeights:
        return self.weights.layer(number)

    def vectors(self, number: int) -> Mapping[str, Array]:
        layer, offset = self.weights.layer(number), np.float32(self.architecture.gain_offset)
        names = vector_names(self.architecture, number)
        return {
            stored: smallest(getattr(layer, name) - (offset if name.endswith("norm") else np.float32(0)))
            for name, stored in names.items()
        }

    def ends(self) -> Iterator[tuple[str, Array]]:
        yield EMBEDDING, smallest(np.asarray(self.weights.embedding))
        yield NORM, smallest(self.weights.norm - np.float32(self.architecture.gain_offset))
        if not self.tied:
            yield HEAD, np.ascontiguousarray(smallest(to_float(self.weights.head)).T)

    def rows(self) -> F32 | Embedding:
        return self.weights.embedding


def uptrain(
    model: str | PathLike[str], out: str | PathLike[str], texts: Sequence[str], course: Course, report: Report = silent
) -> dict[str, Any]:
    """Implements `lowbit.uptrain`; arguments, results and errors are those of `lowbit.uptraining.uptrain`."""
    source, destination = open_source(Path(model)), Path(out)
    check_destination(destination)
    tokens = [np.array(source.tokenizer.encode(text, begin=False), np.int64) for text in texts]
    training = Uptraining(_read(source), tokens, course, tied=source.tied)
    call = _call(source, tokens, course)
    kept = destination.absolute().with_name(f".{destination.name}.training")
    resumed = training.restore(kept, call)
    with deferred() as interrupts:
        try:
            while training.step < course.steps:
                training.until(training.step + 1)
                report(f"training {source.name}", training.step, course.steps)
                if training.step % SAVED_EVERY == 0:
                    training.save(kept, call)
                interrupts.check()
        except KeyboardInterrupt:
            training.save(kept, call)
            raise
    trained = Trained.of(source, training.weights(source.architecture.gain_offset))
    told = write_floats(trained, destination, {"command": "uptrain", "call": call}, report)
    kept.unlink(missing_ok=True)
    ends = training.losses[:RECENT], training.losses[-RECENT:]
    loss = {name: float(np.mean(each)) for name, each in zip(("first", "last"), ends, strict=True)}
    return {"bytes": told["bytes"], "steps": course.steps, "resumed": resumed, "loss": loss}


def _call(source: Source, tokens: Sequence[I64], course: Course) -> str:
    """A digest of all that determines the trained weights."""
    texts = [hashlib.sha256(text.tobytes()).hexdigest() for text in tokens]
    content = [VERSION, source.identity(), texts, vars(course)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(source: Source) -> LlamaWeights:
    """All weights of a source."""
    ends: dict[str, Any] = dict(source.numbers_of_ends())
    head = ends.get("head")
    layers = tuple(source.layer(number) for number in range(source.config.layers))
    tied = np.ascontiguousarray(ends["embedding"].T) if head is None else head
    return LlamaWeights(source.config, ends["embedding"], layers, ends["norm"], tied)
