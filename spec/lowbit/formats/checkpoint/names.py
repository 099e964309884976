"""Tensors of a checkpoint: their names and shapes.

A linear layer is stored N × K, one row for each output, and is K × N everywhere in lowbit. Query and key rows are
half-split as they are (see `rope`), unlike those of a GGUF file of the same model. In Mixtral the three matrices of an
expert are numbered: ``w1`` is the gate, ``w3`` the up projection, and ``w2`` the down projection.

Source: the published checkpoint of Mixtral 8x7B.
"""

from collections.abc import Iterator

from lowbit.model.config import LlamaConfig
from lowbit.model.weights import linear_shapes

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

VECTORS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
ATTENTION = {f"{part}": f"self_attn.{part[0]}_proj" for part in ("query", "key", "value", "output")}
DENSE = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
ROUTER = "block_sparse_moe.gate"
EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}

Shape = tuple[int, ...]


def layer_names(config: LlamaConfig, number: int) -> dict[str, str]:
    """The tensors of one block: from the names of `LayerWeights` and its `linears` to those of the file."""
    stored = VECTORS | ATTENTION
    if config.routing is None:
        stored |= {f"feed_forward.{name}": part for name, part in DENSE.items()}
    else:
        stored["feed_forward.router"] = ROUTER
        for expert in range(config.routing.experts):
            prefix = f"block_sparse_moe.experts.{expert}"
            stored |= {f"feed_forward.experts[{expert}].{name}": f"{prefix}.{part}" for name, part in EXPERT.items()}
    return {name: f"model.layers.{number}.{part}.weight" for name, part in stored.items()}


def layer_shapes(config: LlamaConfig, number: int) -> dict[str, Shape]:
    """The tensors of one block with their shapes as they are stored."""
    shapes: dict[str, Shape] = {name: (columns, rows) for name, (rows, columns) in linear_shapes(config).items()}
    shapes |= dict.fromkeys(VECTORS, (config.hidden,))
    return {stored: shapes[name] for name, stored in layer_names(config, number).items()}


def tensor_shapes(config: LlamaConfig, tied: bool) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a model with its shape as it is stored, in the order in which a token meets them.

    >>> config = LlamaConfig(1, 8, 16, 2, 1, 4, 50, 32, 10000.0, 1e-5)
    >>> dict(tensor_shapes(config, tied=True))["model.layers.0.self_attn.k_proj.weight"]
    (4, 8)
    """
    yield EMBEDDING, (config.vocabulary, config.hidden)
    for number in range(config.layers):
        yield from layer_shapes(config, number).items()
    yield NORM, (config.hidden,)
    if not tied:
        yield HEAD, (config.vocabulary, config.hidden)
