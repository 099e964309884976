"""Backends that `lowbit bench` times in tests."""

import os
import sys
import time
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


class Exits(NumpyBackend):
    """It ends its process with status 0 when it is given a matrix."""

    name = "exits"

    def prepare(self, matrix: Any) -> Any:
        os._exit(0)


class Quits(NumpyBackend):
    """It asks Python to end the process with status 0."""

    name = "quits"

    def prepare(self, matrix: Any) -> Any:
        sys.exit(0)


class Hangs(NumpyBackend):
    """It does not return from its second matrix."""

    name = "hangs"

    def prepare(self, matrix: Any) -> Any:
        time.sleep(600 if vars(self).setdefault("prepared", False) else 0)
        self.prepared = True
        return super().prepare(matrix)


class Partly(NumpyBackend):
    """It leaves columns from the 700th on at 0."""

    name = "partly"

    def prepare(self, matrix: Any) -> Any:
        made: Any = super().prepare(matrix)
        whole = made._qgemv

        def part(x: Any, out: Any) -> None:
            whole(x, out)
            out[700:] = 0

        made._qgemv = part
        return made


class Tires(NumpyBackend):
    """It raises an error in the third call of a product."""

    name = "tires"

    def prepare(self, matrix: Any) -> Any:
        made: Any = super().prepare(matrix)
        whole = made._qgemv

        def some(x: Any, out: Any) -> None:
            self.calls = vars(self).get("calls", 0) + 1
            if self.calls == 3:
                raise RuntimeError("tired")
            whole(x, out)

        made._qgemv = some
        return made


class Waits(NumpyBackend):
    """It says that it waits, and does not return."""

    name = "waits"

    def prepare(self, matrix: Any) -> Any:
        print("waiting", flush=True)
        time.sleep(600)
