"""Backends that `lowbit bench` times in tests."""

import os
from typing import Any

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.contract.rounding import Arithmetic
from lowbit_numpy import NumpyBackend


class Dies(NumpyBackend):
    """It ends its process by a real-time signal, which has no name, when it is given a matrix."""

    name = "dies"

    def prepare(self, matrix: Any) -> Any:
        os.kill(os.getpid(), 40)


class Narrow(Backend):
    """It declares one width."""

    name = "narrow"

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({"bits": (2,)}, Arithmetic("dequantised"))})
