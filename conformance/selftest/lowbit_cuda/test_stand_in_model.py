"""A whole model on the device for GPUs, over a stand-in for NVIDIA's driver, beside the same on the simulation.

The device, its streams, graphs and launches are those that a GPU is given; what kernels do is their meaning in numpy on
both, so logits must be the same to the bit, and the engine's events too. The kernels that are compiled and loaded are
empty ones with the signatures of the table: no kernel's code is tested here.
"""

import json
from typing import Any

import pytest
import stand_in
from cuda_cases import every_kernel
from cuda_tools import needs_stand_in
from paths import ROOT

from lowbit_cuda.port import Kernel

pytestmark = needs_stand_in

TYPES = {"int32": "int", "int64": "long long", "float32": "float"}
BENCH = ROOT / "bench"

SCRIPT = """
import gc, json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
import numpy as np
from gpu import traces
from lowbit_cuda.cuda.device import CudaDevice
from lowbit_gpusim.sim.device import SimDevice
from stand_in import Control
from cuda_cases import every_kernel

control, results = Control(), {}
control.teach(every_kernel())
traces.TOKENS, traces.PROMPT = 3, b"Expert"
weights = traces.model()
budget = traces.budget_for(weights, "mirror")
for mode in ("mirror", "swap"):
    here = traces.generated(SimDevice(budget=budget), weights, mode)
    there = traces.generated(CudaDevice(budget, kernels=Path(sys.argv[1])), weights, mode)
    compared = traces.compared(here, there)
    gc.collect()
    results[mode] = compared | {"left": control.report(), "raised": list(map(repr, control.errors))}
    results[mode]["waits"] = control.waits()
results["launched"] = sorted({name for name, numbers, sizes in control.launched})
print(json.dumps(results))
"""


def declaration(described: Kernel) -> str:
    """An empty kernel of the same signature."""
    arguments = [
        f"{'const ' * (one.access == 'read')}void* {one.name}" if one.access else f"{TYPES[one.kind]} {one.name}"
        for one in described.parameters
    ]
    return f'extern "C" __global__ void {described.name}({", ".join(arguments)}) {{}}\n'


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of both modes."""
    folder = tmp_path_factory.mktemp("stand-in-model")
    stand_in.build(folder)
    sources = folder / "kernels"
    sources.mkdir()
    for described in every_kernel():
        with (sources / described.source).open("a") as file:
            file.write(declaration(described))
    done = stand_in.run(folder, SCRIPT, str(sources), str(BENCH))
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("mode", ["mirror", "swap"])
def test_a_model_runs_on_the_device_as_on_the_simulation(results: dict[str, Any], mode: str) -> None:
    """The same logits, tokens and events, as specified, within the budget; everything is given back."""
    found = results[mode]
    assert found["raised"] == []
    assert found["logits_apart"] == 0
    assert found["tokens_equal"] and found["requests_equal"] and not found["wrong"]
    assert found["said"] == "equal"
    assert found["events"] > 300
    assert found["as_specified"] == {"simulation": True, "device": True}
    assert found["left"] == []
    assert found["waits"] == [], "nothing is freed, allocated or loaded while the device works"


def test_the_kernels_of_a_model_were_launched(results: dict[str, Any]) -> None:
    """So the test above was about something: products of one token and of several, and all that lies between."""
    wanted = {"add", "combine", "rms_norm", "rope", "append_f16", "attend_f16_f16", "dense_f32"}
    wanted |= {"gemm_b4_f16_t1", "gemm_b4_f16_t8", "expert_in_b2_f16_t1", "expert_in_b2_f16_t8", "gemm_b2_f16_t1"}
    assert wanted <= set(results["launched"])
