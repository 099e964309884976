r"""The theorem of roundings: a kernel rounds no term more often than the backend declares.

The suite allows a kernel the error :math:`\gamma_D` of the number of roundings :math:`D` that its backend declares, a
formula in the rows K and the rows of a group. Here D is derived by running the program on counts
(`lowbit_prove.depths`), and the formula is shown to be at least as large, for all K and all groups.

**All sizes.** On counts every instruction is a map f with

.. math:: v \le w \Rightarrow f(v) \le f(w), \qquad f(v + c) \le f(v) + c \quad (c \ge 0),

because it only takes maxima and adds. So is what an iteration of a loop does to the registers. If the counts after the
second iteration exceed those after the first by at most c, those after iteration q exceed those after the first by at
most :math:`c (q - 1)`, by induction. One run therefore bounds all: with n rows in a group, and G groups,

.. math:: D \le D_1(n), \qquad D_1(n + P) \le D_1(n) + c_P, \qquad D(K, n) \le \max_{n' \le n} D_1(n') + c_G (G - 1),

where P is the rows of some iterations, and :math:`D_1` is found by a run for each n up to 2P. The formula is run on
unknown integers (`lowbit_prove.formulas`), and the solver compares.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import getsource
from itertools import pairwise
from math import lcm
from typing import Any, TypeAlias

import z3

from lowbit.contract.rounding import Roundings
from lowbit.kernels.program import Program, Step
from lowbit_cppyy import backend
from lowbit_cppyy.codegen import attention, elementwise
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import SEGMENT
from lowbit_cppyy.runtime import decode_operations
from lowbit_prove import depths
from lowbit_prove.accesses import Facts
from lowbit_prove.depths import EXACT, POWER, ZERO, Count, Depths
from lowbit_prove.formulas import ways
from lowbit_prove.prepared_setting import PreparedSetting
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided, whole

STATEMENT = "no term meets more roundings than are declared for K rows in groups of g, for all K and g"
ROWS, SIZE, TOTAL = z3.Ints("rows group_size total")
HEAD_DIMS = range(1, 257)
"""The head sizes, in channels, whose programs are checked one by one."""
RUNNING = 8
"""The number of running sums of a sum of activations, which takes one more addition for every `RUNNING` rows."""


FEW_ROWS = 8192
"""The most rows of a refutation, if the solver finds one this small."""
MOST_CORRECTIONS = 200


class TooManyError(Exception):
    """A matrix for which a term has more roundings than declared."""

    def __init__(self, found: int, declared: int, numbers: dict[str, int]) -> None:
        super().__init__(f"a term meets {found} roundings, and {declared} are declared")
        self.numbers = {**numbers, "given": found, "wanted": declared}


def of_kernel(kernel: Kernel, program: Program | None = None, declared: Roundings | None = None) -> Theorem:
    """The theorem about a kernel of a prepared matrix; a program or a formula may replace the kernel's own."""
    formula = declared or (backend.integer_roundings if kernel.recipe.integer else backend.roundings)

    def derived() -> Derived:
        return Derived(kernel, program or kernel.program)

    def text() -> str:
        return f"{kernel.recipe}\n{derived().program}\n{getsource(backend)}"

    def ran(numbers: Numbers) -> Refutation | None:
        rows, size = whole(numbers, "rows"), whole(numbers, "group_size")
        return compared_once(derived().depth(rows, size), formula(rows, size), {"rows": rows, "group_size": size})

    decision = partial(decided, lambda: _matrix(derived(), formula), ran)
    return Theorem("roundings", kernel.name, STATEMENT, text, decision, ran)


def theorems() -> Iterator[Theorem]:
    """The theorems about sums along rows and about heads, for each instruction set."""
    for table in TABLES.values():
        for name, module, decide, run in (
            ("sums", elementwise, _sums, ran_sum),
            ("heads", attention, _heads, ran_head),
        ):
            statement = "no term meets more roundings than are declared, for all lengths"
            text = f"{name} {table.name}\n{getsource(module)}{getsource(decode_operations)}"
            ran = partial(run, table)
            decision = partial(decided, partial(decide, table), ran)
            yield Theorem("roundings", f"{name}_{table.name}", statement, partial(str, text), decision, ran)


def decided(decision: Callable[[], int], ran: Callable[[Numbers], Refutation | None]) -> Outcome:
    """A proof, or a refutation that a run confirms, because the count derived for all sizes may exceed that of a
    run."""
    try:
        return Proof(decision())
    except TooManyError as error:
        return ran(error.numbers) or Undecided(f"{error}; the program of this size has fewer")
    except UndecidedError as error:
        return Undecided(str(error))


def compared_once(found: int, declared: int, sizes: dict[str, int]) -> Refutation | None:
    """Compare the roundings of one run with the declared ones."""
    if found <= declared:
        return None
    error = TooManyError(found, declared, sizes)
    return Refutation(str(error), error.numbers)


# **Growth**: how much the counts increase from one iteration to the next.


class Watched(Depths):
    """A run that records the counts of all registers at the end of each iteration of the loops over one body."""

    body: tuple[Step, ...] = ()

    def watch(self, body: tuple[Step, ...]) -> "Watched":
        self.body, self.seen = body, list[dict[str, Count]]()
        return self

    def block(self, steps: tuple[Step, ...]) -> None:
        super().block(steps)
        if steps is self.body:
            self.seen.append({name: each for name, each in self.registers.items() if isinstance(each, Count)})


def growth(seen: list[dict[str, Count]]) -> int:
    """The largest increase of the counts from one iteration to the next; registers that are zero in both do not count.

    Raises:
        UndecidedError: a register is zero at first and not later, so that later iterations may differ.
    """
    most = 0
    for first, second in pairwise(seen):
        for name, count in second.items():
            if count != ZERO and first[name] == ZERO:
                raise UndecidedError(f"the register {name} is zero in the first iteration")
            most = max(most, count.roundings - first[name].roundings)
    return most


# **Matrices.**


@dataclass(frozen=True)
class Derived:
    """What is derived from a kernel's program.

    Attributes:
        kernel: for its recipe and its instruction set.
        program: as it is lowered.
    """

    kernel: Kernel
    program: Program

    @property
    def period(self) -> int:
        """P: a number of rows that is whole iterations and whole additions of a sum of activations."""
        recipe = self.kernel.recipe
        return SEGMENT if recipe.integer else lcm(recipe.unit_codes * recipe.unroll, RUNNING)

    def setting(self, rows: int, group_size: int) -> PreparedSetting:
        recipe = self.kernel.recipe
        sizes = recipe.bits, rows, recipe.panel, group_size, recipe.scales, recipe.convention, recipe.panel
        return PreparedSetting(recipe, self.program, PanelLayout(*sizes))

    def depth(self, rows: int, group_size: int) -> int:
        """D for one matrix."""
        return depths.of_matrix(self.setting(rows, group_size), once=self.kernel.table.fused)

    def admitted(self, rows: int) -> bool:
        """Whether the kernel is used for groups of `rows` rows."""
        return self.setting(rows, rows).activations.whole

    def seen(self, index: str, rows: int, group_size: int) -> list[dict[str, Count]]:
        """The registers after each iteration of a loop."""
        setting = self.setting(rows, group_size)
        memory = {"x": list(depths.activations(setting)), "y": [ZERO] * setting.recipe.rows * setting.recipe.panel}
        machine = Watched(self.program, memory, setting.sizes, once=self.kernel.table.fused)
        machine.watch(body_of(self.program.body, index)).block(self.program.body)
        return machine.seen

    @property
    def growth(self) -> tuple[int, int]:
        """The largest increase of D with P more rows of a group, and with another group."""
        period = self.period
        if self.kernel.recipe.integer:
            more = growth(self.seen("i", 3 * period, 3 * period)[:2])
            return max(more, 1), growth(self.seen("i", 2 * period, period))  # 1: the sum of the group's segments
        each = period // (self.kernel.recipe.unit_codes * self.kernel.recipe.unroll)
        inside = self.seen("u", 2 * period, 2 * period)[each - 1 :: each]
        return max(growth(inside), period // RUNNING), growth(self.seen("g", 3 * period, period))


def body_of(steps: tuple[Step, ...], index: str) -> tuple[Step, ...]:
    """The body of the loop with this index."""
    for step in steps:
        body = getattr(step, "body", ())
        if getattr(step, "index", "") == index:
            return tuple(body)
        if found := body_of(body, index):
            return found
    return ()


Case: TypeAlias = tuple[Any, Facts]
"""The most roundings in one group, under conditions on K and the rows of a group."""


def _matrix(derived: Derived, formula: Roundings) -> int:
    """Compare D with a formula for all sizes; returns the number of comparisons."""
    period, (more, each) = derived.period, derived.growth
    if derived.kernel.recipe.integer:
        return _segments(formula, derived.depth(SEGMENT, SEGMENT), more, each)
    rows = filter(derived.admitted, range(1, 2 * period + 1))
    found = tuple((n, derived.depth(n, n)) for n in rows)
    for n, depth in found:
        if depth > formula(n, n):
            raise TooManyError(depth, formula(n, n), {"rows": n, "group_size": n})
    return float_groups(formula, found, period, more, each)


@cache
def float_groups(formula: Roundings, found: tuple[tuple[int, int], ...], period: int, more: int, each: int) -> int:
    """Compare with a formula: D for some numbers of rows, its growth with P more rows, and with one more group."""
    cases, top = list[Case](), max(depth for _, depth in found)
    for rows, _ in found:
        most = max(depth for n, depth in found if n <= rows)  # the last group may have fewer rows
        q = z3.Int("q") if rows > period else z3.IntVal(0)
        n, one = rows + period * q, max(most, top - more if rows > period else 0) + more * q
        cases.append((one, (q >= 0, z3.Or(z3.And(n == ROWS, n <= SIZE), z3.And(n < ROWS, n == SIZE)))))
    return compared(formula, cases, each)


@cache
def _segments(formula: Roundings, base: int, more: int, each: int) -> int:
    """The same for integers: D by the segments of a group, which has one segment for each block that it overlaps."""
    segments, first, turn = z3.Ints("segments first turn")
    last = first + z3.If(ROWS < SIZE, ROWS, SIZE) - 1
    touched = (segments >= 1, segments <= last / SEGMENT - first / SEGMENT + 1, first >= 0)
    aligned = z3.Or(SIZE % SEGMENT != 0, first % SEGMENT == 0)
    small = [(*touched, first == size * turn, size == SIZE) for size in range(1, SEGMENT + 1)]
    cases = [(base + more * (segments - 1), facts) for facts in (*small, (*touched, aligned, SIZE > SEGMENT))]
    return compared(formula, cases, each)


def compared(formula: Roundings, cases: list[Case], each: int) -> int:
    """Check that ``one + each (G - 1)`` is at most the declared number in all cases; returns the number of
    comparisons."""
    steps = 0
    for way in ways(lambda rows, size: (formula(rows, size), -(-rows // size)), ROWS, SIZE):
        declared, groups = (_plain(part) for part in way.result)
        more = [z3.And(*facts, one + each * (groups - 1) == TOTAL) for one, facts in cases]
        solver = z3.Solver()
        solver.add(*way.conditions, ROWS >= 1, SIZE >= 1, declared < TOTAL, z3.Or(*more))
        if (numbers := _numbers(solver, groups)) is not None:
            rows, size, found = _fewer(solver, groups, numbers)
            if found <= formula(rows, size):
                raise UndecidedError("the formula divides by sizes in another way than a number of groups")
            raise TooManyError(found, formula(rows, size), {"rows": rows, "group_size": size})
        steps += len(cases)
    return steps


Sizes: TypeAlias = tuple[int, int, int]
"""K, the rows of a group and D."""


def _fewer(solver: z3.Solver, groups: Any, numbers: Sizes) -> Sizes:
    """Numbers with at most `FEW_ROWS` rows in place of larger ones, if any are found."""
    if numbers[0] <= FEW_ROWS:
        return numbers
    solver.add(ROWS <= FEW_ROWS, SIZE <= ROWS)
    with suppress(UndecidedError):
        return _numbers(solver, groups) or numbers
    return numbers


def _numbers(solver: z3.Solver, groups: Any) -> Sizes | None:
    """K, the rows of a group and D, with D larger than declared; None if there are none.

    The solver cannot handle a quotient of two unknowns, so it takes any number of groups for which a few facts hold. If
    it takes a wrong one, two facts are added: for which sizes the right number is the number of groups, and what the
    rows allow at this group size, and so at larger and smaller ones: G = ⌈K/n⌉ has (G − 1)·n < K ≤ G·n. With only one
    of these facts, some formulas need too many corrections, depending on earlier questions to the solver.
    """
    for _ in range(MOST_CORRECTIONS):
        answer = solver.check()
        if answer == z3.unsat:
            return None
        if answer == z3.unknown:
            raise UndecidedError(f"the solver gave up: {solver.reason_unknown()}")
        model = solver.model()
        values = (model.eval(each, model_completion=True).as_long() for each in (ROWS, SIZE, TOTAL, groups))
        rows, size, total, given = values
        right = -(-rows // size)
        if given == right:
            return rows, size, total
        solver.add(z3.Implies(z3.And(rows >= ROWS, size <= SIZE), groups <= right))
        solver.add(z3.Implies(z3.And(rows <= ROWS, size >= SIZE), groups >= right))
        solver.add(z3.Implies(size <= SIZE, (groups - 1) * size < ROWS))
        solver.add(z3.Implies(size >= SIZE, groups * size >= ROWS))
    raise UndecidedError("the solver does not find the right number of groups")


def _plain(number: Any) -> Any:
    return getattr(number, "expression", number)


# **Sums along rows, and heads.** Programs that C++ calls for whole chunks; C++ adds the rest of a row, and halves sums.

HALVINGS = 6
"""The number of additions by which ``cpp/decode.h`` combines the 64 running sums into one."""
LENGTH = z3.Int("length")


def _sums(table: InstructionSet) -> int:
    """Sums, and sums of squares, of rows of any length: one iteration for each 64 elements."""
    steps = 0
    for name in ("sums", "squares"):
        program = elementwise.pass_kernel(name, table).program
        memory = {"y": [ZERO] * elementwise.CHUNK}
        machine = Watched(program, memory, {"groups": 2}, once=table.fused).watch(body_of(program.body, "i"))
        machine.block(program.body)
        one = max(each.roundings for key, each in machine.seen[0].items() if key.startswith("acc"))
        iterations = (LENGTH + elementwise.CHUNK - 1) / elementwise.CHUNK
        found = one + growth(machine.seen) * (iterations - 1) + HALVINGS
        steps += _within(decode_operations.sum_roundings, LENGTH, found, (LENGTH >= 1,))
    return steps


def _heads(table: InstructionSet) -> int:
    """Scores of heads of every size, and mixes of any number of tokens, 64 at a time."""
    steps = 0
    for head_dim in HEAD_DIMS:
        found = z3.IntVal(max(_score(table, head_dim, queries) for queries in attention.query_counts(table)))
        steps += _within(decode_operations.head_roundings, LENGTH, found, (head_dim <= LENGTH,))
    return steps + _mixes(table)


def _score(table: InstructionSet, head_dim: int, queries: int) -> int:
    """D of the scores of a head."""
    program = attention.scores(head_dim, table, queries).program
    channels = attention.CHANNELS * attention.sixteens(head_dim)
    one = [EXACT] * head_dim + [ZERO] * (channels - head_dim) + [POWER]  # the bound counts the scale separately
    x = (one + [ZERO] * (attention.CHANNELS - 1)) * queries
    y = (queries - 1) * elementwise.CHUNK + table.lanes
    return depths.depth(program, x, {"groups": 1}, y, once=table.fused)


def _mixes(table: InstructionSet) -> int:
    """Mixes: after the first chunk of tokens, each chunk adds to the earlier result."""
    chunk, steps, mixed = elementwise.CHUNK, 0, partial(_worst_mix, table)
    one = mixed(chunk, ZERO)
    each = mixed(chunk, Count(one)) - one
    for tokens in range(1, chunk + 1):
        steps += _within(decode_operations.head_roundings, tokens, z3.IntVal(mixed(tokens, ZERO)), ())
        q = z3.Int("q")
        found = mixed(tokens, Count(one)) + each * (q - 1)
        steps += _within(decode_operations.head_roundings, chunk * q + tokens, found, (q >= 1,))
    return steps


def _worst_mix(table: InstructionSet, tokens: int, earlier: Count) -> int:
    return max(_mixed(table, tokens, earlier, queries) for queries in attention.query_counts(table))


def _mixed(table: InstructionSet, tokens: int, earlier: Count, queries: int) -> int:
    """D of a mix of at most 64 tokens, added to the earlier result."""
    program = attention.mixed(attention.CHANNELS, table, queries).program
    y = [earlier] * attention.CHANNELS * queries
    x = ([EXACT] * tokens + [ZERO] * (elementwise.CHUNK - tokens)) * queries
    Depths(program, {"x": x, "y": y}, {"groups": (tokens + 1) // 2}, once=table.fused).block(program.body)
    return max(each.roundings for each in y)


def ran_sum(table: InstructionSet, numbers: Numbers) -> Refutation | None:
    """Run the sums of one row, and of its squares."""
    length, found = whole(numbers, "length"), 0
    for name in ("sums", "squares"):
        program = elementwise.pass_kernel(name, table).program
        y, sizes = [ZERO] * elementwise.CHUNK, {"groups": -(-length // elementwise.CHUNK)}
        Depths(program, {"y": y}, sizes, once=table.fused).block(program.body)
        found = max(found, *(each.roundings for each in y))
    return compared_once(found + HALVINGS, decode_operations.sum_roundings(length, length), {"length": length})


def ran_head(table: InstructionSet, numbers: Numbers) -> Refutation | None:
    """Run the scores of heads with `length` channels, and a mix of `length` tokens."""
    length, y = whole(numbers, "length"), ZERO
    for first in range(0, length, elementwise.CHUNK):
        y = Count(_worst_mix(table, min(elementwise.CHUNK, length - first), y))
    score = (
        max(_score(table, length, queries) for queries in attention.query_counts(table))
        if length <= HEAD_DIMS[-1]
        else 0
    )
    found = max(y.roundings, score)
    return compared_once(found, decode_operations.head_roundings(length, length), {"length": length})


def _within(formula: Roundings, length: Any, found: Any, facts: Facts) -> int:
    """Check that the roundings found are at most those declared for a length."""
    steps = 0
    for way in ways(lambda length: formula(length, length), length):
        solver = z3.Solver()
        solver.add(*facts, *way.conditions, found > way.result)
        if solver.check() == z3.sat:
            model = solver.model()
            at = length if isinstance(length, int) else model.eval(length, model_completion=True).as_long()
            raise TooManyError(model.eval(found, model_completion=True).as_long(), formula(at, at), {"length": at})
        if solver.check() == z3.unknown:
            raise UndecidedError(f"the solver gave up: {solver.reason_unknown()}")
        steps += 1
    return steps
