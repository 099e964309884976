r"""Predictions about a kernel before it is compiled: registers, instructions, cycles, bytes.

**Registers.** `lowbit.kernels.program.live_registers` counts every value that is live anywhere. A compiler need not
keep all of them in registers: it can spill values that a loop does not use, and values that were only loaded can be
loaded again or be operands in memory, which most instructions of x86 accept. So the prediction counts the registers
that the innermost loop uses and that hold a computed value: the sums, and codes while they are unpacked. It does not
count masks (``m_…``), words (``w…``), activations (``x_…``) and tables (``t``, ``table``), which are only loaded or
broadcast; nor ``y`` and other values that are used only at the end of a group or segment. A kernel *fits* if the count
is at most η. Equation 4 as printed, with :math:`m_u = 1` because codes are unpacked one at a time, is given beside it;
it includes neither rows of x nor chains.

**Instructions** are those of one group, divided by its *products*: registers of columns × rows of x × codes. A word of
the vocabulary counts as the number of intrinsics in its table.

**Cycles** are a lower bound for such a group, where two vector instructions and two loads begin in each cycle, and an
addition to the same sum can begin in every fourth:

.. math:: \text{cycles} = \max\Bigl(\frac{\text{arithmetic}}{2},\; \frac{\text{loads}}{2},\;
   4 \cdot \text{additions to one sum}\Bigr).

A wider processor takes fewer; only the order matters for the search. Memory is not modelled. `lowbit tune` shows the
predictions beside the measurements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowbit.kernels.blocking import equation_4
from lowbit.kernels.program import Element, Instruction, Loop, Program, Step, live_registers
from lowbit.kernels.vector import VOCABULARY
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.runtime.activations import ActivationStream

LOADS = ("load_int", "load_float", "load_half", "load_byte", "broadcast_int", "broadcast_float")
"""Words that only fetch a value."""

PREFETCHES = ("prefetch", "prefetch_once")
FREE = (*PREFETCHES, "store", "as_float", "cvt_int_subnormal")
"""Words that are not arithmetic."""

PER_CYCLE = 2
LATENCY = 4

Sizes = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class Prediction:
    """The predictions for a recipe and a layout.

    Attributes:
        live: the number of values live at once, as the specification counts them.
        registers: the number of live values that must be in registers, as counted above.
        equation_4: the paper's formula.
        instructions: for each register of products.
        cycles: a lower bound, for each register of products.
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
    words = words_of_a_group(recipe, layout, program)
    instructions = {word: count * spelled(table, word) for word, count in words.items() if word not in PREFETCHES}
    products = min(layout.group_size, layout.rows) * recipe.rows * recipe.registers
    return Prediction(
        live_registers(program),
        counted_registers(program),
        equation_4(1, recipe.registers),
        sum(instructions.values()) / products,
        _cycles(recipe, layout, instructions) / products,
        layout.nbytes / (layout.rows * layout.columns),
    )


def _cycles(recipe: Recipe, layout: PanelLayout, instructions: Mapping[str, int]) -> float:
    loads = sum(count for word, count in instructions.items() if word in LOADS)
    arithmetic = sum(count for word, count in instructions.items() if word not in LOADS + FREE)
    waiting = LATENCY * additions(recipe, min(layout.group_size, layout.rows))
    return max(arithmetic / PER_CYCLE, loads / PER_CYCLE, waiting)


def counted_registers(program: Program) -> int:
    """The number of registers that the computation of the innermost loop needs at once."""
    instructions = list(program.instructions())
    computed = {step.target for step in instructions if step.target and step.word not in LOADS}
    loop = next(_inner_loops(program.body))
    inside = [step for step in loop.body if isinstance(step, Instruction)]
    used = {name for step in inside for name in (step.target, *step.reads())}
    first = {step.target: step for step in reversed(instructions) if step.target in used}
    alone = Program(program.lanes, (*_read_first(inside, first), loop))  # only the loop and its operands
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


def _inner_loops(steps: Sequence[Step]) -> Iterator[Loop]:
    for step in steps:
        if isinstance(step, Loop):
            if isinstance(step.count, Element) and step.count.name == "turns":
                yield step
            yield from _inner_loops(step.body)


def additions(recipe: Recipe, group: int) -> float:
    """The number of additions to one sum, one after the other, in a group of this many codes."""
    if recipe.integer:
        return group / 4
    if recipe.method == "sums":
        return 8 * recipe.unit_words * group / recipe.unit_codes / recipe.chains
    return group / recipe.chains


def spelled(table: InstructionSet, word: str) -> int:
    """The number of instructions of a word, by the intrinsics of its body; 1 for plain C++."""
    if word in LOADS:
        return 1
    body = table.words[word]
    constants = body.count("_set1_")
    return max(1, body.count("_mm") - constants)


def words_of_a_group(recipe: Recipe, layout: PanelLayout, program: Program) -> Counter[str]:
    """How often each word is executed in the first group of a tile of columns."""
    stream = ActivationStream(recipe, layout)
    entries = 1
    if recipe.integer:
        entries = 1 + next(n for n, segment in enumerate(stream.segments) if segment.ends)
    flags = stream.segments[:entries] if recipe.integer else ()
    sizes: Sizes = {
        "groups": 1,
        "segments": entries,
        "turns": stream.iterations[:entries].tolist(),
        "back": [int(segment.back) for segment in flags],
        "ends": [int(segment.ends) for segment in flags],
    }
    inner = tuple(step for step in program.body if isinstance(step, Loop))
    return tally(inner, sizes)


def tally(steps: Sequence[Step], sizes: Sizes, indices: Mapping[str, int] | None = None) -> Counter[str]:
    """How often each word is executed, from the sizes of the loops; the interpreter counts the same."""
    words: Counter[str] = Counter()
    at = dict(indices or {})
    for step in steps:
        if isinstance(step, Instruction):
            words[step.word] += 1
        elif isinstance(step, Loop) and not _uses(step.body, step.index):
            for word, count in tally(step.body, sizes, at).items():
                words[word] += count * _times(step, sizes, at)
        elif isinstance(step, Loop):
            for iteration in range(_times(step, sizes, at)):
                words += tally(step.body, sizes, {**at, step.index: iteration})
    return words


def _uses(steps: Sequence[Step], index: str) -> bool:
    """Whether the count of an inner loop depends on this index."""
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
