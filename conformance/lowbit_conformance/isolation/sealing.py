"""The seal: in the host process the functions of the specification that compute cannot be called.

The judge sends this file's text to the host, which runs it before it imports the code under test. Every function and
method of the chapters in `CHAPTERS` then raises, wherever it has been imported to, and the call is noted as a breach.
What makes no result stays callable: types with their properties, tables of formats with what they decode and encode,
constants, checks, names of parameters, errors, what a declaration is made of (`lowbit.contract.rounding`,
`lowbit.linear.integer_bounds`), programs and generators of kernels, and the few helpers in `KEPT`. Checks may go on
using what is sealed, since every call of a backend begins with them.

A copy is noticed, too: code that is executed, or made into a function, is searched for the bytecode of what is sealed.
This finds a chapter that is reloaded, executed from its file or pasted into a backend. It does not find a computation
that was rewritten, translated to another language or moved to another process; and the code under test, which shares
this process, could undo all of it. So the seal is advisory: it shows mistakes and shortcuts, and stops no forger.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

CHAPTERS = (
    "lowbit.quantization.affine",
    "lowbit.attention.attention",
    "lowbit.linear.elementary",
    "lowbit.quantization.bfp",
    "lowbit.quantization.bfp_dot",
    "lowbit.quantization.bfp_storage",
    "lowbit.model.block",
    "lowbit.model.layers",
    "lowbit.quantization.gptq",
    "lowbit.quantization.hqq",
    "lowbit.quantization.hqq_numbers",
    "lowbit.quantization.hqq_published",
    "lowbit.quantization.hqq_solver",
    "lowbit.linear.integer",
    "lowbit.kernels.interpreter",
    "lowbit.attention.ksort",
    "lowbit.attention.kvcache",
    "lowbit.attention.kivi_cache",
    "lowbit.kernels.layouts",
    "lowbit.linear.linear",
    "lowbit.moe.offload",
    "lowbit.moe.offload_engine",
    "lowbit.quantization.act_order",
    "lowbit.quantization.packing",
    "lowbit.attention.pooling",
    "lowbit.backend.reference",
    "lowbit.attention.rope",
    "lowbit.attention.rope_scaling",
    "lowbit.moe.routing",
    "lowbit.kernels.vector",
    "lowbit.kernels.vector_integer",
    "lowbit.kernels.vector_elementwise",
)
"""The modules whose functions compute results."""

KEPT = {
    "lowbit.quantization.bfp.Format.blocks",
    "lowbit.quantization.bfp.Format.spans",
    "lowbit.quantization.bfp.bfp12",
    "lowbit.quantization.bfp.bfp16",
    "lowbit.quantization.bfp_storage.row_bytes",
    "lowbit.linear.integer.segments",
    "lowbit.kernels.layouts.ColumnPanels.block",
    "lowbit.kernels.layouts.NestedPanels.block",
    "lowbit.kernels.layouts.ZCurve.block",
    "lowbit.attention.rope.half_split",
    "lowbit.attention.rope.interleaved",
}
"""Functions that describe a layout or a name, and compute no result."""

LEAST_CODE = 100
"""Bytes of bytecode: shorter functions may be equal without being copies."""

Refuse = Callable[[str], Any]
Note = Callable[[str], None]
Fingerprint = tuple[bytes, tuple[str, ...], tuple[str, ...]]


def refused(*arguments: Any, **choices: Any) -> Any:
    """The body of sealed functions; its code replaces theirs, and so may use only builtins."""
    import sys

    frame = sys._getframe()
    return sys.modules["__main__"].SEAL.called(frame.f_code.co_name, frame.f_back, arguments, choices)


class Seal:
    """The sealed functions, and the callers that are still allowed."""

    def __init__(self, refuse: Refuse, note: Note) -> None:
        self._refuse, self._note = refuse, note
        self._originals: dict[str, Callable[..., Any]] = {}
        self._fingerprints: dict[Fingerprint, str] = {}
        self._checks: set[int] = set()
        self._kept: list[CodeType] = []  # so that no other code object gets the id of one of them
        self._busy = False

    def close(self) -> None:
        """Seal the present functions, and watch all code that is executed from now on."""
        for name, function, free in list(_functions()):
            if free:
                self._kept.append(function.__code__)
                self._checks.update(map(id, _nested(function.__code__)))
                continue
            code = function.__code__
            if len(code.co_code) >= LEAST_CODE:
                self._fingerprints.setdefault(fingerprint(code), name)
            copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
            copy.__kwdefaults__ = function.__kwdefaults__
            self._originals[name] = copy
            function.__code__ = refused.__code__.replace(co_name=name)
        sys.addaudithook(self._hear)

    def called(self, name: str, caller: Any, arguments: tuple[Any, ...], choices: dict[str, Any]) -> Any:
        """Refuse a call of a sealed function, unless a check of the specification makes it."""
        if caller is not None and id(caller.f_code) in self._checks:
            return self._originals[name](*arguments, **choices)
        return self._refuse(name)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by the interpreter for its audit events."""
        if event == "exec" or event == "function.__new__":
            self._look(arguments[0])
        elif event == "object.__setattr__" and arguments[1] == "__code__":
            self._look(arguments[2])

    def _look(self, code: object) -> None:
        if self._busy or not isinstance(code, CodeType):
            return
        self._busy = True
        try:
            found = {self._fingerprints.get(fingerprint(part)) for part in _nested(code)} - {None}
        finally:
            self._busy = False
        if found:
            first = min(str(name) for name in found)
            more = f" and {len(found) - 1} more functions" if len(found) > 1 else ""
            self._note(f"it runs a copy of {first}{more} of the specification")


def fingerprint(code: CodeType) -> Fingerprint:
    """A fingerprint that two compilations of one source share, whatever the names of variables and files."""
    numbers = tuple(repr(part) for part in code.co_consts if isinstance(part, (int, float)))
    return code.co_code, code.co_names, numbers


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it; for a module, its functions and methods."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _nested(part)


def _functions() -> Iterator[tuple[str, FunctionType, bool]]:
    """Every function and method of the chapters with its full name, and whether it stays callable."""
    for chapter in CHAPTERS:
        module = importlib.import_module(chapter)
        declared = [value for value in vars(module).values() if hasattr(value, "check_step")]
        own = {getattr(each, part) for each in declared for part in ("check", "check_step", "parameters")}
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                for part, member in list(vars(value).items()):
                    if (function := _function(member)) and function.__module__ == module.__name__:
                        free = part.startswith("__") or isinstance(member, (property, functools.cached_property))
                        yield _judged(function, f"{module.__name__}.{name}.{part}", free)
            elif (function := _function(value)) and function.__module__ == module.__name__:
                yield _judged(function, f"{module.__name__}.{name}", function in own)
        for function in own:
            if isinstance(function, FunctionType) and function.__name__ == "<lambda>":
                yield function.__qualname__, function, True


def _judged(function: FunctionType, name: str, free: bool) -> tuple[str, FunctionType, bool]:
    last = name.rpartition(".")[2]
    free = free or name in KEPT or last.startswith(("check_", "_check")) or last.endswith("parameters")
    return name, function, free or bool(function.__code__.co_freevars)


def _function(value: Any) -> FunctionType | None:
    """The Python function behind a name of a module or of a class."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None
