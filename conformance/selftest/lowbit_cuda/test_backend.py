"""The backend of the kernels: the suite on a simulated device, what it says without a GPU, and the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_models import CONFIG, PROMPT, bits_of, model
from cuda_tools import needs_compiler
from paths import ROOT, SUPPORT
from typer.testing import CliRunner, Result

from lowbit.attention.rope import Layout, Rotation, rotate_heads
from lowbit.backend import PreparedLinear, find
from lowbit.backend.whole_model import DeviceSettings
from lowbit.cli import app
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model.generation import generate
from lowbit.quantization.affine import dequantize, quantize
from lowbit_cuda.backend import DECLARED, CudaBackend
from lowbit_cuda.cuda.availability import availability
from lowbit_gpusim.backend import NumpyOnSim, ShimOnSim
from lowbit_gpusim.sim.device import SimDevice

NUMPY, SHIM = ("lowbit_gpusim.backend:NumpyOnSim", "lowbit_gpusim.backend:ShimOnSim")
TRAINED = ROOT / "bench/mixtral/model"


def suite(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON report of a run that passes."""
    command = [sys.executable, "-m", "lowbit", "conformance", name, "--json", *arguments]
    environment = os.environ | {"PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


# The suite.


@pytest.mark.whole
def test_numpy_on_the_simulation_passes_the_suite() -> None:
    """Every operation that is declared, with layouts, copies and launches that are the real ones."""
    report = suite(NUMPY, "--quick")
    tried = {found["operation"] for found in report["operations"] if found["passed"]}
    assert tried == {*DECLARED, "backend"}


@needs_compiler
def test_the_kernels_themselves_pass_the_suite() -> None:
    """The same with the kernels' own C++, on a few cases of three clauses."""
    chosen = [part for name in ("linear.qgemv/C1", "blocks.rms_norm/C3", "rope.rotate/C2") for part in ("--op", name)]
    suite(SHIM, "--quick", *chosen)


# What it is, without a GPU.


def test_the_backend_says_why_it_cannot_run() -> None:
    """It is installed, and answers with the availability of the device, reason and remedy."""
    backend = find("cuda")
    assert isinstance(backend, CudaBackend)
    assert backend.runs_models
    assert backend.availability() == availability()
    if not backend.availability().usable:
        assert backend.availability().reason and backend.availability().remedy
        found = json.loads(CliRunner().invoke(app, ["backends", "cuda", "--json"]).stdout)["cuda"]
        assert found == {"usable": False, "reason": availability().reason, "remedy": availability().remedy}


def test_nothing_stays_on_the_device() -> None:
    """Prepared matrices are given back by the first call after the last reference to them is gone, and all else when
    the backend is closed. Letting go frees nothing by itself: it may happen while the device works."""
    opened: list[SimDevice] = []

    class Seen(NumpyOnSim):
        def open_port(self, budget: int | None) -> SimDevice:
            opened.append(SimDevice(budget=budget))
            return opened[-1]

    with Seen() as backend:
        prepared: PreparedLinear | None = backend.prepare(quantize(np.eye(32, dtype=np.float32), bits=4, group_size=32))
        assert prepared is not None
        prepared.qgemv(np.ones(32, np.float32))
        held = opened[0].used
        prepared = None
        assert opened[0].used == held
        kept = backend.prepare(quantize(np.eye(32, dtype=np.float32), bits=4, group_size=32))
        assert opened[0].used == held
        del kept
        backend.run("blocks.swiglu", np.ones((1, 4), np.float32), np.ones((1, 4), np.float32))
        assert opened[0].leaks().count("a prepared matrix") == 0
        kept = backend.prepare(quantize(np.eye(32, dtype=np.float32), bits=4, group_size=32))
        with backend.decoder(model(), DeviceSettings(context=20)):
            pass
    backend.close()
    assert [device.leaks() for device in opened] == [("a prepared matrix",), ()]
    assert kept.rows == 32  # and is no harm when it is collected, after its device


def test_groups_that_kernels_do_not_do_are_not_declared() -> None:
    """Preparing such a matrix is refused, in the words of the declaration."""
    with NumpyOnSim() as backend, pytest.raises(NotDeclaredError, match="group_size 12"):
        backend.prepare(quantize(np.eye(32, dtype=np.float32), bits=4, group_size=12))


def test_a_rotation_in_any_order_of_channels() -> None:
    """Pairs in a drawn order, firsts and seconds mixed, come back in their places."""
    rng = np.random.default_rng(0)
    pair = rng.permutation(np.repeat(np.arange(8), 2))
    sign = np.zeros(16)
    partner = np.zeros(16, np.int64)
    for number in range(8):
        one, other = rng.permutation(np.flatnonzero(pair == number))
        sign[one], sign[other], partner[one], partner[other] = -1.0, 1.0, other, one
    angle = rng.uniform(0, 6, (3, 8))[:, pair]
    turn = Rotation(Layout(partner, sign, pair), np.cos(angle), sign * np.sin(angle))
    x = rng.standard_normal((3, 2, 16)).astype(np.float32)
    with NumpyOnSim() as backend:
        np.testing.assert_allclose(backend.run("rope.rotate", x, turn), rotate_heads(x, turn), atol=1e-6)


def test_dequantised_to_the_bit() -> None:
    """Both conventions, a width that no panel fills, a group that is short."""
    weights = np.random.default_rng(1).standard_normal((96, 37)).astype(np.float32)
    with NumpyOnSim() as backend:
        for convention in ("minimum", "zero_point"):
            for bits in (2, 3, 4, 8):
                matrix = quantize(weights, bits=bits, group_size=64, convention=convention)
                assert np.array_equal(backend.run("affine.dequantize", matrix), dequantize(matrix))


# Whole models.


@needs_compiler
def test_a_model_on_the_kernels_themselves() -> None:
    """Few slots or all: the same bits; and close to what numpy gives in the kernels' place."""
    weights = model(CONFIG, seed=8)
    prompt = PROMPT[:3]
    with ShimOnSim() as backend:
        with backend.decoder(weights, DeviceSettings(context=8)) as whole:
            expected = bits_of(whole, 3, prompt)
        with pytest.raises(ArgumentError) as caught:
            backend.decoder(weights, DeviceSettings(context=8, memory=1))
        least = int(re.findall(r"at least (\d+)", str(caught.value))[0])
        with backend.decoder(weights, DeviceSettings(context=8, memory=least)) as offloaded:
            assert bits_of(offloaded, 3, prompt) == expected
    with NumpyOnSim().decoder(weights, DeviceSettings(context=8)) as simulated:
        near = np.frombuffer(bits_of(simulated, 3, prompt), np.float32)
    np.testing.assert_allclose(np.frombuffer(expected, np.float32), near, rtol=0, atol=2e-3)  # float16 keys


def test_the_trained_model() -> None:
    """Real routing: with two slots a layer the same bits as with all, and tokens as the numpy backend has them."""
    from lowbit.formats.checkpoint.reader import open_checkpoint
    from lowbit.model.weights import in_memory
    from lowbit.runtime import load as loaded

    weights = in_memory(open_checkpoint(TRAINED))
    prompt = list(b"The cat ")
    with NumpyOnSim() as backend:
        with backend.decoder(weights, DeviceSettings(context=20)) as whole:
            steps = list(generate(whole, prompt, 4))
        with backend.decoder(weights, DeviceSettings(context=20, memory=3_000_000)) as offloaded:
            again = list(generate(offloaded, prompt, 4))
            account = offloaded.account()
    assert all(np.array_equal(a.logits, b.logits) for a, b in zip(steps, again, strict=True))
    assert account.slots == 2
    assert account.recall is not None and 0 < account.recall.value < 1
    expected = list(loaded(weights, "numpy").generate(prompt, 4))
    assert [step.token for step in steps] == [step.token for step in expected]


# The command line.


def run(*arguments: object) -> Result:
    """A command on the trained model."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def asked(*arguments: object) -> tuple[object, ...]:
    """``lowbit generate`` with the trained model."""
    return ("generate", "--model", TRAINED, "--prompt", "The ", "--tokens", 3, *arguments)


def test_generate_on_a_device() -> None:
    """The options arrive, and the account has slots, recall, bytes, prefetching and memory, in words and as JSON."""
    options = ("--device-memory", "2.4MB", "--buffers", 2, "--memory", "swap", "--prefetch", "off", "--keys", "float32")
    result = run(*asked("--backend", NUMPY, "--json", *options))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"] == {
        "memory": 2_400_000,
        "context": 6,
        "buffers": 2,
        "mode": "swap",
        "prefetch": "off",
        "keys": "float32",
        "cold_experts": None,
    }
    assert found["device"]["peak"] <= found["device"]["budget"] == 2_400_000
    assert found["device"]["recall"]["staged"] == 0 < found["device"]["slots"] < 8
    plain = run(*asked("--backend", NUMPY, "--device-memory", "2.4MB"))
    for word in ("peak device memory", "of 8 experts", "recall", "copied", "prefetch on"):
        assert word in plain.stderr


@pytest.mark.whole
def test_logits_and_perplexity_on_a_device(tmp_path: Path) -> None:
    """The other commands that need a model run there too."""
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 3)
    device = ("--model", TRAINED, "--backend", NUMPY, "--device-memory", "3MB", "--json")
    assert json.loads(run("logits", "--prompt", "The ", *device).stdout)["device"]["budget"] == 3_000_000
    found = json.loads(run("perplexity", "--text", text, "--window", 16, "--tokens", 40, *device).stdout)
    plain = run("perplexity", "--text", text, "--window", 16, "--tokens", 40, "--model", TRAINED, "--json")
    assert found["perplexity"] == pytest.approx(json.loads(plain.stdout)["perplexity"], rel=1e-2)  # keys in float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--backend", "numpy", "--device-memory", "1GB"),
            "--device-memory applies only where a backend runs whole",
        ),
        (
            ("--backend", "numpy", "--memory", "swap"),
            "--memory applies only where a backend runs whole models; numpy runs one",
        ),
        (("--backend", NUMPY, "--device-memory", "1 gig"), "--device-memory is '1 gig'; allowed: a size"),
        (("--backend", NUMPY, "--device-memory", "1kB"), "allowed: a size in bytes"),
        (("--backend", NUMPY, "--device-memory", "1KB"), "device memory is 1000 bytes"),
        (("--backend", NUMPY, "--keys", "int8"), "--keys is 'int8'; allowed: float16, bfp12 or float32"),
        (("--backend", NUMPY, "--memory", "both"), "--memory is 'both'; allowed: mirror or swap"),
        (("--backend", NUMPY, "--prefetch", "yes"), "--prefetch is 'yes'; allowed: auto, on or off"),
        (("--backend", NUMPY, "--buffers", 0), "--buffers is 0"),
        (
            ("--backend", NUMPY, "--contract", "integer"),
            "--contract does not apply to",
        ),
        (("--backend", NUMPY, "--step", "compiled"), "--step does not apply to"),
        (("--backend", NUMPY, "--cold-experts", "abacus"), "--cold-experts is 'abacus'"),
        (("--backend", NUMPY, "--keys", "bfp12"), "head_dim 16 with keys in bfp12"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[object, ...], message: str) -> None:
    """One line that names the option, what was given and what is allowed."""
    result = run(*asked(*options))
    assert message in str(result.exception)
