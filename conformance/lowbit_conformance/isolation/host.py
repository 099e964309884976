"""The process that owns the code under test.

The judge (`remote`) sends this file's text to a fresh interpreter, so that the code under test sees no module, no
argument and no variable of the suite: a kernel cannot tell that it is being tested. The texts of `state` and `channel`
come before this one, in the same namespace. Requests and replies are JSON objects on one socket, and arrays lie in the
shared memory of `arena`. During a call the pages of that call are the only ones that can be accessed.

This process does not judge. It reports results, exceptions and *breaches*, which are what a call did to the process:
changed its environment, its folder, its floating-point mode or its signal handlers, wrote to standard output, left a
child, or asked for the answer elsewhere.
"""

from __future__ import annotations  # names of `state` and `channel` are missing if this is imported alone

import ctypes
import dataclasses
import fcntl
import gc
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

import lowbit.backend
from lowbit.backend import Backend, Declaration, PreparedLinear
from lowbit.backend.declarations import availability_of, capabilities_of
from lowbit.backend.wire import Tree, decode, encode
from lowbit.contract.rounding import any_order, one_loop
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.system.entries import entries

if TYPE_CHECKING:  # their texts run before this one; importing them here would import the suite
    from lowbit_conformance.isolation.channel import Memory, Message, receive, send
    from lowbit_conformance.isolation.state import LIBC, OBSERVED, Breach, Watch, measure

M_PERTURB = -6  # of mallopt: fill memory in malloc and in free
MOST_KEPT = 1 << 16  # bytes of a result that is kept, to check whether a later call changes it
KEPT_RESULTS = 8  # arrays; a backend may have a buffer for each matrix, or alternate between a few
MOST_NOTED = 100  # results that are not the backend's own, and its child processes
CHANNEL_LOST = 4  # a status
SUITE = "lowbit_conformance"

KNOWN_ROUNDINGS = {any_order: "any_order", one_loop: "one_loop"}


# **Results that are not the backend's own.**

_asked: list[Breach] = []


def fall_back(name: str) -> None:
    """Record and refuse a call of a function of the specification."""
    note_fallback(f"it called {name}, which a backend must not: it computes the result itself")
    raise RuntimeError(f"{name} cannot be called here: a backend computes the result itself")


def note_fallback(text: str) -> None:
    """Record a result, or a way to one, that is not the backend's own."""
    if len(_asked) < MOST_NOTED:
        _asked.append(("SILENT_FALLBACK", text))


def breaches_asked() -> list[Breach]:
    """What was recorded since the last call."""
    found = list(_asked)
    _asked.clear()
    return found


SEAL: Any = None
"""The seal of `sealing`, after it is closed; sealed functions look for it here."""


def close_seal(text: str) -> None:
    """Run the text of `sealing`, and seal the functions of the specification."""
    global SEAL
    names: dict[str, Any] = {"__name__": "seal"}
    exec(compile(text, "<string>", "exec"), names)
    SEAL = names["Seal"](fall_back, note_fallback)
    SEAL.close()


class Others:
    """The packages of other installed backends, which should not be imported here."""

    def __init__(self) -> None:
        found = entries(lowbit.backend.ENTRY_POINTS)
        packages = {entry.value.partition(":")[0].partition(".")[0] for entry in found} - {"lowbit"}
        self._packages = packages | {SUITE}

    def owned(self, modules: list[str]) -> None:
        """Treat the packages of these modules as the backend's own."""
        self._packages -= {module.partition(".")[0] for module in modules}

    def breaches(self) -> list[Breach]:
        """The packages that were imported since the last call."""
        imported = sorted(package for package in self._packages if package in sys.modules)
        self._packages -= set(imported)
        kinds = {SUITE: "which knows the right answers"}
        return [
            ("SILENT_FALLBACK", f"it imported {package}, {kinds.get(package, 'which is another backend')}")
            for package in imported
        ]


# **Requests.**


class Host:
    """The backend under test, and the requests that the judge can make."""

    def __init__(self, memory: Memory, watch: Watch, others: Others) -> None:
        self.memory, self.watch, self.others = memory, watch, others
        self.backend: Any = None
        self.claimed: Mapping[str, Declaration] = {}
        self.held: dict[int, Any] = {}
        self.number = 0
        self.given: deque[tuple[Any, bytes]] = deque(maxlen=KEPT_RESULTS)
        self.fresh: list[Any] = []
        self.same: dict[tuple[int, int], tuple[list[Any], dict[str, Any]]] = {}
        self.broken: list[Breach] = []
        self.warm: set[str] = set()

    # Loading.

    def load(self, kind: str, name: str, own: list[str], seal: str, handler: str) -> Message:
        """Import and create the backend.

        `own` are packages that it may import. `seal` is the text of `sealing`; it is empty for the suite's own
        backends, which alone may call the reference.
        """
        if seal:
            close_seal(seal)
        try:
            self.backend = made(kind, name)
            if kind == "function":  # one that does not exist is refused as a class is, and is not a declaration
                with suppress(ImportError):  # from the library of its arrays, which `availability` names
                    self.backend.load()
        except (ArgumentError, UnavailableError) as error:
            return {"refused": str(error)}
        try:
            state = availability_of(self.backend)
            if not state.usable:
                shown = f"function {self.backend.name}" if kind == "function" else f"backend {name}"
                return {"refused": str(UnavailableError(shown, state.reason, state.remedy))}
            if kind == "function":  # its code has not run; importing the library of its arrays may change the process
                self.watch.remember()
            capabilities = self.capabilities()
            same = capabilities == self.capabilities()
        except (ArgumentError, UnavailableError) as error:
            return {"misdeclared": str(error)}
        # As in the adapter of programs; declared values may be endless.
        self.watch.allowed = lambda: tuple(islice(getattr(self.backend, "children", ()), MOST_NOTED))
        kinds = [kind for kind in type(self.backend).__mro__ if kind is type(self.backend) or inspect.isabstract(kind)]
        self.others.owned([*(kind.__module__ for kind in kinds), *own])  # it may complete an abstract class of another
        breaches = self.watch.breaches(preparing=True) + self.others.breaches() + breaches_asked()
        if not same:
            breaches.append(("NONDETERMINISTIC", "its capabilities are not the same when asked again"))
        if handler:
            ctypes.CDLL(handler).lowbit_record_faults(ctypes.c_void_p(self.memory.base))
        self.watch.remember()
        gc.collect()
        gc.freeze()  # present objects stay, and need not be scanned again and again
        return {"capabilities": capabilities, "breaches": breaches}

    def capabilities(self) -> Message:
        given: Any = capabilities_of(self.backend)  # plain values
        self.claimed = given.operations
        operations = {}
        for name, declaration in given.operations.items():
            arithmetic = declaration.arithmetic
            told = None
            if arithmetic:
                told = {part.name: getattr(arithmetic, part.name) for part in dataclasses.fields(arithmetic)}
                told["roundings"] = KNOWN_ROUNDINGS.get(arithmetic.roundings, "own")
            operations[name] = {"limits": declaration.told_limits, "arithmetic": told}
        rest = {part.name: getattr(given, part.name) for part in dataclasses.fields(given)}
        rest |= {"operations": operations, "details": dict(given.details or {})}
        return json.loads(json.dumps(rest))  # type: ignore[no-any-return]  # JSON is Any to mypy

    def roundings(self, operation: str, rows: int, group_size: int) -> Message:
        arithmetic: Any = self.claimed[operation].arithmetic
        return {"roundings": int(arithmetic.roundings(rows, group_size))}

    # Calls. A request has several attempts at one call, each with its arrays in other places.

    def call(self, what: str, attempts: list[Message], operation: str = "") -> Message:
        """Perform the attempts one by one: `run`, `prepare`, `open`, or a method of a handle: a product or `step`."""
        outcomes: list[Message] = []
        breaches = self.warm_up(operation) if what in ("run", "open") else []
        for attempt in attempts:
            outcomes.append(self.attempt(what, operation, attempt))
            breaches += self.broken
            if os.getpid() != PROCESS:
                os._exit(3)  # a child that returned from the call; its parent answers
        breaches += self.watch.breaches(what == "prepare") + self.others.breaches() + breaches_asked()
        return {"outcomes": outcomes, "breaches": breaches}

    def warm_up(self, operation: str) -> list[Breach]:
        """Let the backend prepare what the first call of an operation needs, which may start programs."""
        if operation in self.warm:
            return []
        self.warm.add(operation)
        with suppress(Exception):  # an error shows in the call
            self.backend.warm_up(operation)
        return self.watch.breaches(preparing=True)

    def attempt(self, what: str, operation: str, attempt: Message) -> Message:
        segments, held = attempt["segments"], what in ("prepare", "open")
        self.memory.allow(segments)
        try:
            arguments, choices = self.arguments(attempt)
            if hasattr(LIBC, "mallopt"):  # of the GNU C library
                LIBC.mallopt(M_PERTURB, attempt["perturb"])
            try:
                result = self.function(what, operation, attempt.get("handle"))(*arguments, **choices)
            except BaseException as error:
                return raised(error)
            finally:
                self.broken = self.overwritten()
            if not held:
                return self.outcome(result, arguments)
            if what == "prepare" and not isinstance(result, PreparedLinear):
                return {"strange": f"prepare gave a {type(result).__name__}, which is no PreparedLinear"}
            self.number += 1
            self.held[self.number] = result
            numbers = {"handle": self.number}
            if what == "prepare":
                numbers |= {name: int(getattr(result, name)) for name in ("rows", "columns", "nbytes")}
            return numbers
        finally:
            self.memory.forbid(segments)

    def arguments(self, attempt: Message) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of an attempt; a named attempt reuses the objects of the previous one with its name."""
        name = tuple(attempt.get("same", ()))
        if name in self.same:
            return self.same[name]
        arguments = [decode(tree, self.memory.get) for tree in attempt["arguments"]]
        choices = {key: decode(tree, self.memory.get) for key, tree in attempt["choices"].items()}
        if name:
            self.same[name] = arguments, choices
        return arguments, choices

    def forget(self, serial: int) -> Message:
        """Drop the arguments that were kept under names of this series."""
        self.same = {name: kept for name, kept in self.same.items() if name[0] != serial}
        return {}

    def function(self, what: str, operation: str, handle: int | None) -> Callable[..., Any]:
        if what in ("run", "open"):
            call = getattr(self.backend, what)
            return lambda *arguments, **choices: call(operation, *arguments, **choices)
        if handle is not None:
            return getattr(self.held[handle], what)  # type: ignore[no-any-return]  # what is held is Any
        return self.backend.prepare  # type: ignore[no-any-return]  # the backend is Any

    def outcome(self, result: Any, arguments: list[Any]) -> Message:
        for number, argument in enumerate(arguments):
            if result is argument and isinstance(argument, np.ndarray) and argument.flags.writeable:
                return {"argument": number}
        try:
            return {"result": encode(result, self.put)}
        except (ArgumentError, MemoryError, RecursionError) as error:
            of = "" if isinstance(result, np.ndarray) else f"the result is a {type(result).__name__}: "
            return {"strange": f"{of}{error}"}
        finally:
            self.keep()

    def keep(self) -> None:
        """Write other bytes into the given arrays, as the caller, their owner, may; and remember them."""
        for array in self.fresh:
            if array.flags.writeable:
                if any(np.may_share_memory(array, before) for before, _ in self.given):
                    self.given.clear()
                    self.broken.append(("OOB_WRITE", "the result lies in an array that was given as a result before"))
                other = np.invert(np.frombuffer(array.tobytes(), np.uint8))
                array[...] = other.view(array.dtype).reshape(array.shape)
        self.given.extend((array, array.tobytes()) for array in self.fresh)
        self.fresh.clear()

    def put(self, array: Any) -> Message:
        """Copy an array of a result to the judge, and keep it, to check whether a later call changes it.

        Raises:
            ArgumentError: it is of a class derived from numpy's, or is in the memory of an argument.
        """
        if type(array) is not np.ndarray:
            raise ArgumentError("an array of the result", f"a {type(array).__name__}", "a numpy.ndarray")
        if array.size and self.memory.holds(array):
            raise ArgumentError("an array of the result", "in the memory of an argument", "an array of its own")
        if 0 < array.nbytes <= MOST_KEPT:
            self.fresh.append(array)
        return self.memory.put(array)

    def overwritten(self) -> list[Breach]:
        """Whether an array that an earlier call returned has changed since."""
        if any(array.tobytes() != content for array, content in self.given):
            self.given.clear()
            return [("OOB_WRITE", "the result of a call before was overwritten")]
        return []

    def release(self, handles: list[int]) -> None:
        """Close and forget the objects of these handles."""
        for handle in handles:
            held = self.held.pop(handle)
            if hasattr(held, "close"):
                held.close()

    # Concurrent and repeated calls.

    def together(self, calls: list[Message], times: int) -> Message:
        """Perform several calls, each in its own thread and `times` times; returns the outcomes of each."""
        outcomes: list[list[Message]] = [[] for _ in calls]
        ready, lock = threading.Barrier(len(calls)), threading.Lock()

        def work(number: int, call: Message) -> None:
            attempt = call["attempt"]
            function = self.function(call["what"], call["operation"], attempt.get("handle"))
            arguments, choices = self.arguments(attempt)
            ready.wait()
            for _ in range(times):
                try:
                    result = function(*arguments, **choices)
                    with lock:
                        own = next((a for a in arguments if a is result and isinstance(a, np.ndarray)), result)
                        outcomes[number].append({"result": encode(own, self.memory.put)})
                except BaseException as error:
                    outcomes[number].append(raised(error))

        segments = [segment for call in calls for segment in call["attempt"]["segments"]]
        self.memory.allow(segments)
        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.memory.forbid(segments)
        return {"outcomes": outcomes, "breaches": self.watch.breaches(False) + breaches_asked()}

    def walk(self, handles: list[int], steps: list[Tree], times: int) -> Message:
        """Repeat the same steps of each session, without returning results."""
        arguments = [decode(step, self.memory.get) for step in steps]
        for handle in handles:
            take = self.function("step", "", handle)
            for _ in range(times):
                for step in arguments:
                    take(*step)
        return {"breaches": self.watch.breaches(False)}

    def repeat(self, what: str, attempt: Message, operation: str, batches: int, times: int) -> Message:
        """Perform a call repeatedly; returns the counts of all resources before and after each batch of `times`."""
        self.memory.allow(attempt["segments"])
        arguments, choices = self.arguments(attempt)
        function = self.function(what, operation, attempt.get("handle"))
        counts = []
        try:
            for number in range(batches + 1):
                for _ in range(times if number else 3):
                    result = function(*arguments, **choices)
                    if what == "open":
                        result.close()
                    del result
                counts.append(measure())
        except BaseException as error:
            return raised(error) | {"breaches": []}
        finally:
            self.memory.forbid(attempt["segments"])
        return {"counts": counts, "breaches": self.watch.breaches(what == "prepare") + breaches_asked()}


PROCESS = os.getpid()
FOREIGN = {
    "function": "lowbit.backend.function:FunctionBackend",
    "library": "lowbit_foreign:LibraryBackend",
    "command": "lowbit_foreign:CommandBackend",
}


def made(kind: str, name: str) -> Backend:
    """The backend under test: by a name that `lowbit.backend.find` knows, or made by a function from the name."""
    if kind == "name":
        return lowbit.backend.find(name)
    module, _, factory = FOREIGN.get(kind, kind).partition(":")
    backend: Backend = getattr(importlib.import_module(module), factory)(name)
    return backend


def raised(error: BaseException) -> Message:
    """An exception in the form for the judge."""
    known = next((kind for kind in (ArgumentError, NotDeclaredError) if isinstance(error, kind)), None)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != raised.__code__.co_filename
    ]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    told: Message = {"raised": type(error).__name__, "text": text[:1000], "place": place}
    if known:
        told |= {"known": known.__name__, "arguments": [str(part) for part in error.args][:3]}
    return told


def serve(channel: socket.socket, memory: Memory, watch: Watch, others: Others) -> None:
    """Answer requests until the judge has gone."""
    host = Host(memory, watch, others)
    while message := receive(channel):
        memory.next = memory.results
        token = message.pop("token")
        request: Callable[..., Message] = getattr(host, message.pop("do"))
        try:
            host.release(message.pop("release"))
            reply = request(**message)
        except BaseException as error:
            reply = {"failed": raised(error)}
        if os.getpid() != PROCESS:
            os._exit(3)
        send(channel, reply | {"token": token})


def main() -> None:
    """Take over standard input, which is the socket to the judge, and replace it with an empty one."""
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 50))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    # A crash leaves no core file in the user's folder; it would contain 4 GiB of shared memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: do not outlive the judge
        LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: grandchildren become children
    greeting = receive(channel)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    memory = Memory(greeting["file"], greeting["control"], greeting["arguments"])
    os.close(greeting["file"])
    isolation = globals().get("ISOLATION", "")  # set by the text before this one
    if isolation == "none" and not OBSERVED:
        isolation = "unobserved"
    send(channel, {"base": memory.base, "isolation": isolation, "token": greeting["token"]})
    try:
        serve(channel, memory, Watch(1), Others())
    except OSError as error:
        os.write(2, f"the channel to the process that judges was closed or replaced: {error.strerror}".encode())
        os._exit(CHANNEL_LOST)
    os._exit(0)


if __name__ == "__main__":
    main()
