"""The directive ``.. chapter:: lowbit.quantization.packing``: the page is the chapter.

It reads the one source file and writes the page in source order: prose as reStructuredText, each function and class
under its name with its docstring and then its code, everything else as code. Every line that is handed to the parser
carries the number that it has in the source, so a warning names the chapter's own file and line.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.addnodes import desc
from sphinx.domains.python import PythonDomain
from sphinx.util.docutils import SphinxDirective, switch_source_input
from sphinx.util.nodes import make_id
from sphinx.util.parsing import nested_parse_to_nodes
from sphinx.writers.html5 import HTML5Translator

from lowbit_docs.fields import with_fields
from lowbit_docs.reading import Code, Item, Line, Piece, read_chapter
from lowbit_docs.sources import Sources, sources


class Chapter(SphinxDirective):
    """``.. chapter:: MODULE``: the whole page of one chapter; what the directive contains follows the docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        file = source_file(module)
        if file is None:
            raise self.error(f"there is no chapter {module}")
        self.env.note_dependency(file)
        try:
            doc, pieces = read_chapter(file)
        except (SyntaxError, ValueError) as error:
            raise self.error(str(error)) from error
        text = Page(module, file, sources(self.env)).write(doc, self.content, pieces)
        with switch_source_input(self.state, text):  # so that a slip inside a line is reported where it stands, too
            page = nested_parse_to_nodes(self.state, text, allow_section_headings=True)
        for item in (item for node in page for item in node.findall(desc)):
            item.line = item[0].line  # what Sphinx makes of its fields has no line of its own
        return page


class Page:
    """The reStructuredText of a chapter, line by line, each with its place in the source."""

    def __init__(self, module: str, file: Path, sources: Sources) -> None:
        self.module, self.file, self.sources = module, file, sources
        self.text = StringList()

    def write(self, doc: list[Line], added: StringList, pieces: list[Piece]) -> StringList:
        self._opening(doc)
        for source, number, text in added.xitems():
            self.text.append(text, source, number)
        self.text.append("", str(self.file), doc[-1][0] - 1)
        for piece in pieces:
            match piece:
                case Item():
                    self._item(piece, self.module, indent="")
                case Code():
                    self._code(piece, indent="")
                case _:
                    self._lines([*piece.lines, (piece.lines[-1][0], "")], indent="")
        return self.text

    def _opening(self, doc: list[Line]) -> None:
        """The docstring: its first sentence is the title of the page, the rest its opening."""
        number, title = doc[0]
        title = title.removesuffix(".")
        self._lines([(number, title), (number, "=" * len(title)), (number, "")], indent="")
        self._lines([(number, f".. py:module:: {self.module}"), (number, "")], indent="")
        self._lines([(number, f".. chapter-file:: {self.module}"), (number, "")], indent="")
        self.sources.note(self.module, doc, self.file)
        self._lines([*with_fields(doc[1:]), (doc[-1][0], "")], indent="")

    def _item(self, item: Item, owner: str, indent: str) -> None:
        """A name, what its docstring says, and its code; the methods of a class one step further in."""
        name = f"{owner}.{item.name}"
        inside = indent + "   "
        self._lines([(item.line, f".. py:{item.kind}:: {item.name}"), (item.line, "")], indent)
        self.sources.note(name, item.doc, self.file)
        self._lines([*with_fields(item.doc), (item.line, "")], inside)
        for part in item.body:
            if isinstance(part, Item):
                self._item(part, name, inside)
            else:
                self._code(part, inside)

    def _code(self, code: Code, indent: str) -> None:
        number = code.lines[0][0]
        self._lines([(number, f".. chapter-code:: {self.module} {ranges(code.lines)}")], indent)
        self._lines([(number, f"   :names: {' '.join(code.names)}")] if code.names else [], indent)
        self._lines([(number, "")], indent)

    def _lines(self, lines: Iterable[Line], indent: str) -> None:
        for number, text in lines:
            self.text.append((indent + text).rstrip(), str(self.file), number - 1)


class chapter_code(nodes.literal_block):  # noqa: N801 (docutils finds the writer's method by this name)
    """A literal block that knows the number of each of its lines; they need not follow one another."""


class ChapterCode(SphinxDirective):
    """``.. chapter-code:: MODULE 45-46,76-90``: these lines of a chapter, with their numbers."""

    required_arguments = 2
    option_spec: ClassVar = {"names": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        module, wanted = self.arguments
        file = source_file(module)
        if file is None:
            raise self.error(f"there is no chapter {module}")
        numbers = list(line_numbers(wanted))
        lines = file.read_text(encoding="utf-8").splitlines()
        shown = [lines[number - 1] for number in numbers]
        margin = min((len(text) - len(text.lstrip()) for text in shown if text.strip()), default=0)
        text = "\n".join(text[margin:] for text in shown)
        node = chapter_code(text, text, language="python", numbers=numbers)
        self.set_source_info(node)
        self._note_names(node, module)
        return [node]

    def _note_names(self, node: chapter_code, module: str) -> None:
        """Make the constants of this block known, so that prose can link to them."""
        domain = self.env.domains["py"]
        assert isinstance(domain, PythonDomain)
        for name in self.options.get("names", "").split():
            target = make_id(self.env, self.state.document, "", f"{module}.{name}")
            node["ids"].append(target)
            domain.note_object(f"{module}.{name}", "data", target, location=node)


class ChapterFile(SphinxDirective):
    """``.. chapter-file:: MODULE``: one line that says which file the page is."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        file = source_file(self.arguments[0])
        if file is None:
            raise self.error(f"there is no chapter {self.arguments[0]}")
        house = Path(self.env.srcdir).parent
        shown = file.relative_to(house) if file.is_relative_to(house) else Path(file.name)
        paragraph = nodes.paragraph("", "This page is the file ", classes=["chapter-file"])
        paragraph += nodes.literal(text=shown.as_posix())
        paragraph += nodes.Text(".")
        return [paragraph]


def source_file(module: str) -> Path | None:
    """Where a module's text is, without importing anything, its package included."""
    for folder in sys.path:
        path = Path(folder, *module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def ranges(lines: Iterable[Line]) -> str:
    """The numbers of some lines as ranges.

    >>> ranges([(45, "def f():"), (46, ""), (76, "    return 1")])
    '45-46,76-76'
    """
    found: list[list[int]] = []
    for number, _ in lines:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" for first, last in found)


def line_numbers(text: str) -> Iterator[int]:
    """The inverse of `ranges`.

    >>> list(line_numbers("45-46,76-76"))
    [45, 46, 76]
    """
    for part in text.split(","):
        first, last = part.split("-")
        yield from range(int(first), int(last) + 1)


def visit_code(writer: HTML5Translator, node: chapter_code) -> None:
    """Highlight the block as one text, then write each line's own number in front of it."""
    code = writer.highlighter.highlight_block(node.rawsource, "python", location=node, nowrap=True)
    width = len(str(node["numbers"][-1]))
    rows = code.rstrip("\n").split("\n")
    body = "\n".join(
        f'<span class="linenos">{number:>{width}}</span>{row}'
        for number, row in zip(node["numbers"], rows, strict=True)
    )
    anchors = "".join(f'<span id="{target}"></span>' for target in node["ids"])
    writer.body.append(f'<div class="chapter-code highlight">{anchors}<pre>{body}</pre></div>\n')
    raise nodes.SkipNode
