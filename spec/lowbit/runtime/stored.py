"""Models on disk: a GGUF file or a checkpoint directory, opened, and quantised where a plan asks for it.

A GGUF file is read into memory as a whole when the first weight is needed. Of a checkpoint directory only the
description is read at first, because the weights may be larger than memory. Its blocks are read one at a time; if they
are to be quantised, they are quantised one at a time and kept in the cache folder.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint import tokenizer as checkpoint_tokenizer
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.formats.fetch import Report, silent
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.reader import check_model, open_gguf, read_llama
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.config import LlamaConfig
from lowbit.model.quantization_plan import Plan, planned
from lowbit.model.weights import DeferredWeights, LayeredWeights, LlamaWeights, Progress, in_memory
from lowbit.text import quoted


def part_of(report: Report, what: str) -> Progress:
    """The progress of one task; reports its start at once."""
    report(what, 0, 1)
    return lambda done, total: report(what, done, total)


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model as it is stored.

    Attributes:
        name: of the file or directory.
        layered: the weights, in memory or block by block from disk.
        tokenizer: text to tokens and back.
        remarks: what a user should know about how the file is read, a sentence each.
    """

    name: str
    layered: LayeredWeights
    tokenizer: Tokenizer
    remarks: tuple[str, ...] = ()

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model."""
        return self.layered.config

    @property
    def weights(self) -> LlamaWeights:
        """All weights in memory; those of a directory are read again each time."""
        return in_memory(self.layered)


def open_model(
    path: Path, *, identified: bool = False, gptq_version: Version | None = None, context: int | None = None
) -> StoredModel:
    """Open a GGUF file or a checkpoint directory.

    Args:
        path: of the file or directory.
        identified: whether the digest of a file will be needed; it is then computed in the background.
        gptq_version: ``v1`` or ``v2`` for a GPTQ directory, overriding its label and its zeros; None to follow them.
        context: the longest text, in tokens; None for the model's default.

    Raises:
        ArgumentError: there is no such file or directory; a version of GPTQ for another model; a context that the
            model does not have.
        FormatError: its architecture is not supported, or it is damaged.
    """
    if os.path.isdir(path):  # `Path.is_dir` raises where a folder on the way may not be entered
        checkpoint = open_checkpoint(path, gptq_version, context)
        tokenizer = checkpoint_tokenizer.read_tokenizer(checkpoint)
        return StoredModel(checkpoint.file, checkpoint, tokenizer, checkpoint.remarks)
    if gptq_version is not None:
        sentence = f"GPTQ version {gptq_version} was asked for, and {quoted(path.name)} is no directory of GPTQ"
        raise ArgumentError("gptq_version", gptq_version, "None", sentence)
    source = open_gguf(path, context)
    check_model(source)  # before the tokenizer, whose error would be less specific
    digest = _begun(source.digest) if identified else source.digest
    tokenizer = gguf_tokenizer.read_tokenizer(source)
    return StoredModel(path.name, DeferredWeights(source.config, partial(read_llama, source), digest), tokenizer)


def _begun(digest: Callable[[], str]) -> Callable[[], str]:
    """A function that waits for a digest, whose computation starts now in a thread."""
    threads = ThreadPoolExecutor(1)
    waiting = threads.submit(digest)
    threads.shutdown(wait=False)
    return waiting.result


def all_of(name: str, weights: LayeredWeights, report: Report = silent) -> LlamaWeights:
    """All weights of a model in memory; reports only what is read now."""
    held = weights.held if isinstance(weights, DeferredWeights) else weights
    return held if isinstance(held, LlamaWeights) else in_memory(weights, part_of(report, f"reading {name}"))


def quantised(name: str, weights: LayeredWeights, plan: Plan | None, report: Report = silent) -> LayeredWeights:
    """The weights as stored, or quantised by a plan.

    A directory is quantised with only a few of its matrices in memory, and the result is kept in the cache folder. A
    model in memory stays there.

    Args:
        name: of the model, for `report`.
        weights: the model.
        plan: how it is quantised; None for the stored weights.
        report: called while it is quantised.

    Raises:
        LowbitError: weights that cannot be quantised in this way; no room for them.
    """
    if plan is None:
        return weights
    if not isinstance(weights, Checkpoint):
        return planned(all_of(name, weights, report), plan, part_of(report, f"quantising {plan}"))
    return quantized(
        weights,
        plan,
        progress=lambda done, total: report(f"quantising {plan}", done, total),
        checking=lambda done, total: report(f"checking {name}", done, total),
    )
