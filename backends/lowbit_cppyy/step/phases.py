"""Phases: the lines of a block's program, grouped by what threads do between two waits.

All threads of a step run the same phases, and each phase divides its work between them:

- `Norm`: the norm of whole rows. For one token every thread computes it for itself, which is cheaper than to wait.
- `Multiply`: products of one value with several matrices. Each thread computes some of their columns, and may go on to
  what needs no other columns than those: the sum with the residual stream, or the activation of a gated unit.
- `AllHeads`: the norms of all heads of a token together, of queries and of keys.
- `PerHead`: what is done to each head of queries, keys and values: biases, norms, rotations, and the cache.
- `Attend`: some of the heads.
- `Experts`: those that the scores of a router choose for each token.
- `Add`: the sum with the residual stream, where a norm stands between it and the product.

**Values in memory.** A value that is only changed element by element, or head by head, takes the place of the one that
it is made from; the residual stream always does. Another value gets a place that no living value has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import ClassVar

from lowbit.errors import NotDeclaredError
from lowbit.model.config import LlamaConfig
from lowbit.model.step import BEGIN, Line, Program, widths

ROOM = "room of experts"
HEAD_NORMS = ("query_norm", "key_norm")
GATED = ("swiglu", "geglu", "clamped_swiglu")
STREAM = -1
"""The place of the residual stream, which lies in memory of its own."""


@dataclass(frozen=True)
class Norm:
    """The norm of whole rows."""

    line: Line


@dataclass(frozen=True)
class Multiply:
    """Products of one value with several matrices, and what follows in the same columns.

    Attributes:
        lines: the products.
        bias: of the result of attention; None for none.
        then: ``add`` or a gated activation of their columns; None for nothing.
    """

    lines: tuple[Line, ...]
    bias: Line | None = None
    then: Line | None = None


@dataclass(frozen=True)
class AllHeads:
    """Norms of whole rows of queries or of keys, in place."""

    lines: tuple[Line, ...]


@dataclass(frozen=True)
class PerHead:
    """What is done to single heads."""

    lines: tuple[Line, ...]
    kinds: ClassVar[frozenset[str]] = frozenset(("bias", "norm", "rotate", "append"))


@dataclass(frozen=True)
class Attend:
    """Attention over the cache."""

    line: Line


@dataclass(frozen=True)
class Add:
    """A sum with the residual stream, of rows that were normed."""

    line: Line


@dataclass(frozen=True)
class Experts:
    """A sparse layer: its scores, which may have a bias, its choice and its experts."""

    lines: tuple[Line, ...]


Phase = Norm | Multiply | AllHeads | PerHead | Attend | Experts | Add
ALONE: Mapping[str, type[Norm] | type[Attend] | type[Add]] = MappingProxyType(
    {"norm": Norm, "attend": Attend, "attend_shaped": Attend, "add": Add}
)
"""The kinds of lines that are a phase by themselves."""


def phases_of(program: Program, config: LlamaConfig) -> list[Phase]:
    """The phases of a block's program.

    Raises:
        NotDeclaredError: it has a line that is not compiled.
    """
    found: list[Phase] = []
    lines = list(program)
    while lines:
        found.append(_first_phase(lines, program, config))
        del lines[: len(lines_of(found[-1]))]
    return found


def _first_phase(lines: Sequence[Line], program: Program, config: LlamaConfig) -> Phase:
    """The phase with which the rest of a program begins."""
    line = lines[0]
    if line.kind == "product":
        count = _leading(lines, partial(_multiplies, line.inputs))
        return _multiply(lines[:count], lines[count:], program)
    if _all_heads(config, line):
        return AllHeads(tuple(lines[: _leading(lines, partial(_all_heads, config))]))
    if _per_head(config, line):
        return PerHead(tuple(lines[: _leading(lines, partial(_per_head, config))]))
    if line.kind == "gate":
        count = 1 + _leading(lines[1:], lambda other: other.parameter == "router_bias") + 1
        return Experts(tuple(lines[:count]))
    if line.kind not in ALONE:
        raise NotDeclaredError("cppyy", f"a compiled step with {line.kind}")
    return ALONE[line.kind](line)


def _leading(lines: Sequence[Line], alike: Callable[[Line], bool]) -> int:
    count = 0
    while count < len(lines) and alike(lines[count]):
        count += 1
    return count


def _multiplies(inputs: tuple[str, ...], line: Line) -> bool:
    return line.kind == "product" and line.inputs == inputs


def _all_heads(config: LlamaConfig, line: Line) -> bool:
    """Whether a line is the norm of all heads together."""
    return config.heads_normed_together and line.parameter in HEAD_NORMS


def _per_head(config: LlamaConfig, line: Line) -> bool:
    """Whether a line treats heads one by one; the norms of whole rows have another parameter."""
    if line.kind == "norm":
        return line.parameter in HEAD_NORMS and not config.heads_normed_together
    return line.kind in PerHead.kinds


def _multiply(products: Sequence[Line], behind: Sequence[Line], program: Program) -> Multiply:
    """The phase of these products, with as many of the lines behind them as need no other columns than a thread's."""
    outs, bias = tuple(product.out for product in products), None
    if behind and behind[0].parameter == "output_bias":
        bias, behind = behind[0], behind[1:]
        outs = (bias.out,)
    then = behind[0] if behind and _follows(outs, behind[0], program) else None
    return Multiply(tuple(products), bias, then)


def _follows(outs: tuple[str, ...], line: Line, program: Program) -> bool:
    """Whether a line needs no other columns of these values than those that a thread has written, and nothing else
    reads the values."""
    readers = [other for other in program if set(outs) & set(other.inputs)]
    if readers != [line]:
        return False
    if line.kind == "add":
        return len(outs) == 1 and line.inputs[1] == outs[0]
    return line.kind in GATED and line.inputs == outs


# **Places.**


@dataclass
class Places:
    """Where the values of a program lie: the column at which each begins, or `STREAM`.

    Attributes:
        of: the place of each value.
        columns: of all values together, for each token.
    """

    of: dict[str, int] = field(default_factory=dict)
    columns: int = 0

    def place(self, name: str, taken: dict[str, tuple[int, int]], size: int) -> None:
        """Give a value the first columns that no other has."""
        start = _free(taken, size)
        self.of[name], taken[name] = start, (start, start + size)
        self.columns = max(self.columns, start + size)


def places_of(program: Program, phases: Sequence[Phase], config: LlamaConfig) -> Places:
    """A place for every value. Two values that are alive in the same phase have different ones, unless one is made from
    the other in place."""
    wide, places = widths(program, config), Places({BEGIN: STREAM})
    last = {name: number for number, phase in enumerate(phases) for line in lines_of(phase) for name in line.inputs}
    taken: dict[str, tuple[int, int]] = {}  # the names of places that are in use, with their first and last column
    for number, phase in enumerate(phases):
        if isinstance(phase, Experts):
            places.place(ROOM, taken, experts_room(phase, config))
        for line in lines_of(phase):
            source = line.inputs[0] if line.inputs else ""
            if not line.out:
                continue
            if line.kind == "add":
                places.of[line.out] = STREAM
            elif line.kind in ("bias", "rotate", *GATED) or line.parameter in HEAD_NORMS:
                places.of[line.out] = places.of[source]
                taken[line.out] = taken.pop(source)
                last[line.out] = max(last.get(line.out, number), number)
            else:
                places.place(line.out, taken, wide[line.out])
        for name in [name for name in taken if last.get(name, number) <= number]:
            del taken[name]
    return places


def experts_room(phase: Experts, config: LlamaConfig) -> int:
    """Columns for what is computed between the input of experts and their sum (``run_experts``)."""
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
        return (*phase.lines, *([phase.bias] if phase.bias else []), *([phase.then] if phase.then else []))
    return phase.lines if isinstance(phase, AllHeads | PerHead | Experts) else (phase.line,)
