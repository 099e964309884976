"""Backends that say odd things of themselves; the defects of kernels are in `lowbit_conformance.defects`."""

import numpy as np
import pytest

from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic
from lowbit.quantization.packing import Codes, Words


class Narrow(Backend):
    """Packs 8 bits, and nothing else: a right backend."""

    name = "narrow"

    def capabilities(self) -> Capabilities:
        return Capabilities({"packing.pack": Declaration({"bits": (8,)})})

    def _packing_pack(self, codes: Codes, bits: int) -> Words:
        rows, columns = codes.shape
        return codes.reshape(rows // 4, 4, columns).swapaxes(1, 2).copy().view("<u4")[..., 0].copy()


class Unavailable(Narrow):
    """Cannot run here, and says so."""

    def availability(self) -> Availability:
        return Availability(False, "it needs an abacus", "buy one")


class DeclaresNothing(Narrow):
    """Declares no operation."""

    def capabilities(self) -> Capabilities:
        return Capabilities({})


class DeclaresWhatItLacks(Narrow):
    """Declares unpacking and has no code for it."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"packing.unpack": Declaration()})


class DeclaresAnUnknownOperation(Narrow):
    """Declares an operation that the specification does not have."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemw": Declaration()})


class LimitsAnUnknownParameter(Narrow):
    """Limits a parameter that the operation does not have."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({"bitz": (4,)}, Arithmetic("dequantised"))})


class ChangesItsMind(Narrow):
    """Claims something else each time it is asked."""

    asked = 0

    def capabilities(self) -> Capabilities:
        self.asked += 1
        return Capabilities({"packing.pack": Declaration({"bits": (8,)})}, overread=self.asked)


class SkipsItself(Narrow):
    """Pretends that a case was not declared."""

    def _packing_pack(self, codes: Codes, bits: int) -> Words:
        pytest.skip("not declared: today")


class CannotBeImported(Narrow):
    """Ends the process while it is made."""

    def __init__(self) -> None:
        import os

        os.abort()


class SetsTheEnvironment(Narrow):
    """Changes a variable of the environment while it is made."""

    def __init__(self) -> None:
        import os

        os.environ["ODD_BACKEND_THREADS"] = "1"


class NeverPrepares(Narrow):
    """Declares products and hands out something else."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({"bits": (8,)}, Arithmetic("dequantised"))})

    def _prepare(self, matrix: object) -> PreparedLinear:
        return None  # type: ignore[return-value]  # wrong on purpose


class AnswersWithAnArgument(Narrow):
    """Unpacks 8 bits where the words lie, and copies nothing."""

    def capabilities(self) -> Capabilities:
        return Capabilities({"packing.unpack": Declaration({"bits": (8,)})})

    def _packing_unpack(self, words: Words, bits: int) -> Codes:
        return words.view(np.uint8).reshape(-1, words.shape[1])


class AnswersWithAMatrix(AnswersWithAnArgument):
    """Answers with an array of a class in which products mean something else."""

    def _packing_unpack(self, words: Words, bits: int) -> Codes:
        return words.view(np.uint8).copy().view(np.matrix)
