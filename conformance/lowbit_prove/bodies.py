"""Bodies: the C++ of the instruction tables, read and executed on the meanings of its intrinsics.

A body is a few statements: constants of a register type, and at the end a result. Expressions are calls of intrinsics,
operands, numbers and casts of pointers, which change nothing. All else is refused.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_prove.intrinsics import MEANINGS, Intrinsic, split
from lowbit_prove.terms import UndecidedError

READ = tuple(name for name, table in TABLES.items() if "immintrin.h" in table.headers)
"""The tables that are read: those of x86. The others are C++ in vector types, and intrinsics of another processor."""
NO_VALUE = ("prefetch", "prefetch_once")
"""Words that change no value."""


def statements(body: str) -> Iterator[tuple[str, ast.expr]]:
    """Each statement of a body: the name that it defines, or empty for the result, and its expression.

    >>> [(name, ast.unparse(value)) for name, value in statements("const vint d = f(a); return g(d, 0xD8);")]
    [('d', 'f(a)'), ('', 'g(d, 216)')]

    Raises:
        UndecidedError: it is none of this form.
    """
    for text in filter(None, (part.strip() for part in body.split(";"))):
        plain = re.sub(r"static_cast<[^<>]*>", "", text)
        found = re.fullmatch(r"(?:const \w+ (\w+) = |return )?(.*)", plain, re.DOTALL)
        assert found is not None
        try:
            yield found[1] or "", ast.parse(found[2], mode="eval").body
        except SyntaxError as error:
            raise UndecidedError(f"a statement is not read: {text}") from error


def intrinsic(name: str) -> tuple[Intrinsic, int]:
    """An intrinsic by its name in a body, and the lanes of its registers.

    Raises:
        UndecidedError: it has no meaning.
    """
    if name.startswith("_mm"):
        plain, lanes = split(name)
        if plain in MEANINGS:
            return MEANINGS[plain], lanes
    raise UndecidedError(f"{name} has no meaning")


def executed(table: InstructionSet, word: str, operands: Mapping[str, Any]) -> Any:
    """The result of a word by the meanings of the intrinsics of its body.

    Args:
        table: the instruction set.
        word: of the vocabulary.
        operands: registers, addresses and scalars by their letters, and the number `i` of bits.
    """
    known, result = dict(operands), None
    for name, expression in statements(table.words[word]):
        result = _value(expression, known)
        if name:
            known[name] = result
    return result


def _value(expression: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
        return expression.value
    if isinstance(expression, ast.Name) and expression.id in known:
        return known[expression.id]
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and not expression.keywords:
        found, lanes = intrinsic(expression.func.id)
        if len(found.takes) != len(expression.args):
            raise UndecidedError(f"{expression.func.id} has {len(expression.args)} operands")
        return found.meaning(lanes, *(_value(each, known) for each in expression.args))
    raise UndecidedError(f"an expression is not read: {ast.unparse(expression)}")


Use = tuple[str, tuple[int | None, ...]]
"""An intrinsic as a body calls it: its name, and its constants in order; None for a number `i`."""


def uses(table: InstructionSet) -> Iterator[Use]:
    """All calls of intrinsics in the bodies of a table."""
    for word, body in table.words.items():
        for _, expression in statements(body) if word not in NO_VALUE else ():
            for call in (each for each in ast.walk(expression) if isinstance(each, ast.Call)):
                assert isinstance(call.func, ast.Name)
                takes = intrinsic(call.func.id)[0].takes
                constants = [each for each, kind in zip(call.args, takes, strict=True) if kind == "constant"]
                yield call.func.id, tuple(each.value if isinstance(each, ast.Constant) else None for each in constants)  # type: ignore[misc]  # integers
