"""The generated kernels in the documentation: their C++, the functions of words, and the costs of methods.

All of it comes from the generator while the pages are built, so it cannot differ from what runs. Nothing here needs a
compiler.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

import lowbit_cppyy
from lowbit.kernels.program import Loop
from lowbit.quantization.packing import BITS
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import INTEGER, METHODS, Method, Recipe
from lowbit_cppyy.tuning.prediction import FREE, LOADS, Sizes, spelled, tally
from lowbit_docs.tables import Cell, table


class KernelDirective(SphinxDirective):
    """A directive that shows output of the generator. Its page is built again when a file of the generator changes."""

    def note_generator(self) -> None:
        """Every module of the package: a kernel depends on most of them."""
        for file in sorted(Path(str(lowbit_cppyy.__file__)).parent.rglob("*.py")):
            self.env.note_dependency(str(file))


class KernelSource(KernelDirective):
    """``.. kernel-source:: NAME``: the C++ of a kernel, from the line with text ``from`` to before that with ``to``."""

    required_arguments = 1
    option_spec: ClassVar = {"from": directives.unchanged_required, "to": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        self.note_generator()
        lines = kernel_of(self.arguments[0]).source.splitlines()
        first = self._line(lines, "from", 0)
        text = "\n".join(lines[first : self._line(lines, "to", len(lines), first)])
        block = nodes.literal_block(text, text, language="cpp")
        self.set_source_info(block)
        return [block]

    def _line(self, lines: list[str], option: str, otherwise: int, first: int = 0) -> int:
        wanted = self.options.get(option)
        if wanted is None:
            return otherwise
        found = [number for number, line in enumerate(lines) if number >= first and wanted in line]
        if not found:
            raise self.error(f"no line of {self.arguments[0]} has the text {wanted!r}")
        return found[0]


class KernelWords(KernelDirective):
    """``.. kernel-words:: and permute``: the functions of these words, in three tables."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.note_generator()
        rows: list[list[Cell]] = []
        for word in self.arguments[0].split():
            for name in ("plain", "avx2", "avx512"):
                body = shortened(TABLES[name].words[word])
                rows.append([[nodes.literal(text=word)], name, [nodes.literal(text=body)]])
        return [table(["word", "table", "C++"], rows, [14, 14, 72])]


def shortened(body: str) -> str:
    """A body without its ``return``, if it is a single statement."""
    return body.removeprefix("return ").removesuffix(";") if body.count(";") == 1 else body


@dataclass(frozen=True)
class Cost:
    """Vector instructions for one code of each lane of a register and one row of x, without loads.

    Attributes:
        sums: multiply-adds, additions of floats, products of bytes.
        conversions: to float.
        lookups: permutes.
        integers: masks, shifts, additions of integers.
    """

    sums: float
    conversions: float
    lookups: float
    integers: float

    @property
    def together(self) -> float:
        """All of them."""
        return self.sums + self.conversions + self.lookups + self.integers

    @property
    def cycles(self) -> float:
        """A lower bound, where four instructions begin in a cycle, among them two sums and two conversions."""
        return max(self.together / PIPES, self.sums / 2, self.conversions / 2)


HEADS = ["bits", "method", "table", "multiply, add", "convert", "look up", "integer", "all", "cycles ≥", "GB/s ≤"]
PIPES = 4
GIGAHERTZ = 4.1
KINDS: Mapping[str, tuple[str, ...]] = {
    "sums": ("fmadd", "add", "dot4", "dot4_pairs"),
    "conversions": ("cvt_int_float",),
    "lookups": ("permute", "permute_pair"),
    "integers": ("and", "or", "and_or", "select", "srli", "slli", "add_pairs"),
}


def cost(kernel: Kernel) -> Cost:
    """The instructions of the innermost loop: those of two iterations less those of one.

    >>> recipe = Recipe(4, "float16", "zero_point", "fold")
    >>> found = cost(Kernel(recipe, TABLES["avx512"]))
    >>> found.sums, found.conversions, found.integers, found.cycles
    (1.0, 1.0, 1.0, 0.75)
    """
    recipe, table_ = kernel.recipe, kernel.table
    inner = tuple(step for step in kernel.program.body if isinstance(step, Loop))
    one: Sizes = {"groups": 1, "segments": 1, "turns": [1], "back": [0], "ends": [0]}
    words = tally(inner, {**one, "turns": [2]}) - tally(inner, one)
    known = {word for some in KINDS.values() for word in some} | set(LOADS) | set(FREE)
    assert set(words) <= known, f"what kind of instruction is each of {set(words) - known}?"
    codes = recipe.unroll * recipe.unit_codes * recipe.registers * recipe.rows
    kinds = {kind: sum(words[word] * spelled(table_, word) for word in some) / codes for kind, some in KINDS.items()}
    return Cost(**kinds)


def tables_for(method: Method) -> tuple[InstructionSet, ...]:
    """The tables for which the costs of a method are shown: for integers, those that have its instruction."""
    names = {"dot4": ("avx512vnni", "avxvnni"), "pairs": ("avx512", "avx2")}.get(method, ("avx512", "avx2"))
    return tuple(TABLES[name] for name in names)


def costs() -> Iterator[tuple[int, Method, list[tuple[InstructionSet, Cost]]]]:
    """Every width and method, with the tables that have such a kernel."""
    for bits in BITS:
        for method in METHODS:
            found = []
            for each in tables_for(method):
                recipe = Recipe(bits, "float16", "zero_point", method, registers=64 // each.lanes)
                if not recipe.fits(each.lanes):
                    found.append((each, cost(Kernel(recipe, each))))
            if found:
                yield bits, method, found


class KernelCosts(KernelDirective):
    """``.. kernel-costs::``: a row for each width, method and table; ``:integers:`` for those of integers."""

    option_spec: ClassVar = {"integers": directives.flag}

    def run(self) -> list[nodes.Node]:
        self.note_generator()
        integers = "integers" in self.options
        rows: list[list[Cell]] = []
        for bits, method, found in costs():
            if (method in INTEGER) == integers:
                rows += [row(bits, method, each, found_cost) for each, found_cost in found]
        return [table(HEADS, rows, [7, 13, 15, 9, 10, 10, 11, 8, 9, 8])]


def row(bits: int, method: str, each: InstructionSet, found: Cost) -> list[Cell]:
    """One row; the last column is the bytes of a register of codes by the least time for them."""
    kinds = (found.sums, found.conversions, found.lookups, found.integers, found.together, found.cycles)
    rate = bits / 8 * each.lanes / found.cycles * GIGAHERTZ
    name: Cell = [nodes.literal(text=method)]
    return [str(bits), name, each.name, *(f"{number:.2f}" if number else "" for number in kinds), f"{rate:.0f}"]
