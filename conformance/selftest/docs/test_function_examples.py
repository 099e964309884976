"""The functions of the docs in PyTorch, Triton, Pallas and numba are certified, and arrays are refused by name.

`nox -s functions` installs these libraries and runs these tests.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from paths import ROOT

from lowbit.backend.function import JaxArrays, TorchArrays
from lowbit.errors import ArgumentError, UnavailableError
from lowbit_conformance.cli.conformance import run
from lowbit_conformance.cli.functions import function_target

REASON = "{} is not installed: `nox -s functions` installs it and runs these tests"
EXAMPLES = (
    ("numba_q4_k:product", "q4_k-q8_k", "numpy", "numba"),
    ("pallas_fp8:gemm", "fp8-channel-gemm-bf16", "jax", "jax"),
    ("torch_gptq:gemm", "gptq-gemm-bf16", "torch", "torch"),
    ("triton_awq:gemm", "awq-gemm-fp16", "torch", "triton"),
)
DEADLINE = 400.0
"""Seconds: Triton's interpreter takes part of one for a call, and the suite makes hundreds in a row."""


@pytest.mark.parametrize(("function", "profile", "arrays", "library"), EXAMPLES, ids=lambda each: each)
def test_the_function_is_certified(
    function: str, profile: str, arrays: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its profile, with all its cases and habits."""
    pytest.importorskip(library, reason=REASON.format(library))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "docs/examples/functions"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = f"lowbit-1.1/{profile}"
    target, judged = function_target(function, None, {}, [], arrays, "cpu", [name])
    settings: dict[str, Any] = {"seeds": 5, "first_seed": 0, "ops": [], "profiles": [name]}
    settings |= {"case": None, "model": None, "quick": False}
    tally = run(target, settings, DEADLINE, judged=judged).tally
    assert [(each.profile, each.certified) for each in tally.certificates] == [(name, True)], tally.failures


def test_tensors_are_refused_by_name() -> None:
    """On another device, not contiguous, with a gradient, on a device that there is not, of a type that torch lacks."""
    torch = pytest.importorskip("torch", reason=REASON.format("torch"))
    arrays = TorchArrays("cpu")
    for wrong, said in (
        (torch.zeros(2, device="meta"), "result is a tensor on meta; allowed: one on cpu"),
        (torch.zeros(2, 3).T, "result is a tensor that is not contiguous"),
        (torch.zeros(2, requires_grad=True), "result is a tensor with a gradient"),
    ):
        with pytest.raises(ArgumentError, match=said):
            arrays.back(wrong)
    with pytest.raises(UnavailableError, match="device 'nonsense'"):
        TorchArrays("nonsense")

    with pytest.raises(ArgumentError, match="an array of float4_e2m1fn is for torch"):
        arrays.to(np.zeros(2, ml_dtypes.float4_e2m1fn))


def test_arrays_of_jax_are_refused_by_name() -> None:
    """Traced ones, and devices that there are not."""
    jax = pytest.importorskip("jax", reason=REASON.format("jax"))
    arrays = JaxArrays("cpu")
    with pytest.raises(ArgumentError, match="result is a traced array; allowed: a concrete one"):
        jax.grad(lambda x: arrays.back(x).sum())(jax.numpy.zeros(2))
    with pytest.raises(UnavailableError, match="device 'nonsense'"):
        JaxArrays("nonsense")
