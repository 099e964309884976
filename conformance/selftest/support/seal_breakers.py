"""Backends that let the specification answer, each by another way, and one that only looks like them."""

import importlib
import importlib.util
import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import lowbit.backend.reference
import lowbit.linear.linear
from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear, load
from lowbit.contract.rounding import Arithmetic
from lowbit.linear.linear import qgemv_codes
from lowbit.quantization.packing import unpack

FOLDER = Path(lowbit.linear.linear.__file__).parent
Codes = Any


def own_codes(words: Any, bits: int) -> Codes:
    """The codes of words, computed here."""
    ones = np.unpackbits(np.ascontiguousarray(words.T).view(np.uint8), axis=1, bitorder="little")
    weights = 1 << np.arange(bits)
    return (ones.reshape(words.shape[1], -1, bits) * weights).sum(axis=2).T.astype(np.uint8)


class Linear(PreparedLinear):
    """Asks `answer` for each product."""

    def __init__(self, matrix: Any, answer: Callable[[Any, Codes, Any], Any]) -> None:
        super().__init__("broken", matrix.rows, matrix.columns, matrix.nbytes)
        self.matrix, self.codes, self.answer = matrix, own_codes(matrix.words, matrix.bits), answer

    def _qgemv(self, x: Any, out: Any) -> None:
        out[:] = self.answer(x, self.codes, self.matrix)


class Asking(Backend):
    """Products of any width; a subclass says who computes them."""

    name = "asking"

    def capabilities(self) -> Capabilities:
        return Capabilities({"linear.qgemv": Declaration({}, Arithmetic("factored"))})

    def _prepare(self, matrix: Any) -> PreparedLinear:
        return Linear(deepcopy(matrix), self.answer)  # its memory is the caller's again after this call

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        raise NotImplementedError


class Inner(Asking):
    """A function inside a chapter, which is no operation."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        return qgemv_codes(x, codes, matrix)


class Quiet(Asking):
    """Asks, and computes by itself when it is refused."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        with suppress(RuntimeError):
            return qgemv_codes(x, codes, matrix)
        scale = np.repeat(matrix.scales, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
        zero = np.repeat(matrix.zeros, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
        weights = scale * codes + zero if matrix.convention == "minimum" else scale * (codes - zero)
        return x.astype(np.float64) @ weights


class Partial(Asking):
    """The same behind `functools.partial`."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        return partial(qgemv_codes, x, codes)(matrix)


class Unpacking(Asking):
    """An operation in another chapter."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        return x @ unpack(matrix.words, matrix.bits)


class Reference(Asking):
    """The backend that is the specification."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        return load("reference").prepare(matrix).qgemv(x)


class ReferenceObject(Asking):
    """A part of it."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        out = np.zeros(matrix.columns, np.float32)
        product = object.__new__(lowbit.backend.reference.ReferenceLinear)  # without unpacking, which is sealed too
        product._matrix, product._codes = matrix, codes
        product._qgemv(x, out)
        return out


class Reloaded(Asking):
    """The chapter, loaded again."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        with suppress(ValueError):  # its operations are declared already
            importlib.reload(lowbit.linear.linear)
        return lowbit.linear.linear.qgemv_codes(x, codes, matrix)


class Executed(Asking):
    """The chapter's text, executed."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        names: dict[str, Any] = {"__name__": "mine"}
        with suppress(ValueError):
            exec((FOLDER / "linear.py").read_text(), names)
        return names["qgemv_codes"](x, codes, matrix)


class OtherName(Asking):
    """The chapter's file as a module of another name."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        spec = importlib.util.spec_from_file_location("mine", FOLDER / "linear.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with suppress(ValueError):
            spec.loader.exec_module(module)
        return module.qgemv_codes(x, codes, matrix)


class MadeOfCode(Asking):
    """A function made of the chapter's code, as a cache of compiled files has it."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        module = compile((FOLDER / "linear.py").read_text(), "linear.py", "exec")
        code = next(part for part in module.co_consts if getattr(part, "co_name", "") == "qgemv_codes")
        return types.FunctionType(code, vars(lowbit.linear.linear))(x, codes, matrix)


class Unsealed(Asking):
    """The chapter's code put back into the sealed function."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        module = compile((FOLDER / "linear.py").read_text(), "linear.py", "exec")
        code = next(part for part in module.co_consts if getattr(part, "co_name", "") == "qgemv_codes")
        qgemv_codes.__code__ = code
        return qgemv_codes(x, codes, matrix)


class Another(Asking):
    """Another backend."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        return load("numpy").prepare(matrix).qgemv(x)


class Suite(Asking):
    """The suite, which knows the answers."""

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        from lowbit_conformance.defects import steps

        return steps.product(x[np.newaxis], steps.RIGHT.weights(matrix))[0]


class Legal(Quiet):
    """Reads its own source, makes functions of its own code, and uses what any backend may use."""

    def __init__(self) -> None:
        text = inspect.getsource(inspect.getmodule(type(self)) or types)
        names: dict[str, Any] = {}
        exec("def twice(x):\n    return 2 * x", names)
        assert "Legal" in text and types.FunctionType(names["twice"].__code__, {})(2) == 4
        own_codes.__code__ = own_codes.__code__.replace(co_name="mine")
        assert (FOLDER / "linear.py").read_text()

    def answer(self, x: Any, codes: Codes, matrix: Any) -> Any:
        from lowbit.contract.checks import check_array
        from lowbit.linear.integer import segments
        from lowbit.quantization.bfp import Blocks, bfp12
        from lowbit.quantization.packing import BITS

        check_array("x", x, np.float32, (matrix.rows,))
        spans: list[Any] = [*bfp12(4).spans(10), *segments(8, 4, 4)]
        assert matrix.bits in BITS and spans and Blocks.__name__
        scale = np.repeat(matrix.scales, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
        zero = np.repeat(matrix.zeros, matrix.group_size, axis=0)[: matrix.rows].astype(np.float64)
        weights = scale * codes + zero if matrix.convention == "minimum" else scale * (codes - zero)
        return x.astype(np.float64) @ weights


BREAKERS = {
    Inner: "lowbit.linear.linear.qgemv_codes",
    Quiet: "lowbit.linear.linear.qgemv_codes",
    Partial: "lowbit.linear.linear.qgemv_codes",
    Unpacking: "lowbit.quantization.packing.unpack",
    Reference: "lowbit.backend.reference",
    ReferenceObject: "lowbit.backend.reference",
    Reloaded: "a copy of lowbit.linear.linear",
    Executed: "a copy of lowbit.linear.linear",
    OtherName: "a copy of lowbit.linear.linear",
    MadeOfCode: "a copy of lowbit.linear.linear.qgemv_codes",
    Unsealed: "a copy of lowbit.linear.linear.qgemv_codes",
    Another: "lowbit_numpy, which is another backend",
    Suite: "lowbit_conformance",
}
"""What each is told."""
