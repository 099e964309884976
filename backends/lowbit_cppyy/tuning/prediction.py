r"""What can be said of a kernel before it is compiled: registers, instructions, cycles, bytes.

**Registers.** `lowbit.kernels.program.live_registers` counts every value that is live anywhere. A compiler need not
keep all of them in registers: what a loop does not touch can be put aside around it, and what was loaded and not
changed since can be loaded again, or be an operand in memory, from where most instructions of x86 take one. So what is
*counted* here are the registers that the innermost loop uses and that hold something computed: the sums, and codes on
their way. Not counted are masks (``m_…``), words (``w…``), activations (``x_…``) and tables (``t``, ``table``), which
are only ever loaded or broadcast; and ``y`` and whatever else is touched only where a group or a segment ends. A kernel
*fits* if the count is at most η. Equation 4 as printed, with :math:`m_u = 1` since codes are taken one after the other,
stands beside it: it knows neither rows of x nor chains.

**Instructions** are those of one group, divided by its *products*: registers of columns × rows of x × codes. A word of
the vocabulary counts as many as the intrinsics that its table spells it with.

**Cycles** are what such a group takes at least where two vector instructions and two loads begin in a cycle, and a sum
can be added to in every fourth:

.. math:: \text{cycles} = \max\Bigl(\frac{\text{arithmetic}}{2},\; \frac{\text{loads}}{2},\;
   4 \cdot \text{additions to one sum}\Bigr).

A processor that begins more takes fewer; what matters for the search is the order. Nothing is said of memory. What is
predicted so is set beside what was measured by `lowbit tune`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowbit.kernels.blocking import equation_4
from lowbit.kernels.program import Element, Instruction, Loop, Program, Step, live_registers
from lowbit.kernels.vector import VOCABULARY
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.layout.streams import Stream
from lowbit_cppyy.recipe.recipe import Recipe

LOADS = ("load_int", "load_float", "load_half", "load_byte", "broadcast_int", "broadcast_float")
"""Words that only fetch a value."""

PREFETCHES = ("prefetch", "prefetch_once")
FREE = (*PREFETCHES, "store", "as_float")
"""Words that are no arithmetic."""

PER_CYCLE = 2
LATENCY = 4

Sizes = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class Prediction:
    """What the models say of a recipe for a layout.

    Attributes:
        live: every value that is live at once, as the specification counts.
        registers: those that must be in registers, as counted above.
        equation_4: the paper's formula.
        instructions: for each register of products.
        cycles: at least, for each register of products.
        bytes_per_code: of codes, scales and zeros together.
    """

    live: int
    registers: int
    equation_4: int
    instructions: float
    cycles: float
    bytes_per_code: float


def predict(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> Prediction:
    """The prediction for a recipe.

    Args:
        recipe: one that fits registers of the table's length.
        layout: of the matrix.
        table: the instruction set.
    """
    program = micro_kernel(recipe, table.lanes)
    products, instructions = _instructions(recipe, layout, table, program)
    return Prediction(
        live_registers(program),
        counted_registers(program),
        equation_4(1, recipe.registers),
        sum(instructions.values()) / products,
        _cycles(recipe, layout, instructions) / products,
        layout.nbytes / (layout.rows * layout.columns),
    )


def rank(recipe: Recipe, layout: PanelLayout, table: InstructionSet) -> tuple[float, int]:
    """Cycles and registers alone, as `predict`: what a search orders hundreds of recipes by."""
    program = micro_kernel(recipe, table.lanes)
    products, instructions = _instructions(recipe, layout, table, program)
    return _cycles(recipe, layout, instructions) / products, counted_registers(program)


def _instructions(
    recipe: Recipe, layout: PanelLayout, table: InstructionSet, program: Program
) -> tuple[int, Mapping[str, int]]:
    """The products of a group, and for each word the instructions that it comes to."""
    words = words_of_a_group(recipe, layout, program)
    group = min(layout.group_size, layout.rows)
    spelled_out = {word: count * spelled(table, word) for word, count in words.items() if word not in PREFETCHES}
    return group * recipe.rows * recipe.registers, spelled_out


def _cycles(recipe: Recipe, layout: PanelLayout, instructions: Mapping[str, int]) -> float:
    loads = sum(count for word, count in instructions.items() if word in LOADS)
    arithmetic = sum(count for word, count in instructions.items() if word not in LOADS + FREE)
    waiting = LATENCY * additions(recipe, min(layout.group_size, layout.rows))
    return max(arithmetic / PER_CYCLE, loads / PER_CYCLE, waiting)


def counted_registers(program: Program) -> int:
    """The registers that the innermost loop needs at once for what it computes."""
    instructions = list(program.instructions())
    computed = {step.target for step in instructions if step.target and step.word not in LOADS}
    loop = next(_loops_of_turns(program.body))
    inside = [step for step in loop.body if isinstance(step, Instruction)]
    used = {name for step in inside for name in (step.target, *step.reads())}
    first = {step.target: step for step in reversed(instructions) if step.target in used}
    alone = Program(program.lanes, (*_read_first(inside, first), loop))  # the loop with what it needs, and nothing else
    return live_registers(alone, set(first) - computed)


def _read_first(inside: Sequence[Instruction], first: Mapping[str, Instruction]) -> Iterator[Instruction]:
    """A broadcast for each register that is read before it is written."""
    written: set[str] = set()
    for step in inside:
        for name in step.reads():
            if name not in written:
                written.add(name)
                kind = VOCABULARY[first[name].word].gives
                yield Instruction("broadcast_int" if kind == "int" else "broadcast_float", name, (0,))
        written.add(step.target)


def _loops_of_turns(steps: Sequence[Step]) -> Iterator[Loop]:
    for step in steps:
        if isinstance(step, Loop):
            if isinstance(step.count, Element) and step.count.name == "turns":
                yield step
            yield from _loops_of_turns(step.body)


def additions(recipe: Recipe, group: int) -> float:
    """How often something is added to one sum in a group of so many codes, one after the other."""
    if recipe.integer:
        return group / 4
    if recipe.method == "sums":
        return 8 * recipe.unit_words * group / recipe.unit_codes / recipe.chains
    return group / recipe.chains


def spelled(table: InstructionSet, word: str) -> int:
    """How many instructions a word is, by the intrinsics of its body; 1 where it is plain C++."""
    if word in LOADS:
        return 1
    body = table.words[word]
    constants = body.count("_set1_")
    return max(1, body.count("_mm") - constants)


def words_of_a_group(recipe: Recipe, layout: PanelLayout, program: Program) -> Counter[str]:
    """How often each word is carried out for the first group of a tile of columns."""
    stream = Stream(recipe, layout)
    entries = 1
    if recipe.integer:
        entries = 1 + next(n for n, segment in enumerate(stream.segments) if segment.ends)
    flags = stream.segments[:entries] if recipe.integer else ()
    sizes: Sizes = {
        "groups": 1,
        "segments": entries,
        "turns": [int(turns) for turns in stream.turns[:entries]],
        "back": [int(segment.back) for segment in flags],
        "ends": [int(segment.ends) for segment in flags],
    }
    inner = tuple(step for step in program.body if isinstance(step, Loop))
    return tally(inner, sizes)


def tally(steps: Sequence[Step], sizes: Sizes, indices: Mapping[str, int] | None = None) -> Counter[str]:
    """How often each word is executed, by the sizes of the loops; the interpreter counts the same."""
    words: Counter[str] = Counter()
    at = dict(indices or {})
    for step in steps:
        if isinstance(step, Instruction):
            words[step.word] += 1
        elif isinstance(step, Loop) and not _uses(step.body, step.index):
            for word, count in tally(step.body, sizes, at).items():
                words[word] += count * _times(step, sizes, at)
        elif isinstance(step, Loop):
            for turn in range(_times(step, sizes, at)):
                words += tally(step.body, sizes, {**at, step.index: turn})
    return words


def _uses(steps: Sequence[Step], index: str) -> bool:
    """Whether loops inside are counted by this one's index."""
    loops = [step for step in steps if isinstance(step, Loop)]
    counts = [loop.count for loop in loops]
    return any(isinstance(count, Element) and count.index == index for count in counts) or any(
        _uses(loop.body, index) for loop in loops
    )


def _times(loop: Loop, sizes: Sizes, indices: Mapping[str, int]) -> int:
    if isinstance(loop.count, int):
        return loop.count
    if isinstance(loop.count, Element):
        size = sizes[loop.count.name]
        return size if isinstance(size, int) else size[indices[loop.count.index]]
    size = sizes[loop.count]
    assert isinstance(size, int)
    return size
