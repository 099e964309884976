"""An architecture of one's own: attention and the feed-forward part stand side by side and share one norm."""

import numpy as np

from lowbit.model.config import LlamaConfig
from lowbit.model.program import BEGIN, END, Line
from lowbit.model.weights import GatedWeights, LayerWeights, LlamaWeights
from lowbit.quantization.affine import quantize
from lowbit.runtime import Options, load

CONFIG = LlamaConfig(
    layers=2,
    hidden=64,
    feed_forward=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    context=32,
    rope_base=1e4,
    rms_epsilon=1e-5,
)
TURN = (("head_dim", 16), ("base", 1e4))
PROGRAM = (
    Line("norm", "normed", (BEGIN,), "attention_norm", (("epsilon", 1e-5),)),
    Line("product", "query", ("normed",), "query"),
    Line("product", "key", ("normed",), "key"),
    Line("product", "value", ("normed",), "value"),
    Line("rotate", "query_rotated", ("query",), settings=TURN),
    Line("rotate", "key_rotated", ("key",), settings=TURN),
    Line("append", "", ("key_rotated", "value")),
    Line("attend", "mixed", ("query_rotated",), settings=(("head_dim", 16),)),
    Line("product", "attention", ("mixed",), "output"),
    Line("product", "gate", ("normed",), "feed_forward.gate"),
    Line("product", "up", ("normed",), "feed_forward.up"),
    Line("swiglu", "inner", ("gate", "up")),
    Line("product", "feed_forward", ("inner",), "feed_forward.down"),
    Line("add", "middle", (BEGIN, "attention")),
    Line("add", END, ("middle", "feed_forward")),
)

rng = np.random.default_rng(0)


def matrix(rows, columns):
    return quantize(rng.normal(size=(rows, columns)).astype(np.float32) / rows**0.5, bits=4, group_size=32)


def layer():
    return LayerWeights(
        attention_norm=np.ones(64, np.float32),
        query=matrix(64, 64),
        key=matrix(64, 32),
        value=matrix(64, 32),
        output=matrix(64, 64),
        feed_forward_norm=None,
        feed_forward=GatedWeights(gate=matrix(64, 128), up=matrix(64, 128), down=matrix(128, 64)),
        program=PROGRAM,
    )


embedding = rng.normal(size=(100, 64)).astype(np.float32)
weights = LlamaWeights(CONFIG, embedding, (layer(), layer()), np.ones(64, np.float32), matrix(64, 100))
with (
    load(weights, "numpy", Options(step="formulas")) as formulas,
    load(weights, "cppyy", Options(step="operations")) as operations,
    load(weights, "cppyy", Options(step="compiled")) as compiled,
):
    expected, one_by_one, whole = (model.logits([1, 2, 3]) for model in (formulas, operations, compiled))
print("largest difference from the formulas:", f"{np.abs(whole - expected).max():.0e}")
print("compiled and one by one have the same bits:", np.array_equal(whole, one_by_one))
