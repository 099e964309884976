"""Replay: what was refuted, run again on its numbers.

A refutation is a case: a theorem and numbers, which ``--json`` writes and ``--run`` reads. The subject runs on the
numbers without the solver: a program in the specification's interpreter, a cast, a decoder, a machine of states. The
kernel of a matrix is also compiled and called, if this processor has its instructions and cppyy is installed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.linear.integer import ACTIVATIONS
from lowbit.quantization.bfp import Blocks
from lowbit.text import one_line
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_cppyy.stored.types import TYPES, as_bytes
from lowbit_prove import catalogue
from lowbit_prove.demonstration import Demonstration, read
from lowbit_prove.processors import lacking
from lowbit_prove.products import setting_of
from lowbit_prove.theorem import Numbers, Refutation, Theorem


@dataclass(frozen=True)
class Run:
    """A run of a theorem's subject on numbers.

    Attributes:
        theorem: the theorem.
        wrong: the error on the numbers; None if there is none.
        compiled: the result of the compiled kernel, as text; empty for subjects that are not kernels of a matrix.
    """

    theorem: Theorem
    wrong: Refutation | None
    compiled: str

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        wrong = None if self.wrong is None else {"reason": self.wrong.reason, **self.wrong.numbers}
        return {"kernel": self.theorem.name, "theorem": self.theorem.id, "wrong": wrong, "compiled": self.compiled}

    @property
    def told(self) -> Iterator[str]:
        """The run as text."""
        yield f"{self.theorem.name}: {'right on these numbers' if self.wrong is None else self.wrong.reason}"
        if self.compiled:
            yield f"    {self.compiled}"


def runs(names: list[str], path: Path) -> list[Run]:
    """Run the content of a file: the output of ``--json``, or numbers for the one named theorem.

    Raises:
        ArgumentError: the file holds neither.
    """
    content = _content(path)
    if isinstance(listed := content.get("theorems"), list):
        refuted = [each for each in listed if isinstance(each, dict) and each.get("outcome") == "refutation"]
        wanted = {each.id for each in catalogue.chosen(names)} if names else {each.get("theorem") for each in refuted}
        return [_run(str(each["theorem"]), each.get("numbers")) for each in refuted if each.get("theorem") in wanted]
    if len(names) != 1:
        raise ArgumentError("names", len(names), "one kernel or theorem, with numbers in --run")
    return [_run(names[0], content.get("numbers", content))]


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentError("--run", f"{path}: {one_line(str(error))}", "a file with an object of JSON") from error
    if not isinstance(content, dict):
        raise ArgumentError("--run", str(path), "a file with an object of JSON")
    return content


def _run(name: str, numbers: object) -> Run:
    if not isinstance(numbers, dict) or not all(type(each) in (int, float, str) for each in numbers.values()):
        raise ArgumentError("--run", f"the numbers of {name}", "an object of names and numbers")
    theorem = _theorem(name)
    compiled = on_this_machine(catalogue.kernel(theorem.name), numbers) if theorem.kind == "products" else ""
    return Run(theorem, theorem.run(numbers), compiled)


def _theorem(name: str) -> Theorem:
    """The theorem with a name; for the name of a kernel, the theorem about its products."""
    found = catalogue.chosen([name])
    if len(found) > 1:
        found = [each for each in found if each.kind == "products"]
    if len(found) != 1:
        raise ArgumentError("names", name, "one kernel or theorem, with numbers in --run")
    return found[0]


def on_this_machine(kernel: Kernel | StoredKernel, numbers: Numbers) -> str:
    """The result, as text, of compiling a kernel and calling it on the numbers of a refutation."""
    if missing := lacking(kernel.table):
        return f"not compiled: this processor lacks {', '.join(missing)}"
    setting = setting_of(kernel)
    shown = Demonstration(setting, *read(numbers))
    try:
        given = compiled(kernel, shown)
    except (ImportError, UnavailableError) as error:
        return f"not compiled: {one_line(str(error))}"
    same = (given == shown.y.reshape(given.shape))[:, setting.first_column :]
    if same.all():
        return "compiled and called on this processor, it gives the same"
    return f"compiled and called on this processor, it gives other numbers in {int((~same).sum())} columns"


def compiled(kernel: Kernel | StoredKernel, shown: Demonstration) -> Any:
    """The product of a demonstration's activations and matrix, by the compiled kernel: float32, rows × columns."""
    from lowbit_cppyy.runtime.compiler import Linear, Pool, Route, raise_failure
    from lowbit_cppyy.stored.linear import functions

    setting: Any = shown.setting
    called = partial(_stored, functions()) if isinstance(kernel, StoredKernel) else _prepared  # before a route exists
    linear, route = Linear(setting.layout, shown.w, Pool(1)), Route(kernel, setting.activations)
    out = np.zeros((len(shown.x), setting.layout.columns), np.float32)
    if status := called(linear.handle, route.handle, shown.x, out, integer=kernel.recipe.integer):
        raise_failure(status)
    return out


def _prepared(linear: int, route: int, x: F32, out: F32, *, integer: bool) -> int:
    """A call with a prepared matrix; mantissas have the exponent 0."""
    from lowbit_cppyy.runtime.compiler import runtime

    if not integer:
        return runtime().multiply(linear, route, x, out, len(x))
    blocks = Blocks(x.astype(np.int8), np.zeros((len(x), -(-x.shape[1] // 32)), np.int16), ACTIVATIONS)
    return runtime().multiply_blocks(linear, route, blocks.mantissas.view(np.uint8), blocks.exponents, out, len(x))


def _stored(functions: tuple[Any, ...], linear: int, route: int, x: F32, out: F32, *, integer: bool) -> int:
    """A call with a stored matrix; bytes have the scale 1."""
    multiply: Callable[..., int]
    multiply_bytes: Callable[..., int]
    multiply, multiply_bytes = functions
    kind = TYPES[out.dtype]
    if not integer:
        return multiply(linear, route, as_bytes(x), kind, as_bytes(out), kind, len(x))
    ones = np.ones(len(x), np.float32)
    return multiply_bytes(linear, route, as_bytes(x.astype(np.int8)), ones, x.shape[1], as_bytes(out), kind, len(x))
