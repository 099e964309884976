"""Phases: the lines of a block's program, grouped by what threads do between two waits.

All threads of a step run the same phases, and each phase divides its work between them:

- `Norm`: the norm of whole rows. For one token every thread computes it for itself, which is cheaper than waiting.
- `Multiply`: products of one value with several matrices. Each thread computes some of their columns, and may go on to
  what needs no other columns than those: the sum with the residual stream, or the activation of a gated unit.
- `AllHeads`: the norms of all heads of a token together, of queries and of keys.
- `PerHead`: what is done to each head of queries, keys and values: biases, norms, rotations, and the cache.
- `Attend`: some of the heads.
- `Experts`: those that the scores of a router choose for each token.
- `Add`: the sum with the residual stream, where a norm stands between it and the product.

A sum with the residual stream includes the factor of what is added, where the program has one.

**Values in memory.** A value that is only changed element by element, or head by head, takes the place of the one that
it is made from; the residual stream always does. Another value gets a place that no living value has.

**What is refused.** Not every sound program can run in phases. `phases_of` refuses lines that no phase runs, and
`check_places` those that would read a value after its place was reused. The error names the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lowbit.errors import NotDeclaredError
from lowbit.model.config import LlamaConfig
from lowbit.model.program import BEGIN, END, Line, Program, overwritten
from lowbit.model.step import GATES, widths
from lowbit.model.weights import vector_sizes
from lowbit.text import quoted

ROOM = "room of experts"
HEADS = ("query", "key", "value")
HEAD_NORMS = ("query_norm", "key_norm")
GATED = tuple(GATES.values())
IN_PLACE = ("bias", "rotate", "scale", *GATED)
"""The kinds of lines whose value overwrites its operand."""
STREAM = -1
"""The place of the residual stream, which has separate memory."""


@dataclass(frozen=True)
class Norm:
    """The norm of whole rows."""

    line: Line


@dataclass(frozen=True)
class Multiply:
    """Products of one value with several matrices, and the operations that follow in the same columns.

    Attributes:
        lines: the products.
        bias: of the result of attention, or None.
        then: a sum with the residual stream or a gated activation of their columns; empty for nothing.
    """

    lines: tuple[Line, ...]
    bias: Line | None = None
    then: tuple[Line, ...] = ()


@dataclass(frozen=True)
class AllHeads:
    """Norms of whole rows of queries or of keys, in place."""

    lines: tuple[Line, ...]


@dataclass(frozen=True)
class PerHead:
    """Operations on single heads; writing to the cache comes last."""

    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Attend:
    """Attention over the cache."""

    line: Line


@dataclass(frozen=True)
class Add:
    """A sum of the residual stream and rows that are normalised or computed by experts."""

    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Experts:
    """A sparse layer: its scores, possibly with a bias, its choice and its experts."""

    lines: tuple[Line, ...]


Phase = Norm | Multiply | AllHeads | PerHead | Attend | Experts | Add
ALONE: Mapping[str, type[Norm] | type[Attend]] = MappingProxyType(
    {"norm": Norm, "attend": Attend, "attend_shaped": Attend}
)
"""The kinds of lines that form a phase by themselves."""


def phases_of(program: Program, config: LlamaConfig) -> list[Phase]:
    """The phases of a block's program.

    Raises:
        NotDeclaredError: it has a line that is not compiled, or is not compiled in this order.
    """
    found: list[Phase] = []
    lines, reading = list(program), _Reading(program, config, roles_of(program))
    while lines:
        found.append(reading.first_phase(lines))
        del lines[: len(lines_of(found[-1]))]
    return found


def roles_of(program: Program) -> dict[str, str]:
    """Which values are heads of queries, keys or values: products with those matrices, and values derived from them."""
    roles: dict[str, str] = {}
    for line in program:
        if line.kind == "product" and line.parameter in HEADS:
            roles[line.out] = line.parameter
        elif line.kind in ("bias", "norm", "rotate") and line.inputs[0] in roles:
            roles[line.out] = roles[line.inputs[0]]
    return roles


def refused(line: Line, why: str = "") -> NotDeclaredError:
    """The error for a line that is not compiled."""
    return NotDeclaredError("cppyy", f"a compiled step with the line {quoted(str(line))}{why and f', {why}'}")


@dataclass(frozen=True)
class _Reading:
    """A reader of a program, from its first line on."""

    program: Program
    config: LlamaConfig
    roles: Mapping[str, str]

    def first_phase(self, lines: Sequence[Line]) -> Phase:
        """The phase with which the rest of a program begins."""
        line = lines[0]
        if line.kind == "product":
            count = _leading(lines, lambda other: other.kind == "product" and other.inputs == line.inputs)
            return _multiply(lines[:count], lines[count:], self.program)
        if self._all_heads(line):
            return AllHeads(tuple(lines[: _leading(lines, self._all_heads)]))
        if self._per_head(line):
            return PerHead(tuple(self._to_the_cache(lines[: _leading(lines, self._per_head)])))
        if line.kind == "gate":
            return _experts(lines)
        if own := _sum(lines, self.program):
            return Add(own)
        if line.kind == "scale":
            raise refused(line, "which does not scale what a sum then adds to the residual stream")
        if line.kind in GATED:
            raise refused(line, "which does not follow the products of its gate and its other side, in this order")
        if line.kind not in ALONE or (line.kind == "norm" and not self._whole_rows(line)):
            raise refused(line)
        return ALONE[line.kind](line)

    def _all_heads(self, line: Line) -> bool:
        """Whether a line is the norm of all heads together."""
        return self.config.heads_normed_together and self._norms_heads(line)

    def _per_head(self, line: Line) -> bool:
        """Whether a line treats heads one by one."""
        if line.kind == "norm":
            return self._norms_heads(line) and not self.config.heads_normed_together
        if line.kind == "append":
            return [self.roles.get(name) for name in line.inputs] == ["key", "value"]
        return line.kind in ("bias", "rotate") and line.inputs[0] in self.roles

    def _norms_heads(self, line: Line) -> bool:
        return line.kind == "norm" and line.parameter == f"{self.roles.get(line.inputs[0])}_norm"

    def _whole_rows(self, line: Line) -> bool:
        """Whether a norm is over whole rows of the stream's width, rather than heads."""
        sizes = vector_sizes(self.config)
        return line.inputs[0] not in self.roles and sizes.get(str(line.parameter)) == self.config.hidden

    def _to_the_cache(self, lines: Sequence[Line]) -> Sequence[Line]:
        """The leading lines, up to the first that must follow the cache."""
        kinds = [line.kind for line in lines]
        return lines[: kinds.index("append") + 1] if "append" in kinds else lines


def _leading(lines: Sequence[Line], alike: Callable[[Line], bool]) -> int:
    count = 0
    while count < len(lines) and alike(lines[count]):
        count += 1
    return count


def _experts(lines: Sequence[Line]) -> Experts:
    """A sparse layer: the scores of its gate, possibly with a bias, and the experts, which read the same input."""
    count = 1 + _leading(lines[1:], lambda other: other.parameter == "router_bias") + 1
    own = tuple(lines[:count])
    if count > len(lines) or own[-1].kind != "experts":
        raise refused(own[0], "which the experts do not follow")
    expected: list[tuple[str, ...]] = [*((line.out,) for line in own[:-2]), (own[0].inputs[0], own[-2].out)]
    if [line.inputs for line in own[1:]] != expected:
        raise refused(own[-1], "which does not belong to the gate before it")
    return Experts(own)


def _multiply(products: Sequence[Line], behind: Sequence[Line], program: Program) -> Multiply:
    """The phase of these products, with as many of the following lines as need only the columns of one thread."""
    outs, bias = tuple(product.out for product in products), None
    if behind and behind[0].kind == "bias" and behind[0].inputs == outs and behind[0].parameter == "output_bias":
        bias, behind = behind[0], behind[1:]
        outs = (bias.out,)
    then = _sum(behind, program)
    if then and products[0].inputs[0] in _stream(program):
        then = ()  # other threads may still be reading the stream, so none may add to it here
    elif not then:
        then = tuple(line for line in behind[:1] if line.kind in GATED)
    return Multiply(tuple(products), bias, then if then and _follows(outs, then[0], program) else ())


def _sum(lines: Sequence[Line], program: Program) -> tuple[Line, ...]:
    """The sum with which these lines begin, with the factor of its addend; empty if they begin otherwise."""
    kinds = [line.kind for line in lines[:2]]
    if kinds == ["scale", "add"] and lines[0].inputs[0] not in _stream(program):
        return tuple(lines[:2]) if _follows((lines[0].out,), lines[1], program) else ()
    return tuple(lines[:1]) if kinds[:1] == ["add"] else ()


def _follows(outs: tuple[str, ...], line: Line, program: Program) -> bool:
    """Whether a line needs only the columns of these values that the same thread has written, and nothing else reads
    the values."""
    readers = [other for other in program if set(outs) & set(other.inputs)]
    if readers != [line]:
        return False
    if line.kind == "add":
        return len(outs) == 1 and line.inputs[1] == outs[0]
    return line.kind in (*GATED, "scale") and line.inputs == outs


def _stream(program: Program) -> set[str]:
    """The values that are the residual stream."""
    return {BEGIN, *(line.out for line in program if line.kind == "add")}


# **Places.**


@dataclass
class Places:
    """The places of the values of a program: the column at which each begins, or `STREAM`.

    Attributes:
        of: the place of each value.
        columns: the number of columns of all values together, for each token.
    """

    of: dict[str, int] = field(default_factory=dict)
    columns: int = 0

    def place(self, name: str, taken: dict[str, tuple[int, int]], size: int) -> None:
        """Give a value the first free columns."""
        start = _free(taken, size)
        self.of[name], taken[name] = start, (start, start + size)
        self.columns = max(self.columns, start + size)


def places_of(program: Program, phases: Sequence[Phase], config: LlamaConfig) -> Places:
    """A place for every value. Two values that are live in the same phase have different places, unless one overwrites
    the other in place."""
    wide, places = widths(program, config), Places({BEGIN: STREAM})
    last = {name: number for number, phase in enumerate(phases) for line in lines_of(phase) for name in line.inputs}
    for number, phase in enumerate(phases):
        if isinstance(phase, Norm):  # for one token no barrier follows, so threads may still read it in the next phase
            name = phase.line.inputs[0]
            last[name] = max(last[name], number + 1 + len(_unwaited(phases[number + 1 :])))
    taken: dict[str, tuple[int, int]] = {}  # the values that are live, with their first and last column
    for number, phase in enumerate(phases):
        if isinstance(phase, Experts):
            places.place(ROOM, taken, experts_room(phase, config))
        for line in lines_of(phase):
            source = line.inputs[0] if line.inputs else ""
            if not line.out:
                continue
            if line.kind == "add":
                places.of[line.out] = STREAM
            elif line.kind in IN_PLACE or line.parameter in HEAD_NORMS:
                places.of[line.out] = places.of[source]
                taken[line.out] = taken.pop(source)
                last[line.out] = max(last.get(line.out, number), number)
            else:
                places.place(line.out, taken, wide[line.out])
        for name in [name for name in taken if last.get(name, number) <= number]:
            del taken[name]
    return places


def check_places(program: Program, phases: Sequence[Phase], places: Places) -> None:
    """Refuse a program that a step would compute wrongly.

    Sums overwrite the residual stream, so its older values are lost. For one token, all norms share a row of the
    thread, and no barrier follows them.

    Raises:
        NotDeclaredError: the program is of this kind; the message names a line.
    """
    for line in program:
        streams = [places.of[name] == STREAM for name in line.inputs]
        if line.kind == "add" and streams != [True, False]:
            raise refused(line, "which does not add another value to the residual stream, as its second")
    row = dict.fromkeys((phase.line.out for phase in phases if isinstance(phase, Norm)), "row")
    for where in (places.of, {**places.of, **row}):
        if (late := overwritten(program, where)) is not None:
            raise refused(late, "which reads a value that is overwritten already")
    if places.of[END] != STREAM:
        raise refused(program[-1], "which does not end with the residual stream")
    for number, phase in enumerate(phases):
        if isinstance(phase, Norm) and places.of[phase.line.inputs[0]] == STREAM:
            following = phases[number + 1 + len(_unwaited(phases[number + 1 :])) :][:1]
            for line in (line for each in following for line in lines_of(each) if line.kind == "add"):
                raise refused(line, "which adds to what is normed directly before")


def _unwaited(phases: Sequence[Phase]) -> Sequence[Phase]:
    """The norms at the beginning, after which threads do not wait if there is one token."""
    count = 0
    while count < len(phases) and isinstance(phases[count], Norm):
        count += 1
    return phases[:count]


def experts_room(phase: Experts, config: LlamaConfig) -> int:
    """The number of columns for the values between the input of experts and their sum (``run_experts``)."""
    top_k = int(phase.lines[-1].setting("top_k"))
    return top_k * (2 * config.feed_forward + config.hidden + 2) + config.hidden


def _free(taken: dict[str, tuple[int, int]], size: int) -> int:
    """The first column at which `size` are free; columns are rounded to whole cache lines."""
    start = 0
    for first, end in sorted(taken.values()):
        if first - start >= size:
            break
        start = max(start, -(-end // 16) * 16)
    return start


def lines_of(phase: Phase) -> tuple[Line, ...]:
    """The lines of a phase, in order."""
    if isinstance(phase, Multiply):
        return (*phase.lines, *([phase.bias] if phase.bias else []), *phase.then)
    return phase.lines if isinstance(phase, AllHeads | PerHead | Experts | Add) else (phase.line,)
