"""Lowering: a program printed as C++ for one instruction set.

The text is the program, line by line, as calls of functions named after the vocabulary. So a kernel reads the same for
every instruction set, and like the paper's Algorithms 2 and 3. The same program always gives the same text.
"""

from collections.abc import Iterator
from typing import Protocol

from lowbit.kernels.program import Address, Advance, Argument, Comment, Element, Instruction, Loop, Program, Step
from lowbit.kernels.vector import VOCABULARY, Operand, Word
from lowbit_cppyy.codegen.broadcasts import separated
from lowbit_cppyy.codegen.isa import InstructionSet

_FUNCTION = {"and": "and_", "or": "or_"}  # keywords of C++; the other words are names of functions
_REGISTER = {"int": "vint", "float": "vfloat", "none": "void"}

# A table whose `fmadd` rounds twice tells the compiler, which might otherwise fuse it. LOWBIT_ONCE fetches data
# that is read once, and LOWBIT_OPERANDS says whether multiply-adds broadcast numbers in memory
# (`lowbit_cppyy.codegen.broadcasts`); `lowbit_cppyy.runtime.definitions` chooses both for this processor.
_MACROS = """\
#ifndef LOWBIT_INLINE
#define LOWBIT_INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define LOWBIT_ROUND_TWICE _Pragma("clang fp contract(off)")
#else  // g++ has only the option -ffp-contract=off
#define LOWBIT_ROUND_TWICE
#endif
#ifndef LOWBIT_ONCE
#define LOWBIT_ONCE(a) _mm_prefetch(a, _MM_HINT_NTA)
#endif
#ifndef LOWBIT_OPERANDS
#define LOWBIT_OPERANDS 1
#endif
#if LOWBIT_OPERANDS  // a copy of the pointer to x, or the pointer itself, so that the compiler joins broadcasts
#define LOWBIT_COPY(a) const float* a = copied(x)
#define LOWBIT_MOVE(a, by) a += by
#else
#define LOWBIT_COPY(a) const float* const& a = x
#define LOWBIT_MOVE(a, by)
#endif
namespace lowbit {
// Prefetches the line seven pages after `a` if `a` lies in the first eighth of its page, six pages after it in the
// second, and so on. A kernel that reads one stream thus fetches each line once, from eight pages at a time.
LOWBIT_INLINE void fetch_in_eight_pages(const char* a) {
  const auto place = reinterpret_cast<std::uintptr_t>(a);
  __builtin_prefetch(reinterpret_cast<const char*>(place + (~place % 4096 / 512 * 4096)), 0, 3);
}
// The same pointer; the compiler cannot know that it is the same.
LOWBIT_INLINE const float* copied(const float* a) { asm("" : "+r"(a)); return a; }
LOWBIT_INLINE std::uint32_t bits(float a) { std::uint32_t d; std::memcpy(&d, &a, sizeof d); return d; }
}
#endif
"""

_POINTERS = ("w", "s", "z", "x", "y")
"""The pointers of a kernel. Others are copies of x."""

_FLOATS = ("x", "y")
"""The pointers to float; `w`, `s` and `z` point to 32-bit elements."""


class Compilable(Protocol):
    """A kernel that can be compiled: a function of this name in the namespace of its table."""

    @property
    def name(self) -> str: ...

    @property
    def table(self) -> InstructionSet: ...

    @property
    def source(self) -> str: ...


def prelude(table: InstructionSet) -> str:
    """An instruction table as C++: two register types and a function for each word, in a namespace of its own."""
    lines = [f"#include <{header}>" for header in ("cstdint", "cstring", *table.headers)]
    lines += [_MACROS, f"namespace lowbit::{table.name} {{", table.types]
    lines += [_word(table, name, word) for name, word in VOCABULARY.items() if name in table.words]
    lines.append(f"}}  // namespace lowbit::{table.name}")
    return "\n".join(lines) + "\n"


def _word(table: InstructionSet, name: str, word: Word) -> str:
    operands = ", ".join(_parameter(name, word, place) for place in range(len(word.takes)))
    head = f"{table.attribute} LOWBIT_INLINE {_REGISTER[word.gives]} {_FUNCTION.get(name, name)}({operands})".lstrip()
    return f"{head} {{ {table.words[name]} }}"


def _parameter(name: str, word: Word, place: int) -> str:
    operand, letter = word.takes[place], "abc"[place]
    if operand == "address":
        return f"float* {letter}" if name == "store" else f"const void* {letter}"
    if operand == "scalar":
        return f"std::uint32_t {letter}" if word.gives == "int" else f"float {letter}"
    return "int i" if operand == "count" else f"{_REGISTER[operand]} {letter}"


def function(program: Program, table: InstructionSet, name: str, summary: str) -> str:
    """The program as one C++ function in the namespace of its instruction table.

    Args:
        program: for registers with as many lanes as the table's.
        table: the instruction set.
        name: of the function.
        summary: what the kernel computes; printed as a comment above it.
    """
    assert program.lanes == table.lanes
    steps, copies = separated(program) if table.memory_broadcasts else (program.body, [])
    lines = [
        f"namespace lowbit::{table.name} {{",
        *(f"// {line}" for line in summary.splitlines()),
        f"{table.attribute} inline void {name}(const std::uint32_t* w, const std::uint32_t* s,".lstrip(),
        "    const std::uint32_t* z, const float* x, float* y, const Sizes& sizes) {",
        *(f"  const auto {size} = sizes.{size};" for size in sorted(_sizes(program.body))),
        *(f"  LOWBIT_COPY({copy});" for copy in copies),
        *("  " + line for line in _block(steps, set())),
        "}",
        f"}}  // namespace lowbit::{table.name}",
    ]
    return "\n".join(lines) + "\n"


def _sizes(steps: tuple[Step, ...]) -> set[str]:
    """The names of the sizes that bound the loops of a program."""
    names: set[str] = set()
    for step in steps:
        if isinstance(step, Loop):
            names |= _sizes(step.body)
            if not isinstance(step.count, int):
                names.add(step.count.name if isinstance(step.count, Element) else step.count)
    return names


def _block(steps: tuple[Step, ...], outer: set[str]) -> Iterator[str]:
    """The lines of a block. A register is declared where it is first written."""
    declared = set(outer)
    for step in steps:
        if isinstance(step, Comment):
            yield f"// {step.text}"
        elif isinstance(step, Advance):
            moved = f"{step.pointer} += {step.step};"
            yield moved if step.pointer in _POINTERS else f"LOWBIT_MOVE({step.pointer}, {step.step});"
        elif isinstance(step, Loop):
            yield f"for (std::int64_t {step.index} = 0; {step.index} < {step.count}; ++{step.index}) {{"
            yield from ("  " + line for line in _block(step.body, declared))
            yield "}"
        else:
            yield _statement(step, declared)


def _statement(step: Instruction, declared: set[str]) -> str:
    word = VOCABULARY[step.word]
    arguments = [_argument(*pair, word) for pair in zip(step.arguments, word.takes, strict=True)]
    call = f"{_FUNCTION.get(step.word, step.word)}({', '.join(arguments)});"
    if not step.target:
        return call
    if step.target in declared:
        return f"{step.target} = {call}"
    declared.add(step.target)
    return f"{_REGISTER[word.gives]} {step.target} = {call}"


def _argument(argument: Argument, operand: Operand, word: Word) -> str:
    if isinstance(argument, Address):
        pointer, offset = argument.pointer, argument.offset
        if operand == "address":
            return f"{pointer} + {offset}"
        number = f"{pointer}[{offset}]"
        return f"bits({number})" if word.gives == "int" and pointer in _FLOATS else number
    if operand == "scalar":
        return f"{argument}u" if word.gives == "int" else f"{argument}f"
    return str(argument)
