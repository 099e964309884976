"""Backends that say odd things of themselves; the defects of kernels are in `lowbit_conformance.defects`."""

import numpy as np
import pytest

from lowbit.arrays import F64, Activations
from lowbit.attention.rope import Rotation
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear, Range
from lowbit.contract.rounding import Arithmetic, any_order
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


class HeadsOf40(Narrow):
    """Right attention and rotations in every type, for heads of multiples of 40 channels, which no case has."""

    def capabilities(self) -> Capabilities:
        inputs = ("float32", "float16", "bfloat16")
        declared = Declaration(
            {"inputs": inputs, "head_dim": Range(40)},
            Arithmetic("dequantised", "float32", any_order, intermediate="float32"),
        )
        return Capabilities(dict.fromkeys(("attention.attend", "rope.rotate"), declared))

    def _rope_rotate(self, x: Activations, turn: Rotation) -> Activations:
        wide = x.astype(np.float64)
        found = wide * turn.cos[:, None] + wide[..., turn.layout.partner] * turn.sin[:, None]
        return self._cut(found).astype(x.dtype)

    def _attention_attend(
        self, queries: Activations, keys: Activations, values: Activations, window: int | None = None
    ) -> Activations:
        shared = queries.shape[1] // len(keys)
        wide = [np.repeat(part.astype(np.float64), shared, axis=0) for part in (keys, values)]
        scores = np.einsum("thd,hsd->ths", queries.astype(np.float64), wide[0]) / np.sqrt(queries.shape[2])
        age = (keys.shape[1] - len(queries) + np.arange(len(queries)))[:, None] - np.arange(keys.shape[1])
        unseen = (age < 0) | (age >= (window or keys.shape[1]))
        scores[np.broadcast_to(unseen[:, None], scores.shape)] = -np.inf
        powers = np.exp(scores - scores.max(axis=2, keepdims=True))
        found = np.einsum("ths,hsd->thd", powers / powers.sum(axis=2, keepdims=True), wide[1])
        return self._cut(found).astype(queries.dtype)

    def _cut(self, result: F64) -> F64:
        return result


class HeadsOf40Cut(HeadsOf40):
    """The last 8 channels of a head are forgotten, as by a kernel that takes 32 at a time."""

    def _cut(self, result: F64) -> F64:
        result[..., -8:] = 0
        return result
