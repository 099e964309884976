"""Recording what the tests of the suite ask of a backend, by answering them with the reference."""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend import Capabilities, Declaration
from lowbit.backend.reference import ReferenceBackend, in_type
from lowbit.backend.session import Session
from lowbit.backend.wire import Tree, as_json, encode, from_json
from lowbit.contract.operation import OPERATIONS, Promise
from lowbit.errors import ArgumentError
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.stored import RESULTS
from lowbit_conformance.isolation.calls import Call, Variant
from lowbit_conformance.suite.cases import CONCURRENT, HABIT, Case
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.clauses.test_habits import HabitCase
from lowbit_conformance.suite.format_inputs import FormatCase
from lowbit_conformance.suite.marking import MARKS, Mark, Settings
from lowbit_conformance.suite.mistakes import made, mistakes
from lowbit_conformance.vectors.judging import STATED, right_answer

MOST_BYTES = 1 << 14
"""Largest size in bytes of the arguments and of the result of a call; larger calls are left out to keep files small."""
MOST_TEXT = 1 << 16
"""Largest number of characters of a vector in its file."""
RIGHT_CALLS = 20
"""Largest number of calls in which a mistake is tried."""
TOO_LARGE = f"arrays of more than {MOST_BYTES} bytes, or more than {MOST_TEXT} characters"


class TooLargeError(BaseException):
    """A call whose arrays are too large for a file; it ends the case, and no test mistakes it for a result."""


@dataclass
class Vectors:
    """The vectors of one operation.

    Attributes:
        operation: its id.
        vectors: one object each, in the order of the suite's cases.
        left_out: the number of calls that were left out, by reason.
    """

    operation: str
    vectors: list[dict[str, Tree]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def record(operation: str, settings: Settings) -> Vectors:
    """The calls of one operation in the suite's cases.

    A format of stored matrices has a vector in each type in which it is tried, its smallest case if no other is small
    enough. A call that another case made before is not repeated. Calls that depend on the placement of arrays in
    memory, on threads or on a model file cannot be recorded and are counted.
    """
    recorded = Vectors(operation)
    seen: set[str] = set()
    tried: list[tuple[Case, Mark, bool]] = []

    def keep(case: Case, mark: Mark) -> None:
        before = len(recorded.vectors)
        for vector in vectors_of(case, mark, recorded.left_out):
            said = json.dumps([vector["arguments"], vector.get("steps")])
            if len(json.dumps(vector)) > MOST_TEXT:
                recorded.left_out[TOO_LARGE] += 1
            elif said in seen:
                recorded.left_out["equal to another"] += 1
            else:
                seen.add(said)
                recorded.vectors.append(vector)
        tried.append((case, mark, len(recorded.vectors) > before))

    for mark in marks_of(operation):
        for case in {case.id: case for case in mark.generator(mark.clause, settings)}.values():
            if case.variant == CONCURRENT:
                recorded.left_out["called from several threads"] += 1
                continue
            keep(case, mark)
    for case, mark in types_left_out(tried):
        keep(case, mark)
    recorded.vectors += refusals(operation, recorded)
    return recorded


def types_left_out(tried: Iterable[tuple[Case, Mark, bool]]) -> list[tuple[Case, Mark]]:
    """The smallest case of each format and tier, in the types for which every case was too large.

    The suite tries all types in one large shape, which kernels with large tiles accept.
    """
    groups: dict[tuple[str, str], list[tuple[FormatCase, Mark, bool]]] = {}
    for case, mark, kept in tried:
        if isinstance(case, FormatCase) and case.activations in RESULTS:
            groups.setdefault((case.format, case.tier), []).append((case, mark, kept))
    found: list[tuple[Case, Mark]] = []
    for group in groups.values():
        small = [(case, mark) for case, mark, kept in group if kept]
        have = {(case.activations, case.result) for case, _ in small}
        missing = dict.fromkeys((case.activations, case.result) for case, _, _ in group)
        if small:
            case, mark = min(small, key=lambda each: each[0].rows * each[0].columns)
            found += [(replace(case, activations=x, result=y), mark) for x, y in missing if (x, y) not in have]
    return found


def refusals(operation: str, recorded: Vectors) -> list[dict[str, Tree]]:
    """The cases of H8 that a file can express: each mistake, in the first call in which it is possible."""
    specified, found = OPERATIONS[operation], []
    right = [vector for vector in recorded.vectors if "must-refuse" not in vector["flags"]]
    for name, mistake in mistakes(specified.signature).items():
        case = HabitCase(f"{operation}/H8", HABIT, name)
        flags: list[Tree] = [*sorted(_flags(case) | {"must-refuse"})]
        about: dict[str, Tree] = {"id": case.id, "clause": case.clause, "tier": case.tier, "flags": flags}
        for vector in right[:RIGHT_CALLS]:
            given = {argument: from_json(tree) for argument, tree in vector["arguments"].items()}
            wrong = made(specified.signature, mistake, (), given)
            if wrong and array_bytes(*wrong[1].values()) <= MOST_BYTES:
                if written := written_refusal(specified.check, (), wrong[1]):
                    notes = f"The argument {mistake.argument} is wrong, and all others are right."
                    found.append({**about, "notes": notes, "arguments": written})
                else:
                    recorded.left_out["refused for what a file cannot say, such as the order of memory"] += 1
                break
    return found


def marks_of(operation: str) -> list[Mark]:
    """The tests of an operation, in the order of modules and lines; tests of habits make no calls of their own."""
    load_suite()
    marks = [mark for mark in MARKS if mark.clause.partition("/")[0] == operation]
    return sorted(marks, key=lambda mark: (mark.test.__module__, mark.test.__code__.co_firstlineno))


def vectors_of(case: Case, mark: Mark, left_out: Counter[str]) -> Iterator[dict[str, Tree]]:
    """The calls of one case as vectors; the first has the case's id, the others a number after it."""
    recorder = Recorder(case.operation)
    try:
        mark.run(recorder, case)
    except TooLargeError:
        left_out[TOO_LARGE] += 1
    if recorder.unwritten:
        left_out["refused for what a file cannot say, such as the order of memory"] += recorder.unwritten
    notes = " ".join((mark.test.__doc__ or "").partition("\n\n")[0].split())
    for number, call in enumerate(recorder.calls, 1):
        flags = call.pop("flags") | _flags(case)
        if not call.pop("representable", False):
            flags.discard("lattice")
        name = case.id if number == 1 else f"{case.id}#{number}"
        about = {"id": name, "clause": case.clause, "tier": case.tier, "flags": sorted(flags), "notes": notes}
        yield about | call


def _flags(case: Case) -> set[str]:
    """The special properties of a case, from the names of its parameters."""
    parameters = case.parameters()
    flags = {"edge"} if case.tier == "edge" else {"lattice"} if case.tier == "lattice" else set()
    rows, group_size = parameters.get("rows"), parameters.get("group_size")
    if parameters.get("bits") == 3:
        flags.add("straddling")
    if isinstance(rows, int) and isinstance(group_size, int) and group_size and rows % group_size:
        flags.add("short-group")
    if case.operation.startswith("hqq.") or (group_size and parameters.get("convention") == "minimum"):
        flags.add("needs-real-zero")
    if group_size and parameters.get("scale_dtype") == "float16":
        flags.add("half-scales")
    return flags


# **The recorder** has the methods of a backend that tests use.


class Recorder:
    """The reference, which records its calls.

    Attributes:
        calls: the vectors of the calls so far, without the fields of the case.
        unwritten: the number of refusals without a vector.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.calls: list[dict[str, Any]] = []
        self.unwritten = 0

    def capabilities(self) -> Capabilities:
        """All operations, with the arithmetic for which bounds are stated."""
        return Capabilities({name: Declaration(arithmetic=STATED.get(name)) for name in OPERATIONS})

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        """The reference's result, as a backend would return it."""
        check_size(*arguments, *choices.values())
        specified = OPERATIONS[operation]
        with np.errstate(all="ignore"):
            try:
                exact = specified.reference(*arguments, **choices)
            except ArgumentError:
                self._refused(operation, arguments, choices)
                raise
            result = exact
            if specified.promise is Promise.BOUNDED:
                result = in_type(exact, specified.result_type(*arguments, **choices))
        check_size(exact)
        if operation == self._operation:
            given = named(operation, arguments, choices)
            self.calls.append({"arguments": trees(given)} | right_answer(operation, given, exact))
        return result

    def prepare(self, matrix: QuantizedMatrix) -> "RecorderLinear":
        """A matrix for products, which are recorded with their matrix."""
        check_size(matrix)
        return RecorderLinear(self, matrix)

    def open(self, operation: str, *arguments: Any) -> "RecorderSession":
        """A session, which becomes one vector with all its steps."""
        check_size(*arguments)
        specified = OPERATIONS[operation]
        assert specified.check_step is not None
        try:
            opened = specified.reference(*arguments)
        except ArgumentError:
            self._refused(operation, arguments, {})
            raise
        steps: list[dict[str, Tree]] = []
        self.calls.append({"arguments": trees(named(operation, arguments, {})), "steps": steps, "flags": set()})
        check_step = specified.check_step(*arguments)
        session = Session(operation, opened, check_step)
        return RecorderSession(self, session, steps, check_step)

    def same_arrays(self) -> AbstractContextManager[None]:
        """Calls from the same arrays; a file does not express where arrays are."""
        return nullcontext()

    def elsewhere(self, call: Call, variants: list[Variant]) -> list[Any]:
        """One call for all variants, because they differ only in the places of arrays."""
        if call.what in ("run", "open", "prepare"):
            where = () if call.what == "prepare" else (call.operation,)
            made = getattr(self, call.what)(*where, *call.arguments, **call.choices)
            return [made] if call.what != "run" else [made] * len(variants)
        return [getattr(call.owner, call.what)(*call.arguments)] * len(variants)

    def walk(self, session: "RecorderSession", steps: list[tuple[Any, ...]], times: int) -> None:
        """Repeated steps, which are too many for a file."""
        raise TooLargeError

    def _refused(self, operation: str, arguments: tuple[Any, ...], choices: Mapping[str, Any]) -> None:
        """Record a refused call, if it is still refused after its arguments were written and read again."""
        written = written_refusal(OPERATIONS[operation].reference, arguments, choices)
        if written is None:
            self.unwritten += 1
        elif operation == self._operation:
            self.calls.append({"arguments": written, "flags": {"must-refuse"}})


class RecorderLinear:
    """A prepared matrix."""

    def __init__(self, recorder: Recorder, matrix: QuantizedMatrix) -> None:
        self._recorder, self._matrix = recorder, matrix
        self.rows, self.columns, self.nbytes = matrix.rows, matrix.columns, matrix.nbytes

    def qgemv(self, x: Any, out: Any = None) -> Any:
        """One product, as `Recorder.run`; a refused `out` has no vector."""
        return self._product("linear.qgemv", x, out)

    def qgemm(self, x: Any, out: Any = None) -> Any:
        """See `qgemv`."""
        return self._product("linear.qgemm", x, out)

    def qgemm_bfp(self, x: Any, out: Any = None) -> Any:
        """See `qgemv`."""
        return self._product("linear.qgemm_bfp", x, out)

    def call(self, method: str, x: Any) -> Call:
        """A product to be made by `Recorder.elsewhere`."""
        owner: Any = self
        return Call(method, f"linear.{method}", (x,), owner=owner)

    def guarded(self, x: F32, vectors: int) -> F32:
        """What `lowbit_conformance.isolation.remote.RemoteLinear` does with guards."""
        result: F32 = self.qgemm(x) if vectors else self.qgemv(x[0])
        return result

    def guarded_blocks(self, x: Any) -> F32:
        """See `guarded`."""
        result: F32 = self.qgemm_bfp(x)
        return result

    def _product(self, operation: str, x: Any, out: Any) -> Any:
        result = self._recorder.run(operation, x, self._matrix)
        if out is not None:
            prepared = ReferenceBackend().prepare(self._matrix)
            try:
                getattr(prepared, operation.removeprefix("linear."))(x, out)
            except ArgumentError:
                self._recorder.calls.pop()
                self._recorder.unwritten += 1
                raise
        return result


class RecorderSession:
    """An opened operation."""

    def __init__(
        self, recorder: Recorder, session: Session, steps: list[dict[str, Tree]], check: Callable[..., None]
    ) -> None:
        self._recorder, self._session, self._steps, self._check = recorder, session, steps, check

    def step(self, *arguments: Any) -> Any:
        """One step, which may be refused."""
        check_size(*arguments)
        try:
            result = self._session.step(*arguments)
        except ArgumentError:
            written = written_refusal(self._check, arguments, {})
            if written is None:
                self._recorder.unwritten += 1
            else:
                self._steps.append({"arguments": written, "refused": True})
            raise
        given = inspect.signature(self._check).bind(*arguments).arguments
        self._steps.append({"arguments": trees(given), "result": as_json(result)})
        return result

    def close(self) -> None:
        """Close it."""
        self._session.close()


def written_refusal(
    refusing: Callable[..., Any], arguments: tuple[Any, ...], choices: Mapping[str, Any]
) -> dict[str, Tree] | None:
    """The arguments of a refused call as trees, or None if the values read back are no longer refused."""
    try:
        bound = inspect.signature(refusing).bind(*arguments, **choices)
        bound.apply_defaults()
        written = trees(bound.arguments)
        values = {name: from_json(tree) for name, tree in written.items()}
    except (TypeError, ArgumentError):
        return None
    try:
        refusing(**values)
    except ArgumentError:
        return written
    return None


def check_size(*values: Any) -> None:
    """Refuse values whose arrays are too large for a file.

    Raises:
        TooLargeError: they are.
    """
    if array_bytes(*values) > MOST_BYTES:
        raise TooLargeError


def array_bytes(*values: Any) -> int:
    """Bytes of all arrays in some values."""
    sizes: list[int] = []

    def put(array: Array) -> dict[str, Tree]:
        sizes.append(array.nbytes)
        return {}

    for value in values:
        with suppress(ArgumentError):  # not a value of the specification, and refused next
            encode(value, put)
    return sum(sizes)


def named(operation: str, arguments: tuple[Any, ...], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, with defaults for those left out."""
    bound = inspect.signature(OPERATIONS[operation].check).bind(*arguments, **choices)
    bound.apply_defaults()
    return dict(bound.arguments)


def trees(arguments: Mapping[str, Any]) -> dict[str, Tree]:
    """The arguments as trees."""
    return {name: as_json(value) for name, value in arguments.items()}
