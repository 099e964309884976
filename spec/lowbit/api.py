"""What most users need first, in one place: the names that ``import lowbit`` offers.

Each has a chapter of its own: quantisation (`lowbit.quantization.affine`), products on a backend (`lowbit.backend`),
running a model (`lowbit.runtime`), and the conformance suite, which is a package of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend
from lowbit.backend import load as load_backend
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.formats.fetch import DEFAULT_MODEL, fetch
from lowbit.model.quantization_plan import Plan
from lowbit.quantization.affine import QuantizedMatrix, dequantize, quantize
from lowbit.runtime import LanguageModel, Options, load
from lowbit.runtime.language_model import AS_STORED
from lowbit.system.entries import entries, loaded

__all__ = ["certify", "dequantize", "load_backend", "load_model", "matmul", "quantize"]

CERTIFY = "lowbit.certify"
"""The group of the entry point by which a package offers the conformance suite."""


def matmul(x: F32, W: QuantizedMatrix, backend: str | Backend | None = None) -> F32:
    """``x W`` for a vector or a matrix x and a quantised matrix W, by a backend's own kernel.

    >>> W = quantize(np.eye(32, dtype=np.float32), bits=4, group_size=32)
    >>> float(matmul(np.ones(32, np.float32), W, "reference").sum())
    32.0

    W is prepared anew in each call. To multiply by it often, prepare it once: `lowbit.backend.Backend.prepare`.

    Args:
        x: float32, K or T × K.
        W: K × N, from `quantize`.
        backend: its name; None for the default, the first of `lowbit.backend.DEFAULT_ORDER` that can run here; or a
            backend that is open.

    Returns:
        float32, N or T × N.

    Raises:
        ArgumentError: wrong dtype or shape; no such backend.
        UnavailableError: the backend cannot run here.
        NotDeclaredError: the backend does not declare this product.
    """
    with ExitStack() as opened:
        engine = backend if isinstance(backend, Backend) else opened.enter_context(load_backend(backend))
        y: F32 = engine.run("linear.qgemv" if np.ndim(x) == 1 else "linear.qgemm", x, W)
        return y


def load_model(
    model: str | Path | None = None,
    backend: str | Backend | None = None,
    *,
    bits: int | None = None,
    group_size: int = 64,
    options: Options = AS_STORED,
) -> LanguageModel:
    """A language model on a backend, ready to generate; leaving it as a context manager closes it.

    Args:
        model: a GGUF file, or a checkpoint directory with config.json, safetensors and tokenizer.json; None for a small
            published model, which is fetched once.
        backend: as in `matmul`.
        bits: quantise the linear layers again to this many bits; None to leave them as they are stored.
        group_size: weights in a group, with `bits`.
        options: further choices (`lowbit.runtime.Options`).

    Raises:
        LowbitError: no such model or backend, or wrong options; the message says what to do.
    """
    if bits is not None:
        if options.plan is not None:
            sentence = "bits and options.plan both say how to quantise the model; give one of them"
            raise ArgumentError("bits", bits, "None, where options has a plan", sentence)
        options = replace(options, plan=Plan.uniform(bits, group_size))
    return load(fetch(DEFAULT_MODEL) if model is None else model, backend, options)


@dataclass(frozen=True)
class Certification:
    """What the conformance suite found about a backend.

    Attributes:
        verdict: ``passed``, ``failed`` or ``nothing executed``.
        passed: how many cases passed.
        failed: how many failed.
        not_declared: how many were not run, because the backend does not declare them.
        report: the whole report, as ``lowbit conformance --json`` prints it.
    """

    verdict: str
    passed: int
    failed: int
    not_declared: int
    report: Mapping[str, Any]


def certify(
    backend: str | Callable[..., Any],
    operations: str | Sequence[str] = (),
    *,
    profiles: str | Sequence[str] = (),
    seeds: int = 5,
    quick: bool = False,
    model: str | None = None,
    **function: Any,
) -> Certification:
    """Test a backend, or a plain function, against the specification with the conformance suite.

    A function is tested in a process of its own, as a backend of one operation (`lowbit.backend.function`)::

        lowbit.certify(my_gemv, "linear.gemv", format="gptq-v2", bits=4, activations="bfloat16", arrays="torch")
        lowbit.certify(my_gemv, profiles="lowbit-1.1/gptq-gemv-bf16", arrays="torch")

    Args:
        backend: a name that `lowbit backends` lists, or ``module:Class``; or a function.
        operations: only these operations or clauses, such as ``linear.qgemv``; all by default. For a function the
            operation that it computes, which a profile says too.
        profiles: only the cases of these profiles, which are certified. For a function one of one operation; it says
            what the function handles.
        seeds: how many seeds of the random tier.
        quick: only a few cases of each clause.
        model: the path of a GGUF file whose shapes and weights are tested too.
        function: what a function handles: ``format``, ``activations``, ``result``, the options of the format, a
            `lowbit.backend.Range` of ``rows``, ``columns`` or ``batch``; its ``arithmetic``; ``arrays`` and ``device``.

    Raises:
        UnavailableError: the suite is not installed, or several packages offer one.
        LowbitError: the suite refuses an argument or the backend.
    """
    found, what = entries(CERTIFY), "the conformance suite"
    if not found:
        raise UnavailableError(what, "no installed package offers it", "install lowbit[conformance]")
    if len(found) > 1:
        reason = f"several packages offer it: {', '.join(entry.value for entry in found)}"
        raise UnavailableError(what, reason, "uninstall all of them but one")
    suite: Any = loaded(found[0], what)
    choices = {"profiles": profiles, "seeds": seeds, "quick": quick, "model": model}
    answer: Certification = suite(backend, operations, **choices, **function)
    return answer
