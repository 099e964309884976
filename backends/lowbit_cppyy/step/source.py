"""The C++ of a step: a function for each kind of block, and one that runs them all.

The text follows the program line by line, in calls of ``cpp/step.h``. It is made for one shape of model: sizes are
constants in it, visible to the compiler. Weights are not: two models of one shape share a step.
"""

import hashlib
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
            f"// The step of a decoder: {config.layers} blocks of {config.hidden} channels, {config.heads} query heads",
            f"// and {config.kv_heads} key-value heads of {config.head_dim} channels.",
            f"struct {name}_of {{",
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
        self._rows: set[str] = set()  # values that `norm_rows` has a pointer to

    def _matrices_of(self, line: Line) -> list[str]:
        """The names of the matrices of a line."""
        routing = self._config.routing
        if line.kind == "experts" and routing is not None:
            return [f"{line.parameter}[{n}].{part}" for n in range(routing.experts) for part in ("gate", "up", "down")]
        return [str(line.parameter)] if line.kind == "product" else []

    def lines(self) -> Iterator[str]:
        """The lines of the function of the block."""
        self._rows = set()
        for part, phase in enumerate(self.phases, self._first):
            yield from (f"// {line}" for line in lines_of(phase))
            yield from getattr(self, f"_{type(phase).__name__.lower()}")(phase)
            yield from self._of.lap(part)
            if not isinstance(phase, Norm):
                yield "team.wait();"
                yield from self._of.lap(part, waited=True)

    def _value(self, name: str) -> str:
        if name in self._rows:
            return name
        place = self.places.of[name]
        return "call.x" if place == STREAM else f"call.values + {place} * call.tokens"

    def _matrix(self, line: Line) -> str:
        return f"p + {self.matrices.index(str(line.parameter))}"

    def _vector(self, line: Line) -> str:
        return self._vector_of(str(line.parameter))

    def _vector_of(self, name: str) -> str:
        return f"v[{self.vectors.index(name)}]" if name in self.vectors else "nullptr"

    def _norm(self, phase: Norm) -> Iterator[str]:
        line = phase.line
        source, place = self._value(line.inputs[0]), self._value(line.out)
        yield f"const float* const {line.out} = norm_rows(team, *call.model->norm, {source}, {self._vector(line)},"
        yield f"                                          {_epsilon(line)}, {self._config.hidden}, {place});"
        self._rows.add(line.out)

    def _multiply(self, phase: Multiply) -> Iterator[str]:
        first, bias, then = phase.lines[0], phase.bias, phase.then[-1] if phase.then else None
        matrices = ", ".join(self._matrix(line) for line in phase.lines)
        outs = ", ".join(self._value(line.out) for line in phase.lines)
        division, done = "bytes", "Nothing{}"
        added = "nullptr" if bias is None else self._vector(bias)
        if then is not None and then.kind == "add":
            sizes = f"{self._config.hidden}, {added}, {_factor(phase.then)}"
            done = f"Residual{{call.x, {self._value(first.out)}, {sizes}}}"
        elif then is not None:
            gate, up = (self._value(name) for name in then.inputs)
            division = "pair"
            sizes = f"{self._config.feed_forward}, {self._value(then.out)}, {_limit(then)}"
            done = f"Gate{{call.model->gate, {gate}, {up}, {sizes}}}"
        elif bias is not None:
            done = f"Biased{{{self._value(first.out)}, {self._config.hidden}, {added}}}"
        call = f"multiply_all<Division::{division}>(team, {{{matrices}}}, {self._value(first.inputs[0])}, {{{outs}}},"
        yield f"if (const int status = {call}"
        yield f"                       {done})) return status;"

    def _attend(self, phase: Attend) -> Iterator[str]:
        line, config = phase.line, self._config
        window = line.setting("window") or 0
        sizes = f"{config.heads}, {config.kv_heads}, {config.head_dim}, {window}"
        places = f"call.model->kept, call.places, number * {config.kv_heads}"
        yield f"attend_rows(team, *call.model->heads, {places}, {sizes},"
        shape = f"{_number(line.setting('scale') or 0.0)}, {_number(line.setting('cap') or 0.0)}"
        sinks = "nullptr" if line.parameter is None else self._vector(line)
        yield f"            {self._value(line.inputs[0])}, {self._value(line.out)}, {shape}, {sinks});"

    def _experts(self, phase: Experts) -> Iterator[str]:
        gate, experts, config = phase.lines[0], phase.lines[-1], self._config
        assert config.routing is not None
        before = str(experts.setting("softmax") == "before").lower()
        sizes = (
            f"{config.routing.experts}, {experts.setting('top_k')}, {before}, {config.hidden}, {config.feed_forward}"
        )
        first = f"p - call.products + {self.matrices.index(f'{experts.parameter}[0].gate')}"
        biases = ", ".join(self._vector_of(name) for name in ("router_bias", *BIASES))
        yield f"const Experts experts{{{sizes}, {first}, {_limit(experts)}, {biases}}};"
        values = f"{self._value(gate.inputs[0])}, {self._vector(gate)}, {self._value(ROOM)}, {self._value(experts.out)}"
        yield f"if (const int status = run_experts(team, call, experts, {values})) return status;"

    def _add(self, phase: Add) -> Iterator[str]:
        source = phase.lines[0].inputs[-1]
        yield f"add_rows(team, {self._value(source)}, {_factor(phase.lines)}, {self._config.hidden}, call.x);"

    def _allheads(self, phase: AllHeads) -> Iterator[str]:
        """A loop over the rows of all tokens: of queries, then of keys."""
        d, count = self._config.head_dim, len(phase.lines)
        yield f"for (std::int64_t n = team.first(call.tokens * {count}); n < team.last(call.tokens * {count}); ++n) {{"
        for number, line in enumerate(phase.lines):
            width = d * (self._config.heads if line.parameter == "query_norm" else self._config.kv_heads)
            yield f"  if (n % {count} == {number}) {{"
            yield f"    float* const row = {self._value(line.out)} + n / {count} * {width};"
            yield f"    rms_norm_row(*call.model->norm, row, {self._vector(line)}, {_epsilon(line)}, {width}, row);"
            yield "  }"
        yield "}"

    def _perhead(self, phase: PerHead) -> Iterator[str]:
        """A loop over the heads of all tokens: of queries, then of keys, then of values."""
        config, d = self._config, self._config.head_dim
        counts = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
        total = sum(counts.values())
        cached = [each for line in phase.lines if line.kind == "append" for each in line.inputs]
        yield f"for (std::int64_t n = team.first(call.tokens * {total}); n < team.last(call.tokens * {total}); ++n) {{"
        yield f"  const std::int64_t t = n / {total}, h = n % {total};"
        yield "  const Place& place = call.places[t];"
        start = 0
        for name, count in counts.items():
            own = [line for line in phase.lines if line.kind != "append" and self._roles[line.inputs[0]] == name]
            kept = [each for each in cached if self._roles[each] == name]
            yield f"  if ({start} <= h && h < {start + count}) {{" if own or kept else f"  // {name}: nothing"
            if own or kept:
                yield f"    const std::int64_t j = h - {start};"
                heads = self._value([*(line.inputs[0] for line in own), *kept][0])
                yield f"    float* const head = {heads} + (t * {count} + j) * {d};"
                yield from (f"    {self._head_line(line)}" for line in own)
                if kept:
                    part = "keys" if name == "key" else "values"
                    row = f"(number * {count} + j) * place.capacity + place.position"
                    keep = f"keep_row(call.model->kept.{part}, head, {d}, {row}, place.{part})"
                    yield f"    if (const int status = {keep}) team.fail(status);"
                yield "  }"
            start += count
        yield "}"

    def _head_line(self, line: Line) -> str:
        d = self._config.head_dim
        if line.kind == "bias":
            return f"add_to(head, {self._vector(line)} + j * {d}, {d});"
        if line.kind == "norm":
            return f"rms_norm_row(*call.model->norm, head, {self._vector(line)}, {_epsilon(line)}, {d}, head);"
        angles = f"call.angles[{self._of.frequencies.index(line.frequencies)}]"
        both, model = f"{angles} + place.position * 2 * padded_channels({d})", "call.model->"
        return f"rotate_head(*{model}rotation, head, {both}, {model}partners, {d}, team.rotation, head);"
