r"""Contracts: what an operation promises, clause by clause.

A specification that only shows its own computation leaves kernel authors to guess which properties are required. So
each chapter ends by declaring its operations: an id that never changes (`linear.qgemv`), the kind of promise, and
numbered *clauses*, each one sentence that can be broken. The docs show the clauses, the conformance suite tests them by
number, and a failing report names the clause.

There are two kinds of promise.

**Exact**: equal bits. Packing, layouts and casts consist of integers and single roundings, so they need no tolerance.

**Bounded**: for each element of the result

.. math:: |\hat y - y| \le \mathrm{bound}(\text{inputs},\ \text{declared arithmetic}),

where *y* is the value in real arithmetic. The bound is derived in `rounding` from the arithmetic that a backend
declares; it is never tuned to what a kernel happens to return.

Besides its own clauses, every operation has the same eight *habits* (`HABITS`): they say which calls are refused and
what a call may do to its process, and even a kernel whose numbers are right can break them. The annotations of an
operation's function state its arguments (`lowbit.contract.signature`), for readers and checks alike.

**Stateful operations** remember: a cache, an engine. They are opened with some arguments and then take *steps*, each
with arguments of its own; the result of a step depends only on these and the steps before it. `reference` opens one and
returns an object with a method `step`, and `check_step` makes the check of its steps.

An operation ends where arithmetic becomes discontinuous (a cast, a choice of the largest): beyond that point, one
rounding more or less changes the result completely, so what follows is another operation with inputs of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from lowbit.contract.signature import INPUTS, Signature, signature_of, unchecked


class Promise(Enum):
    """The kind of agreement between a backend and the specification."""

    EXACT = "exact"
    BOUNDED = "bounded"


EXACT, BOUNDED = Promise.EXACT, Promise.BOUNDED

Parameters = Mapping[str, object]
"""The choices that a call makes (bits, convention, layout …), by name. A backend may declare only some of them."""


@dataclass(frozen=True)
class Operation:
    """One operation of the specification.

    Attributes:
        id: chapter and name, which never change: ``packing.pack``.
        title: a few words for a table.
        promise: exact or bounded.
        source: where in the papers, and which errata rule on it.
        reference: the function that checks its arguments and computes it; for a bounded operation, in float64.
        check: takes the same arguments and raises `ArgumentError` if they are wrong.
        parameters: takes the same arguments and names the choices that they make.
        clauses: clause id (``packing.pack/C1``) to one sentence.
        check_step: None, unless the operation is stateful: takes the opening arguments and returns the check of the
            steps that follow. That check is called with the arguments of each step before it runs, raises
            `ArgumentError` if they are wrong, and may remember what it has accepted.
    """

    id: str
    title: str
    promise: Promise
    source: str
    reference: Callable[..., Any]
    check: Callable[..., None]
    parameters: Callable[..., Parameters]
    clauses: Mapping[str, str]
    check_step: Callable[..., Callable[..., None]] | None = None

    @property
    def signature(self) -> Signature:
        """Its arguments, one by one."""
        return signature_of(self.reference)

    @property
    def compute(self) -> Callable[..., Any]:
        """The reference without its checks, for arguments that have passed `check`."""
        return unchecked(self.reference)

    def result_type(self, *arguments: Any, **choices: Any) -> str:
        """The type of a bounded operation's result: what the argument `result` names, or the type of the inputs."""
        named = self.signature.given(arguments, choices).get("result")
        return str(named or {**IMPLIED, **self.signature.inputs(*arguments, **choices)}[INPUTS])

    @property
    def stateful(self) -> bool:
        """Whether it is opened and takes steps (`lowbit.backend.base.Backend.open`) rather than run once."""
        return self.check_step is not None


IMPLIED: Mapping[str, object] = MappingProxyType({INPUTS: "float32"})
"""The defaults of parameters that a declaration, a profile or a call does not name. Operations whose arrays share one
type took only float32 at first, so an unnamed type of the inputs means float32."""

_operations: dict[str, Operation] = {}

OPERATIONS: Mapping[str, Operation] = MappingProxyType(_operations)
"""The operations of the chapters imported so far, by id; `lowbit.operations` imports them all."""


def operation(
    id: str,
    title: str,
    reference: Callable[..., Any],
    *,
    promise: Promise,
    source: str,
    clauses: Mapping[str, str],
    parameters: Callable[..., Parameters] | None = None,
    check_step: Callable[..., Callable[..., None]] | None = None,
) -> Operation:
    """Declare an operation; a chapter calls this once for each of its own.

    Args:
        id, title, promise, source: see `Operation`.
        reference: the function that computes it, which `checked` has given its signature.
        clauses: short number (``C1``) to one sentence.
        parameters: see `Operation`; by default the choices among the arguments (`Signature.parameters`).
        check_step: see `Operation`; given for a stateful operation only.

    Returns:
        The operation, now also in `OPERATIONS`.

    Raises:
        ValueError: the id is taken.
    """
    if id in _operations:
        raise ValueError(f"operation {id} is declared twice")
    signature = signature_of(reference)
    full = MappingProxyType({f"{id}/{number}": sentence for number, sentence in clauses.items()})
    parameters = signature.with_inputs(parameters) if parameters else signature.parameters
    _operations[id] = Operation(id, title, promise, source, reference, signature.check, parameters, full, check_step)
    return _operations[id]


# **Habits** have ids like clauses, ``packing.pack/H4``, with the same text for every operation. The suite watches all
# of them in every case; H4, H6 and H8 have cases of their own besides.

HABITS: Mapping[str, str] = MappingProxyType(
    {
        "H1": "It reads nothing but its arguments, and as many bytes past an array's end as the backend declares.",
        "H2": "It writes nothing but its result: not its arguments, and nothing beside them.",
        "H3": "It writes every element of its result.",
        "H4": "Equal arguments give equal bits: again, after a hundred other calls, wherever the arrays lie and "
        "whatever lies around them, and from several threads at once if the backend declares that.",
        "H5": "It comes back in time, and does not end the process.",
        "H6": "It leaves the process as it found it: environment, folder, locale, floating-point mode, signal "
        "handlers, standard output, open files, threads, child processes; "
        "and memory does not grow with the number of calls.",
        "H7": "It computes the result itself, and asks neither the reference nor another backend.",
        "H8": "It refuses wrong arguments with an ArgumentError before it computes or writes anything: another dtype, "
        "shape, layout or class, a choice that does not exist, a value out of range, and an out that is read-only or "
        "overlaps an argument.",
    }
)


# **Retired clauses** keep their numbers, which no other clause ever gets. Before the profiles of lowbit-1.1 most
# operations had their own clause for what H8 now says for all.

_REFUSALS = """
packing.pack/C3 packing.unpack/C3 affine.quantize/C5 linear.qgemv/C6 linear.qgemm/C5 linear.qgemm_bfp/C5 bfp.cast/C6
bfp.dot/C4 bfp.store/C3 bfp.load/C2 blocking.apply/C3 blocking.invert/C3 attention.softmax/C4 attention.attend/C5
rope.rotate/C4 ksort.permutation/C4 ksort.relabel/C3 pooling.pool/C4 routing.gate/C6 routing.top_k/C4 routing.weights/C4
routing.expert/C5 routing.sparse/C5 offload.trace/C7 blocks.rms_norm/C8 blocks.swiglu/C6 gptq.hessian/C3
gptq.targets/C4 hqq.codes/C3 hqq.step/C3 hqq.qgemv/C4
"""

RETIRED: Mapping[str, str] = MappingProxyType(
    {clause: clause.partition("/")[0] + "/H8" for clause in _REFUSALS.split()}
)
"""Each retired clause, and the clause or habit that says the same now."""


def sentence(clause: str) -> str:
    """The text of a clause or a habit; for a retired clause, that of its successor.

    >>> sentence("packing.pack/H3")
    'It writes every element of its result.'

    Raises:
        KeyError: there is no such operation, clause or habit; import `lowbit.operations` first.
    """
    operation, _, number = RETIRED.get(clause, clause).rpartition("/")
    return HABITS[number] if number in HABITS else _operations[operation].clauses[clause]
