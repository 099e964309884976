"""A model's step in torch, with gradients: what `lowbit_torch.uptraining` trains.

The program of the specification (`lowbit.model.step`) runs line by line, as the interpreter of `lowbit.model.block`
does, on whole windows of several sequences at once and in float32. So every model whose lines are in `TRAINED` can be
trained, whatever its architecture is called. A model with other lines, such as experts or sorted channels, is refused.

Shapes: B sequences of T tokens; a value of the program is B × T × its width.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError
from lowbit.model.block import parameters_of
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.program import BEGIN, END, Line, Program
from lowbit.model.step import step_of
from lowbit.model.weights import LlamaWeights
from lowbit_torch.operator import torch

Tensor = Any  # torch is not installed where types are checked
EMBEDDING, NORM, HEAD = "embedding", "norm", "head"


class Network:
    """A model with trainable parameters.

    Attributes:
        config: of the model.
        parameters: float32 tensors by name: ``embedding``, ``norm``, ``head`` and those of block n as ``n.NAME``, with
            the names and shapes of `LayerWeights`. A head that is tied to the embedding has none of its own.

    Raises:
        ArgumentError: the model has a line that is not in `TRAINED`, such as experts.
    """

    def __init__(self, weights: LlamaWeights, *, tied: bool) -> None:
        self.config, self._step, self._given = weights.config, step_of(weights), weights
        for program in (*self._step.blocks, self._step.last):
            for line in program:
                if line.kind not in TRAINED:
                    sentence = f"a model with the operation {line.kind} cannot be trained; allowed: {spoken(TRAINED)}"
                    raise ArgumentError("model", f"one with {line.kind}", spoken(TRAINED), sentence)
        found: dict[str, F32] = {EMBEDDING: np.asarray(weights.embedding), NORM: weights.norm}
        if not tied:
            found[HEAD] = to_float(weights.head)
        for number, layer in enumerate(weights.layers):
            found |= {f"{number}.{name}": to_float(value) for name, value in parameters_of(layer).items()}
        self.parameters = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in found.items()}

    def logits(self, tokens: Tensor) -> Tensor:
        """B × T × vocabulary, for tokens int64, B × T, at positions from 0 on."""
        x = self.parameters[EMBEDDING][tokens] * self.config.embedding_scale
        for number, program in enumerate(self._step.blocks):
            x = self._run(program, x, f"{number}.")[END]
        head = self.parameters.get(HEAD)
        named = {HEAD: self.parameters[EMBEDDING].T if head is None else head}
        return self._run(self._step.last, x, "", named)["logits"]

    def _run(self, program: Program, x: Tensor, prefix: str, named: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
        """The values of a program after its last line."""
        values = {BEGIN: x}
        for line in program:
            name = line.parameter
            parameter = None if name is None else named.get(name, self.parameters.get(f"{prefix}{name}"))
            inputs = [values[each] for each in line.inputs]
            if line.kind == "append":
                values["keys"], values["values"] = inputs
            elif line.kind == "attend":
                values[line.out] = attend(line, inputs[0], values["keys"], values["values"])
            else:
                values[line.out] = KINDS[line.kind](line, parameter, *inputs)
        return values

    def weights(self, rounded: Callable[[str, F32], F32]) -> LlamaWeights:
        """The model as it is now.

        Args:
            rounded: from the name of a parameter, without the number of its block, and its numbers to the numbers that
                are kept.
        """
        given, layers = self._given, []
        found = {
            name: rounded(name.rpartition(".")[2], value.detach().numpy()) for name, value in self.parameters.items()
        }
        for number, layer in enumerate(given.layers):
            own = {name.partition(".")[2]: value for name, value in found.items() if name.startswith(f"{number}.")}
            vectors: dict[str, Any] = {name: own[name] for name, value in vars(layer).items() if is_vector(value)}
            layers.append(replace(layer.changed(partial(_named, own)), **vectors))
        head = found[HEAD] if HEAD in found else np.ascontiguousarray(found[EMBEDDING].T)
        return LlamaWeights(self.config, found[EMBEDDING], tuple(layers), found[NORM], head)


def _named(numbers: Mapping[str, F32], name: str, matrix: Matrix) -> F32:
    """What replaces the matrix with a name."""
    return numbers[name]


def is_vector(value: object) -> bool:
    """Whether an attribute of `LayerWeights` is a vector, and not a matrix or absent."""
    return isinstance(value, np.ndarray) and value.ndim == 1


def norm(line: Line, gain: Tensor, x: Tensor) -> Tensor:
    """RMSNorm of every run of channels that is as long as the gain."""
    heads = x.unflatten(-1, (-1, gain.numel()))
    normed = torch.nn.functional.rms_norm(heads, (gain.numel(),), gain, line.setting("epsilon"))
    return normed.flatten(-2)


def rotate(line: Line, _: None, x: Tensor) -> Tensor:
    """RoPE of every head."""
    size = line.setting("head_dim")
    turn = line.frequencies.rotation(size, 0, x.shape[1])
    cos, sin = (torch.from_numpy(each.astype(np.float32))[:, None, :] for each in (turn.cos, turn.sin))
    heads = x.unflatten(-1, (-1, size))
    return (heads * cos + heads[..., torch.from_numpy(turn.layout.partner)] * sin).flatten(-2)


def attend(line: Line, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal grouped-query attention within a window, where the line has one."""
    size, window, count = line.setting("head_dim"), line.setting("window"), queries.shape[1]
    query, key, value = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in (queries, keys, values))
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    seen = None
    if window is not None and window < count:
        back = torch.arange(count)[:, None] - torch.arange(count)
        seen = (back >= 0) & (back < window)
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None)
    return attended.transpose(1, 2).flatten(-2)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda line, _, gate, up: activation(gate) * up


KINDS: Mapping[str, Callable[..., Tensor]] = {
    "norm": norm,
    "product": lambda line, matrix, x: x @ matrix,
    "bias": lambda line, bias, x: x + bias,
    "rotate": rotate,
    "swiglu": _gated(torch.nn.functional.silu),
    "geglu": _gated(lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
    "add": lambda line, _, one, other: one + other,
    "scale": lambda line, _, x: x * line.setting("factor"),
}
"""From a kind of line to its function of the line, its parameter and its inputs."""
TRAINED = (*KINDS, "append", "attend")
"""The kinds of lines that can be trained. `Network` itself hands keys and values from ``append`` to ``attend``."""
