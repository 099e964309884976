"""The backend under test, as the tests see it: each call is performed in the host process and judged on its return.

`Remote` has the methods of a `lowbit.backend.Backend`, so a test reads as if the backend were in this process. It
also does what no test does itself: it performs every call twice, with the arrays against the guard page on their right
and then on their left, with other bytes around them and in fresh memory, and both results must have equal bits. Writes
beside the result and changes of the process are verdicts. A result is read and copied before a test can compute the
expected one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import count
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.backend import Capabilities
from lowbit.backend.wire import Get, decode, encode
from lowbit.contract.rounding import Roundings
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.text import one_line
from lowbit_conformance.isolation import faults
from lowbit_conformance.isolation.arena import Arena, Segment
from lowbit_conformance.isolation.blame import blame
from lowbit_conformance.isolation.calls import POISON, SIDES, Call, Held, RemoteLinear, RemoteSession, Variant
from lowbit_conformance.isolation.claims import claimed
from lowbit_conformance.isolation.equal_bits import difference, same
from lowbit_conformance.isolation.placing import Attempt, SameArrays, placed
from lowbit_conformance.isolation.process import HostEndedError, HostProcess, Message
from lowbit_conformance.isolation.verdicts import BrokenPromiseError, HostRefusedError

BOTH_SIDES = 1 << 24  # bytes of arguments up to which a call is performed twice
TWO_HANDLES = 1 << 22
# Read once, before a backend could replace it.
SEAL = (files("lowbit_conformance.isolation") / "sealing.py").read_text("utf-8")
# The errors of `lowbit_foreign` when a library writes beside a result, and when a program dies or breaks the protocol.
OWN_WORDS = {"OutOfBoundsError": "OOB_WRITE", "BrokenLineError": "CRASHED"}
ORDER = (0, 1, 1, 0, 1, 0, 0, 1)  # placements, to distinguish dependence on time from dependence on addresses
# The errors of parsing a reply that does not have the host's form.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, MemoryError)
MOST_HANGS, MOST_DEATHS = 2, 12  # in one operation, after which its other cases are not run


class Remote:
    """The backend under test in its host process.

    Attributes:
        name: as the user gave it.
        loading: seconds that importing and creating it may take.
        started: the number of hosts so far.
        breaches: what loading it changed in the process.
        isolation: how each host is isolated from this process; empty before the first one.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        deadline: float,
        *,
        loading: float = 120.0,
        own: Sequence[str] = (),
        sealed: bool = True,
    ) -> None:
        """Nothing is started before `load`.

        Args:
            kind: ``name``, ``library`` or ``command``, as the user named it; or the function ``module:function`` that
                makes a backend of the name.
            name: of the backend, the path of the library, the command, or what the function takes.
            deadline: seconds that a call may take.
            loading: seconds that importing and making the backend may take.
            own: packages besides its own that it may import.
            sealed: whether the functions of the specification are closed to it.
        """
        self.kind, self.name, self.deadline = kind, name, deadline
        self.loading, self._own_packages, self._sealed = loading, list(own), sealed
        self.arena, self.started = Arena(), 0
        self.breaches: list[tuple[str, str]] = []
        self.isolation = ""
        self._host: HostProcess | None = None
        self._capabilities = Capabilities({})
        self._roundings: dict[tuple[str, int, int], int] = {}
        self._forgotten: list[tuple[int, list[int], list[list[Segment]]]] = []
        self._handler = faults.handler()
        self._deaths: Counter[tuple[str, bool]] = Counter()
        self._recording: list[Call] | None = None
        self._series: SameArrays | None = None
        self._serials = count()
        self._live: list[Segment] = []

    # The host.

    def load(self) -> None:
        """Start a host, and let it import and create the backend.

        Raises:
            UnavailableError: the backend says that it cannot run here, or does not exist; in the host's words.
            BrokenPromiseError: loading it ended the process or hung, or its declaration cannot be understood.
        """
        try:  # a backend must not cause a later host to be isolated less well than the first
            host = HostProcess(self.arena, [self.isolation] if self.isolation else None)
        except HostEndedError as end:
            raise BrokenPromiseError(str(end)) from None
        self._host, self.started, self._live, self.isolation = host, self.started + 1, [], host.isolation
        sealed = self._sealed and (self.kind, self.name) != ("name", "reference")
        request = {"do": "load", "kind": self.kind, "name": self.name, "own": self._own_packages}
        reply = self._ask(request | {"seal": SEAL if sealed else "", "handler": self._handler}, self.loading)
        if "refused" in reply:
            self.close()
            raise HostRefusedError(one_line(str(reply["refused"])))
        if "misdeclared" in reply:
            raise BrokenPromiseError(f"DECLARATION_REFUSED: {one_line(str(reply['misdeclared']))}")
        with self._understanding():
            self.breaches = [(str(verdict), str(text)) for verdict, text in reply["breaches"]] + self._host.seen()
            self._host.remember()
            try:
                self._capabilities = claimed(reply["capabilities"], self._own)
            except ArgumentError as error:  # the host lets none of these through
                raise BrokenPromiseError(f"DECLARATION_REFUSED: {one_line(str(error))}") from None

    def close(self) -> None:
        """End the host."""
        if self._host is not None:
            self._host.end()
            self._host = None

    def _ask(self, message: Message, deadline: float) -> Message:
        if self._host is None:
            self.load()
        assert self._host is not None
        try:
            reply = self._host.ask(message | {"release": self._released()}, deadline)
        except HostEndedError as end:
            raise self._broken(end) from None
        if "failed" in reply:
            with self._understanding():
                raise BrokenPromiseError(f"RAISED: {_told(reply['failed'])}")
        return reply

    @contextmanager
    def _understanding(self) -> Iterator[None]:
        """Parse a reply; one without the form of `host` was written by a backend."""
        try:
            yield
        except (ArgumentError, NotDeclaredError):
            raise
        except MALFORMED as error:
            self.close()
            what = f"CRASHED: the process answered with what is no reply: {type(error).__name__}: {error}"
            raise BrokenPromiseError(what) from None
        except HostEndedError as end:
            raise self._broken(end) from None

    def _broken(self, end: HostEndedError) -> BrokenPromiseError:
        """Close the remains of a host that has ended, and report how it ended."""
        assert self._host is not None
        verdict = blame(str(end), self.arena, self._host.base, self._live)
        self.close()
        return BrokenPromiseError(verdict)

    def forget(self, host: int, handles: list[int], segments: list[list[Segment]]) -> None:
        """Release a held object with the next request; this may be called at any moment."""
        self._forgotten.append((host, handles, segments))

    def _released(self) -> list[int]:
        """The handles that were forgotten in this host; their pages are released."""
        released = []
        while self._forgotten:
            host, handles, segments = self._forgotten.pop()
            if host == self.started:
                released += handles
            for group in segments:
                self._free(group)
        return released

    # Declarations.

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def _own(self, operation: str) -> Roundings:
        """The count of roundings that the backend declares by its own function."""

        def roundings(rows: int, group_size: int) -> int:
            key = operation, rows, group_size
            if key not in self._roundings:
                request = {"do": "roundings", "operation": operation, "rows": rows, "group_size": group_size}
                reply = self._ask(request, self.deadline)
                with self._understanding():
                    self._roundings[key] = int(reply["roundings"])
            return self._roundings[key]

        return roundings

    # The methods of a backend.

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        """See `lowbit.backend.Backend.run`."""
        return self.perform(Call("run", operation, arguments, choices))

    def prepare(self, matrix: QuantizedMatrix) -> RemoteLinear:
        """See `lowbit.backend.Backend.prepare`."""
        held = self.perform(Call("prepare", "linear.qgemv", (matrix,)))
        assert isinstance(held, RemoteLinear)
        return held

    def open(self, operation: str, *arguments: Any) -> RemoteSession:
        """See `lowbit.backend.Backend.open`."""
        held = self.perform(Call("open", operation, arguments))
        assert isinstance(held, RemoteSession)
        return held

    # Performing a call.

    def perform(self, call: Call) -> Any:
        """Make a call on both sides and compare.

        Raises:
            BrokenPromiseError: a habit is broken, or the host ended.
            ArgumentError: the backend refuses the arguments, on both sides.
            NotDeclaredError: it does not declare the operation.
        """
        self._give_up(call.operation)
        limit = TWO_HANDLES if call.what in ("prepare", "open") else BOTH_SIDES
        sides = 2 if call.nbytes <= limit and self._series is None else 1
        try:
            results = self.elsewhere(call, list(SIDES[:sides]), self._series)
        except BrokenPromiseError as error:
            hung = str(error).startswith("HUNG")
            if hung or self._host is None:
                self._deaths[call.operation, hung] += 1
            raise
        if isinstance(results[0], Held):
            call.result = results[0]
        else:
            for result in results:  # a write or broken promise is the verdict, even if the words of both sides differ
                if isinstance(result, BrokenPromiseError) and str(result).startswith(tuple(OWN_WORDS.values())):
                    raise result
            for other in results[1:]:
                if not same(results[0], other):
                    self._record_moving(call, results[0], other)
                    self._explain(call, results[0], other)
            if isinstance(results[0], Exception):
                raise results[0]
            call.result = results[0]
            if call.out >= 0 and not call.poisoned:
                call.arguments[call.out][...] = call.result
                call.result = call.arguments[call.out]
        if self._recording is not None:
            self._recording.append(call)
        return call.result

    def _record_moving(self, call: Call, result: Any, again: Any) -> None:
        """Keep results that differ between both sides: their errors and differences may show why."""
        if self._recording is not None and isinstance(result, np.ndarray):
            call.result, call.again = result, again
            self._recording.append(call)

    def _give_up(self, operation: str) -> None:
        hangs, deaths = self._deaths[operation, True], self._deaths[operation, False]
        if hangs >= MOST_HANGS or deaths >= MOST_DEATHS:
            raise BrokenPromiseError(
                f"NOT_RUN: the process hung {hangs} times and ended {deaths} times in {operation}; the rest is not run"
            )

    def elsewhere(self, call: Call, variants: list[Variant], series: SameArrays | None = None) -> list[Any]:
        """The outcome of a call in each of these variants; it may be an exception.

        A call that makes a held object returns only that object, with a handle for each variant.
        """
        held = call.what in ("prepare", "open")
        attempts = [placed(call, variant, self.arena, self._capabilities, series) for variant in variants]
        segments = [segment for attempt in attempts for segment in attempt.segments]
        self._live += segments
        request = {"do": "call", "what": call.what, "operation": call.operation}
        kept: list[Segment] = []
        try:
            reply = self._ask(request | {"attempts": [attempt.message for attempt in attempts]}, self.deadline)
            with self._understanding():
                self._check_breaches(reply)
                for segment in segments:
                    if spoilt := self.arena.spoilt(segment):
                        raise BrokenPromiseError(spoilt)
                outcomes = reply["outcomes"]
                if len(outcomes) != len(attempts):
                    raise ValueError(f"{len(outcomes)} outcomes of {len(attempts)} calls")
                if held and all("handle" in outcome for outcome in outcomes):
                    held_by_host = self._hold(call, [] if series else attempts, outcomes)
                    kept = segments
                    return [held_by_host]
                read = self.arena.reading()
                results = [self._outcome(call, attempts[0], outcomes[0], variants[0].filling, read)]
                for attempt, outcome, variant in zip(attempts[1:], outcomes[1:], variants[1:], strict=True):
                    # Equal trees contain no arrays, whose places would differ; reading a long trace once is enough.
                    equal = call.out < 0 and outcome == outcomes[0]
                    filling = variant.filling
                    results.append(results[0] if equal else self._outcome(call, attempt, outcome, filling, read))
                return results
        finally:
            if series is None:
                self._free([segment for segment in segments if segment not in kept])

    def _free(self, segments: list[Segment]) -> None:
        """Release the pages of arrays."""
        self.arena.free(segments)
        gone = {segment.first for segment in segments}
        self._live = [segment for segment in self._live if segment.first not in gone]

    def _check_breaches(self, reply: Message) -> None:
        assert self._host is not None
        try:
            seen = self._host.seen()
        except HostEndedError as end:
            raise self._broken(end) from None
        for verdict, text in [*reply["breaches"], *seen]:
            raise BrokenPromiseError(f"{verdict}: {one_line(str(text))}")

    def _hold(self, call: Call, attempts: list[Attempt], outcomes: list[Message]) -> Held:
        handles = [int(outcome["handle"]) for outcome in outcomes]
        segments = [attempt.segments for attempt in attempts]
        if call.what == "open":
            session = RemoteSession(self, handles, segments)
            session.operation, session.opened_with = call.operation, call.arguments
            return session
        rows, columns, nbytes = (int(outcomes[0][part]) for part in ("rows", "columns", "nbytes"))
        linear = RemoteLinear(self, handles, segments)  # from here on it releases the segments
        linear.matrix, linear.rows, linear.columns, linear.nbytes = call.arguments[0], rows, columns, nbytes
        return linear

    def _outcome(self, call: Call, attempt: Attempt, outcome: Message, filling: int, read: Get) -> Any:
        """A result, or the exception that was raised."""
        if "known" in outcome:
            kind = {"ArgumentError": ArgumentError, "NotDeclaredError": NotDeclaredError}[outcome["known"]]
            parts = ([str(part) for part in outcome["arguments"]] + ["", "", ""])[:3]
            return kind(*parts)
        if "raised" in outcome:
            return BrokenPromiseError(f"{OWN_WORDS.get(str(outcome['raised']), 'RAISED')}: {_told(outcome)}")
        if "strange" in outcome:
            return BrokenPromiseError(f"WRONG: {outcome['strange']}")
        if call.out >= 0:
            return self._written(call, attempt, outcome, filling)
        if "argument" in outcome:
            return np.array(call.arguments[int(outcome["argument"])])
        try:
            return decode(outcome["result"], read)
        except ValueError as error:
            return BrokenPromiseError(f"WRONG: the result is not what it claims to be: {error}")

    def _written(self, call: Call, attempt: Attempt, outcome: Message, filling: int) -> Any:
        """The output array of the call."""
        if outcome.get("argument") != call.out:
            return BrokenPromiseError("STALE_OUTPUT: the call did not return the array it was given as out")
        out, tree = call.arguments[call.out], attempt.message["arguments"][call.out]
        result = self.arena.read(out.dtype, out.shape, tree)
        if call.poisoned:
            stale = np.flatnonzero(result.view(np.uint32) == POISON[filling])
            if len(stale):
                text = f"{len(stale)} of {result.size} elements of out were never written, first {stale[0]}"
                return BrokenPromiseError(f"STALE_OUTPUT: {text}")
        return result

    def _explain(self, call: Call, first: Any, second: Any) -> None:
        """Find out why the two sides differ, by changing one thing at a time.

        Raises:
            BrokenPromiseError: always.
        """
        where = difference(first, second)
        if isinstance(call.owner, RemoteSession):
            raise BrokenPromiseError(f"NONDETERMINISTIC: two sessions that were asked the same differ: {where}")
        # Both placements again, in an aperiodic order: results that depend only on the placement are the same two.
        again = self.elsewhere(call, [SIDES[side] for side in ORDER])
        if not all(same((first, second)[side], result) for side, result in zip(ORDER, again, strict=True)):
            raise BrokenPromiseError(f"NONDETERMINISTIC: the same call again gives other bits: {where}")
        causes = (
            (Variant(padding=1), "OOB_READ: the result changes with the bytes around the arguments"),
            (Variant(filling=1), "STALE_OUTPUT: the result changes with what fresh memory holds"),
        )
        for variant, verdict in causes:
            if not same(first, self.elsewhere(call, [variant])[0]):
                raise BrokenPromiseError(f"{verdict}: {where}")
        raise BrokenPromiseError(f"NONDETERMINISTIC: the result changes with the addresses of the arguments: {where}")

    # Many calls.

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Record the calls in the block, with their results."""
        calls: list[Call] = []
        before, self._recording = self._recording, calls
        try:
            yield calls
        finally:
            self._recording = before

    @contextmanager
    def same_arrays(self) -> Iterator[None]:
        """Calls of one kind in the block get the same arrays each time, with other contents.

        Each is one Python object at one address, as with a caller that allocates its arrays once and overwrites them
        for each call. Between two calls the host may not access them. Calls are made once, not on both sides, because
        code that remembers only the last call would otherwise forget it in between.
        """
        self._series = series = SameArrays(next(self._serials))
        try:
            yield
        finally:
            self._series = None
            for segments in series.places.values():
                self._free(segments)
            if self._host is not None:
                self._ask({"do": "forget", "serial": series.serial}, self.deadline)

    def together(self, calls: list[Call], times: int) -> list[list[Any]]:
        """Make several calls at once, each in its own thread and `times` times; returns the results of each."""
        attempts = [placed(call, Variant(), self.arena, self._capabilities) for call in calls]
        segments = [segment for attempt in attempts for segment in attempt.segments]
        self._live += segments
        request: Message = {"do": "together", "times": times, "calls": []}
        for call, attempt in zip(calls, attempts, strict=True):
            request["calls"].append({"what": call.what, "operation": call.operation, "attempt": attempt.message})
        try:
            reply = self._ask(request, self.deadline)
            with self._understanding():
                self._check_breaches(reply)
                results, read = [], self.arena.reading()
                for outcomes in reply["outcomes"]:
                    given = []
                    for outcome in outcomes:
                        if "raised" in outcome:
                            raise BrokenPromiseError(f"RAISED: {_told(outcome)} beside other threads")
                        given.append(decode(outcome["result"], read))
                    results.append(given)
                if [len(given) for given in results] != [times] * len(calls):
                    raise ValueError("not as many outcomes as calls")
                return results
        finally:
            self._free(segments)

    def walk(self, session: RemoteSession, steps: list[tuple[Any, ...]], times: int) -> None:
        """Repeat the same steps, whose arguments have no arrays; their results are not compared."""
        request = {"do": "walk", "handles": session.handles, "times": times}
        trees = [[encode(part, _no_array) for part in step] for step in steps]
        reply = self._ask(request | {"steps": trees}, self.deadline * 4)
        with self._understanding():
            self._check_breaches(reply)

    def repeat(self, call: Call, batches: int, times: int) -> list[dict[str, int]]:
        """Make a call in batches; returns the host's resource counts after each batch."""
        attempt = placed(call, Variant(), self.arena, self._capabilities)
        self._live += attempt.segments
        request = {"do": "repeat", "what": call.what, "operation": call.operation, "attempt": attempt.message}
        try:
            reply = self._ask(request | {"batches": batches, "times": times}, self.deadline * 4)
            with self._understanding():
                self._check_breaches(reply)
                if "raised" in reply:
                    raise BrokenPromiseError(f"NONDETERMINISTIC: the call, repeated, raises {_told(reply)}")
                counted = [{str(name): int(count) for name, count in counts.items()} for counts in reply["counts"]]
                if len(counted) != batches + 1:
                    raise ValueError(f"{len(counted)} counts of {batches} batches")
                return counted
        finally:
            self._free(attempt.segments)


def _no_array(array: Array) -> Message:
    raise ValueError("an array among the arguments of a step that is taken many times")


def _told(outcome: Message) -> str:
    return one_line(f"{outcome['raised']}: {outcome['text']}{outcome['place']}")
