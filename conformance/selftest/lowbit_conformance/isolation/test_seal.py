"""The seal of the host process: what lets the specification answer is told so, by whatever way it asks."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosting import hosted
from paths import SUPPORT
from seal_breakers import BREAKERS, Legal

from lowbit.quantization import packing
from lowbit.quantization.affine import dequantize, quantize
from lowbit_conformance.isolation.verdicts import BrokenPromiseError

MATRIX = quantize(np.random.default_rng(1).normal(size=(16, 5)).astype(np.float32), bits=4, group_size=8)
X = np.arange(1, 17, dtype=np.float32)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an unregistered backend is looked for."""
    monkeypatch.chdir(SUPPORT)


@pytest.mark.parametrize("kind", BREAKERS, ids=lambda kind: kind.__name__)
def test_whoever_lets_the_specification_answer_is_told(kind: Any) -> None:
    """Inner functions, copies of chapters, sealed functions opened again, other backends: all are one verdict."""
    with hosted(f"seal_breakers:{kind.__name__}") as remote:
        with pytest.raises(BrokenPromiseError) as caught:
            remote.prepare(MATRIX).qgemv(X)
        assert str(caught.value).startswith("SILENT_FALLBACK: it ")
        assert BREAKERS[kind] in str(caught.value)


def test_what_is_legal_is_no_breach() -> None:
    """A backend may read files, execute its own code, and use types, checks and layouts of the specification."""
    with hosted(f"seal_breakers:{Legal.__name__}") as remote:
        assert not remote.breaches
        right = X.astype(np.float64) @ dequantize(MATRIX)
        assert np.allclose(remote.prepare(MATRIX).qgemv(X), right, rtol=1e-5)


def test_a_chapter_pasted_into_a_backend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy under another name in the backend's own folder is noticed while the backend is loaded."""
    text = Path(packing.__file__).read_text().partition("# **What a backend promises.**")[0]
    (tmp_path / "pasted_packing.py").write_text(text)
    (tmp_path / "pasting.py").write_text("from pasted_packing import unpack\nfrom seal_breakers import Legal as Mine\n")
    shutil.copy(SUPPORT / "seal_breakers.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    with hosted("pasting:Mine") as remote:
        assert [verdict for verdict, _ in remote.breaches] == ["SILENT_FALLBACK"]
        assert "a copy of lowbit.quantization.packing" in remote.breaches[0][1]


def test_checks_go_on_using_what_is_sealed() -> None:
    """A matrix of 8-bit scales is checked by decoding them, which the backend itself may not ask for."""
    from lowbit.quantization import hqq

    weights = np.random.default_rng(2).normal(size=(64, 4)).astype(np.float32)
    matrix = hqq.quantize(weights, bits=4, group_size=16, meta_group=8)
    x = np.ones(64, np.float32)
    with hosted("numpy") as remote:
        assert np.allclose(remote.run("hqq.qgemv", x, matrix), hqq.qgemv(x, matrix), rtol=1e-4)
