"""Llama and Mixtral for training, in torch: functions over a dictionary of parameters, named as in a checkpoint.

The reading directions are the checkpoint's too (N × K, ``y = x Wᵀ``), and the experts of a layer are stacked, so that
writing the file is cutting them apart. Nothing here is used to run the model; that is the decoder of the specification.

**Sparse layers.** A token goes to the two experts with the best gate logits, weighted by the softmax of these two. The
experts compute dropless: the (token, expert) pairs are sorted by expert, each expert multiplies its run of rows, and
the results are added back. The sum that keeps the load of experts even is that of the Switch Transformer, for each
layer :math:`E \\sum_e f_e P_e`, with :math:`f_e` the share of pairs that expert e gets and :math:`P_e` the mean
probability that the gate gives it; it is 1 where both are even.

Source: Mixtral (arXiv 2401.04088) §2; Switch Transformer (arXiv 2101.03961) equation 4.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from training.models import Shape

Tensor = Any  # torch is not installed where types are checked
Parameters = dict[str, Tensor]


def new_parameters(shape: Shape, seed: int) -> Parameters:
    """Drawn anew, float32: each matrix so that its results are as large as what goes in, and what is added to the
    stream less by the number of additions."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    added = 1 / math.sqrt(2 * shape.num_hidden_layers)

    def matrix(*size: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * (gain / math.sqrt(size[-1]))).requires_grad_()

    def feed_forward() -> Parameters:
        if not shape.sparse:
            return {
                "mlp.gate_proj.weight": matrix(inner, hidden),
                "mlp.up_proj.weight": matrix(inner, hidden),
                "mlp.down_proj.weight": matrix(hidden, inner, gain=added),
            }
        return {
            "block_sparse_moe.gate.weight": matrix(experts, hidden),
            "block_sparse_moe.experts.w1.weight": matrix(experts, inner, hidden),
            "block_sparse_moe.experts.w3.weight": matrix(experts, inner, hidden),
            "block_sparse_moe.experts.w2.weight": matrix(experts, hidden, inner, gain=added),
        }

    made = {"model.embed_tokens.weight": matrix(shape.vocab_size, hidden, gain=math.sqrt(hidden) / 2)}
    for number in range(shape.num_hidden_layers):
        made |= {
            f"model.layers.{number}.{name}": value
            for name, value in {
                "input_layernorm.weight": torch.ones(hidden, requires_grad=True),
                "self_attn.q_proj.weight": matrix(queries, hidden),
                "self_attn.k_proj.weight": matrix(keys, hidden),
                "self_attn.v_proj.weight": matrix(keys, hidden),
                "self_attn.o_proj.weight": matrix(hidden, queries, gain=added),
                "post_attention_layernorm.weight": torch.ones(hidden, requires_grad=True),
                **feed_forward(),
            }.items()
        }
    made["model.norm.weight"] = torch.ones(hidden, requires_grad=True)
    made["lm_head.weight"] = matrix(shape.vocab_size, hidden, gain=0.5)
    return made


@dataclass(frozen=True)
class Answer:
    """What a forward pass gives.

    Attributes:
        logits: B × S × vocabulary.
        balance: the balance loss, its mean over sparse layers; 1 is even, and 0 where no layer is sparse.
        shares: sparse layers × E, without gradient: the share of the (token, expert) pairs that each expert got.
    """

    logits: Tensor
    balance: Tensor
    shares: Tensor


def forward(parameters: Parameters, shape: Shape, tokens: Tensor) -> Answer:
    """Logits of every position of B sequences of S tokens (int64, B × S)."""
    turn = rotation(shape, tokens.shape[1])
    x = parameters["model.embed_tokens.weight"][tokens]
    balances, shares = [], []
    for number in range(shape.num_hidden_layers):
        prefix = f"model.layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        x = x + attention(layer, shape, norm(x, layer["input_layernorm.weight"], shape), turn)
        normed = norm(x, layer["post_attention_layernorm.weight"], shape)
        if not shape.sparse:
            x = x + dense(layer, normed)
            continue
        added, balance, share = sparse(layer, shape, normed)
        x = x + added
        balances.append(balance)
        shares.append(share)
    logits = norm(x, parameters["model.norm.weight"], shape) @ parameters["lm_head.weight"].T
    if not shape.sparse:
        return Answer(logits, torch.zeros(()), torch.zeros(0, 0))
    return Answer(logits, torch.stack(balances).mean(), torch.stack(shares))


def norm(x: Tensor, gain: Tensor, shape: Shape) -> Tensor:
    """RMSNorm."""
    return functional.rms_norm(x, (shape.hidden_size,), gain, shape.rms_norm_eps)


def rotation(shape: Shape, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `count` positions from 0 on, half-split: count × head_dim/2."""
    half = shape.head_dim // 2
    angle = torch.arange(count)[:, None] * shape.rope_theta ** (-torch.arange(half) / half)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """B × heads × S × head_dim, channel c paired with c + head_dim/2."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(layer: Parameters, shape: Shape, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Causal grouped-query attention: B × S × hidden."""
    batch, length, _ = x.shape

    def heads(name: str) -> Tensor:
        return (x @ layer[f"self_attn.{name}_proj.weight"].T).view(batch, length, -1, shape.head_dim).transpose(1, 2)

    group = shape.num_attention_heads // shape.num_key_value_heads
    query, key, value = rotate(heads("q"), turn), rotate(heads("k"), turn), heads("v")
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, -1) @ layer["self_attn.o_proj.weight"].T


def dense(layer: Parameters, x: Tensor) -> Tensor:
    """SwiGLU: B × S × hidden."""
    gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def sparse(layer: Parameters, shape: Shape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' answers (as x), the balance loss, and the experts' shares."""
    rows, experts, top_k = x.reshape(-1, shape.hidden_size), shape.num_local_experts, shape.num_experts_per_tok
    logits = rows @ layer["block_sparse_moe.gate.weight"].T
    best, chosen = logits.topk(top_k, dim=-1)
    order = torch.argsort(chosen.reshape(-1), stable=True)  # pairs, sorted by expert
    token = order // top_k
    counts = torch.bincount(chosen.reshape(-1), minlength=experts)
    answers = []
    for expert, run in enumerate(rows[token].split(counts.tolist())):
        w1, w2, w3 = (layer[f"block_sparse_moe.experts.{name}.weight"][expert] for name in ("w1", "w2", "w3"))
        answers.append((functional.silu(run @ w1.T) * (run @ w3.T)) @ w2.T)
    weights = best.softmax(dim=-1).reshape(-1)[order]
    summed = torch.zeros_like(rows).index_add(0, token, torch.cat(answers) * weights[:, None])
    share = counts / counts.sum()
    balance = experts * (share * logits.softmax(dim=-1).mean(dim=0)).sum()
    return summed.view_as(x), balance, share
