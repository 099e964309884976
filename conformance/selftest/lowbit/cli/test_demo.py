"""The demo on a tiny model: its steps, and what it says where two backends disagree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import published, write
from typer.testing import CliRunner

from lowbit.backend import Capabilities, Declaration, PreparedLinear
from lowbit.backend import base as registry
from lowbit.backend.reference import ReferenceBackend, ReferenceLinear
from lowbit.cli import app, demo
from lowbit.contract.rounding import Arithmetic
from lowbit.model.quantization_plan import Plan, planned
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import load, open_model

SIMULATED = "lowbit_gpusim.backend:NumpyOnSim"
ARGUMENTS = ["demo", "--prompt", "hello", "--tokens", "4", "--text-tokens", "32"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", published())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("hello hello 12 hello\r\n" * 20)
    return path


def verdict(name: str, outcome: str) -> dict[str, Any]:
    row = {"operation": "linear.qgemv", "passed": 1, "declared": 1, "specified": 1, "bound_used": "1%"}
    return {"backend": name, "verdict": outcome, "operations": [row]}


def test_the_demo_compares_what_is_certified(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certified backends generate equal tokens; one that failed is left out, and the status says so."""
    monkeypatch.setattr(registry, "names", lambda: ["numpy", "reference"])
    for outcome, status in (("passed", 0), ("failed", 1)):
        monkeypatch.setattr(
            demo, "certify", lambda name, path, o=outcome: verdict(name, o if name == "numpy" else "passed")
        )
        result = CliRunner().invoke(app, [*ARGUMENTS, "--model", str(model), "--text", str(text), "--json"])
        assert result.exit_code == status
        answer = json.loads(result.stdout)
        said = {name: [each["backend"] for each in each_said] for name, each_said in answer["generation"].items()}
        expected = ["reference", "numpy"] if outcome == "passed" else ["reference"]
        assert said == dict.fromkeys(("as stored", "re-quantised: 4 bits, groups of 64"), expected)
        assert [row["weights"][:12] for row in answer["perplexity"]] == ["as stored", *["re-quantised"] * 3]
        if outcome == "passed":
            assert all("all 4 tokens equal" in each[1]["agreement"] for each in answer["generation"].values())


def test_a_backend_that_does_not_hold_the_model_is_not_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without products, and one that lacks the model's bits, are left out with the reason."""
    narrow = Capabilities({"linear.qgemv": Declaration({"bits": (2,)}, Arithmetic("factored"))})
    assert demo.lacking(ReferenceBackend(), open_model(model).weights) is None
    for declared, reason in ((Capabilities({}), "linear.qgemv"), (narrow, "linear.qgemv for bits 4")):
        monkeypatch.setattr(ReferenceBackend, "capabilities", lambda self, declared=declared: declared)
        missing = demo.lacking(ReferenceBackend(), open_model(model).weights)
        assert str(missing) == f"backend reference does not declare {reason}"


def test_a_backend_that_runs_whole_models_generates_by_its_certified_products(model: Path) -> None:
    """What has been certified is what is compared, and the bytes that a token reads are known."""
    loaded = open_model(model)
    variant = demo.Variant("4 bits", planned(loaded.weights, Plan.uniform(4, 32)))
    (said,) = demo.continuations(variant, [SIMULATED], loaded, "hello", 2)
    assert said.backend == SIMULATED and said.read_bytes > 0


class Tilted(ReferenceBackend):
    """The reference with a head that prefers another token."""

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return TiltedLinear(matrix)


class TiltedLinear(ReferenceLinear):
    def _qgemv(self, x: Any, out: Any) -> None:
        super()._qgemv(x, out)
        if self.columns > 200:  # the head
            out[7] = np.max(out) + 1


def test_the_first_difference_is_shown_with_its_logits_and_bound(model: Path) -> None:
    """Where tokens part, the report names both tokens, both logits and what the head's own product may err by."""
    loaded = open_model(model)
    ids, reference, tilted = loaded.tokenizer.encode("hello"), ReferenceBackend(), Tilted()
    expected = list(load(loaded.weights, reference).generate(ids, 3))
    tilting = load(loaded.weights, tilted)
    steps = list(tilting.generate(ids, 3))
    said = demo.compare(("reference", expected), steps, tilting, tilted, loaded.weights, ids, loaded)
    own, other = steps[0].logits[7], steps[0].logits[expected[0].token]
    assert f"token 1 is {loaded.tokenizer.decode([7])!r}, that of reference is" in said
    assert f"logits {own:.5f} and {other:.5f}" in said
    assert "the head's product alone may err by" in said
