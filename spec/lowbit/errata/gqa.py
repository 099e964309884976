"""Rulings on GQA.

Source: GQA, as printed in the copy at hand.
"""

import numpy as np

from lowbit.arrays import F64
from lowbit.attention.attention import attend
from lowbit.attention.pooling import KeyValueProjection, convert, pool
from lowbit.errata import ruling
from lowbit.linear.elementary import softmax

HEADS, GROUPS, DIM, TOKENS = 4, 2, 2, 3
RNG = np.random.Generator(np.random.PCG64(0))
QUERIES = RNG.normal(size=(TOKENS, HEADS, DIM))
KEYS, VALUES = RNG.normal(size=(2, GROUPS, TOKENS, DIM))

PRINTED_TABLE_1 = {
    "MHA-Large": (46.0, (42.9, 44.6, 46.2, 35.5, 46.6, 27.7, 78.2)),
    "MHA-XXL": (47.2, (43.8, 45.6, 47.5, 36.4, 46.9, 28.4, 81.9)),
    "MQA-XXL": (46.6, (43.0, 45.0, 46.9, 36.1, 46.5, 28.5, 81.3)),
    "GQA-8-XXL": (47.1, (43.5, 45.4, 47.7, 36.3, 47.2, 28.4, 81.6)),
}
"""Table 1: the average as printed, and the seven columns that it is the average of."""


def one_head(head: int, group: int, scale: float) -> F64:
    """The last token's output of one query head with the keys and values of one group."""
    scores = KEYS[group] @ QUERIES[-1, head] * scale
    mixed: F64 = softmax(scores) @ VALUES[group]
    return mixed


@ruling("G1", printed="query heads are divided into G groups; which heads form one is not stated", ruled="neighbours")
def groups_are_neighbours() -> None:
    """Neighbours and every G-th head give other outputs and other pooled heads; both chapters take neighbours."""
    output, scale = attend(QUERIES, KEYS, VALUES)[-1], 1 / np.sqrt(DIM)
    for head in range(HEADS):
        np.testing.assert_allclose(output[head], one_head(head, head // (HEADS // GROUPS), scale), rtol=1e-12)
    strided = [one_head(head, head % GROUPS, scale) for head in range(HEADS)]
    assert np.abs(output - strided).max() > 0.1
    weights = np.array([[1, 3, 10, 20]], np.float32)
    assert pool(weights, HEADS, GROUPS).tolist() == [[2, 15]]
    assert pool(weights[:, [0, 2, 1, 3]], HEADS, GROUPS).tolist() == [[5.5, 11.5]]


@ruling("G2", printed="projection matrices are mean-pooled; biases are not mentioned", ruled="pooled like weights")
def biases_are_pooled() -> None:
    """The keys of the converted layer are the mean keys only if the mean bias is added; dropped, they are elsewhere."""
    weights = RNG.normal(size=(5, HEADS * DIM)).astype(np.float32)
    bias = (10 * RNG.normal(size=HEADS * DIM)).astype(np.float32)
    layer = KeyValueProjection("self", HEADS, weights, weights, bias, bias)
    x = RNG.normal(size=5)
    means = (x @ layer.key + bias).reshape(GROUPS, HEADS // GROUPS, DIM).mean(axis=1).reshape(-1)
    pooled = convert(layer, GROUPS)
    assert pooled.key_bias is not None
    np.testing.assert_allclose(x @ pooled.key + pooled.key_bias, means, rtol=1e-4, atol=1e-4)
    assert np.abs(x @ pooled.key - means).max() > 1


@ruling(
    "G3",
    printed="Table 1: MQA-XXL averages 46.6, GQA-8-XXL 47.1",
    ruled="46.76 and 47.16, from the table's own columns",
)
def averages_of_table_1() -> None:
    """The two rows of multi-head models average to what is printed; the other two do not, by more than rounding.

    Source: GQA, Table 1.
    """
    averages = {name: sum(columns) / len(columns) for name, (_, columns) in PRINTED_TABLE_1.items()}
    assert round(averages["MQA-XXL"], 2) == 46.76
    assert round(averages["GQA-8-XXL"], 2) == 47.16
    wrong = [name for name, (printed, _) in PRINTED_TABLE_1.items() if abs(averages[name] - printed) > 0.05 + 1e-9]
    assert wrong == ["MQA-XXL", "GQA-8-XXL"]


@ruling(
    "G4",
    printed="models are T5, whose scores have no 1/√d and a relative bias per query head; attention is not written out",
    ruled="scores are divided by √d, without a bias, as in a decoder-only Llama; T5's form is given by the arguments "
    "scale and bias",
)
def scores_are_scaled() -> None:
    """The two forms differ; the chapter attends with the root, and with scale 1 and a bias per query head it is T5."""
    output, plain = attend(QUERIES, KEYS, VALUES)[-1], attend(QUERIES, KEYS, VALUES, scale=1.0)[-1]
    for given, scale in ((output, 1 / np.sqrt(DIM)), (plain, 1.0)):
        wanted = [one_head(head, head // (HEADS // GROUPS), scale) for head in range(HEADS)]
        np.testing.assert_allclose(given, wanted, rtol=1e-12)
    assert np.abs(output - plain).max() > 0.01
    by_head = np.arange(HEADS)[:, np.newaxis] * np.arange(TOKENS)  # by the distance of tokens, another for each head
    bias = np.tile(by_head[:, np.newaxis], (1, TOKENS, 1)).astype(np.float64)
    of_t5 = attend(QUERIES, KEYS, VALUES, scale=1.0, bias=bias)[-1]
    for head in range(HEADS):
        keys, values = KEYS[head // (HEADS // GROUPS)], VALUES[head // (HEADS // GROUPS)]
        wanted = softmax(keys @ QUERIES[-1, head] + bias[head, -1]) @ values
        np.testing.assert_allclose(of_t5[head], wanted, rtol=1e-12)
    assert np.abs(of_t5[0] - plain[0]).max() == 0 < np.abs(of_t5[1:] - plain[1:]).max()
