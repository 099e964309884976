"""What tests of the CUDA backend need besides lowbit: a C++ compiler, NVIDIA's packages.

Where they are missing these tests are skipped, with what to install as the reason: lowbit works without them. The job
``nox -s tests`` installs the packages and asks for a compiler, and says so (`COMPLETE`); there nothing of this may be
missing, and a test whose tools are not there runs and fails instead.
"""

import os
import shutil

import pytest
import stand_in

from lowbit.errors import UnavailableError
from lowbit_cuda.cuda import compiler
from lowbit_cuda.cuda.driver import installed

COMPLETE = "LOWBIT_TESTS_COMPLETE"


def needs(missing: str) -> pytest.MarkDecorator:
    """Skip where something is missing, in words, unless nothing may be."""
    return pytest.mark.skipif(bool(missing) and COMPLETE not in os.environ, reason=missing)


def no_nvrtc() -> str:
    """Why kernels cannot be compiled for GPUs here; empty if they can."""
    try:
        compiler.compiler_version()
    except UnavailableError as error:
        return str(error)
    return ""


def no_stand_in() -> str:
    """What is missing for the stand-in for the driver; empty if nothing is."""
    lacking = [module for module in stand_in.NEEDS if not installed(module)]
    if not lacking and stand_in.compiler() is not None:
        return ""
    return f"needs {', '.join(lacking) or 'g++'}: install lowbit with the extra cuda, and a C++ compiler"


needs_compiler = needs("" if shutil.which("g++") else "g++ is not installed")
needs_nvrtc = needs(no_nvrtc())
needs_stand_in = needs(no_stand_in())
