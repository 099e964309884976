"""Where the CUDA backend cannot run it says why, and what the user can do; asked of a stand-in for the driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in
from absence import ABSENCE
from cuda_tools import needs_stand_in

from lowbit_cuda.cuda.availability import availability

ASK = """
import os
from lowbit_cuda.cuda.availability import availability

def ask(ordinal=0, **variables):
    os.environ.update(variables)
    state = availability(ordinal)
    print(state.usable, "|", state.reason, "|", state.remedy)
    for name in variables:
        del os.environ[name]
"""


@needs_stand_in
def test_what_is_wrong_is_said_with_what_to_do(tmp_path: Path) -> None:
    """No device, one too old, a driver too old for the packages, a compiler that does not know the device."""
    stand_in.build(tmp_path)
    script = """
ask()
ask(1)
ask(STAND_IN_DEVICES="0")
ask(STAND_IN_DEVICES="0", CUDA_VISIBLE_DEVICES="")
ask(STAND_IN_CAPABILITY="75")
ask(STAND_IN_CAPABILITY="75", STAND_IN_DEVICES="2")
ask(STAND_IN_CAPABILITY="86")
ask(STAND_IN_CAPABILITY="990")
ask(STAND_IN_CUDA="12040")
ask(STAND_IN_INIT="803")
ask(STAND_IN_INIT="999")
ask()
from stand_in import Control
print(Control().calls("cuDevicePrimaryCtxRetain"), Control().calls("cuMemAlloc"))
"""
    done = stand_in.run(tmp_path, ASK + script)
    assert done.returncode == 0, done.stderr
    driver = "install NVIDIA's driver and see that nvidia-smi lists the device"
    old = "the compute capability of device 0 is 7.5; the kernels need 8.0"
    *lines, unknown, too_old, mismatch, other, last, contexts = done.stdout.splitlines()
    assert lines == [
        "True |  | ",
        "False | there is no device 1: the driver sees 1 | use another number",
        f"False | the driver sees no NVIDIA GPU | {driver}",
        f"False | the driver sees no NVIDIA GPU (CUDA_VISIBLE_DEVICES is '') | {driver}",
        f"False | {old} | use a device of the generation Ampere or later",
        f"False | {old} | use a device of the generation Ampere or later",
        "True |  | ",
    ]
    assert "does not know the compute capability 99.0 | install a newer nvidia-cuda-nvrtc" in unknown
    assert "the driver is for CUDA 12.4, and the installed cuda-bindings are for CUDA" in too_old or "True" in too_old
    assert mismatch.endswith("of different versions | restart the machine, or reinstall the driver")
    assert other.startswith("False | initializing the driver failed: CUDA_ERROR_UNKNOWN")
    assert last == "True |  | "
    assert contexts == "0 0", "asking takes no context"


@pytest.mark.skipif(availability().usable, reason="there is a GPU here")
def test_without_a_driver_it_says_so() -> None:
    """Here."""
    state = availability()
    assert not state.usable
    assert state.reason
    assert state.remedy


@pytest.mark.parametrize("absent", ["cuda", "nothing"])
def test_without_nvidias_packages_everything_else_works(tmp_path: Path, absent: str) -> None:
    """Each module of the CUDA backend can be imported, and the device says what to install."""
    (tmp_path / "sitecustomize.py").write_text(ABSENCE.format(absent=(absent,)))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = """
import importlib, pkgutil, sys
import lowbit_cuda
from lowbit.errors import LowbitError
for module in pkgutil.walk_packages(lowbit_cuda.__path__, "lowbit_cuda."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted(name for name in sys.modules if name.startswith("cuda.")))
from lowbit_cuda.cuda.device import CudaDevice
try:
    CudaDevice().close()
    print("a GPU")
except LowbitError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    imported, message = done.stdout.splitlines()
    assert imported == "[]", "nothing of NVIDIA's is imported before it is needed"
    if absent == "cuda":
        assert message == (
            "the CUDA device is unavailable: the Python package cuda-bindings is not installed; "
            'pip install "lowbit[cuda]" (for drivers of CUDA 12: "lowbit[cuda12]")'
        )
