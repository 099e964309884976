"""Quantisers on weights that were never quantised and that others trained: the errors of the layers of an encoder.

all-MiniLM-L6-v2 is a BERT of six blocks in float32. It predicts no text, so the errors of its layers are all that is
measured: for each matrix the squared error of its results over its squared results, on text that no quantiser has seen.
GPTQ is calibrated on another text. All inputs are those of the unquantised model.

Source: QIGen §2; BERT (arXiv 1810.04805) §3; the architecture's own ``config.json``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from experiments.qigen import BITS, METHODS
from experiments.running import Experiment, Row
from lowbit.arrays import F32, F64
from lowbit.formats.fetch import fetch, read_text
from lowbit.linear.elementary import softmax
from lowbit.quantization.gptq import layer_error
from lowbit.rewriting.methods import Rounding

MODEL = "minilm"
WINDOW, QUICK_WINDOW = 512, 32
MEASURED, CALIBRATED = 33, 16
"""Windows of the text that is measured on, and of the one that GPTQ reads."""
HEADS, LAYERS, EPSILON = 12, 6, 1e-12
CLS, SEP = 101, 102
GROUPS = (0, 128, 64, 32)
"""Rows of a group; 0 for a whole column."""
GROUPS_OF = {"GPTQ act-order": (0, 128)}
SHARED = {"attention.self.key": "attention.self.query", "attention.self.value": "attention.self.query"}
"""Matrices that read what another one reads."""
MATRICES = (
    *("attention.self.query", "attention.self.key", "attention.self.value"),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)


def rows(quick: bool) -> list[Row]:
    """Every quantiser."""
    return list(_rows(quick))


def _rows(quick: bool) -> Iterator[Row]:
    for method in METHODS:
        for bits in BITS[1:2] if quick else BITS:
            for group in GROUPS[2:3] if quick else GROUPS_OF.get(method, GROUPS):
                settings: dict[str, str | int] = {"model": MODEL, "method": method, "bits": bits, "group": group}
                yield Row(settings, partial(measured, method, bits, group, quick))


def measured(method: str, bits: int, group: int, quick: bool) -> dict[str, Any]:
    """The error of each matrix, by its place in the model."""
    it, errors = subject(quick), []
    kind, act_order = METHODS[method]
    for name, weights in it.matrices.items():
        rounding = Rounding(kind, group or len(weights), act_order=act_order, real_zeros=True)
        inputs = rounding.of_inputs(it.calibrated[source_of(name)]) if kind == "gptq" else None
        square = it.measured[source_of(name)]
        found = rounding(weights, bits, inputs).floats
        errors.append(layer_error(weights, found, square) / layer_error(weights, np.zeros_like(weights), square))
    return {"errors": errors, "names": list(it.matrices), "counts": list(it.counts)}


def source_of(name: str) -> str:
    """The matrix whose inputs are kept for this one.

    >>> source_of("0.attention.self.value")
    '0.attention.self.query'
    """
    layer, _, part = name.partition(".")
    return f"{layer}.{SHARED.get(part, part)}"


@dataclass(frozen=True, eq=False)
class Subject:
    """The encoder with what its matrices read.

    Attributes:
        matrices: float32, K × N each, by layer and name.
        measured: X^T X of the text that is measured on, by the names of `source_of`.
        calibrated: the same of the text that GPTQ reads.
        counts: tokens of each window that is measured on.
    """

    matrices: Mapping[str, F32]
    measured: Mapping[str, F64]
    calibrated: Mapping[str, F64]
    counts: Sequence[int]


@cache
def subject(quick: bool) -> Subject:
    """The model and its inputs on both texts, or on a little of them."""
    model = loaded()
    size, read = (QUICK_WINDOW, (1, 1)) if quick else (WINDOW, (MEASURED, CALIBRATED))
    texts = [windows(name, size, count) for name, count in zip(("lcet10", "alice29"), read, strict=True)]
    measured, calibrated = (inputs_of(model, text) for text in texts)
    return Subject(model.matrices, measured, calibrated, [len(window) for window in texts[0]])


def loaded() -> "Encoder":
    """The model."""
    tensors = load_file(fetch("minilm"))
    names = [f"{number}.{name}" for number in range(LAYERS) for name in MATRICES]
    return Encoder(tensors, {name: np.ascontiguousarray(tensors[f"encoder.layer.{name}.weight"].T) for name in names})


def tokens_of(text: str) -> list[int]:
    """The tokens of a text, without marks."""
    tokenizer = Tokenizer.from_file(str(fetch("minilm-tokenizer")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def marked(tokens: list[int]) -> list[int]:
    """Tokens between the marks that the model was trained with."""
    return [CLS, *tokens, SEP]


def windows(name: str, size: int, count: int) -> list[list[int]]:
    """The first windows of a text, each between the marks that the model was trained with."""
    ids, inner = tokens_of(read_text(fetch(name))), size - 2
    return [marked(ids[start : start + inner]) for start in range(0, inner * count, inner)]


def inputs_of(encoder: "Encoder", text: list[list[int]]) -> dict[str, F64]:
    """X^T X of what the matrices read in the windows of a text."""
    sums: dict[str, F64] = {}

    def watch(name: str, x: F32) -> None:
        if source_of(name) == name:
            wide = x.astype(np.float64)
            sums[name] = sums.get(name, 0.0) + wide.T @ wide

    for window in text:
        encoder(window, watch)
    return sums


class Encoder:
    """BERT in float32, norms after each part.

    Args:
        tensors: of the file.
        matrices: K × N, by layer and name.
    """

    def __init__(self, tensors: Mapping[str, F32], matrices: Mapping[str, F32]) -> None:
        self._tensors, self.matrices = tensors, matrices

    def __call__(self, tokens: list[int], watch: Any = None) -> F32:
        """The last hidden states, T × hidden; `watch` is called with the name of a matrix and what it reads."""
        parts = [self._tensors[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
        x = self._norm("embeddings", parts[0][tokens] + parts[1][: len(tokens)] + parts[2][0])
        for number in range(LAYERS):
            mixed = self._attention(number, x, watch)
            x = self._norm(
                f"encoder.layer.{number}.attention.output",
                x + self._linear(f"{number}.attention.output.dense", mixed, watch),
            )
            inner = gelu(self._linear(f"{number}.intermediate.dense", x, watch))
            x = self._norm(f"encoder.layer.{number}.output", x + self._linear(f"{number}.output.dense", inner, watch))
        return x

    def _attention(self, number: int, x: F32, watch: Any) -> F32:
        query, key, value = (
            self._linear(f"{number}.attention.self.{name}", x, watch).reshape(len(x), HEADS, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / np.float32(np.sqrt(query.shape[2]))
        mixed: F32 = (softmax(scores.astype(np.float64)).astype(np.float32) @ value).swapaxes(0, 1)
        return np.ascontiguousarray(mixed.reshape(x.shape))

    def _linear(self, name: str, x: F32, watch: Any) -> F32:
        if watch is not None:
            watch(name, x)
        y: F32 = x @ self.matrices[name] + self._tensors[f"encoder.layer.{name}.bias"]
        return y

    def _norm(self, name: str, x: F32) -> F32:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
        gain, bias = (self._tensors[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        normed: F32 = (scaled * gain + bias).astype(np.float32)
        return normed


def gelu(x: F32) -> F32:
    """x times the distribution function of the normal distribution, by a rational approximation whose error is at most
    1.5e-7 (Abramowitz and Stegun, 7.1.26).

    >>> gelu(np.array([-10, 0, 1], np.float32)).round(4)
    array([-0.    ,  0.    ,  0.8413], dtype=float32)
    """
    t = 1 / (1 + 0.3275911 * np.abs(x) / np.sqrt(2))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = series * np.exp(-(x.astype(np.float64) ** 2) / 2)  # 1 - erf(|x| / √2)
    y: F32 = (x * np.where(x < 0, tail / 2, 1 - tail / 2)).astype(np.float32)
    return y


EXPERIMENT = Experiment("encoder", "Errors of the layers of a float32 encoder by bits, group size and quantiser.", rows)
