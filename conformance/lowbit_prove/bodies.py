"""Bodies: the C++ of the instruction tables, executed on the meanings of its intrinsics and operators.

A vector is an array of its lanes, a struct is a mapping of its fields, and memory is an array. The meanings of
intrinsics are those of `lowbit_prove.intrinsics` and `lowbit_prove.intrinsics_neon`, those of operators are in
`lowbit_prove.operators`. All compute on numbers and on unknowns. What has no meaning is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.kernels.vector import VOCABULARY
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_prove import cplusplus, operators
from lowbit_prove.cplusplus import Assign, Declarations, Declare, Expression, Repeat, Statement
from lowbit_prove.intrinsics import MEANINGS, Intrinsic, split
from lowbit_prove.intrinsics_neon import NEON_MEANINGS
from lowbit_prove.registers import Struct, Type, bytes_of, from_bytes, made, type_of
from lowbit_prove.terms import UndecidedError

NO_VALUE = ("prefetch", "prefetch_once")
"""Words that change no value."""


def intrinsic(name: str) -> tuple[Intrinsic, int]:
    """An intrinsic by its name in a body, and the lanes of its registers; 0 for ARM, whose types give the lanes.

    Raises:
        UndecidedError: it has no meaning.
    """
    if name in NEON_MEANINGS:
        return NEON_MEANINGS[name], 0
    if name.startswith("_mm"):
        plain, lanes = split(name)
        if plain in MEANINGS:
            return MEANINGS[plain], lanes
    raise UndecidedError(f"{name} has no meaning")


def executed(table: InstructionSet, word: str, operands: Mapping[str, Any]) -> Any:
    """The result of a word by the meanings of the calls in its body; for a store, what it writes.

    Args:
        table: the instruction set.
        word: of the vocabulary.
        operands: registers, addresses and scalars by their letters, and the number `i` of bits.
    """
    declared, told = cplusplus.declarations(table.types), VOCABULARY[word]
    known, kinds = dict(operands), dict[str, Type]()
    for letter, kind in zip("abc", told.takes, strict=False):
        if kind in ("int", "float"):
            kinds[letter] = type_of(f"v{kind}", declared)
            if isinstance(kinds[letter], Struct):
                known[letter] = from_bytes(kinds[letter], bytes_of(operands[letter]))
    scope = Scope(declared, known, kinds)
    result = scope.run(cplusplus.body(table.words[word]))
    if word == "store":
        return bytes_of(result).view(np.float32)
    given = made(type_of(f"v{told.gives}", declared), result)
    return np.concatenate(list(given.values()), axis=-1) if isinstance(given, dict) else given


@dataclass(frozen=True)
class Scope:
    """The variables of a body or a function.

    Attributes:
        declared: the declarations of its table.
        known: values by name. A list is a vector whose elements are assigned one by one.
        types: of the variables; addresses and scalars have none.
    """

    declared: Declarations
    known: dict[str, Any]
    types: dict[str, Type]

    def run(self, statements: tuple[Statement, ...]) -> Any:
        """The value of the last statement that has one."""
        result = None
        for each in statements:
            if isinstance(each, Declare):
                self._declare(each)
            elif isinstance(each, Repeat):
                for n in range(each.count):
                    self.known[each.index] = n
                    self.run((each.body,))
            elif isinstance(each, Assign):
                self._assign(each.target, self.value(each.value))
            else:
                result = self.value(each.value)
        return result

    def _declare(self, each: Declare) -> None:
        if each.type == "auto":
            assert each.value is not None
            self.known[each.name] = self.value(each.value)
            return
        kind = type_of(each.type, self.declared, each.length)
        self.types[each.name] = kind
        if each.value is not None:
            self.known[each.name] = made(kind, self.value(each.value))
        elif not isinstance(kind, Struct):
            self.known[each.name] = [None] * kind.lanes

    def _assign(self, target: Expression, value: Any) -> None:
        if target.kind == "name":
            self.known[target.name] = made(self._type(target.name), value)
            return
        if target.name != "[]" or target.parts[0].kind != "name":
            raise UndecidedError(f"an assignment is not read: {target}")
        vector, place = self.known.get(target.parts[0].name), self.value(target.parts[1])
        kind = self._type(target.parts[0].name)
        if not isinstance(vector, list) or not isinstance(place, int) or isinstance(kind, Struct):
            raise UndecidedError(f"an assignment is not read: {target}")
        vector[place] = operators.converted(value, kind.dtype)

    def value(self, expression: Expression) -> Any:
        """The value of an expression."""
        name, parts = expression.name, expression.parts
        if expression.kind == "number":
            return operators.number(name)
        if expression.kind == "name":
            return self._named(name)
        if expression.kind == "field":
            return self._field(self.value(parts[0]), name)
        if expression.kind == "cast" and not self.declared.intrinsics:
            return operators.reinterpreted(self.value(parts[0]), type_of(name, self.declared))
        if expression.kind == "call":
            return self._called(name, parts)
        if name == "sizeof":
            return self._type(parts[0].name).size
        values = [self.value(each) for each in parts]
        if expression.kind == "list":
            return made(type_of(name, self.declared), values) if name else values
        if self.declared.intrinsics and not all(isinstance(each, int) for each in values):
            # for __m256i it would mean lanes of 64 bits
            raise UndecidedError(f"{name} is unsupported beside intrinsics")
        return operators.applied(name, values)

    def _field(self, struct: Any, name: str) -> Any:
        if not isinstance(struct, dict) or name not in struct:
            raise UndecidedError(f"there is no field {name}")
        return struct[name]

    def _type(self, name: str) -> Type:
        if name not in self.types:
            raise UndecidedError(f"{name} has no supported type")
        return self.types[name]

    def _named(self, name: str) -> Any:
        if name not in self.known:
            raise UndecidedError(f"{name} has no value")
        value = self.known[name]
        if isinstance(value, list):
            if any(each is None for each in value):
                raise UndecidedError(f"{name} is read before it is written")
            return np.stack(value)
        return value

    def _called(self, name: str, parts: tuple[Expression, ...]) -> Any:
        if name == "std::memcpy":
            return self._copied(*parts)
        if name == "__builtin_convertvector":
            return operators.each_converted(self.value(parts[0]), type_of(parts[1].name, self.declared))
        values = [self.value(each) for each in parts]
        if name == "__builtin_shufflevector":
            return operators.shuffled(*values)
        if name in self.declared.functions:
            function = self.declared.functions[name]
            kinds = {letter: type_of(kind, self.declared) for kind, letter in function.takes}
            known = {letter: made(kinds[letter], each) for letter, each in zip(kinds, values, strict=True)}
            result = Scope(self.declared, known, kinds).run(function.body)
            return made(type_of(function.gives, self.declared), result)
        found, lanes = intrinsic(name)
        if len(found.takes) != len(values):
            raise UndecidedError(f"{name} has {len(values)} operands")
        return found.applied(lanes, values)

    def _copied(self, target: Expression, source: Expression, count: Expression) -> Any:
        """Copy bytes of a variable or of memory; the result is what is written to memory."""
        from_, to = (each.parts[0] if each.name == "address" else each for each in (source, target))
        size, given = self.value(count), bytes_of(self.value(from_))
        if given.shape[-1] < size:
            raise UndecidedError(f"{size} bytes are read of {given.shape[-1]}")
        if to.name not in self.types:
            return given[..., :size]
        if size != self.types[to.name].size:
            raise UndecidedError(f"{size} bytes are written to {self.types[to.name].size}")
        self.known[to.name] = from_bytes(self.types[to.name], given[..., :size])
        return None


Use = tuple[str, tuple[int | None, ...]]
"""An intrinsic as a body calls it: its name, and its constants in order; None for a number `i`."""


def uses(table: InstructionSet) -> Iterator[Use]:
    """All calls of intrinsics in the bodies of a table, and in the functions that these call."""
    declared = cplusplus.declarations(table.types)
    bodies = [cplusplus.body(body) for word, body in table.words.items() if word not in NO_VALUE]
    for call in (
        call
        for body in (*bodies, *(each.body for each in declared.functions.values()))
        for call in cplusplus.calls(body)
    ):
        if call.name in declared.functions or call.name.startswith(("std::", "__builtin")):
            continue
        takes = intrinsic(call.name)[0].takes
        constants = [each for each, kind in zip(call.parts, takes, strict=True) if kind == "constant"]
        yield call.name, tuple(int(each.name, 0) if each.kind == "number" else None for each in constants)
