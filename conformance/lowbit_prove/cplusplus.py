"""C++ as data: the small part of it that instruction tables are written in.

A table (`lowbit_cppyy.codegen.isa`) has declarations of types and functions, and a body for each word. Here their text
becomes statements and expressions, and `lowbit_prove.bodies` executes these. Everything else is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from lowbit_prove.terms import UndecidedError

Kind = Literal["name", "number", "call", "operator", "cast", "list", "field"]


@dataclass(frozen=True)
class Expression:
    """A part of a body that has a value.

    Attributes:
        kind: a name, a number, a call of a function, an operator, a cast to another vector type, a list in braces, or
            a field of a struct.
        name: of the variable, function, type or field; the operator; or the number's text.
        parts: its operands.
    """

    kind: Kind
    name: str
    parts: tuple["Expression", ...] = ()


@dataclass(frozen=True)
class Declare:
    """A new variable; an array if it has a length, and without a value if nothing is assigned yet."""

    type: str
    name: str
    length: int | None
    value: Expression | None


@dataclass(frozen=True)
class Assign:
    """An assignment to a variable or to one of its elements."""

    target: Expression
    value: Expression


@dataclass(frozen=True)
class Result:
    """The result, or an expression that is evaluated for its side effect."""

    value: Expression


@dataclass(frozen=True)
class Repeat:
    """A loop over 0, 1, …, `count` - 1."""

    index: str
    count: int
    body: "Statement"


Statement: TypeAlias = Declare | Assign | Result | Repeat


@dataclass(frozen=True)
class Function:
    """A function that a table declares: the type of its result, types and names of its parameters, and its body."""

    gives: str
    takes: tuple[tuple[str, str], ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Declarations:
    """The declarations of a table.

    Attributes:
        others: type aliases: of vectors with their number of bytes, of registers without.
        structs: the fields of each, with their types.
        functions: by name.
        intrinsics: whether its registers are those of intrinsics; otherwise they are C++ vectors.
    """

    others: Mapping[str, tuple[str, int | None]]
    structs: Mapping[str, tuple[tuple[str, str], ...]]
    functions: Mapping[str, Function]

    @property
    def intrinsics(self) -> bool:
        return all(size is None for _, size in self.others.values())


TOKEN = re.compile(
    r"//[^\n]*|\s+|(0x[0-9a-fA-F]+(?:p-?[0-9]+f)?u?|[0-9]+u?|[A-Za-z_]\w*(?:::\w+)*|<<|>>|<=|>=|==|!=|\+\+|[^\s\w])"
)
TYPE = re.compile(r"(std::)?u?int\d+_t|(u?int|float)\d+x\d+(x\d)?_t|int|float|auto|v[a-z]+|__m\d+[id]?|[A-Z][a-z]+")
"""Names of types: of C++, of ARM's and x86's registers, and those that tables declare."""
BINARY = (("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/"))
"""Operators, the lowest precedence first."""
MACRO = "LOWBIT_ROUND_TWICE"
"""Keeps compilers from fusing products and sums; this reader never fuses them."""


class Reader:
    """A reader of a text, from its beginning."""

    def __init__(self, text: str) -> None:
        self.tokens = [found[1] for found in TOKEN.finditer(text) if found[1]]
        self.place = 0

    def next(self, ahead: int = 0) -> str:
        """A token that is not consumed yet; empty at the end."""
        place = self.place + ahead
        return self.tokens[place] if place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.next(-1)

    def accept(self, *tokens: str) -> bool:
        """Whether these tokens follow; if so, consumes them."""
        same = all(self.next(ahead) == each for ahead, each in enumerate(tokens))
        self.place += len(tokens) if same else 0
        return same

    def expect(self, *tokens: str) -> None:
        if not self.accept(*tokens):
            around = " ".join(self.tokens[max(0, self.place - 4) : self.place + 4])
            raise UndecidedError(f"a statement is not read: {' '.join(tokens)!r} is missing in: {around}")

    def separated(self, each: Callable[[], Expression], end: str) -> tuple[Expression, ...]:
        """Expressions between commas, up to a token."""
        found = list[Expression]()
        while not self.accept(end):
            found.append(each())
            if self.next() != end:
                self.expect(",")
        return tuple(found)

    # Expressions.

    def expression(self) -> Expression:
        condition = self._binary(0)
        if not self.accept("?"):
            return condition
        yes = self.expression()
        self.expect(":")
        return Expression("operator", "?", (condition, yes, self.expression()))

    def _binary(self, level: int) -> Expression:
        if level == len(BINARY):
            return self._unary()
        found = self._binary(level + 1)
        while self.next() in BINARY[level]:
            found = Expression("operator", self.take(), (found, self._binary(level + 1)))
        return found

    def _unary(self) -> Expression:
        if self.next() in ("-", "~", "&", "sizeof"):
            return Expression(
                "operator", {"-": "negative", "&": "address"}.get(name := self.take(), name), (self._unary(),)
            )
        if self.next() == "(" and TYPE.fullmatch(self.next(1)) and self.next(2) == ")":
            _, name, _ = self.take(), self.take(), self.take()
            return Expression("cast", name, (self._unary(),))
        return self._behind(self._primary())

    def _behind(self, found: Expression) -> Expression:
        """An expression with the fields and elements that follow it."""
        while True:
            if self.accept("."):
                found = Expression("field", self.take(), (found,))
            elif self.accept("["):
                found = Expression("operator", "[]", (found, self.expression()))
                self.expect("]")
            else:
                return found

    def _primary(self) -> Expression:
        token = self.take()
        if token == "(":
            found = self.expression()
            self.expect(")")
            return found
        if token == "{":
            return Expression("list", "", self.separated(self.expression, "}"))
        if token == "static_cast":  # of a pointer, or of a number to another type of the same width
            while self.take() not in (">", ""):
                pass
            self.expect("(")
            (found,) = self.separated(self.expression, ")")
            return found
        if re.match(r"[0-9]", token):
            return Expression("number", token)
        if re.match(r"[A-Za-z_]", token):
            if self.accept("("):
                return Expression("call", token, self.separated(self.expression, ")"))
            if TYPE.fullmatch(token) and self.accept("{"):
                return Expression("list", token, self.separated(self.expression, "}"))
            return Expression("name", token)
        raise UndecidedError(f"an expression is not read: {token!r}")

    # Statements.

    def statements(self, end: str) -> Iterator[Statement]:
        """All statements up to a token."""
        while not self.accept(end):
            yield from self._statement()
            if end == "" and self.place >= len(self.tokens):
                return

    def _statement(self) -> Iterator[Statement]:
        self.accept(MACRO)
        if self.accept("for"):
            yield self._loop()
        elif self.accept("const") or (TYPE.fullmatch(self.next()) and re.match(r"[A-Za-z_]", self.next(1))):
            yield from self._declared()
        elif self.accept("return"):
            yield Result(self.expression())
            self.expect(";")
        else:
            value = self.expression()
            yield Assign(value, self.expression()) if self.accept("=") else Result(value)
            self.expect(";")

    def _declared(self) -> Iterator[Declare]:
        kind = self.take()
        while True:
            name, length = self.take(), None
            if self.accept("["):
                length = int(self.take())
                self.expect("]")
            yield Declare(kind, name, length, self.expression() if self.accept("=") else None)
            if not self.accept(","):
                break
        self.expect(";")

    def _loop(self) -> Repeat:
        self.expect("(", "int")
        name = self.take()
        self.expect("=", "0", ";", name, "<")
        count = self.take()
        self.expect(";", "++", name, ")")
        (body,) = self._statement()
        return Repeat(name, int(count), body)

    # Declarations.

    def declarations(self) -> Declarations:
        """All declarations of a text."""
        others, structs, functions = dict[str, tuple[str, int | None]](), dict[str, tuple[tuple[str, str], ...]](), {}
        while self.next():
            if self.accept("using"):
                name = self.take()
                self.expect("=")
                others[name] = self.take(), None
                self.expect(";")
            elif self.accept("typedef"):
                kind, name = self.take(), self.take()
                self.expect("__attribute__", "(", "(", "vector_size", "(")
                others[name] = kind, int(self.take())
                self.expect(")", ")", ")", ";")
            elif self.accept("struct"):
                name = self.take()
                self.expect("{")
                structs[name] = tuple((each.name, each.type) for each in self._declared())
                self.expect("}", ";")
            else:
                self.expect("inline", "__attribute__", "(", "(", "always_inline", ")", ")")
                gives, name = self.take(), self.take()
                functions[name] = self._function(gives)
        return Declarations(others, structs, functions)

    def _function(self, gives: str) -> Function:
        self.expect("(")
        takes = list[tuple[str, str]]()
        while not self.accept(")"):
            takes.append((self.take(), self.take()))
            self.accept(",")
        self.expect("{")
        return Function(gives, tuple(takes), tuple(self.statements("}")))


@cache
def body(text: str) -> tuple[Statement, ...]:
    """The statements of a word.

    >>> body("return a + b.lo;")[0].value.name
    '+'

    Raises:
        UndecidedError: it has another form.
    """
    return tuple(Reader(text).statements(""))


@cache
def declarations(text: str) -> Declarations:
    """The declarations of a table.

    >>> declarations("struct vint { uint32x4_t lo, hi; };").structs
    {'vint': (('lo', 'uint32x4_t'), ('hi', 'uint32x4_t'))}

    Raises:
        UndecidedError: it has another form.
    """
    return Reader(text).declarations()


def calls(statements: tuple[Statement, ...]) -> Iterator[Expression]:
    """All calls of functions in statements."""
    for each in statements:
        if isinstance(each, Repeat):
            yield from calls((each.body,))
        elif each.value is not None:
            yield from _calls(each.value)


def _calls(expression: Expression) -> Iterator[Expression]:
    if expression.kind == "call":
        yield expression
    for each in expression.parts:
        yield from _calls(each)
