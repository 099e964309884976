"""Checking declarations: whether what a backend says of itself can be understood.

A declaration is judged before anything is run. A misspelt limit would otherwise declare more than was meant, a limit
given as a text would match its parts, and bounds cannot be derived for an operation without an arithmetic. So every
mistake in a declaration is refused, with a sentence that says what to change.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from lowbit.backend import Availability, Backend, Capabilities, Declaration
from lowbit.check import spoken
from lowbit.contract import Promise
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.profiles import PROFILES
from lowbit.rounding import Arithmetic

MOST_VALUES = 1 << 16
"""Values of one limit. A backend that handles more of them leaves the limit out, or handles all."""
MOST_NUMBER = 2**64
MOST_SHOWN = 60
"""Characters of a value in a message."""

_CODES = ("bits", "group_size", "convention", "scale_dtype")
_BLOCKS = ("block", "mantissa", "exponent")
_REAL_ZEROS = ("bits", "group_size", "axis", "scales", "zeros")
_SLOTS = ("layers", "experts", "slots", "buffers", "memory")
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
    "attention.attend": ("head_dim", "window"),
    "routing.gate": ("scores",),
    "routing.top_k": ("k",),
    "routing.weights": ("softmax",),
    "rope.rotate": ("head_dim",),
    "gptq.factor": ("dtype",),
    "hqq.codes": ("bits",),
    "hqq.dequantize": _REAL_ZEROS,
    "hqq.qgemv": _REAL_ZEROS,
    "kvcache.bfp": ("kv_heads", "head_dim", *_CACHE),
    "blocking.apply": ("order",),
    "blocking.invert": ("order",),
    "offload.trace": _SLOTS,
    "offload.engine": _SLOTS,
    "pooling.pool": ("method",),
}
"""The parameters of each operation that a declaration may limit; an operation that is not here has none."""


def availability_of(backend: Backend) -> Availability:
    """What a backend says of whether it can run here.

    Raises:
        ArgumentError: it has no name, or its answer is of another type.
    """
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name:
        raise ArgumentError("the attribute name of the backend", _shown(name), "a text: name = 'mine' in its class")
    state = _answer(backend.availability, "availability()")
    if not isinstance(state, Availability):
        raise ArgumentError("the result of availability()", _shown(state), "a lowbit.backend.Availability")
    return state


def capabilities_of(backend: Backend) -> Capabilities:
    """What a backend claims, after a check.

    Raises:
        ArgumentError: what is wrong with it, and what is allowed in its place.
    """
    capabilities: Any = _answer(backend.capabilities, "capabilities()")
    if not isinstance(capabilities, Capabilities):
        raise ArgumentError("the result of capabilities()", _shown(capabilities), "a lowbit.backend.Capabilities")
    check_capabilities(capabilities)
    return capabilities


def check_capabilities(capabilities: Capabilities) -> None:
    """Refuse capabilities that cannot be understood.

    >>> check_capabilities(Capabilities({"packing.unpak": Declaration()}))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: an operation in capabilities() is 'packing.unpak'; allowed: packing.unpack, ...
    >>> check_capabilities(Capabilities({"packing.pack": Declaration({"bits": 4})}))
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: limit bits of packing.pack is 4; allowed: a tuple of values, such as (4,)

    Raises:
        ArgumentError: what is wrong, and what is allowed in its place.
    """
    operations: Any = capabilities.operations
    if not isinstance(operations, Mapping):
        allowed = "a mapping from operations to declarations, such as {'packing.pack': Declaration()}"
        raise ArgumentError("operations in capabilities()", _shown(operations), allowed)
    for operation, declaration in operations.items():
        if operation not in OPERATIONS:
            raise ArgumentError("an operation in capabilities()", _shown(operation), _close(operation, OPERATIONS))
        _check_declaration(operation, declaration)
    if not isinstance(capabilities.concurrent, bool):
        raise ArgumentError("concurrent in capabilities()", _shown(capabilities.concurrent), "True or False")
    for field in ("alignment", "overread"):
        if not isinstance(getattr(capabilities, field), Integral):
            raise ArgumentError(f"{field} in capabilities()", _shown(getattr(capabilities, field)), "an integer")
    if capabilities.details is not None and not isinstance(capabilities.details, Mapping):
        raise ArgumentError("details in capabilities()", _shown(capabilities.details), "None or a mapping of texts")
    _check_profiles(capabilities.profiles)


def _check_profiles(profiles: object) -> None:
    if isinstance(profiles, str) or not isinstance(profiles, Collection):
        raise ArgumentError("profiles in capabilities()", _shown(profiles), "a tuple of names: ('lowbit-1.0/packing',)")
    for name in profiles:
        if not isinstance(name, str) or name not in PROFILES:
            raise ArgumentError("a profile in capabilities()", _shown(name), _close(name, PROFILES))


def _check_declaration(operation: str, declaration: object) -> None:
    if not isinstance(declaration, Declaration):
        allowed = "a lowbit.backend.Declaration, such as Declaration()"
        raise ArgumentError(f"the declaration of {operation}", _shown(declaration), allowed)
    limits: Any = declaration.limits
    if not isinstance(limits, Mapping):
        allowed = "a mapping from parameters to tuples of values, such as {'bits': (4,)}"
        raise ArgumentError(f"limits of {operation}", _shown(limits), allowed)
    for name, values in limits.items():
        known = LIMITS.get(operation, ())
        if name not in known:
            allowed = _close(name, known) if known else "none, since it has no parameter that can be limited"
            raise ArgumentError(f"a limit of {operation}", _shown(name), allowed)
        _check_values(f"limit {name} of {operation}", values)
    bounded = OPERATIONS[operation].promise is Promise.BOUNDED
    if bounded and declaration.arithmetic is None:
        allowed = "an Arithmetic, since the operation is bounded: Declaration(arithmetic=Arithmetic(...))"
        raise ArgumentError(f"arithmetic of {operation}", "missing", allowed)
    if declaration.arithmetic is not None:
        _check_arithmetic(operation, declaration.arithmetic)


def _check_values(what: str, values: object) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
        example = f"({values!r},)" if isinstance(values, (str, int, float)) else "(2, 4)"
        raise ArgumentError(what, _shown(values), f"a tuple of values, such as {example}")
    if not 0 < len(values) <= MOST_VALUES:
        allowed = f"1 to {MOST_VALUES} values; a parameter that is handled in full has no limit"
        raise ArgumentError(f"the number of values of {what}", len(values), allowed)
    for value in values:
        bounded: Any = value  # numbers.Real has no comparison with integers for a type checker
        number = isinstance(value, Real) and bool(0 <= bounded < MOST_NUMBER)
        if not (number or value is None or isinstance(value, str)):
            raise ArgumentError(f"a value of {what}", _shown(value), "a text, or a number from 0 to below 2**64")


def _check_arithmetic(operation: str, arithmetic: object) -> None:
    if not isinstance(arithmetic, Arithmetic):
        raise ArgumentError(f"arithmetic of {operation}", _shown(arithmetic), "a lowbit.rounding.Arithmetic")
    roundings: Any = arithmetic.roundings
    if not callable(roundings):
        allowed = "a function of rows and group size, such as lowbit.rounding.any_order"
        raise ArgumentError(f"roundings of {operation}", _shown(roundings), allowed)
    count = _answer(lambda: roundings(64, 32), f"roundings(64, 32) of {operation}")
    if not isinstance(count, Integral) or count < 1:
        raise ArgumentError(f"roundings(64, 32) of {operation}", _shown(count), "an integer of at least 1")


def _answer(ask: Callable[[], Any], what: str) -> Any:
    """What a method of the backend answers; an exception of its own is a mistake in the declaration."""
    try:
        return ask()
    except ArgumentError as error:
        raise ArgumentError(f"{error.argument} in {what}", error.given, error.allowed) from error
    except Exception as error:
        raise ArgumentError(f"the result of {what}", f"a {type(error).__name__}: {error}", "no exception") from error


def _shown(given: object) -> str:
    """A value where it is short, its type where it is not."""
    if type(given) is int and abs(given) >= MOST_NUMBER:  # Python writes no integer of thousands of digits
        return "an integer of more than 64 bits"
    if isinstance(given, (str, int, float, bool)) or given is None:
        text = repr(given)
        return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
    return f"an object of type {type(given).__name__}"


def _close(given: object, allowed: Iterable[str]) -> str:
    """The name that is like the given one; all of them if none is."""
    names = sorted(allowed)
    nearest = get_close_matches(str(given)[:MOST_SHOWN], names, 1, 0.75)
    return f"{nearest[0]}, which is the nearest name" if nearest and len(names) > 1 else spoken(names)
