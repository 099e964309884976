r"""The theorem of memory: every load and store of a kernel lies inside the arrays that its caller passes.

The program is the one that is lowered. `lowbit_prove.accesses` gives its accesses as linear expressions over the
counters of its loops and the sizes, `lowbit_prove.arrays` what callers pass. The solver shows of each access, for all
integers that the loops and the caller admit,

.. math:: 0 \le \mathrm{first} \quad\text{and}\quad \mathrm{last} < \mathrm{length} .

Sizes are unknowns: rows, columns, groups and their sizes, panels, blocks, and the column at which a tile begins. Only
head sizes and the shapes of blocks, which are constants of their programs, are enumerated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import getsource
from itertools import islice, product
from typing import Any

import numpy as np
import z3

from lowbit.errors import ArgumentError
from lowbit.kernels.interpreter import Machine
from lowbit.kernels.program import Instruction, Program
from lowbit_cppyy.codegen import attention, block_products, elementwise
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.recipe import NONE
from lowbit_cppyy.runtime.prefetching import ROWS
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_prove import arrays
from lowbit_prove.accesses import Access, Walk
from lowbit_prove.arrays import Arrays, Call, segments_hold
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

STATEMENT = "every load and store lies inside the arrays that the caller passes, for all sizes"
HEAD_DIMS = range(1, 257)
"""The head sizes, in channels, whose programs are checked one by one."""
PROGRAM = "program"
"""The name of a program's number in the refutation of a theorem about several programs."""
BLOCKS = tuple(2**power for power in range(2, 13))
"""The block sizes of Block Floating Point, in elements, whose programs are checked."""


@dataclass(frozen=True)
class Subject:
    """A program with the arrays of its calls.

    Attributes:
        program: as it is lowered.
        arrays: what callers pass.
        unit: codes of a unit, if the program loops over segments; otherwise 0.
    """

    program: Program
    arrays: Arrays
    unit: int = 0


def of_kernel(kernel: Kernel, program: Program | None = None) -> Theorem:
    """The theorem about a kernel of a prepared matrix, or about a program in place of the kernel's own."""

    def subject() -> Subject:
        unit = kernel.recipe.unit_codes if kernel.recipe.integer else 0
        return Subject(program or kernel.program, arrays.of_matrix(kernel), unit)

    return _of(kernel, program or kernel, subject)


def of_stored(kernel: StoredKernel) -> Theorem:
    """The theorem about a kernel of a stored matrix."""
    return _of(kernel, kernel, lambda: Subject(kernel.program, arrays.of_stored(kernel)))


def _of(kernel: Kernel | StoredKernel, of: Program | Kernel | StoredKernel, subject: Callable[[], Subject]) -> Theorem:
    """The theorem about a subject, which is created when the theorem is decided."""

    def text() -> str:
        return repr((kernel.recipe, of if isinstance(of, Program) else of.program))

    return Theorem(
        *("memory", kernel.name, STATEMENT, text), lambda: decide(subject()), lambda numbers: ran_on(subject(), numbers)
    )


def theorems() -> Iterator[Theorem]:
    """The theorems about passes, heads and blocks, for each instruction set."""
    kinds: tuple[tuple[str, str, Any, Callable[[InstructionSet], Iterator[Subject]]], ...] = (
        ("passes", "", elementwise, passes),
        ("scores", f"; heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} channels", attention, scores),
        ("mixed", f"; heads of {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} channels", attention, mixes),
        ("block_products", f"; blocks of {BLOCKS[0]} to {BLOCKS[-1]} elements", block_products, blocks),
    )
    for table, (name, which, module, subjects) in product(TABLES.values(), kinds):
        text = f"{name} {table.name}"
        yield Theorem(
            *("memory", f"{name}_{table.name}", STATEMENT + which),
            partial("{}\n{}".format, text, getsource(module)),
            partial(decide_all, partial(subjects, table)),
            partial(_ran_one, partial(subjects, table)),
        )


def passes(table: InstructionSet) -> Iterator[Subject]:
    """Every pass over rows."""
    for name in elementwise.PASSES:
        yield Subject(elementwise.pass_kernel(name, table).program, arrays.of_pass(name))


def scores(table: InstructionSet) -> Iterator[Subject]:
    """Scores of heads of every size, of one query and of those that share rows, with fetches and without."""
    for head_dim, queries, ahead in product(HEAD_DIMS, attention.query_counts(table), (NONE, ROWS)):
        program = attention.scores(head_dim, table, queries, ahead).program
        yield Subject(program, arrays.of_scores(head_dim, table.lanes, queries))


def mixes(table: InstructionSet) -> Iterator[Subject]:
    """Mixes of heads of every size, of one query and of those that share rows, with fetches and without."""
    for head_dim, queries, ahead in product(HEAD_DIMS, attention.query_counts(table), (NONE, ROWS)):
        program = attention.mixed(head_dim, table, queries, ahead).program
        yield Subject(program, arrays.of_mixed(head_dim, table.lanes, queries))


def blocks(table: InstructionSet) -> Iterator[Subject]:
    """Products of blocks of every size, with every number of blocks in a row."""
    for block, each in product(BLOCKS, range(1, table.lanes + 1)):
        if block_products.fits(block * each, block, table.lanes):
            kernel = block_products.block_products(block * each, block, table)
            yield Subject(kernel.program, arrays.of_block_products(block * each, block, table.lanes))


# **The decision.**


def decide(subject: Subject) -> Outcome:
    """Whether every access is inside its array; an error is demonstrated by a call."""
    steps = 0
    if subject.unit:
        found = segments_hold(subject.unit)
        if isinstance(found, str):
            return Refutation(found)
        steps += found
    try:
        for access in Walk(subject.program, subject.arrays.known).accesses:
            if (why := _outside(access, subject.arrays)) is not None:
                return _shown(subject, why)
            steps += 1
    except UndecidedError as error:
        return _shown(subject, str(error))
    return Proof(steps)


def decide_all(subjects: Callable[[], Iterable[Subject]]) -> Outcome:
    """Whether that holds for each of several programs."""
    steps = 0
    for number, subject in enumerate(subjects()):
        outcome = decide(subject)
        if isinstance(outcome, Refutation):
            return replace(outcome, numbers={PROGRAM: number, **outcome.numbers})
        if not isinstance(outcome, Proof):
            return outcome
        steps += outcome.steps
    return Proof(steps)


def _outside(access: Access, arrays: Arrays) -> str | None:
    """A sentence about an access that may lie outside its array; None if none can."""
    pointer = access.pointer
    if pointer not in arrays.lengths:
        return f"{pointer} is no array of its caller"
    start, length = access.base + arrays.starts.get(pointer, 0), arrays.lengths[pointer]
    solver = z3.Solver()
    solver.add(*arrays.facts, *access.facts)
    solver.add(z3.Or(start + access.first < 0, start + access.last >= length))
    answer = solver.check()
    if answer == z3.unknown:
        raise UndecidedError(f"the solver gave up: {solver.reason_unknown()}")
    if answer == z3.unsat:
        return None
    place = solver.model().eval(start + access.first, model_completion=True)
    return f"an access at {pointer} may begin at element {place}, outside its array"


def _shown(subject: Subject, why: str) -> Outcome:
    """A call in which a program leaves its memory; if none of a few calls shows this, the theorem is undecided."""
    for call in subject.arrays.calls:
        if (error := ran(subject, call)) is not None:
            return Refutation(f"the program leaves its memory: {error}", flat(call))
    return Undecided(why)


def flat(call: Call) -> dict[str, int]:
    """The sizes of a call, each with its own name."""
    found = dict(call.others)
    for name, size in call.sizes.items():
        found |= {name: size} if isinstance(size, int) else {f"{name}[{n}]": each for n, each in enumerate(size)}
    return found


def ran_on(subject: Subject, numbers: Numbers) -> Refutation | None:
    """Run a program in the call of a refutation; returns its access outside its arrays, if any."""
    if subject.unit and isinstance(found := segments_hold(subject.unit), str):
        return Refutation(found)
    error = ran(subject, _call(numbers, subject.arrays.calls[0]))
    return None if error is None else Refutation(f"the program leaves its memory: {error}")


def _ran_one(subjects: Callable[[], Iterable[Subject]], numbers: Numbers) -> Refutation | None:
    """The same for one of several programs."""
    place = whole(numbers, PROGRAM)
    subject = next(islice(subjects(), place, None), None)
    if subject is None:
        raise ArgumentError(PROGRAM, place, "the number of one of the theorem's programs")
    return ran_on(subject, {name: number for name, number in numbers.items() if name != PROGRAM})


def _call(numbers: Numbers, like: Call) -> Call:
    """The call from which `flat` made these numbers.

    Raises:
        ArgumentError: a size that another call of the program has is missing, or is not an integer.
    """
    found = dict[str, Any]()
    for name in numbers:
        size, _, index = name.partition("[")
        number = whole(numbers, name)
        found[size] = [*found.get(size, []), number] if index else number
    for name in (*like.sizes, *like.others):
        if name not in found:
            raise ArgumentError(name, "missing", "among the sizes of a refutation")
    return Call(found)


class Walker(Machine):
    """The interpreter without arithmetic: it checks every address and nothing else."""

    def execute(self, step: Instruction, operands: list[Any]) -> Any:
        return None


def ran(subject: Subject, call: Call) -> str | None:
    """Run a program with arrays of one call's lengths; returns its access outside of them, if any."""
    numbers = call.integers
    memory = {name: np.zeros(_valued(each, numbers), np.float32) for name, each in subject.arrays.lengths.items()}
    machine = Walker(subject.program, memory, call.sizes)
    machine.pointers |= {name: _valued(each, numbers) for name, each in subject.arrays.starts.items()}
    try:
        machine.block(subject.program.body)
    except ArgumentError as error:
        return str(error)
    return None


def _valued(expression: Any, numbers: Mapping[str, int]) -> int:
    """The value of a linear expression for given integers."""
    chosen = [(z3.Int(name), z3.IntVal(number)) for name, number in numbers.items()]
    return int(z3.simplify(z3.substitute(expression, *chosen)).as_long())
