"""CTranslate2: a linear layer with 8-bit weights, in a model that does nothing else. Python reaches no smaller part.

The model is a decoder of one layer that adds zeros. Its table of embeddings holds the activations, each row is a
sequence of one token, and the logits are the products. The compute type is float32, for which weights are dequantised
when the model is loaded; the types of 8 bits cast activations within the product.

Source: ``ctranslate2.specs`` and CTranslate2's documentation (Quantization). A scale there
is the number that weights were multiplied by.
"""

import tempfile
from typing import Any

import numpy as np

from atlas.entry import Entry, Project, library
from lowbit.arrays import F32, Array

package = library("ctranslate2")
specs = library("ctranslate2.specs.transformer_spec")


def decoder(x: F32, codes: Array, scale: F32) -> Any:
    """The specification of the model."""
    width = x.shape[1]
    choices = {"no_final_norm": True, "rms_norm": True, "alibi": True}
    spec = specs.TransformerDecoderModelSpec.from_config(num_layers=1, num_heads=1, **choices)
    made, layer = spec.decoder, spec.decoder.layer[0]
    zeros = np.zeros((3 * width, width), np.float32)
    layer.self_attention.layer_norm.gamma = layer.ffn.layer_norm.gamma = zeros[0]
    layer.self_attention.linear[0].weight, layer.self_attention.linear[1].weight = zeros, zeros[:width]
    layer.ffn.linear_0.weight, layer.ffn.linear_1.weight = zeros[:1], zeros[:1].T
    made.embeddings.weight, made.scale_embeddings = x, False
    made.projection.weight, made.projection.weight_scale = codes, (1 / scale[:, 0]).astype(np.float32)
    spec.register_vocabulary([str(n) for n in range(len(x))])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    return spec


def product(x: F32, codes: Array, scale: F32) -> F32:
    with tempfile.TemporaryDirectory() as folder:
        decoder(rows := np.atleast_2d(x), codes, scale).save(folder)
        model = package.Generator(folder, device="cpu", compute_type="float32", intra_threads=1)
    tokens = np.arange(len(rows), dtype=np.int32)
    given = (tokens[:, np.newaxis], np.ones_like(tokens))
    logits = model.forward_batch(*(package.StorageView.from_array(each) for each in given))
    return np.array(logits).reshape(*x.shape[:-1], -1)


LIMITS = {"format": "int8-token", "activations": "float32", "result": "float32"}

PROJECT = Project(
    "CTranslate2",
    ("ctranslate2",),
    tuple(
        Entry("Generator.forward_batch, float32", "product", operation, LIMITS, arrays="numpy")
        for operation in ("linear.gemv", "linear.gemm")
    ),
)
