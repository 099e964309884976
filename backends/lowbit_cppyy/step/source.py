"""The C++ of a step: a function for each kind of block, and one that runs them all.

The text follows the program line by line, in calls of ``cpp/step.h``. It is made for one shape of model: sizes are
constants in it, visible to the compiler. Weights are not: two models of one shape share a step. A pointer to a value
has the value's name, with ``_at`` behind it; matrices and vectors have constants for their numbers.
"""

import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowbit.attention.rope import Frequencies
from lowbit.model.program import Line, Program
from lowbit.model.step import EXPERT_BIASES, Step, vectors_of
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.step.phases import (
    ROOM,
    STREAM,
    Add,
    AllHeads,
    Attend,
    Experts,
    Multiply,
    Norm,
    PerHead,
    Phase,
    check_places,
    lines_of,
    phases_of,
    places_of,
    refused,
    roles_of,
)

ENDS = [["norm", "product", *scale, *cap] for scale in ([], ["scale"]) for cap in ([], ["soft_cap"])]
"""The kinds of lines after the blocks."""


@dataclass(frozen=True)
class Part:
    """A part of a step that is timed.

    Attributes:
        blocks: the number of blocks that have it; 1 at the end of a step.
        phase: what threads do between two waits.
    """

    blocks: int
    phase: Phase


@dataclass(frozen=True)
class StepSource:
    """The C++ of a step.

    Attributes:
        step: the program.
        table: the instruction set, whose namespace holds it.
        timed: the number of threads of a step that adds up the seconds of its parts; 0 for one that does not.
    """

    step: Step
    table: InstructionSet
    timed: int = 0

    @cached_property
    def name(self) -> str:
        """A name derived from the text, so that different texts have different names."""
        return f"step_{hashlib.sha256(self._body('step').encode()).hexdigest()[:16]}"

    @property
    def source(self) -> str:
        """Its text."""
        return self._body(self.name)

    @property
    def frequencies(self) -> list[Frequencies]:
        """The frequencies of its rotations, in the order of the tables of angles."""
        return self.step.config.frequencies

    @property
    def value_columns(self) -> int:
        """The number of columns of all shared values of a block, for each token."""
        return max(block.places.columns for block in self._blocks.values())

    def parameters(self, program: Program) -> tuple[list[str], list[str]]:
        """The names of the matrices and of the vectors of a block, in the order in which the text numbers them."""
        block = self._blocks[program]
        return block.matrices, block.vectors

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of a step that are timed, in order: the phases of each kind of block, then the two of the end."""
        counts = Counter(self.step.blocks)
        phases = [Part(counts[program], phase) for program, each in self._blocks.items() for phase in each.phases]
        norm, *scores = self.step.last
        return [*phases, Part(1, Norm(norm)), Part(1, Multiply(tuple(scores)))]

    @cached_property
    def _blocks(self) -> "dict[Program, _Block]":
        blocks, first = dict[Program, _Block](), 0
        for program in dict.fromkeys(self.step.blocks):
            blocks[program] = _Block(self, program, first)
            first += len(blocks[program].phases)
        return blocks

    def lap(self, part: int, *, waited: bool = False) -> Iterator[str]:
        """The line that adds the time since the last such line to that of a part, or to the wait after it."""
        if self.timed:
            yield f"watch.lap({2 * part + waited});"

    def _stopwatch(self, name: str) -> Iterator[str]:
        """The end of the struct; in a timed step with the seconds of each thread, and a function for their address."""
        if self.timed:
            yield f"  alignas(64) static inline double seconds[{self.timed}][{padded(2 * len(self.parts))}];"
        yield "};"
        if self.timed:
            yield f"inline double* {name}_seconds() {{ return {name}_of::seconds[0]; }}"

    def _body(self, name: str) -> str:
        config, numbers = self.step.config, {program: n for n, program in enumerate(self._blocks)}
        watch = ", watch" if self.timed else ""
        arguments = _ARGUMENTS + (", Stopwatch& watch" if self.timed else "")
        lines = [
            f"namespace lowbit::{self.table.name} {{",
            f"// The step of a decoder of {config.layers} blocks. Every thread of the team runs all of it.",
            "// A status other than OK is the same in all threads, since it follows from values that all of them read.",
            "// What one thread alone finds goes to team.fail, so that the others do not wait for it in vain.",
            f"struct {name}_of {{",
            f"static constexpr int HIDDEN = {config.hidden}, FEED_FORWARD = {config.feed_forward};",
            f"static constexpr int HEADS = {config.heads}, KV_HEADS = {config.kv_heads}, HEAD_DIM = {config.head_dim};",
            "static constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;  // of a token: queries, then keys, then values",
        ]
        for program, number in numbers.items():
            lines += ["", f"static int block_{number}({arguments}) {{"]
            lines += ["  " + line for line in self._blocks[program].lines()] + ["  return OK;", "}"]
        lines += [*self._stopwatch(name), "", f"inline int {name}(const Team& team, const Call& call) {{"]
        if self.timed:
            lines += [f"  Stopwatch watch({name}_of::seconds[team.thread]);"]
        lines += ["  const Product* p = call.products;", "  const float* const* v = call.model->vectors.data();"]
        for run, program in self.step.alike:
            block = self._blocks[program]
            lines += [
                f"  for (int number = {run.start}; number < {run.stop}; ++number) {{",
                f"    const int status = {name}_of::block_{numbers[program]}(team, call, number, p, v{watch});",
                "    if (status != OK) return status;",
                f"    p += {len(block.matrices)}, v += {len(block.vectors)};",
                "  }",
            ]
        lines += ["  " + line for line in self._end()]
        lines += ["  return OK;", "}", f"}}  // namespace lowbit::{self.table.name}"]
        return "\n".join(lines) + "\n"

    def _end(self) -> Iterator[str]:
        norm, *scores = self.step.last
        if [line.kind for line in self.step.last] not in ENDS:
            raise refused(self.step.last[-1], "at the end of the step")
        hidden = self.step.config.hidden
        yield f"// {norm}"
        yield f"const float* const hidden = norm_rows(team, *call.model->norm, call.x, v[0], {_epsilon(norm)},"
        yield f"                                      {hidden}, call.hidden);"
        yield f"if (call.tokens == 1 && team.thread == 0) std::memcpy(call.hidden, hidden, {hidden} * sizeof(float));"
        yield from self.lap(len(self.parts) - 2)
        yield from (f"// {line}" for line in scores)
        if not self.timed:
            yield "if (call.logits) return score(team, call, p, hidden);"
            return
        yield "const int scored = call.logits ? score(team, call, p, hidden) : OK;"
        yield from self.lap(len(self.parts) - 1)
        yield "if (scored != OK) return scored;"


def padded(numbers: int) -> int:
    """So many float64, in whole cache lines."""
    return -(-numbers // 8) * 8


WIDTH = 110
_ARGUMENTS = "const Team& team, const Call& call, int number, const Product* p, const float* const* v"


BIASES = tuple(f"expert_{name}" for name in EXPERT_BIASES)


def _epsilon(line: Line) -> str:
    return _number(line.setting("epsilon"))


def _number(value: float) -> str:
    return f"static_cast<float>({value!r})"


def _limit(line: Line) -> str:
    """Minus the limit of a clamped unit, as its pass reads it; 0 for other lines."""
    return _number(-(line.setting("limit") or 0.0))


def _factor(lines: Sequence[Line]) -> str:
    """The factor of the addend in a sum with the residual stream."""
    return _number(lines[0].setting("factor") if lines[0].kind == "scale" else 1.0)


def _constant(name: str) -> str:
    """The constant for the number of a matrix or vector; for an expert's, that of the first expert.

    >>> _constant("feed_forward.experts[3].gate")
    'FEED_FORWARD_EXPERTS'
    """
    return re.sub(r"\W", "_", name.partition("[")[0]).upper()


def wrapped(text: str) -> list[str]:
    """A line of C++, in lines of a usual length."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _vectors_of(line: Line) -> list[str]:
    """The names of the vectors of a line, and of the router, which is kept as one."""
    return [str(line.parameter)] if line.kind == "gate" else vectors_of(line)


class _Block:
    """The text of one kind of block.

    Attributes:
        matrices: names of its matrices, in the order of the lines.
        vectors: names of its vectors, likewise.
        places: where its values lie.
        phases: its phases.
    """

    def __init__(self, of: StepSource, program: Program, first: int) -> None:
        """`first`: the number of its first phase among the parts that are timed."""
        self._of, self._config, self._first = of, of.step.config, first
        self.phases = phases_of(program, self._config)
        self._roles = roles_of(program)
        self.places = places_of(program, self.phases, self._config)
        check_places(program, self.phases, self.places)
        named = [line for line in program if line.parameter is not None]
        self.matrices = [name for line in named for name in self._matrices_of(line)]
        self.vectors = [name for line in named for name in _vectors_of(line)]
        self._used: dict[str, None] = {}  # the values with a pointer in the text, in order
        self._declared: set[str] = set()

    def _matrices_of(self, line: Line) -> list[str]:
        """The names of the matrices of a line."""
        routing = self._config.routing
        if line.kind == "experts" and routing is not None:
            return [f"{line.parameter}[{n}].{part}" for n in range(routing.experts) for part in ("gate", "up", "down")]
        return [str(line.parameter)] if line.kind == "product" else []

    def lines(self) -> Iterator[str]:
        """The lines of the function of the block."""
        self._used, self._declared = {}, set()
        yield from self._constants()
        for part, phase in enumerate(self.phases, self._first):
            yield from (f"// {line}" for line in lines_of(phase))
            body = list(getattr(self, f"_{type(phase).__name__.lower()}")(phase))
            yield from self._pointers()
            yield from body
            yield from self._of.lap(part)
            if not isinstance(phase, Norm):
                yield "team.wait();"
                yield from self._of.lap(part, waited=True)

    def _value(self, name: str) -> str:
        """The pointer to a value, which is declared before the first phase that uses it."""
        if self.places.of[name] == STREAM:
            return "call.x"
        self._used.setdefault(name)
        return f"{name}_at"

    def _place(self, name: str) -> str:
        return f"call.values + {self.places.of[name]} * call.tokens"

    def _pointers(self) -> Iterator[str]:
        """The declarations of the values that are used for the first time."""
        for name in self._used:
            if name not in self._declared:
                yield f"float* const {name}_at = {self._place(name)};"
        self._declared |= self._used.keys()

    def _constants(self) -> Iterator[str]:
        """The numbers of the matrices and of the vectors, of experts those of the first."""
        for of, names in (("matrices, in p", self.matrices), ("vectors, in v", self.vectors)):
            first: dict[str, int] = {}
            for number, name in enumerate(names):
                first.setdefault(_constant(name), number)
            told = ", ".join(f"{name} = {number}" for name, number in first.items())
            if told:
                yield f"// The numbers of its {of}:"
                yield from wrapped(f"enum {{ {told} }};")

    def _matrix(self, line: Line) -> str:
        return f"p + {_constant(str(line.parameter))}"

    def _vector(self, line: Line) -> str:
        return self._vector_of(str(line.parameter))

    def _vector_of(self, name: str) -> str:
        return f"v[{_constant(name)}]" if name in self.vectors else "nullptr"

    def _norm(self, phase: Norm) -> Iterator[str]:
        line = phase.line
        source = self._value(line.inputs[0])
        self._declared.add(line.out)
        yield f"const float* const {line.out}_at = norm_rows(team, *call.model->norm, {source},"
        yield f"    {self._vector(line)}, {_epsilon(line)}, HIDDEN, {self._place(line.out)});"

    def _multiply(self, phase: Multiply) -> Iterator[str]:
        first, bias, then = phase.lines[0], phase.bias, phase.then[-1] if phase.then else None
        matrices = ", ".join(self._matrix(line) for line in phase.lines)
        outs = ", ".join(self._value(line.out) for line in phase.lines)
        division, done = "bytes", "Nothing{}"
        added = "nullptr" if bias is None else self._vector(bias)
        if then is not None and then.kind == "add":
            sizes = f"HIDDEN, {added}, {_factor(phase.then)}"
            done = f"Residual{{call.x, {self._value(first.out)}, {sizes}}}"
        elif then is not None:
            gate, up = (self._value(name) for name in then.inputs)
            division = "pair"
            sizes = f"FEED_FORWARD, {self._value(then.out)}, {_limit(then)}"
            done = f"Gate{{call.model->gate, {gate}, {up}, {sizes}}}"
        elif bias is not None:
            done = f"Biased{{{self._value(first.out)}, HIDDEN, {added}}}"
        yield f"if (const int status = multiply_all<Division::{division}>("
        yield f"        team, {{{matrices}}}, {self._value(first.inputs[0])}, {{{outs}}},"
        yield f"        {done}))"
        yield "  return status;"

    def _attend(self, phase: Attend) -> Iterator[str]:
        line = phase.line
        yield "attend_rows(team, *call.model->heads, call.model->kept, call.places, number * KV_HEADS,"
        window = line.setting("window") or 0
        yield f"    HEADS, KV_HEADS, HEAD_DIM, {window} /* window */,"
        shape = f"{_number(line.setting('scale') or 0.0)} /* factor */, {_number(line.setting('cap') or 0.0)} /* cap */"
        sinks = "nullptr" if line.parameter is None else self._vector(line)
        yield f"    {self._value(line.inputs[0])}, {self._value(line.out)},"
        yield f"    {shape}, {sinks} /* sinks */);"

    def _experts(self, phase: Experts) -> Iterator[str]:
        gate, experts, config = phase.lines[0], phase.lines[-1], self._config
        assert config.routing is not None
        before = str(experts.setting("softmax") == "before").lower()
        choice = f"{config.routing.experts}, {experts.setting('top_k')} /* top_k */, {before} /* softmax before */"
        first = f"p - call.products + {_constant(str(experts.parameter))}"
        biases = ", ".join(self._vector_of(name) for name in ("router_bias", *BIASES))
        yield "{"
        yield f"  const Experts experts{{{choice},"
        yield f"      HIDDEN, FEED_FORWARD, {first},"
        yield f"      {_limit(experts)} /* minus the limit */, {biases} /* biases */}};"
        source, out = self._value(gate.inputs[0]), self._value(experts.out)
        yield f"  float* const room = {self._place(ROOM)};"
        yield f"  if (const int status = run_experts(team, call, experts, {source}, {self._vector(gate)}, room, {out}))"
        yield "    return status;"
        yield "}"

    def _add(self, phase: Add) -> Iterator[str]:
        source = phase.lines[0].inputs[-1]
        yield f"add_rows(team, {self._value(source)}, {_factor(phase.lines)}, HIDDEN, call.x);"

    def _allheads(self, phase: AllHeads) -> Iterator[str]:
        """A loop over the rows of all tokens: of queries, then of keys."""
        count = len(phase.lines)
        yield f"for (std::int64_t n = team.first(call.tokens * {count}); n < team.last(call.tokens * {count}); ++n) {{"
        for number, line in enumerate(phase.lines):
            width = f"{'HEADS' if line.parameter == 'query_norm' else 'KV_HEADS'} * HEAD_DIM"
            yield f"  if (n % {count} == {number}) {{"
            yield f"    float* const row = {self._value(line.out)} + n / {count} * {width};"
            yield f"    rms_norm_row(*call.model->norm, row, {self._vector(line)}, {_epsilon(line)}, {width}, row);"
            yield "  }"
        yield "}"

    def _perhead(self, phase: PerHead) -> Iterator[str]:
        """A loop over the heads of all tokens: of queries, then of keys, then of values."""
        cached = [each for line in phase.lines if line.kind == "append" for each in line.inputs]
        first, last = (f"team.{end}(call.tokens * ALL_HEADS)" for end in ("first", "last"))
        yield f"for (std::int64_t n = {first}; n < {last}; ++n) {{"
        yield "  const std::int64_t t = n / ALL_HEADS, h = n % ALL_HEADS;"
        yield "  const Place& place = call.places[t];"
        for name, (condition, first, count) in _HEADS.items():
            own = [line for line in phase.lines if line.kind != "append" and self._roles[line.inputs[0]] == name]
            kept = [each for each in cached if self._roles[each] == name]
            if not own and not kept:
                continue
            yield f"  if ({condition}) {{"
            yield f"    const std::int64_t j = {first};"
            heads = self._value([*(line.inputs[0] for line in own), *kept][0])
            yield f"    float* const head = {heads} + (t * {count} + j) * HEAD_DIM;"
            for line in own:
                yield from (f"    {text}" for text in self._head_line(line))
            if kept:
                part = "keys" if name == "key" else "values"
                yield "    const std::int64_t row = (number * KV_HEADS + j) * place.capacity + place.position;"
                yield f"    const int status = keep_row(call.model->kept.{part}, head, HEAD_DIM, row, place.{part});"
                yield "    if (status) team.fail(status);"
            yield "  }"
        yield "}"

    def _head_line(self, line: Line) -> Iterator[str]:
        if line.kind == "bias":
            yield f"add_to(head, {self._vector(line)} + j * HEAD_DIM, HEAD_DIM);"
        elif line.kind == "norm":
            yield f"rms_norm_row(*call.model->norm, head, {self._vector(line)}, {_epsilon(line)}, HEAD_DIM, head);"
        else:
            angles = f"call.angles[{self._of.frequencies.index(line.frequencies)}]"
            yield f"rotate_head(*call.model->rotation, head, {angles} + place.position * 2 * padded_channels(HEAD_DIM),"
            yield "    call.model->partners, HEAD_DIM, team.rotation, head);"


_HEADS = {
    "query": ("h < HEADS", "h", "HEADS"),
    "key": ("HEADS <= h && h < HEADS + KV_HEADS", "h - HEADS", "KV_HEADS"),
    "value": ("HEADS + KV_HEADS <= h", "h - HEADS - KV_HEADS", "KV_HEADS"),
}
"""For each kind of heads: which of a token's they are, the number of one among them, and how many there are."""
