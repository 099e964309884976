"""The theorems of steps: in a compiled step every value is read as it was written.

A block's program says which line reads which values (`lowbit.model.step`). The compiled step gives each value a place
in one buffer, whose columns are used again, and runs several lines at once (`lowbit_cppyy.step.phases`). Here the
places are followed through the phases, by a memory that knows which value lies in which columns:

- a value that is read has been written, lies at its place, and nothing was written over any of its columns since;
- what is written at its place either takes the place of its own source, or overlaps no value that is read later;
- two lines of one phase, which threads run at the same time, do not write to the same columns; and none writes to what
  another reads. A line that changes elements or heads in place is alone in reading its source. With one token, a norm
  and the phase behind it run without a wait between them, so they count as one phase;
- at the end the residual stream holds the block's result, and all places lie inside the buffer.

With one token, the rows that norms write lie in a row of each thread; with several they lie in the buffer. Both are
followed. Programs are enumerated: every choice of norms and biases that a block can have, of rotations, of norms of
heads, for dense blocks and experts, and some sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getsource
from itertools import chain, combinations, islice, product

from lowbit.errors import ArgumentError
from lowbit.model import program as forms
from lowbit.model import step
from lowbit.model.config import LlamaConfig, Routing
from lowbit.model.program import BEGIN, END, Line, Program
from lowbit.model.step import EXPERT_BIASES, block, widths
from lowbit.model.weights import NORMS
from lowbit_cppyy.step import phases
from lowbit_cppyy.step.phases import (
    HEAD_NORMS,
    ROOM,
    STREAM,
    Experts,
    Norm,
    Phase,
    Places,
    experts_room,
    lines_of,
    phases_of,
    places_of,
)
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, whole

STATEMENT = "every value is read as it was written, and no two lines that run at once touch the same columns"
OPTIONAL = (
    *(*NORMS, "attention_post_norm", "feed_forward_post_norm", *HEAD_NORMS),
    *("query_bias", "key_bias", "value_bias", "output_bias"),
)
"""Vectors that a block may have or lack."""
SIZES = ((64, 128, 4, 2, 16), (96, 40, 2, 2, 48), (4096, 14336, 32, 8, 128), (640, 2048, 4, 1, 256))
"""Hidden size, feed-forward size, query heads, key-value heads and channels of a head."""
SIZED = tuple(zip(SIZES, (1.0, 0.22, 0.22, 1.0), strict=True))
"""The same sizes, each with a factor for what parts of a block add."""
KINDS: dict[str, tuple[str, Routing | None]] = {
    "dense-silu": ("silu", None),
    "dense-gelu": ("gelu", None),
    "experts": ("silu", Routing(8, 2, "after")),
    "dense-clamped": ("clamped", None),
    "experts-clamped": ("clamped", Routing(8, 2, "after")),
}
"""The activation and the routing; clamped units occur with sinks and with biases of routers and experts, as in
GPT-OSS."""
EXPERTS = ("router_bias", *(f"expert_{name}" for name in EXPERT_BIASES))
PlacesOf = Callable[[Program, Sequence[Phase], LlamaConfig], Places]


class WrongPlaceError(Exception):
    """A value that is not read as it was written, or two lines that access the same columns."""


def theorems() -> Iterator[Theorem]:
    """One theorem for each kind of feed-forward part."""
    for name in KINDS:
        text = f"{name}\n{getsource(forms)}{getsource(step)}{getsource(phases)}"
        yield Theorem("steps", name, STATEMENT, partial(str, text), partial(decide, name), partial(ran, name))


def programs(kind: str, every: int = 1) -> Iterator[tuple[LlamaConfig, Program]]:
    """The programs of all blocks of a kind, or every `every`-th."""
    activation, routing = KINDS[kind]
    choices = chain.from_iterable(combinations(OPTIONAL, count) for count in range(len(OPTIONAL) + 1))
    every_one = product(choices, (False, True), (False, True), SIZED)
    for number, (vectors, together, turned, (sizes, factor)) in enumerate(every_one):
        if number % every == 0:
            hidden, inner, heads, kv_heads, head_dim = sizes
            plain = LlamaConfig(1, hidden, inner, heads, kv_heads, head_dim, 100, 32, 10000.0, 1e-5, routing)
            unrotated = () if turned else (0,)
            sinks = activation == "clamped"
            config = replace(plain, heads_normed_together=together, unrotated=unrotated, residual_scale=factor)
            config = replace(config, activation=activation)  # type: ignore[arg-type]  # one of the table
            own = (*vectors, "sinks", *(EXPERTS if routing else ())) if sinks else vectors
            yield (config := replace(config, sinks=sinks)), block(config, 0, own)


def decide(kind: str, every: int = 1, places: PlacesOf = places_of) -> Outcome:
    """Follow the places of every program of a kind."""
    steps = 0
    for number, (config, program) in enumerate(programs(kind, every)):
        for one in (False, True):
            try:
                steps += followed(program, config, places, one_token=one)
            except WrongPlaceError as error:
                told: Numbers = {"number": number * every, "program": "; ".join(map(str, program))}
                return Refutation(str(error), {"one token": int(one), "hidden": config.hidden, **told})
    return Proof(steps, "enumeration")


def ran(kind: str, numbers: Numbers, places: PlacesOf = places_of) -> Refutation | None:
    """Follow only the places of the program of a refutation."""
    number, one = whole(numbers, "number"), whole(numbers, "one token", 1)
    found = next(islice(programs(kind), number, None), None)
    if found is None:
        raise ArgumentError("number", number, f"the number of a program of {kind}")
    try:
        followed(found[1], found[0], places, one_token=bool(one))
    except WrongPlaceError as error:
        return Refutation(str(error))
    return None


# **Following.**

WHOLE = ("product", "gate", "experts", "attend", "attend_shaped")
"""The kinds of lines that read whole rows, so that several threads need each element; so do norms, except those of
heads."""
ROW = -2
"""The row of a thread, which holds a norm of one token."""


@dataclass(frozen=True)
class Span:
    """Columns of the buffer, of the residual stream or of a thread's row."""

    area: int
    first: int
    end: int

    def meets(self, other: "Span") -> bool:
        """Whether the two have a column in common."""
        return self.area == other.area and self.first < other.end and other.first < self.end


@dataclass
class Memory:
    """The contents of memory.

    Attributes:
        columns: of the buffer.
        held: the columns of each intact value.
    """

    columns: int
    held: dict[str, Span] = field(default_factory=dict)

    def read(self, name: str, span: Span, line: str) -> None:
        """Check that a value is intact at its place."""
        if self.held.get(name) != span:
            raise WrongPlaceError(f"{line} reads {name}, which was not written or was overwritten")

    def write(self, name: str, span: Span, line: str) -> None:
        """Write a value; values that it overlaps are lost."""
        if span.area == 0 and not 0 <= span.first <= span.end <= self.columns:
            raise WrongPlaceError(f"{line} writes {name} outside of the buffer")
        self.held = {other: at for other, at in self.held.items() if not at.meets(span)} | {name: span}


def followed(program: Program, config: LlamaConfig, places: PlacesOf, *, one_token: bool) -> int:
    """Follow a program through its phases; returns the number of values read.

    Raises:
        WrongPlaceError: something is wrong.
    """
    found = phases_of(program, config)
    chosen, wide = places(program, found, config), widths(program, config)

    def span(name: str) -> Span:
        norms = {line.out for phase in found if isinstance(phase, Norm) for line in lines_of(phase)}
        if one_token and name in norms:
            return Span(ROW, 0, wide[name])
        start = chosen.of[name]
        return Span(STREAM, 0, wide[name]) if start == STREAM else Span(0, start, start + wide[name])

    memory, reads = Memory(chosen.columns, {BEGIN: Span(STREAM, 0, config.hidden)}), 0
    waiting = list[Line]()
    for phase in found:
        lines = lines_of(phase)
        room = (
            Span(0, chosen.of[ROOM], chosen.of[ROOM] + experts_room(phase, config))
            if isinstance(phase, Experts)
            else None
        )
        _check_at_once([*waiting, *lines], span, room)
        waiting = list(lines) if one_token and isinstance(phase, Norm) else []
        reads += _run(memory, lines, span, room)
    memory.read(END, span(END), "the next block")
    return reads


def _run(memory: Memory, lines: Sequence[Line], span: Callable[[str], Span], room: Span | None) -> int:
    """Run the lines of a phase in order, as each thread does for its part."""
    if room is not None:
        needed = {name: at for line in lines for name in line.inputs if name in memory.held and (at := span(name))}
        for name, at in needed.items():
            if at.meets(room):
                raise WrongPlaceError(f"the space of experts overlaps {name}, which they read")
        memory.write(ROOM, room, "experts")
    for line in lines:
        for name in line.inputs:
            memory.read(name, span(name), str(line))
        if line.out:
            memory.write(line.out, span(line.out), str(line))
    return sum(len(line.inputs) for line in lines)


def _check_at_once(lines: Sequence[Line], span: Callable[[str], Span], room: Span | None) -> None:
    """Check that lines that threads run at the same time access different columns.

    A value that is made and read in the same phase is read by the thread that made it, in its own columns or heads. So
    a line may overwrite what an earlier line reads, unless the earlier line reads whole rows.
    """
    made = {line.out for line in lines}
    for line, other in product(lines, lines):
        if not line.out or (line is other and not _whole(line)):
            continue
        target, chained = span(line.out), line is not other and _chained(line, other, lines)
        for name in () if chained and not _whole(other) else other.inputs:
            if name not in made and target.meets(span(name)):
                raise WrongPlaceError(f"{line} writes over {name}, which {other} reads at the same time")
        if line is not other and other.out and not chained and target.meets(span(other.out)):
            raise WrongPlaceError(f"{line} and {other} write to the same columns")
        if room is not None and other is lines[-1] and room.meets(span(other.out)):
            raise WrongPlaceError(f"{other} writes over the room of experts")


def _whole(line: Line) -> bool:
    return line.kind in WHOLE or (line.kind == "norm" and line.parameter not in HEAD_NORMS)


def _chained(line: Line, other: Line, lines: Sequence[Line]) -> bool:
    """Whether one of two lines reads a value derived from the other's result, possibly through lines between them."""
    made_from = {each.out: each.inputs for each in lines if each.out}

    def comes_from(name: str, source: str) -> bool:
        return name == source or any(comes_from(each, source) for each in made_from.get(name, ()) if each != name)

    return comes_from(line.out, other.out) or comes_from(other.out, line.out)
