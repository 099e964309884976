"""The machine that a measurement was made on, as far as it can be asked."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lowbit_cuda.cuda.availability import availability
from lowbit_cuda.cuda.device import CudaDevice

ASKED = (
    *("name", "driver_version", "vbios_version", "memory.total", "ecc.mode.current", "power.limit"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)
PACKAGES = (
    *("numpy", "cuda-core", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    *("torch", "triton", "pytest"),
)


def description(simulate: bool) -> dict[str, Any]:
    """All of it, for JSON; what cannot be asked is empty."""
    return {
        "simulated": simulate,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "commit": output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "nvidia_smi": smi(),
        "device": {} if simulate else device(),
    }


def device() -> dict[str, str]:
    """What lowbit says of the device, or why there is none."""
    state = availability()
    if not state.usable:
        return {"unavailable": state.reason, "remedy": state.remedy}
    with CudaDevice(1 << 20) as opened:
        return dict(opened.describe())


def smi() -> dict[str, str]:
    """What nvidia-smi says of the first device, one thing at a time since old ones know less."""
    values = {name: output("nvidia-smi", "-i", "0", f"--query-gpu={name}", "--format=csv,noheader") for name in ASKED}
    return {name: value for name, value in values.items() if value}


def processor() -> str:
    """The host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def installed(name: str) -> str:
    """The version of a package, or nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def output(*command: str) -> str:
    """What a program prints, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
