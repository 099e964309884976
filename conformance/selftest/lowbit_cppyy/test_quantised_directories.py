"""Models in directories that are quantised already: kernels multiply by their bytes, and no float is made of them."""

from pathlib import Path

import numpy as np
import pytest

from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.weights import Matrix
from lowbit.runtime import linears, load
from lowbit_cppyy.stored.formats import PARTS

DATA = Path(__file__).parents[1] / "lowbit" / "formats" / "checkpoint" / "quantised"
MODELS = sorted(path.parent.name for path in DATA.glob("*/expected.npz"))
LIMIT = 1e-5
"""Of the largest logit: both sides multiply in float32."""


def test_kernels_multiply_by_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every model whose formats are declared: each method that has kernels, at each of its widths."""

    def refused(matrix: Matrix) -> None:
        raise AssertionError(f"{matrix} became floats")

    monkeypatch.setattr(linears, "to_float", refused)
    met = set[str]()
    for name in MODELS:
        checkpoint = open_checkpoint(DATA / name)
        formats = {packed.format for packed in checkpoint.packed.values()}
        if not formats <= PARTS.keys():
            continue
        met |= formats
        with np.load(DATA / name / "expected.npz") as told, load(checkpoint, "cppyy") as model:
            taken = model.account().fields["matrices"]
            found, expected = model.logits([int(token) for token in told["tokens"]]), told["logits"]
        assert taken["by_backend"] >= len(checkpoint.packed) and set(taken["by_numpy_float32"]) <= {"stored as floats"}
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected[-1], rtol=0, atol=LIMIT * largest, err_msg=name)
    assert met == {"gptq-v1", "gptq-v2", "awq-gemm", "awq-gemv"}


@pytest.mark.parametrize("name", ["ct-pack", "fp8-block", "hqq-4", "bitsandbytes-nf4"])
def test_other_formats_are_left_to_numpy(name: str) -> None:
    """And the account says how many matrices, and why."""
    checkpoint = open_checkpoint(DATA / name)
    with np.load(DATA / name / "expected.npz") as told, load(checkpoint, "cppyy") as model:
        reasons = model.account().fields["matrices"]["by_numpy_float32"]
        found, expected = model.logits([int(token) for token in told["tokens"]]), told["logits"]
    undeclared = [count for reason, count in reasons.items() if "does not declare" in reason]
    assert sum(undeclared) == len(checkpoint.packed)
    np.testing.assert_allclose(found, expected[-1], rtol=0, atol=LIMIT * float(np.abs(expected).max()))
