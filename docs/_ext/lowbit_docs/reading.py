"""Cut a chapter's source file into pieces, in source order, each line with its number.

This half knows Python and nothing of Sphinx. A chapter is made of *prose* (the module's docstring, and comments that
stand alone at the left margin), *items* (functions and classes: a name, a docstring, code, and for classes the
methods), and *code* (everything else).
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Line = tuple[int, str]  # the line's number in the file, from 1, and its text

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class Prose:
    """Text to be read as reStructuredText."""

    lines: list[Line]


@dataclass(frozen=True)
class Code:
    """Text to be shown as it is, and the names that it defines."""

    lines: list[Line]
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Item:
    """A function, class, method or property: its docstring, then its body without the docstring.

    Attributes:
        kind: the directive of Sphinx's Python domain: function, class, method or property.
        name: the name alone, without module and class.
        line: where it begins.
        doc: the docstring, without the indentation.
        body: code, and for a class the documented methods as items among it.
    """

    kind: str
    name: str
    line: int
    doc: list[Line]
    body: "list[Code | Item]"


Piece = Prose | Code | Item


def read_chapter(file: Path) -> tuple[list[Line], list[Piece]]:
    """The module's docstring, and the pieces that follow it.

    Raises:
        SyntaxError: not a Python file.
        ValueError: a file without a docstring is no chapter.
    """
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, str(file))
    doc, statements = _docstring(tree)
    if not doc:
        raise ValueError(f"{file.name}: a chapter opens with a docstring")
    source = list(enumerate(text.splitlines(), start=1))
    return doc, list(_pieces(source, statements, first=doc[-1][0] + 1, last=len(source)))


def _pieces(source: Sequence[Line], statements: Sequence[ast.stmt], first: int, last: int) -> Iterator[Piece]:
    """What lines `first` to `last` hold: these statements, and the comments between them."""
    code: list[Line] = []
    names: list[str] = []

    def flush() -> Iterator[Code]:
        if lines := _trim(code):
            yield Code(lines, list(names))
        code.clear()
        names.clear()

    for statement in statements:
        start, end = _span(statement)
        before, prose, after = _comments(source, first, start - 1)
        if prose:
            code += before
            yield from flush()
            yield from prose
        if isinstance(statement, Definition) and not _is_overload(statement):
            above = _touching(after)
            code += after[: len(after) - len(above)]
            yield from flush()
            yield _item(source, statement, above, inside_class=False)
        else:
            code += [*after, *source[start - 1 : end]]
            names += _names(statement)
        first = end + 1
    before, prose, after = _comments(source, first, last)
    code += [*before, *after]
    yield from flush()
    yield from prose


def _comments(source: Sequence[Line], first: int, last: int) -> tuple[list[Line], list[Prose], list[Line]]:
    """Sort the lines between two statements: the blocks of comments that stand alone, and what is before and after.

    A block stands alone if a blank line, or the end of the file, is on either side of it.
    """
    gap = list(source[first - 1 : last])
    prose: list[Prose] = []
    before: list[Line] = []
    while blocks := [
        index for index, line in enumerate(gap) if line[1].strip() and index and not gap[index - 1][1].strip()
    ]:
        start = blocks[0]
        end = next((index for index in range(start, len(gap)) if not gap[index][1].strip()), len(gap))
        if end == len(gap) and last < len(source):
            break  # it touches the statement below
        if not prose:
            before = gap[:start]
        prose.append(Prose([_uncomment(line) for line in gap[start:end]]))
        gap = gap[end:]
    return before, prose, gap


def _uncomment(line: Line) -> Line:
    number, text = line
    return number, text.removeprefix("#").removeprefix(" ")


def _item(source: Sequence[Line], node: Definition, above: list[Line], *, inside_class: bool) -> Item:
    """A definition as an item; `above` are the comment lines that touch it."""
    doc, body = _docstring(node)
    start, end = _span(node)
    head = [*above, *source[start - 1 : (doc[0][0] - 1 if doc else _head_end(node))]]
    first = (doc[-1][0] if doc else _head_end(node)) + 1
    pieces: list[Code | Item] = []
    if isinstance(node, ast.ClassDef):
        pieces = list(_class_body(source, head, body, first, end))
    else:
        pieces = [Code(_trim(head) + _trim(source[first - 1 : end]))]
    return Item(_kind(node, inside_class), node.name, start, doc, pieces)


def _class_body(
    source: Sequence[Line], head: list[Line], statements: Sequence[ast.stmt], first: int, last: int
) -> Iterator[Code | Item]:
    """The lines of a class: its head and fields as code, each documented method as an item."""
    code = _trim(head)
    for statement in statements:
        start, end = _span(statement)
        gap = source[first - 1 : start - 1]
        if isinstance(statement, Function) and ast.get_docstring(statement):
            touching = _touching(gap)
            if lines := _trim([*code, *gap[: len(gap) - len(touching)]]):
                yield Code(lines)
            code = []
            yield _item(source, statement, touching, inside_class=True)
        else:
            lead = gap if code and code[-1][0] == first - 1 else _trim(gap)
            code = [*code, *lead, *source[start - 1 : end]]
        first = end + 1
    if lines := _trim([*code, *source[first - 1 : last]]):
        yield Code(lines)


def _touching(gap: Sequence[Line]) -> list[Line]:
    """The lines at the end of a gap that no blank line separates from what follows."""
    lines: list[Line] = []
    for line in reversed(gap):
        if not line[1].strip():
            break
        lines.insert(0, line)
    return lines


def _docstring(node: ast.Module | Definition) -> tuple[list[Line], list[ast.stmt]]:
    """The docstring's lines without their indentation, and the statements after it."""
    first = node.body[0] if node.body else None
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return [], node.body
    start, end = _span(first)
    lines = first.value.value.splitlines()
    margin = min((_indent(text) for text in lines[1:] if text.strip()), default=0)
    clean = [lines[0].strip(), *(text[margin:].rstrip() for text in lines[1:])]
    numbers = [min(start + offset, end) for offset in range(len(clean))]
    return list(zip(numbers, clean, strict=True)) + ([(end, "")] if numbers[-1] < end else []), node.body[1:]


def _span(statement: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement, decorators included."""
    decorators = statement.decorator_list if isinstance(statement, Definition) else []
    start = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return start, statement.end_lineno or statement.lineno


def _head_end(node: Definition) -> int:
    """The line before the body of a definition without a docstring (the same line where they share one)."""
    return max(node.lineno, _span(node.body[0])[0] - 1)


def _kind(node: Definition, inside_class: bool) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not inside_class:
        return "function"
    return "property" if {"property", "cached_property"} & set(_decorators(node)) else "method"


def _is_overload(node: Definition) -> bool:
    return "overload" in _decorators(node)


def _decorators(node: Definition) -> list[str]:
    """The last word of each decorator's name."""
    return [ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list]


def _names(statement: ast.stmt) -> list[str]:
    """The public names that an assignment defines."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            targets += target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _trim(lines: Sequence[Line]) -> list[Line]:
    """Without blank lines at either end."""
    kept = list(lines)
    while kept and not kept[0][1].strip():
        kept.pop(0)
    while kept and not kept[-1][1].strip():
        kept.pop()
    return kept
