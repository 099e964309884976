"""Signatures: what an operation takes, stated once, in the annotations of its function.

A reader of a chapter needs to know the arguments of a function; a backend must refuse all others. Both use the same
lines::

    @checked
    def gate(
        x: Annotated[F32, Shape("T", "hidden")],
        router: Annotated[F32, Shape("hidden", "E")],
        scores: Scores = "logits",
    ) -> F64: ...

`checked` reads the annotations once, when the chapter is imported, and checks the arguments of every call:

- an array type (`lowbit.arrays`) requires its dtype, or one of several: ``F32 | F64``; `Shape` its sizes, which must
  agree wherever a name occurs twice; `FINITE` finite numbers, `POSITIVE` numbers above 0;
- arrays marked `ONE_TYPE` have the same dtype, which is the type of the call's *inputs*;
- a ``Literal``, or `OneOf`, requires one of its values; `In` a number in a range;
- a class requires an instance of it, and `Valid` what else must hold for the instance;
- ``| None`` allows None.

What annotations cannot say, such as distinct ids, is a function that takes the same arguments: ``checked(also=…)``.

The order is fixed, so that a check may rely on those before it: classes and choices, then arrays, then ranges, then the
contents of arrays, then `also`. Everything is refused with an `ArgumentError` before an array is read or written,
except that finding NaN requires reading. The function behind the checks is `unchecked`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import numpy as np

from lowbit.contract.checks import (
    check_array,
    check_choice,
    check_dtype,
    check_finite,
    check_instance,
    check_integer,
    check_number,
    check_view,
)
from lowbit.errors import ArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])
Given = dict[str, Any]
"""The arguments of a call by name."""
Sizes = dict[str, int]
"""The sizes of named dimensions, as the arrays of a call have them."""
Step = Callable[[Given, Sizes], object]


# **The vocabulary** of annotations.


class Shape:
    """The sizes of an array.

    A size is a name (``"T"``: any size of at least 1, the same wherever the name occurs in a call), an attribute of
    another argument (``"matrix.rows"``) or a number.
    """

    def __init__(self, *sizes: str | int) -> None:
        self.sizes = sizes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' x '.join(map(str, self.sizes))})"


class View(Shape):
    """The sizes of an array that may be a view of any stride; arrays of a `Shape` are C-contiguous."""


@dataclass(frozen=True)
class In:
    """A number from `least` to `most`, each a number or the name of a size; without `most` there is no upper limit."""

    least: float | str
    most: float | str | None = None


@dataclass(frozen=True)
class OneOf:
    """One of these values; a ``Literal`` needs no such mark."""

    choices: Sequence[object]


@dataclass(frozen=True)
class Valid:
    """A condition on an argument alone: `check` takes it and raises `ArgumentError`."""

    check: Callable[[Any], None]


@dataclass(frozen=True)
class Contents:
    """What the numbers of an array must be: finite, and perhaps above 0."""

    above_zero: bool = False


class Mark:
    """A mark without parameters, described by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


CHOICE = Mark("CHOICE")
"""Marks a number as one of the choices that a backend may limit, as literals are."""
ONE_TYPE = Mark("ONE_TYPE")
"""Marks the arrays of a call that have one dtype, which is also the type of a backend's result."""
FINITE = Contents()
POSITIVE = Contents(above_zero=True)


# **One argument**, as its annotation describes it.


@dataclass(frozen=True)
class Argument:
    """What one argument may be.

    Attributes:
        name: of the argument.
        classes: the dtypes of an array, or the classes of another argument; empty if only a range is required.
        shape: None for an argument that is not an array.
        choices: the allowed values; None if it is not a choice.
        limits: the range of a number, or None.
        contents: what the numbers of an array must be, or None.
        choice: whether it is one of the choices that a backend may limit.
        valid: further checks of this argument alone.
        optional: whether None is allowed.
        one_type: whether it shares one dtype with all arrays so marked.
    """

    name: str
    classes: tuple[Any, ...] = ()
    shape: Shape | None = None
    choices: tuple[object, ...] | None = None
    limits: In | None = None
    contents: Contents | None = None
    choice: bool = False
    valid: tuple[Valid, ...] = ()
    optional: bool = False
    one_type: bool = False


def described(name: str, annotation: Any) -> Argument:
    """Read one annotation.

    >>> from lowbit.arrays import F32
    >>> described("x", Annotated[F32, Shape("T", 3), FINITE]).shape
    Shape(T x 3)
    >>> described("method", Literal["mean", "first"]).choices
    ('mean', 'first')
    """
    kind, marks = (annotation.__origin__, annotation.__metadata__) if _is(annotation, Annotated) else (annotation, ())
    kinds = _kinds(kind)
    optional, kinds = NoneType in kinds, tuple(each for each in kinds if each is not NoneType)
    if len(kinds) == 1 and _is(kinds[0], Annotated):  # ``Annotated[int, …] | None``
        kinds, marks = _kinds(kinds[0].__origin__), (*kinds[0].__metadata__, *marks)

    def one(mark: type[Any]) -> Any:
        return next((each for each in marks if isinstance(each, mark)), None)

    shape, listed = one(Shape), one(OneOf)
    choices = tuple(listed.choices) if listed else get_args(kinds[0]) if _is(kinds[0], Literal) else None
    if shape is not None:
        kinds = tuple(_dtype(each) for each in kinds)
    elif choices is not None:
        kinds = ()
    else:
        kinds = tuple(get_origin(each) or each for each in kinds)
    choice = choices is not None or CHOICE in marks
    valid = tuple(each for each in marks if isinstance(each, Valid))
    return Argument(name, kinds, shape, choices, one(In), one(Contents), choice, valid, optional, ONE_TYPE in marks)


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The members of a union; any other kind alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is(annotation: Any, form: Any) -> bool:
    return get_origin(annotation) is form


def _dtype(array: Any) -> Any:
    """The class of the elements of an array type such as `lowbit.arrays.F32`.

    Since numpy 2.5 ``NDArray[T]`` keeps T itself; before, it is ``ndarray`` of a shape and ``dtype[T]``.
    """
    element = get_args(array)[-1]
    return next(iter(get_args(element)), element)


# **The checks of one argument**, made once; each is a small function of the arguments and the sizes found so far.


def _kind_steps(argument: Argument) -> list[Step]:
    name, classes, optional = argument.name, argument.classes, argument.optional
    if argument.choices is not None:
        choices = argument.choices
        return [lambda given, sizes: check_choice(name, given[name], choices)]
    if argument.shape is not None or argument.limits is not None or classes in ((), (Any,)):
        return []
    if float in classes:
        classes = (float, int, np.floating)

    def check(given: Given, sizes: Sizes) -> None:
        value = given[name]
        if optional and value is None:
            return
        check_instance(name, value, *classes)
        for each in argument.valid:
            each.check(value)

    return [check]


def _array_steps(argument: Argument) -> list[Step]:
    if argument.shape is None:
        return []
    name, dtypes, sizes_of = argument.name, argument.classes, argument.shape.sizes
    own = check_view if isinstance(argument.shape, View) else check_array
    wanted = [_size(size) for size in sizes_of]
    named = [(place, size) for place, size in enumerate(sizes_of) if isinstance(size, str) and "." not in size]
    names, several, optional = tuple(np.dtype(each).name for each in dtypes), len(dtypes) > 1, argument.optional

    def check(given: Given, sizes: Sizes) -> None:
        array = given[name]
        if array is None and optional:
            return
        if several:
            check_dtype(name, array, names)
        own(name, array, array.dtype.type if several else dtypes[0], tuple([size(given, sizes) for size in wanted]))
        for place, size in named:
            if sizes.setdefault(size, array.shape[place]) != array.shape[place]:
                raise ArgumentError(f"shape of {name}", array.shape, " x ".join(map(str, sizes_of)))

    return [check]


def _size(size: float | str | None) -> Callable[[Given, Sizes], Any]:
    """How a size of a `Shape` is found: None if any size is allowed."""
    if not isinstance(size, str):
        return lambda given, sizes: size
    owner, _, attribute = size.partition(".")
    if attribute:
        return lambda given, sizes: getattr(given[owner], attribute)
    return lambda given, sizes: sizes.get(size)


def _range_steps(argument: Argument) -> list[Step]:
    limits = argument.limits
    if limits is None:
        return []
    name, optional = argument.name, argument.optional
    check_range: Callable[..., None] = check_number if float in argument.classes else check_integer
    least, most = _end(limits.least), _end(limits.most)

    def check(given: Given, sizes: Sizes) -> None:
        if not (optional and given[name] is None):
            check_range(name, given[name], least(given, sizes), most(given, sizes))

    return [check]


def _end(end: float | str | None) -> Callable[[Given, Sizes], Any]:
    """How an end of a range is found: as a size, or it is another argument."""
    if isinstance(end, str) and "." not in end:
        return lambda given, sizes: sizes[end] if end in sizes else given[end]
    return _size(end)


def _contents_steps(argument: Argument) -> list[Step]:
    name, contents = argument.name, argument.contents
    if contents is None:
        return []

    def check(given: Given, sizes: Sizes) -> None:
        array = given[name]
        if array is None:
            return
        check_finite(name, array)
        if contents.above_zero and not (array > 0).all():
            raise ArgumentError(name, f"as low as {array.min()}", "above 0")

    return [check]


def _type_steps(argument: Argument) -> list[Step]:
    """An array of one type agrees with those before it."""
    if not argument.one_type:
        return []
    name, optional = argument.name, argument.optional

    def check(given: Given, sizes: Sizes) -> None:
        if given[name] is None and optional:
            return
        kind = given[name].dtype
        if sizes.setdefault(INPUTS, kind.num) != kind.num:
            raise ArgumentError(f"dtype of {name}", kind, "that of the other arrays")

    return [check]


# **The whole signature.**

INPUTS = "inputs"
"""The parameter that names the type of a call's arrays."""


class Signature:
    """What a function takes, and the check of it.

    Attributes:
        arguments: in order.
        also: what annotations cannot say, or None; takes the same arguments in the same order.
        check: takes the arguments of the function and raises `ArgumentError` where they are wrong.
    """

    def __init__(self, function: Callable[..., Any], also: Callable[..., None] | None = None) -> None:
        self._parameters = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
        self._names = tuple(self._parameters.parameters)
        self._positional = sum(each.kind is not each.KEYWORD_ONLY for each in self._parameters.parameters.values())
        self.arguments = tuple(described(name, hints[name]) for name in self._names if name in hints)
        self.also = also
        self.check = self._made_check(function.__name__)

    def given(self, arguments: tuple[Any, ...], choices: Mapping[str, Any]) -> Given:
        """The arguments of a call by name, those left out with their defaults.

        Raises:
            TypeError: too many arguments, too few, or one of another name, in Python's words.
        """
        if len(arguments) == len(self._names) == self._positional and not choices:  # as most calls are
            return dict(zip(self._names, arguments))  # noqa: B905  # their number has been compared
        bound = self._parameters.bind(*arguments, **choices)
        bound.apply_defaults()
        return dict(bound.arguments)

    def parameters(self, *arguments: Any, **choices: Any) -> dict[str, object]:
        """The choices that a call makes: arguments that are choices, and those that are part of an argument's value
        (a value of a class says so by a property `parameters`)."""
        given, found = self.given(arguments, choices), self.inputs(*arguments, **choices)
        for each in self.arguments:
            if each.choice:
                found[each.name] = given[each.name]
            elif any(hasattr(kind, "parameters") for kind in each.classes):
                found.update(given[each.name].parameters)
        return found

    def inputs(self, *arguments: Any, **choices: Any) -> dict[str, object]:
        """The type of the arrays that have one type, as a parameter; empty where no array is marked so."""
        typed = next((each.name for each in self.arguments if each.one_type), None)
        return {} if typed is None else {INPUTS: self.given(arguments, choices)[typed].dtype.name}

    def with_inputs(self, named: Callable[..., Mapping[str, object]]) -> Callable[..., Mapping[str, object]]:
        """A function that names choices of a call, and before them the type of its arrays if they have one type."""
        if not any(each.one_type for each in self.arguments):
            return named
        return lambda *arguments, **choices: {**self.inputs(*arguments, **choices), **named(*arguments, **choices)}

    def _made_check(self, name: str) -> Callable[..., None]:
        phases = (_kind_steps, _array_steps, _type_steps, _range_steps, _contents_steps)
        steps = tuple(step for phase in phases for each in self.arguments for step in phase(each))
        also, order = self.also, self._names

        def check(*arguments: Any, **choices: Any) -> None:
            given, sizes = self.given(arguments, choices), Sizes()
            for step in steps:
                step(given, sizes)
            if also is not None:
                also(*(given[each] for each in order))

        check.__name__ = check.__qualname__ = f"check_{name}"
        check.__signature__ = self._parameters.replace(return_annotation=None)  # type: ignore[attr-defined]  # functions have it
        return check


@overload
def checked(function: Function) -> Function: ...
@overload
def checked(*, also: Callable[..., None]) -> Callable[[Function], Function]: ...
def checked(function: Any = None, *, also: Callable[..., None] | None = None) -> Any:
    """Check the arguments of a function at the door, as its annotations say.

    >>> @checked
    ... def first(codes: Sequence[int], k: Annotated[int, In(1, 9)] = 1) -> object:
    ...     return codes[:k]
    >>> first([3, 4], 0)
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: k is 0; allowed: an integer from 1 to 9

    Args:
        function: a function whose parameters are annotated in the vocabulary above.
        also: a function of the same arguments that raises `ArgumentError`, called after all other checks pass.
    """

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = Signature(function, also)
        check = signature.check

        @wraps(function)
        def at_the_door(*arguments: Any, **choices: Any) -> Any:
            check(*arguments, **choices)
            return function(*arguments, **choices)

        at_the_door.signature = signature  # type: ignore[attr-defined]  # read by signature_of
        return at_the_door

    return guarded if function is None else guarded(function)


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature that `checked` gave to a function."""
    found: Signature = function.signature  # type: ignore[attr-defined]  # set by checked
    return found


def unchecked(function: Function) -> Function:
    """The function behind its checks, for callers whose arguments have been checked."""
    behind: Function = inspect.unwrap(function)
    return behind
