"""The contract of the port and the suite, on the device.

The contract (`port_contract` among the selftests) is what the engine relies on; the suite holds each operation of the
backend ``cuda`` to the specification. Simulated, the suite runs on the backend's twin, which computes in numpy.
"""

import json
import subprocess
from typing import Any

from gpu.parts import Answer, Setting
from lowbit.system.interpreters import python_command, python_environment

BACKEND = {False: "lowbit_cuda.backend:CudaBackend", True: "lowbit_gpusim.backend:NumpyOnSim"}


def run(setting: Setting) -> Answer:
    """Both."""
    broken = contract(setting)
    report = setting.out / "conformance-report.json"
    command = python_command("-m", "lowbit", "conformance", BACKEND[setting.simulate], "--report", str(report))
    status = subprocess.run(
        [*command, *(["--quick"] if setting.simulate else [])], env=python_environment(), check=False
    ).returncode
    result: dict[str, Any] = {"contract": broken, "suite": {}, "report": report.name}
    if report.exists():
        whole = json.loads(report.read_text())
        result["suite"] = {name: whole[name] for name in ("verdict", "counts", "seconds", "selection")}
    failed = [name for name, error in broken.items() if error]
    if failed or status:
        return Answer("failed", f"contract: {len(failed)} of {len(broken)} broken; suite: status {status}", result)
    why = f"{len(broken)} programs of the contract, and the suite"
    return Answer("simulated" if setting.simulate else "passed", why, result)


def contract(setting: Setting) -> dict[str, str]:
    """Each program of the contract with what went wrong, nothing where nothing did."""
    from port_contract import BUDGET, KERNELS, PROGRAMS

    results = {}
    for name, program in PROGRAMS.items():
        try:
            with _device(setting, BUDGET, KERNELS) as device:
                program(device)
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def _device(setting: Setting, budget: int, kernels: Any) -> Any:
    if setting.simulate:
        from lowbit_gpusim.sim import SimDevice

        return SimDevice(budget=budget)
    from lowbit_cuda.cuda import CudaDevice

    return CudaDevice(budget, kernels=kernels)
