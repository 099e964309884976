"""Quantised copies of tiny checkpoints, and what they must be equal to."""

import numpy as np

from lowbit.formats.checkpoint.cache import QuantizedCheckpoint
from lowbit.model.matrices import Matrix, is_float, to_float
from lowbit.model.quantization_plan import Plan, Quantization, planned
from lowbit.model.weights import in_memory
from lowbit.quantization.affine import QuantizedMatrix

PLAN = Plan(Quantization(2, 16), Quantization(4, 32), Quantization(8, 32))


def same(one: Matrix, other: Matrix) -> bool:
    """Whether two matrices are both quantised or both floats, of any width, and hold the same numbers."""
    if isinstance(one, QuantizedMatrix) and isinstance(other, QuantizedMatrix):
        return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))
    return is_float(one) == is_float(other) and np.array_equal(to_float(one), to_float(other))


def equal(made: QuantizedCheckpoint, plan: Plan) -> None:
    """Every part of the model is what the plan makes of the whole model in memory."""
    whole = planned(in_memory(made.source), plan)
    for number, layer in enumerate(whole.layers):
        found = made.layer(number)
        assert found.linears().keys() == layer.linears().keys()
        for name, matrix in layer.linears().items():
            assert same(found.linears()[name], matrix), name
            assert isinstance(matrix, QuantizedMatrix) == (plan.of(name) is not None), name
        np.testing.assert_array_equal(found.attention_norm, layer.attention_norm)
        np.testing.assert_array_equal(found.feed_forward_norm, layer.feed_forward_norm)
    assert same(made.head, whole.head)
    np.testing.assert_array_equal(made.embedding, whole.embedding)
    np.testing.assert_array_equal(made.norm, whole.norm)
