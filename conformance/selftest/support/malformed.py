"""Backends whose declarations cannot be understood, and what each of them is told."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowbit.backend import Availability, Backend, Capabilities, Declaration
from lowbit.contract.rounding import Arithmetic


class Endless(Mapping[Any, Any]):
    """Says that it has two entries, or values, and gives one of them without end."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: Any) -> Any:
        return self.entry

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.entry)

    def items(self) -> Any:
        return self


class Values(list[Any]):
    """Two values that never end."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(4)


class Liar:
    """Says that it is of another class, equal to all, and in no words at all."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    @property  # type: ignore[misc]  # it lies on purpose
    def __class__(self) -> type:
        return self.kind

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("packing.pack")

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __getattr__(self, name: str) -> Any:
        return self


class Word(str):
    """A text that is equal to the name of an operation and prints as something else."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("packing.pack")

    def __repr__(self) -> str:
        return "x" * 10**6


class NoName(type):
    """The class of classes whose name cannot be asked for."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]  # wrong on purpose
        raise RuntimeError("no name")


class WithoutFloor:
    """A text within a text, and so on."""

    def __str__(self) -> str:
        return str(self)


GIVEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a-dict": (lambda: {"packing.pack": Declaration()}, "result of capabilities() is an object of type dict"),
    "nothing": (lambda: None, "result of capabilities() is None"),
    "raises": (lambda: dict[str, int]()["x"], "result of capabilities() is a KeyError: 'x'; allowed: no exception"),
    "alignment-3": (lambda: Capabilities({}, alignment=3), "alignment in capabilities() is 3; allowed: 0 or a power"),
    "overread-half": (lambda: Capabilities({}, overread=0.5), "overread in capabilities() is 0.5"),  # type: ignore[arg-type]  # wrong on purpose
    "operations-a-list": (lambda: Capabilities(["packing.pack"]), "operations in capabilities() is"),  # type: ignore[arg-type]  # wrong on purpose
    "operation-misspelt": (
        lambda: Capabilities({"packing.unpak": Declaration()}),
        "an operation in capabilities() is 'packing.unpak'; allowed: packing.unpack, which is the nearest name",
    ),
    "operation-a-number": (lambda: Capabilities({7: Declaration()}), "an operation in capabilities() is 7"),  # type: ignore[dict-item]  # wrong on purpose
    "no-declaration": (lambda: Capabilities({"packing.pack": True}), "declaration of packing.pack is True"),  # type: ignore[dict-item]  # wrong on purpose
    "limits-a-list": (lambda: pack(limits=["bits"]), "limits of packing.pack is an object of type list"),
    "limit-misspelt": (lambda: pack({"bist": (4,)}), "a limit of packing.pack is 'bist'; allowed: bits"),
    "limit-unknown": (
        lambda: Capabilities({"gptq.hessian": Declaration({"bits": (4,)}, Arithmetic("direct"))}),
        "a limit of gptq.hessian is 'bits'; allowed: none, since it has no parameter",
    ),
    "limit-a-number": (lambda: pack({"bits": 4}), "limit bits of packing.pack is 4; allowed: a tuple of values, such"),
    "limit-a-text": (
        lambda: dequantize({"convention": "minimum"}),
        "limit convention of affine.dequantize is 'minimum'; allowed: a tuple of values, such as ('minimum',)",
    ),
    "limit-without-end": (lambda: pack({"bits": itertools.count()}), "limit bits of packing.pack is an object of type"),
    "limit-a-generator": (lambda: pack({"bits": (b for b in (2, 4))}), "limit bits of packing.pack is an object of"),
    "limit-of-millions": (
        lambda: dequantize({"group_size": range(10**7)}),
        "the number of values of limit group_size of affine.dequantize is 10000000; allowed: 1 to 65536 values",
    ),
    "limit-empty": (lambda: pack({"bits": ()}), "the number of values of limit bits of packing.pack is 0"),
    "limit-nan": (lambda: pack({"bits": (4, float("nan"))}), "a value of limit bits of packing.pack is nan"),
    "limit-negative": (lambda: pack({"bits": (-4,)}), "a value of limit bits of packing.pack is -4"),
    "limit-huge": (lambda: pack({"bits": (10**5000,)}), "a value of limit bits of packing.pack is an integer of more"),
    "size-a-text": (
        lambda: Capabilities({"linear.gemv": Declaration({"rows": ("many",)}, Arithmetic("dequantised"))}),
        "a value of limit rows of linear.gemv is 'many'; allowed: an integer",
    ),
    "limit-of-lists": (lambda: pack({"bits": ([4],)}), "a value of limit bits of packing.pack is an object of type"),
    "arithmetic-missing": (
        lambda: Capabilities({"linear.qgemv": Declaration()}),
        "arithmetic of linear.qgemv is missing; it must be an Arithmetic, since the operation is bounded",
    ),
    "arithmetic-a-text": (lambda: product("float32"), "arithmetic of linear.qgemv is 'float32'"),
    "form-unknown": (lambda: product(Arithmetic("fused")), "form in capabilities() is 'fused'; allowed: dequantised"),  # type: ignore[arg-type]  # wrong on purpose
    "roundings-a-number": (
        lambda: product(Arithmetic("dequantised", "float32", 9)),  # type: ignore[arg-type]  # wrong on purpose
        "roundings of linear.qgemv is 9; allowed: a function",
    ),
    "roundings-raise": (
        lambda: product(Arithmetic("dequantised", "float32", lambda rows, group: rows // 0)),
        "the result of roundings(64, 32) of linear.qgemv is a ZeroDivisionError",
    ),
    "roundings-nan": (
        lambda: product(Arithmetic("dequantised", "float32", lambda rows, group: float("nan"))),  # type: ignore[arg-type,return-value]  # wrong on purpose
        "roundings(64, 32) of linear.qgemv is nan; allowed: an integer",
    ),
    "promotion-a-text": (lambda: product(promoted("many")), "promotion of linear.qgemv is 'many'; allowed: an integer"),
    "concurrent-a-number": (lambda: Capabilities({}, concurrent=4), "concurrent in capabilities() is 4"),  # type: ignore[arg-type]  # wrong on purpose
    "details-a-text": (lambda: Capabilities({}, details="fast"), "details in capabilities() is 'fast'"),  # type: ignore[arg-type]  # wrong on purpose
    "profile-a-text": (lambda: Capabilities({}, profiles="lowbit-1.1/packing"), "allowed: a tuple of names"),  # type: ignore[arg-type]  # wrong on purpose
    "operations-without-end": (
        lambda: Capabilities(Endless(("packing.pack", Declaration()))),
        "the number of values of operations in capabilities() is more than 1000; allowed: at most 1000",
    ),
    "limits-without-end": (
        lambda: pack(Endless(("bits", (4,)))),
        "the number of values of limits of packing.pack is more than 1000; allowed: at most 1000",
    ),
    "values-without-end": (
        lambda: pack({"bits": Values([4, 4])}),
        "the number of values of limit bits of packing.pack is more than 65536; allowed: at most 65536",
    ),
    "details-without-end": (lambda: Capabilities({}, details=Endless(("a", "b"))), "details in capabilities() is more"),
    "profiles-without-end": (
        lambda: Capabilities({}, profiles=Values()),  # type: ignore[arg-type]  # wrong on purpose
        "the number of values of profiles in capabilities() is more than 1000",
    ),
    "details-without-floor": (
        lambda: Capabilities({}, details={"a": WithoutFloor()}),  # type: ignore[dict-item]  # wrong on purpose
        "the result of details in capabilities() is a RecursionError: maximum recursion depth exceeded",
    ),
    "class-lies": (lambda: Liar(Capabilities), "result of capabilities() is an object of type Liar"),
    "class-without-a-name": (lambda: NoName("Real", (), {})(), "result of capabilities() is an object of type Real"),
    "operation-lies": (lambda: Capabilities({Word("x"): Declaration()}), "an operation in capabilities() is an object"),
    "declaration-lies": (
        lambda: Capabilities({"packing.pack": Liar(Declaration)}),  # type: ignore[dict-item]  # wrong on purpose
        "the declaration of packing.pack is an object of type Liar",
    ),
    "value-lies": (lambda: pack({"bits": (Liar(int),)}), "a value of limit bits of packing.pack is an object of type"),
    "value-without-end": (
        lambda: dequantize({"convention": ("x" * 10**7,)}),
        "a value of limit convention of affine.dequantize is 'xxxxxxx",
    ),
    "concurrent-lies": (lambda: Capabilities({}, concurrent=Liar(bool)), "concurrent in capabilities() is an object"),  # type: ignore[arg-type]  # wrong on purpose
    "ends": (lambda: sys.exit(0), "result of capabilities() is a SystemExit: 0; allowed: no exception"),
    "profile-misspelt": (
        lambda: Capabilities({}, profiles=("lowbit-1.1/pakcing",)),
        "a profile in capabilities() is 'lowbit-1.1/pakcing'; allowed: lowbit-1.1/packing, which is the nearest name",
    ),
}
"""By name, what `capabilities` does, and words of the sentence that answers it."""


def pack(limits: Any) -> Capabilities:
    return Capabilities({"packing.pack": Declaration(limits)})


def dequantize(limits: Any) -> Capabilities:
    return Capabilities({"affine.dequantize": Declaration(limits)})


def promoted(promotion: Any) -> Arithmetic:
    """An arithmetic that was changed after its own checks."""
    arithmetic = Arithmetic("dequantised")
    object.__setattr__(arithmetic, "promotion", promotion)
    return arithmetic


def product(arithmetic: Any) -> Capabilities:
    return Capabilities({"linear.qgemv": Declaration({}, arithmetic)})


class Malformed(Backend):
    """A backend of one of the declarations."""

    name = "malformed"
    key = ""

    def capabilities(self) -> Capabilities:
        return GIVEN[self.key][0]()  # type: ignore[no-any-return]  # GIVEN is of anything


class Misspelt(Malformed):
    key = "limit-misspelt"


class WithoutEnd(Malformed):
    key = "limit-without-end"


class WithoutArithmetic(Malformed):
    key = "arithmetic-missing"


class Raising(Malformed):
    key = "raises"


class Nameless(Malformed):
    """Forgets its name."""

    name = None  # type: ignore[assignment]  # wrong on purpose


class Simply(Malformed):
    """Says yes."""

    def availability(self) -> Availability:
        return True  # type: ignore[return-value]  # wrong on purpose


class WithoutEndAtAll(Malformed):
    key = "operations-without-end"


class Controlling(Malformed):
    """Its name would clear the screen and print a line of its own."""

    name = "\x1b[2Jmine\nlowbit: passed"


class Long(Malformed):
    """Says at length why it cannot run, and prints otherwise than it says."""

    def availability(self) -> Availability:
        return Availability(False, Word("x"), "x" * 10**8)


CLASSES = {
    WithoutEndAtAll: "the number of values of operations in capabilities() is more than 1000",
    Controlling: "the attribute name of the backend is '\\x1b[2Jmine\\nlowbit: passed'; allowed: at most 100",
    Long: "reason in availability() is an object of type Word; allowed: a text",
    Misspelt: "a limit of packing.pack is 'bist'",
    WithoutEnd: "limit bits of packing.pack is",
    WithoutArithmetic: "arithmetic of linear.qgemv is missing",
    Raising: "the result of capabilities() is a KeyError",
    Nameless: "the attribute name of the backend is None; allowed: a text",
    Simply: "the result of availability() is True; allowed: a lowbit.backend.Availability",
}
"""Backends for whole runs, and the beginning of the one verdict on each."""
