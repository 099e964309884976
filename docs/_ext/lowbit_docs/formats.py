"""The directive ``.. formats::``: every tensor format, its fields and where the bits of its first elements lie.

The places of bits are found by trying: each bit of a field of codes is flipped, and belongs to the elements whose
numbers change. So the page shows what `decode` does, and not what somebody wrote about it.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_id

from lowbit.arrays import Array
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Format
from lowbit_conformance.suite.clauses.test_formats import fitted, options_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn
from lowbit_docs.chapter import source_file
from lowbit_docs.tables import Cell, table

MOST_BITS = 4096
SHOWN = 4
"""Elements of which the bits are shown, from the first on, and the last."""


class Formats(SphinxDirective):
    """``.. formats::``: one section a format, sorted by name."""

    def run(self) -> list[nodes.Node]:
        found = [FORMATS[name] for name in sorted(FORMATS)]
        for module in sorted({_chapter(each) for each in found}):
            if file := source_file(module):
                self.env.note_dependency(file)
        return [self._section(each) for each in found]

    def _section(self, each: Format) -> nodes.section:
        section = nodes.section(ids=[make_id(self.env, self.state.document, "", f"format-{each.name}")])
        section += nodes.title("", "", nodes.literal(text=each.name))
        link, _ = self.parse_inline(f":py:mod:`{_chapter(each)}`")
        unit = f"Blocks of {each.block} elements in {each.record.itemsize} bytes. " if each.block else ""
        lead = nodes.paragraph("", f"{each.title}. {unit}{self._options(each)}Chapter: ", *link)
        lead += nodes.Text(f". Source: {each.source}.")
        section += lead
        rows: list[list[Cell]] = [
            [[nodes.literal(text=row.name)], row.dtype, " × ".join(map(str, row.shape)) or "1", row.holds]
            for row in each.fields
        ]
        section += table(["field", "dtype", "shape", "holds"], rows, [20, 15, 20, 45])
        if places := places_of(each):
            section += table(["element k of column 0", "bits, from the lowest"], places, [25, 75])
        for trap in each.traps:
            section += nodes.paragraph("", "", nodes.strong(text="Trap: "), nodes.Text(trap))
        self.state.document.note_implicit_target(section)
        return section

    @staticmethod
    def _options(each: Format) -> str:
        said = [f"{name} {', '.join(map(str, values)) if values else 'any'}" for name, values in each.options.items()]
        return f"Options: {'; '.join(said)}. " if said else ""


def _chapter(each: Format) -> str:
    """The module of a format's decode, which may be a function with some arguments given."""
    module: str = getattr(each.decode, "func", each.decode).__module__
    return module


def places_of(table: Format) -> list[list[Cell]]:
    """For the first elements and the last of column 0, where their bits lie; empty where bits are shared."""
    options = options_of(table, 0)
    rows, columns = fitted(table, table.block or 32, 1, options)
    case = FormatCase("formats.dequantize/C1", "lattice", "places", table.name, rows, columns, options=options)
    found = _bits(drawn(case, powers=True))
    if not found:
        return []
    elements = [*sorted(found)[:SHOWN], max(found)]
    return [[str(k), "; ".join(_runs(found[k]))] for k in dict.fromkeys(elements)]


def _bits(weights: Stored) -> dict[int, list[tuple[str, int]]]:
    """For each element of column 0 its field and bits, counted from the start of its array or record."""
    table = weights.table
    fields = {name: np.ascontiguousarray(each) for name, each in table.fields_of(weights.by_name).items()}
    names = [row.name for row in table.fields if row.role == "codes"]
    if 8 * sum(fields[name].nbytes for name in names) > MOST_BITS:
        return {}
    before = _values(table, fields, weights)
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name in names:
        octets = fields[name].reshape(-1).view(np.uint8)
        for bit in range(8 * octets.size):
            octets[bit // 8] ^= 1 << bit % 8
            changed = np.argwhere(_values(table, fields, weights) != before)
            octets[bit // 8] ^= 1 << bit % 8
            if len(changed) > 1:
                return {}
            if len(changed) == 1 and changed[0][1] == 0:
                found[int(changed[0][0])].append((name, bit))
    return found


def _values(table: Format, fields: dict[str, Array], weights: Stored) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        terms = table.decode(fields, weights.sizes)
        terms = terms if table.block is None else terms.across(weights.sizes)
        return np.ascontiguousarray(terms.products).view(np.uint64)  # so that -0 is another number than 0


def _runs(bits: Iterable[tuple[str, int]]) -> list[str]:
    """Neighbouring bits of a field as one run: ``qs byte 0 bits 0-3``."""
    words: list[str] = []
    runs: list[tuple[str, int, int]] = []
    for name, bit in sorted(bits):
        if runs and runs[-1][0] == name and runs[-1][2] + 1 == bit and bit % 8:
            runs[-1] = (name, runs[-1][1], bit)
        else:
            runs.append((name, bit, bit))
    for name, low, high in runs:
        span = f"bits {low % 8} to {high % 8}" if high > low else f"bit {low % 8}"
        words.append(f"{name} byte {low // 8} {span}")
    return words
