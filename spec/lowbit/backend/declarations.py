"""Checking declarations: a backend must describe itself without mistakes.

A declaration is checked before anything is run. A misspelt limit would otherwise declare more than intended, a limit
given as a string would match parts of it, and bounds cannot be derived for an operation without an arithmetic. So every
mistake in a declaration is refused, with a sentence that says what to change.

A declaration is an object from unknown code: it may be endless, contradict itself, or differ when it is read again. So
each part of it is read once, up to a limit, and copied to plain Python values.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from numbers import Integral, Real
from typing import Any, TypeVar

from lowbit.backend.base import Availability, Backend, Capabilities, Declaration
from lowbit.contract.checks import spoken
from lowbit.contract.operation import Promise
from lowbit.contract.ranges import Range
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, words_of
from lowbit.operations import OPERATIONS
from lowbit.profiles import PROFILES
from lowbit.tensor_formats.stored import FORMATS, OPTIONS, RESULTS
from lowbit.text import one_line

T = TypeVar("T")

MOST_VALUES = 1 << 16
"""The most values of one limit. A backend that handles more omits the limit, or handles all."""
MOST_NUMBER = 2**64
MOST_ENTRIES = 1000
"""The most entries of a mapping, and the most profiles."""
MOST_WORDS = 1000
"""The most characters of a text."""
MOST_NAME = 100
"""The most characters of a name."""
MOST_LISTED = 40
"""The most names in a message."""
MOST_SHOWN = 60
"""The most characters of a value in a message."""

_CODES = ("bits", "group_size", "convention", "scale_dtype")
_BLOCKS = ("block", "mantissa", "exponent")
_REAL_ZEROS = ("bits", "group_size", "axis", "scales", "zeros")
_SLOTS = ("layers", "experts", "slots", "buffers", "memory")
_STORED = ("format", *OPTIONS, "rows", "columns", "result")
_PRODUCT = (*_STORED, "activations", "batch")
_CACHE = tuple(f"{part}_{name}" for part in ("key", "value") for name in _BLOCKS)

LIMITS: Mapping[str, tuple[str, ...]] = {
    "packing.pack": ("bits",),
    "packing.unpack": ("bits",),
    "affine.quantize": _CODES,
    "affine.dequantize": _CODES,
    "linear.qgemv": _CODES,
    "linear.qgemm": _CODES,
    "linear.qgemm_bfp": (*_CODES, *_BLOCKS),
    "bfp.cast": _BLOCKS,
    "bfp.decode": _BLOCKS,
    "bfp.store": _BLOCKS,
    "bfp.load": _BLOCKS,
    "bfp.dot": ("block", "mantissa_a", "mantissa_b"),
    "attention.softmax": ("inputs",),
    "attention.attend": ("inputs", "head_dim", "window"),
    "attention.attend_shaped": ("inputs", "head_dim", "window", "cap", "sinks"),
    "attention.attend_stored": ("inputs", "key_format", "value_format", "head_dim", "window"),
    "attention.attend_residual": ("inputs", "key_format", "value_format", "head_dim"),
    "blocks.rms_norm": ("inputs",),
    "blocks.swiglu": ("inputs",),
    "blocks.geglu": ("inputs",),
    "blocks.clamped_swiglu": ("inputs",),
    "blocks.soft_cap": ("inputs",),
    "routing.expert": ("inputs",),
    "routing.gate": ("inputs", "scores"),
    "routing.sparse": ("inputs",),
    "routing.top_k": ("inputs", "k"),
    "routing.weights": ("inputs", "softmax"),
    "rope.rotate": ("inputs", "head_dim"),
    "floats.decode": ("type",),
    "floats.round": ("type", "overflow", "direction"),
    "formats.dequantize": _STORED,
    "formats.quantize": ("inputs", "format", *OPTIONS, "rows", "columns"),
    "linear.gemv": _PRODUCT,
    "linear.gemm": _PRODUCT,
    "linear.gemm_cast": _PRODUCT,
    "gptq.factor": ("dtype",),
    "hqq.codes": ("bits",),
    "hqq.dequantize": _REAL_ZEROS,
    "hqq.qgemv": _REAL_ZEROS,
    "kvcache.bfp": ("kv_heads", "head_dim", *_CACHE),
    "kvcache.kivi": ("kv_heads", "head_dim", "bits", "group_size", "residual", "dtype"),
    "blocking.apply": ("order",),
    "blocking.invert": ("order",),
    "offload.trace": _SLOTS,
    "offload.engine": _SLOTS,
    "pooling.pool": ("method",),
}
"""The parameters of each operation that a declaration may limit; an operation not listed has none."""

NAMED: Mapping[str, Collection[str]] = {
    "format": FORMATS,
    "activations": (*RESULTS, *FORMATS),
    "result": RESULTS,
}
"""Parameters whose values must be names of the specification."""

SIZES = frozenset(("rows", "columns", "batch", "head_dim", "kv_heads", "residual", "tokens"))
"""Parameters whose values are integers."""


def availability_of(backend: Backend) -> Availability:
    """Whether a backend can run here, by its own answer.

    Raises:
        ArgumentError: it has no printable name, or its answer is of another type.
    """
    what = "the attribute name of the backend"
    name = _answer(lambda: getattr(backend, "name", None), what)
    if not _is(name, str) or not name:
        raise ArgumentError(what, _shown(name), "a text: name = 'mine' in its class")
    if len(name) > MOST_NAME or one_line(name) != name:
        raise ArgumentError(what, _shown(name), f"at most {MOST_NAME} characters, none of them a control character")
    state = _answer(backend.availability, "availability()")
    if not _is(state, Availability):
        raise ArgumentError("the result of availability()", _shown(state), "a lowbit.backend.Availability")
    usable, reason, remedy = (_field(state, field, "availability()") for field in ("usable", "reason", "remedy"))
    if not _is(usable, bool):
        raise ArgumentError("usable in availability()", _shown(usable), "True or False")
    return Availability(usable, _text("reason in availability()", reason), _text("remedy in availability()", remedy))


def capabilities_of(backend: Backend) -> Capabilities:
    """The capabilities of a backend, checked, as a copy of plain Python values.

    Raises:
        ArgumentError: something is wrong; the message says what, and what is allowed.
    """
    capabilities: Any = _answer(backend.capabilities, "capabilities()")
    if not _is(capabilities, Capabilities):
        raise ArgumentError("the result of capabilities()", _shown(capabilities), "a lowbit.backend.Capabilities")
    return check_capabilities(capabilities)


def check_capabilities(capabilities: Capabilities) -> Capabilities:
    """Check capabilities, and return a copy of plain Python values.

    >>> check_capabilities(Capabilities({"packing.unpak": Declaration()}))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: an operation in capabilities() is 'packing.unpak'; allowed: packing.unpack, ...
    >>> check_capabilities(Capabilities({"packing.pack": Declaration({"bits": 4})}))
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: limit bits of packing.pack is 4; allowed: a tuple of values, such as (4,)

    Raises:
        ArgumentError: something is wrong; the message says what, and what is allowed.
    """
    claims = "capabilities()"
    given: Any = _field(capabilities, "operations", claims)
    example = "a mapping from operations to declarations, such as {'packing.pack': Declaration()}"
    operations = {}
    for operation, declaration in _entries("operations in capabilities()", given, example):
        if not _is(operation, str) or operation not in OPERATIONS:
            raise ArgumentError("an operation in capabilities()", _shown(operation), _close(operation, OPERATIONS))
        operations[operation] = _declaration(operation, declaration)
    concurrent = _field(capabilities, "concurrent", claims)
    if not _is(concurrent, bool):
        raise ArgumentError("concurrent in capabilities()", _shown(concurrent), "True or False")
    alignment, overread = (
        _integer(f"{name} in {claims}", _field(capabilities, name, claims)) for name in ("alignment", "overread")
    )
    details = _details(_field(capabilities, "details", claims))
    profiles = _profiles(_field(capabilities, "profiles", claims))
    return Capabilities(operations, concurrent, details, alignment, overread, profiles)


def _details(details: Any) -> dict[str, str] | None:
    if details is None:
        return None
    what = "details in capabilities()"
    entries = _entries(what, details, "None or a mapping of texts")
    texts = _answer(lambda: [[str(part)[:MOST_WORDS] for part in entry] for entry in entries], what)
    return {str.__str__(key): str.__str__(value) for key, value in texts}


def _profiles(profiles: Any) -> tuple[str, ...]:
    what, allowed = "profiles in capabilities()", "a tuple of names: ('lowbit-1.1/packing',)"
    if _is(profiles, str) or not _is(profiles, Collection):
        raise ArgumentError(what, _shown(profiles), allowed)
    names = _first(what, profiles, MOST_ENTRIES)
    for name in names:
        if not _is(name, str) or name not in PROFILES:
            raise ArgumentError("a profile in capabilities()", _shown(name), _close(name, PROFILES))
    return tuple(names)


def _declaration(operation: str, declaration: Any) -> Declaration:
    if not _is(declaration, Declaration):
        allowed = "a lowbit.backend.Declaration, such as Declaration()"
        raise ArgumentError(f"the declaration of {operation}", _shown(declaration), allowed)
    what, known = f"limits of {operation}", LIMITS.get(operation, ())
    limits = {}
    example = "a mapping from parameters to tuples of values, such as {'bits': (4,)}"
    for name, values in _entries(what, _field(declaration, "limits", operation), example):
        if not _is(name, str) or name not in known:
            allowed = _close(name, known) if known else "none, since it has no parameter that can be limited"
            raise ArgumentError(f"a limit of {operation}", _shown(name), allowed)
        what_limited = f"limit {name} of {operation}"
        limits[name] = _values(what_limited, values)
        for value in limits[name] if name in NAMED else ():
            if value not in NAMED[name]:
                raise ArgumentError(f"a value of {what_limited}", _shown(value), _close(value, NAMED[name]))
        for value in () if name not in SIZES or isinstance(limits[name], Range) else limits[name]:
            if not _is(value, int):
                raise ArgumentError(f"a value of {what_limited}", _shown(value), "an integer")
    arithmetic = _field(declaration, "arithmetic", operation)
    if OPERATIONS[operation].promise is Promise.BOUNDED and arithmetic is None:
        allowed = "an Arithmetic, since the operation is bounded: Declaration(arithmetic=Arithmetic(...))"
        raise ArgumentError(f"arithmetic of {operation}", "missing", allowed)
    return Declaration(limits, None if arithmetic is None else _arithmetic(operation, arithmetic))


def _values(what: str, values: Any) -> tuple[object, ...] | Range:
    if _is(values, Range):
        multiple, least, most = (_field(values, name, what) for name in ("multiple", "least", "most"))
        allowed = "a Range of integers, such as Range(multiple=8)"
        end = None if most is None else _integer(what, most, allowed)
        return Range(_integer(what, multiple, allowed), _integer(what, least, allowed), end)
    if any(_is(values, kind) for kind in (str, bytes, Mapping)) or not _is(values, Collection):
        example = f"({_shown(values)},)" if _is(values, str) or _is(values, Real) else "(2, 4)"
        raise ArgumentError(what, _shown(values), f"a tuple of values, such as {example}")
    count = _answer(lambda: len(values), f"the number of values of {what}")
    if not 0 < count <= MOST_VALUES:
        allowed = f"1 to {MOST_VALUES} values; a parameter that is handled in full has no limit"
        raise ArgumentError(f"the number of values of {what}", count, allowed)
    return tuple(_value(f"a value of {what}", value) for value in _first(what, values, MOST_VALUES))


def _integer(what: str, number: Any, allowed: str = "an integer") -> int:
    if not _is(number, Integral):
        raise ArgumentError(what, _shown(number), allowed)
    return int(_exactly(what, number))


def _value(what: str, value: Any) -> object:
    """A plain copy of a value of a limit."""
    if value is None or _is(value, bool):
        return value
    if _is(value, str) and len(value) <= MOST_WORDS:
        return value
    if _is(value, Real):
        number = _exactly(what, value)
        if 0 <= number < MOST_NUMBER:
            return number
        value = number
    raise ArgumentError(
        what, _shown(value), f"a text of at most {MOST_WORDS} characters, or a number from 0 to below 2**64"
    )


def _arithmetic(operation: str, arithmetic: Any) -> Arithmetic:
    what = f"arithmetic of {operation}"
    if not _is(arithmetic, Arithmetic):
        raise ArgumentError(what, _shown(arithmetic), "a lowbit.contract.rounding.Arithmetic")
    names = ("form", "accumulator", "roundings", "weights", "promotion", "intermediate")
    form, accumulator, roundings, weights, promotion, between = (_field(arithmetic, name, what) for name in names)
    if not callable(roundings):
        allowed = "a function of rows and group size, such as lowbit.contract.rounding.any_order"
        raise ArgumentError(f"roundings of {operation}", _shown(roundings), allowed)
    asked = f"roundings(64, 32) of {operation}"
    count = _answer(lambda: roundings(64, 32), asked)
    if not _is(count, Integral) or not 1 <= _exactly(asked, count) < MOST_NUMBER:
        raise ArgumentError(asked, _shown(count), "an integer of at least 1")
    if accumulator == "float16" and not operation.startswith("linear.gem"):
        raise ArgumentError(f"accumulator of {operation}", repr(accumulator), "'float32' or 'float64'")
    return Arithmetic(form, accumulator, roundings, weights, _integer(f"promotion of {operation}", promotion), between)


# **Reading objects of foreign code.**


def _is(given: object, kind: type) -> bool:
    """Whether a value is of a kind, regardless of what it claims as its class.

    A text must be of the class itself, not of a derived class, which may compare and print in any way.
    """
    return type(given) is kind if kind in (str, bool) else issubclass(type(given), kind)


def _exactly(what: str, number: Any) -> Any:
    """A number as a plain Python number."""
    whole = _is(number, Integral)
    plain: Any = _answer(lambda: operator.index(number) if whole else float(number), what)
    kind: Any = int if whole else float
    return kind.__add__(plain, 0)


def _field(owner: object, name: str, of: str) -> Any:
    return _answer(lambda: getattr(owner, name), f"{name} in {of}")


def _text(what: str, given: Any) -> str:
    """A text, cut to its beginning if it is long."""
    if not _is(given, str):
        raise ArgumentError(what, _shown(given), "a text")
    return str(given[:MOST_WORDS])


def _entries(what: str, mapping: Any, allowed: str) -> list[tuple[Any, Any]]:
    if not _is(mapping, Mapping):
        raise ArgumentError(what, _shown(mapping), allowed)
    pairs: list[Any] = _first(what, _answer(mapping.items, what), MOST_ENTRIES)
    return _answer(lambda: [(pair[0], pair[1]) for pair in pairs], what)


def _first(what: str, values: Iterable[T], most: int) -> list[T]:
    """All values, if there are at most this many."""
    found = _answer(lambda: list(islice(values, most + 1)), what)
    if len(found) > most:
        raise ArgumentError(f"the number of values of {what}", f"more than {most}", f"at most {most}")
    return found


def _answer(ask: Callable[[], T], what: str) -> T:
    """The return value of backend code; an exception in it is an error in the declaration."""
    try:
        return ask()
    except KeyboardInterrupt:  # the user's
        raise
    except BaseException as error:
        if type(error) is ArgumentError and _is(error.argument, str) and _is(error.allowed, str):
            part: Any = error.given
            given = part[:MOST_WORDS] if _is(part, str) else _shown(part)
            raise ArgumentError(f"{error.argument[:MOST_WORDS]} in {what}", given, error.allowed[:MOST_WORDS]) from None
        raise ArgumentError(f"the result of {what}", f"a {words_of(error)[:MOST_WORDS]}", "no exception") from None


def _shown(given: object) -> str:
    """A value if it is short, else its type."""
    if type(given) is int and abs(given) >= MOST_NUMBER:  # Python does not print integers of thousands of digits
        return "an integer of more than 64 bits"
    if type(given) in (str, int, float, bool, type(None)):
        text = repr(given[:MOST_SHOWN] if isinstance(given, str) else given)
        return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
    return f"an object of type {_NAME(type(given))[:MOST_SHOWN]}"


_NAME: Callable[[type], str] = type.__dict__["__name__"].__get__  # a metaclass may override it


def _close(given: object, allowed: Iterable[str]) -> str:
    """The most similar name; some names if none is similar."""
    names = sorted(allowed)
    nearest = get_close_matches(given[:MOST_SHOWN] if type(given) is str else "", names, 1, 0.75)
    if nearest and len(names) > 1:
        return f"{nearest[0]}, which is the nearest name"
    return spoken(names) if len(names) <= MOST_LISTED else f"one of {len(names)}: {', '.join(names[:MOST_LISTED])}, ..."
