"""Tensors of a checkpoint: their names and shapes.

A linear layer is stored N × K, one row for each output, and is K × N everywhere in lowbit. Query and key rows are
half-split as they are (see `rope`), unlike those of a GGUF file of the same model. In Mixtral the three matrices of an
expert are numbered: ``w1`` is the gate, ``w3`` the up projection, and ``w2`` the down projection. A tensor may hold
several matrices of the same input, one after another (`lowbit.formats.checkpoint.architectures`).

Source: the published checkpoint of Mixtral 8x7B.
"""

from collections.abc import Iterator

from lowbit.formats.checkpoint import stacked
from lowbit.formats.checkpoint.architectures import ARCHITECTURES, ATTENTION, Architecture
from lowbit.model.config import LlamaConfig
from lowbit.model.weights import linear_shapes, vector_sizes

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Shape = tuple[int, ...]


def vector_names(architecture: Architecture, number: int) -> dict[str, str]:
    """The vectors of one block: from the names of `LayerWeights` to those of the file."""
    return {name: f"model.layers.{number}.{stored}" for name, stored in architecture.vectors.items()}


def matrix_names(architecture: Architecture, config: LlamaConfig, number: int) -> dict[str, list[str]]:
    """The matrices of one block: from the names of the file to those of `LayerWeights.linears`, in order of rows;
    stacked experts are not among them."""
    parts = dict(architecture.matrices)
    if (sparse := architecture.sparse) is not None and config.routing is not None:
        parts = ATTENTION | {"feed_forward.router": sparse.router}
        for expert in range(0 if sparse.stacked else config.routing.experts):
            parts |= {
                f"feed_forward.experts[{expert}].{name}": f"{sparse.experts}.{expert}.{part}"
                for name, part in sparse.parts.items()
            }
    held: dict[str, list[str]] = {}
    for name, stored in parts.items():
        held.setdefault(f"model.layers.{number}.{stored}.weight", []).append(name)
    return held


def stack_prefix(architecture: Architecture, number: int) -> str | None:
    """The prefix of the names of a block's stacked experts; None if it has none."""
    sparse = architecture.sparse
    return f"model.layers.{number}.{sparse.experts}" if sparse is not None and sparse.stacked else None


def layer_shapes(
    architecture: Architecture, config: LlamaConfig, number: int, *, coded: bool = False
) -> dict[str, Shape]:
    """The tensors of one block with their stored shapes; stacked experts in MXFP4 if they are `coded`."""
    sizes, shapes = vector_sizes(config), linear_shapes(config)
    found: dict[str, Shape] = {stored: (sizes[name],) for name, stored in vector_names(architecture, number).items()}
    for stored, names in matrix_names(architecture, config, number).items():
        found[stored] = (sum(shapes[name][1] for name in names), shapes[names[0]][0])
    prefix = stack_prefix(architecture, number)
    return found if prefix is None else found | stacked.shapes(config, prefix, coded=coded)


def tensor_shapes(
    config: LlamaConfig,
    tied: bool,
    architecture: Architecture = ARCHITECTURES["mixtral"],
    *,
    coded: bool = False,
) -> Iterator[tuple[str, Shape]]:
    """Every tensor of a model with its stored shape, in the order of use.

    >>> config = LlamaConfig(1, 8, 16, 2, 1, 4, 50, 32, 10000.0, 1e-5)
    >>> dict(tensor_shapes(config, tied=True))["model.layers.0.self_attn.k_proj.weight"]
    (4, 8)

    Args:
        config: the shape of the model.
        tied: whether the head is the embedding.
        architecture: the kind of model; by default one with the names of Llama, Mistral and Mixtral.
        coded: whether stacked experts are MXFP4.
    """
    yield EMBEDDING, (config.vocabulary, config.hidden)
    for number in range(config.layers):
        yield from layer_shapes(architecture, config, number, coded=coded).items()
    yield NORM, (config.hidden,)
    if not tied:
        yield HEAD, (config.vocabulary, config.hidden)
