"""What most users need first, in one place: the names of ``import lowbit``.

Each has its own chapter: quantisation (`lowbit.quantization.affine`), products on a backend (`lowbit.backend`), running
a model (`lowbit.runtime`), continuing its training (`lowbit.uptraining`), and the conformance suite, which is a
separate package.
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Backend
from lowbit.backend import load as load_backend
from lowbit.certification import certify
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.fetch import DEFAULT_MODEL, fetch
from lowbit.model.quantization_plan import Plan
from lowbit.quantization.affine import QuantizedMatrix, dequantize, quantize
from lowbit.runtime import LanguageModel, Options, load
from lowbit.runtime.options import AS_STORED
from lowbit.uptraining import uptrain

__all__ = ["certify", "dequantize", "load_backend", "load_model", "matmul", "quantize", "uptrain"]


def matmul(x: F32, W: QuantizedMatrix, backend: str | Backend | None = None) -> F32:
    """``x W`` for a vector or a matrix x and a quantised matrix W, by a backend's own kernel.

    >>> W = quantize(np.eye(32, dtype=np.float32), bits=4, group_size=32)
    >>> float(matmul(np.ones(32, np.float32), W, "reference").sum())
    32.0

    Each call prepares W again. To multiply by it often, prepare it once with `lowbit.backend.Backend.prepare`.

    Args:
        x: float32, K or T × K.
        W: K × N, from `quantize`.
        backend: its name; None for the default, the first of `lowbit.backend.DEFAULT_ORDER` that can run here; or an
            open backend.

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
    gptq_version: Version | None = None,
    context: int | None = None,
) -> LanguageModel:
    """A language model on a backend, ready to generate. As a context manager it closes itself on exit.

    Args:
        model: a GGUF file, or a checkpoint directory with config.json, safetensors and tokenizer.json; None for a small
            published model, which is fetched once.
        backend: as in `matmul`.
        bits: requantise the linear layers to this many bits; None leaves them as stored.
        group_size: weights in a group, with `bits`.
        options: further choices (`lowbit.runtime.Options`).
        gptq_version: ``v1`` or ``v2`` for a GPTQ directory, overriding its label and its zeros; None to follow them.
        context: the longest text, in tokens; None for the model's default. A rotary embedding that depends on the
            length of the text, such as that of Phi-3, follows this value (`lowbit.formats.checkpoint.rope`).

    Raises:
        LowbitError: no such model or backend, or wrong options; the message says what to do.
    """
    if bits is not None:
        if options.plan is not None:
            sentence = "bits and options.plan both say how to quantise the model; give one of them"
            raise ArgumentError("bits", bits, "None, where options has a plan", sentence)
        options = replace(options, plan=Plan.uniform(bits, group_size))
    opened = fetch(DEFAULT_MODEL) if model is None else model
    return load(opened, backend, options, gptq_version=gptq_version, context=context)
