"""`CommandBackend`: a program that answers on its standard output, as a backend.

Each line is one JSON object. A request has an ``id``, what to ``do``, and what that needs; the answer has the same
``id`` and either a ``result`` or an ``error``::

    {"lowbit": 1, "id": 1, "do": "capabilities"}
    {"id": 1, "result": {"name": "mine", "operations": {"packing.pack": {}}}}
    {"lowbit": 1, "id": 2, "do": "run", "operation": "packing.pack", "arguments": {"codes": {...}, "bits": 4}}
    {"id": 2, "result": {"array": "<u4", "shape": [1, 1], "data": "EDJUdg=="}}
    {"lowbit": 1, "id": 3, "do": "run", ...}
    {"id": 3, "error": {"kind": "failed", "message": "out of memory"}}

Capabilities are those of ``lowbit.h``, arguments and results the trees of `lowbit.backend.wire` with their arrays in
base64. What else may be done:

==============================  ===============================================  ==================================
do                              with                                             result
==============================  ===============================================  ==================================
``run``                         ``operation``, ``arguments``                     of the operation
``prepare``                     ``operation``, ``arguments`` (the matrix)        a handle: any number or text
``run`` of a prepared product   ``operation``, ``arguments`` (x), ``handle``     the product
``release``                     ``handle``                                       null
``open``                        ``operation``, ``arguments``                     a handle
``step``                        ``operation``, ``arguments``, ``handle``         of the step
``close``                       ``handle``                                       null
==============================  ===============================================  ==================================

``prepare`` is requested only where the capabilities declare ``"prepare": true``. An error is of kind ``argument``,
``not declared`` or ``failed``. Standard error is the program's own. The program ends when its standard input does.
"""

import contextlib
import json
import shlex
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from lowbit.arrays import F32
from lowbit.backend import Capabilities, PreparedLinear
from lowbit.backend.wire import Tree, as_json, from_json
from lowbit.contract.checks import check_array
from lowbit.errors import ArgumentError, FormatError, NotDeclaredError, UnavailableError, on_one_line
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.system.json_files import described, parsed
from lowbit_foreign.backend import ForeignBackend
from lowbit_foreign.child import BrokenLineError, Child, shown
from lowbit_foreign.declared import Declared, read
from lowbit_foreign.linear import ForeignLinear, copied, first_product

PROTOCOL = 1
START = 60.0
"""Seconds within which a program must declare its capabilities."""


class CommandBackend(ForeignBackend):
    """A program as a backend; it is started when it is first needed, and again after an error of the protocol.

    Attributes:
        name: the name of its file; after it was started, the name that it declares.
    """

    def __init__(self, command_line: str) -> None:
        """Nothing is started yet.

        Args:
            command_line: the program and its arguments, quoted as for a POSIX shell; no shell is run.

        Raises:
            ArgumentError: no program, or a quote that is not closed.
        """
        try:
            self._words = shlex.split(command_line)
        except ValueError as error:
            raise ArgumentError("command", repr(command_line), f"words in pairs of quotes ({error})") from None
        if not self._words:
            raise ArgumentError("command", repr(command_line), "a program and its arguments")
        self.name = self._words[0].rpartition("/")[2]
        self._lock = threading.RLock()  # the program answers one line at a time
        self._child: Child | None = None
        self._declared: Declared | None = None
        self._end: Callable[[], object] = lambda: None
        self._ids = 0
        self._given_up: list[tuple[str, Child, Tree]] = []

    @property
    def children(self) -> tuple[int, ...]:
        """The process id of the program, if it runs: the processes that this backend may have."""
        child = self._child
        return (child.pid,) if child is not None and child.alive else ()

    def capabilities(self) -> Capabilities:
        """The program's declared capabilities; it is asked once.

        Raises:
            UnavailableError: it cannot be started, does not answer, or its declaration is not valid.
        """
        return self._said().capabilities

    def close(self) -> None:
        """End the program. Closing twice is harmless."""
        with self._lock:
            self._end()
            self._child = None

    def _said(self) -> Declared:
        with self._lock:
            if self._declared is None:
                what = f"command {self._words[0]}"
                try:
                    answer = self._ask("capabilities", {}, START)
                except (BrokenLineError, RuntimeError, ArgumentError, NotDeclaredError) as error:
                    if isinstance(error, UnavailableError):
                        raise
                    raise UnavailableError(what, on_one_line(error), "it must declare its capabilities first") from None
                said = read(answer)
                capabilities = replace(said.capabilities, concurrent=False)  # one line at a time
                self._declared = replace(said, capabilities=capabilities)
                self.name = said.name
            return self._declared

    # Hooks.

    def opened(self, operation: str, arguments: dict[str, Any]) -> "_Handle":
        return self._handle("open", "close", operation, arguments)

    def end(self, handle: "_Handle") -> None:
        handle.end()
        with contextlib.suppress(BrokenLineError):  # a program that has ended holds no handles
            self.give_back()

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        declared = self.capabilities().operations
        if not self._said().prepare:
            return ForeignLinear(self.name, matrix, declared, self._multiply, {"matrix": copied(matrix)})
        operation = first_product(declared)
        handle = self._handle("prepare", "release", operation, {"matrix": matrix})
        return ForeignLinear(self.name, matrix, declared, self._multiply, {}, handle)

    def _multiply(self, operation: str, handle: object, arguments: dict[str, Any], out: F32) -> None:
        assert handle is None or isinstance(handle, _Handle)
        result = self.answer("run", operation, arguments, handle)
        try:
            check_array("result", result, out.dtype, out.shape)
        except ArgumentError as error:
            raise RuntimeError(f"{self.name} gives no result of {operation}: {error}") from None
        out[...] = result

    # The protocol.

    def answer(self, do: str, operation: str, arguments: dict[str, Any], handle: "_Handle | None" = None) -> Any:
        """The value in the answer to one request.

        Raises:
            ArgumentError, NotDeclaredError: the program reports one.
            RuntimeError: the program fails, or its answer is not a value of the specification.
        """
        tree = self._request(do, operation, arguments, handle)
        try:
            return from_json(tree)
        except ArgumentError as error:
            raise RuntimeError(f"{self.name} gives no result of {operation}: {error}") from None

    def _handle(self, do: str, end: str, operation: str, arguments: dict[str, Any]) -> "_Handle":
        with self._lock:
            name = self._request(do, operation, arguments, None)
            if type(name) not in (int, str):
                raise RuntimeError(f"{self.name} answers {do} with {described(name)}, which is not a number or text")
            assert self._child is not None
            return _Handle(name, self._child, end, self._given_up)

    def _request(self, do: str, operation: str, arguments: dict[str, Any], handle: "_Handle | None") -> Tree:
        request: dict[str, Tree] = {"operation": operation}
        request["arguments"] = {name: as_json(value) for name, value in arguments.items()}
        with self._lock:
            self.give_back()
            if handle is not None:
                if handle.child is not self._child or not handle.child.alive:
                    raise RuntimeError(f"{self.name} was restarted, and has lost what was prepared or opened before")
                request["handle"] = handle.name
            return self._ask(do, request)

    def give_back(self) -> None:
        """Tell the program which handles are no longer used."""
        with self._lock:
            while self._given_up:
                end, child, name = self._given_up.pop()
                if child is self._child and child.alive:
                    self._ask(end, {"handle": name})

    def _ask(self, do: str, request: dict[str, Tree], seconds: float | None = None) -> Tree:
        """The result in the answer to one line; the program is started if it does not run."""
        with self._lock:
            if self._child is None or not self._child.alive:
                self._end()
                self._child = Child(self._words)
                self._end = weakref.finalize(self, self._child.end)
            self._ids += 1
            line = json.dumps({"lowbit": PROTOCOL, "id": self._ids, "do": do} | request, allow_nan=False)
            answer = self._child.exchange(line.encode(), seconds)
            try:
                return self._result(answer, self._ids)
            except BrokenLineError:
                self._child.end(0)
                raise

    def _result(self, line: bytes, id: int) -> Tree:
        """The result in a line, or the exception that it stands for."""
        try:
            answer = parsed(f"{self.name} writes a line", line).values
        except FormatError as error:
            raise BrokenLineError(f"{error}: {shown(line)}") from None
        match answer:
            case {"id": int(given), "result": result, **more} if given == id and not more:
                return result
            case {"id": int(given), "error": {"kind": str(kind), "message": str(message)}} if given == id:
                self._raise(kind, on_one_line(message))
        raise BrokenLineError(f"{self.name} writes a line that does not answer request {id}: {shown(line)}")

    def _raise(self, kind: str, message: str) -> NoReturn:
        if kind == "argument":
            raise ArgumentError("an argument", f"refused by {self.name}", message)
        if kind == "not declared":
            raise NotDeclaredError(self.name, message)
        if kind == "failed":
            raise RuntimeError(f"{self.name} fails: {message}")
        raise BrokenLineError(f"{self.name} answers with an error of the unknown kind {on_one_line(kind)}: {message}")


class _Handle:
    """An object of the program. When it is no longer used, the next request tells the program."""

    def __init__(self, name: Tree, child: Child, end: str, given_up: list[tuple[str, Child, Tree]]) -> None:
        self.name, self.child = name, child
        self.end = weakref.finalize(self, given_up.append, (end, child, name))
        self.end.atexit = False  # the program ends then anyway
