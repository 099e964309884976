"""Checks of what calls leave behind for other calls: habit `H4` where the same arrays come again.

A program makes its arrays once. A decoding loop writes the next activations where the last ones were; a loader reads
the next matrix into the buffer of the one before; what is freed is handed out again. So an address, a Python object or
a part of the contents says nothing about what an array holds now, and a backend that remembers by one of them answers
with the numbers of another call. In these cases arrays keep their addresses and their objects and get other contents,
which differ in little: one element, or the order of two.

As in `test_habits`, the calls are those of the operation's own cases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.attention.rope import Rotation
from lowbit.backend.wire import Tree, decode, encode
from lowbit.contract.operation import Promise
from lowbit.errors import ArgumentError
from lowbit.numbers.floats import FLOATS
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import Result, dequantized
from lowbit_conformance.isolation.calls import Call, RemoteLinear, Variant
from lowbit_conformance.isolation.equal_bits import difference, same
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.clauses.test_habits import HabitCase, every, own_calls
from lowbit_conformance.suite.compare import unsigned_zeros
from lowbit_conformance.suite.marking import checks

CALLS = 4  # of each operation
ROUNDS = 3
CLEARLY = 0.125  # of the largest number: more than any rounding error
ALONE = 100  # the offset of the first call that is made elsewhere; other cases have smaller offsets


# **In turns.**


@checks("*/H4", every("in-turns"))
def test_calls_in_turns(backend: Remote, case: HabitCase) -> None:
    """Calls of many shapes and choices, large after small and small after large, with refused calls between, give the
    same bits each time."""
    calls, rng = own_calls(backend, case.operation, 12), case.generator()
    for turn in range(ROUNDS):
        for number in rng.permutation(len(calls)):
            call = calls[int(number)]
            if turn == 1 and call.what == "run":
                _refused(backend, call)
            again = backend.perform(replace(call, result=None))
            if not same(call.result, again):
                text = f"the same call in turns with others: {difference(call.result, again)}"
                raise BrokenPromiseError(f"NONDETERMINISTIC: {text}")


def _refused(backend: Remote, call: Call) -> None:
    """The call with its first array in another kind of dtype, which every operation refuses."""
    arguments = list(call.arguments)
    for position, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            arguments[position] = argument.astype(np.complex128)
            try:
                backend.perform(replace(call, arguments=tuple(arguments), result=None))
            except ArgumentError:
                return


# **Offsets.** numpy promises only that an array begins at a multiple of its element size: a slice can begin anywhere.
# Arrays at all offsets in a cache line, different for each argument.

VARIANTS = [
    *(Variant(side=1, padding=1, filling=1, offset=offset) for offset in range(16)),
    *(Variant(side=1, offset=offset, stride=7) for offset in range(1, 16, 3)),
    *(Variant(side=1, offset=offset, stride=1) for offset in (17, 22, 31, 33, 47, 60)),
    # Arrays of a few elements that begin at the end of a page and end in the next: of 8 and of 4 bytes an element.
    *(Variant(side=1, offset=offset) for offset in (509, 511, 1018, 1021, 1023)),
]


@checks("*/H4", every("offsets"))
def test_arrays_at_every_offset(backend: Remote, case: HabitCase) -> None:
    """A call gives the same bits at every offset of its arrays that their type or a declared alignment allows, also
    with a matrix that was prepared from arrays at every offset."""
    for call in own_calls(backend, case.operation, CALLS):
        owner, variants = call.owner, VARIANTS
        if isinstance(owner, RemoteLinear):
            owner = backend.elsewhere(Call("prepare", "linear.qgemv", (owner.matrix,)), VARIANTS)[0]
            variants = [replace(variant, handle=number) for number, variant in enumerate(VARIANTS)]
        assert_equal_at_offsets(backend, replace(call, owner=owner, result=None), call.result, variants)


def assert_equal_at_offsets(backend: Remote, call: Call, expected: Any, variants: list[Variant]) -> None:
    __tracebackhide__ = True
    for variant, given in zip(variants, backend.elsewhere(call, variants), strict=True):
        if not same(expected, given):
            if isinstance(given, BrokenPromiseError):
                raise given
            text = f"the result changes with the addresses of the arguments, at offset {variant.offset}"
            raise BrokenPromiseError(f"NONDETERMINISTIC: {text}: {difference(expected, given)}")


# **Other contents in the same arrays.**


@checks("*/H4", every("rewritten"))
def test_other_contents_in_the_same_arrays(backend: Remote, case: HabitCase) -> None:
    """After other contents are written to its arrays, a call gives the result for these, as with arrays elsewhere; one
    element is changed, or two are swapped."""
    for call in own_calls(backend, case.operation, CALLS):
        calls = [replace(call, result=None), *rewritten(call)]
        with backend.same_arrays():
            given = [_answer(backend, each) for each in calls]
            given.append(_answer(backend, calls[0]))
        calls.append(calls[0])
        assert_own_results(calls, given)
        for number, (each, mine) in enumerate(zip(calls, given, strict=True)):
            alone = backend.elsewhere(each, [Variant(side=1, padding=1, filling=1, offset=ALONE + number)])[0]
            if not same(mine, alone):
                text = f"other contents in the same arrays than elsewhere: {difference(mine, alone)}"
                raise BrokenPromiseError(f"NONDETERMINISTIC: {text}")


def _answer(backend: Remote, call: Call) -> Any:
    """The result of a call, or the error with which it is refused."""
    try:
        return np.array(given) if isinstance(given := backend.perform(replace(call)), np.ndarray) else given
    except ArgumentError as error:
        return error


def rewritten(call: Call) -> Iterator[Call]:
    """The call with changed contents of each array in turn, except the output array."""
    arrays: list[Array] = []
    written = call.arguments[call.out] if call.out >= 0 else None

    def put(array: Array) -> dict[str, Tree]:
        arrays.append(array)
        return {"number": len(arrays) - 1}

    trees = [encode(argument, put) for argument in call.arguments]
    choices = {name: encode(choice, put) for name, choice in call.choices.items()}
    for place, array in enumerate(arrays):
        for contents in () if array is written else others(array):
            with_these = [contents if number == place else each for number, each in enumerate(arrays)]

            def get(dtype: Any, shape: Any, tree: dict[str, Tree], these: list[Array] = with_these) -> Array:
                return these[tree["number"]]

            try:
                arguments = tuple(_turned(decode(tree, get)) for tree in trees)
                chosen = {name: decode(tree, get) for name, tree in choices.items()}
            except ArgumentError:  # values with parts may refuse such contents
                continue
            yield replace(call, arguments=arguments, choices=chosen, result=None)


def _turned(value: Any) -> Any:
    """The changed parts made a rotation again, because a kernel may treat each pair of channels as one complex number.

    Both channels of a pair get the cosine of the first, and its sine with opposite signs. Other values are unchanged.

    Raises:
        ArgumentError: the channels do not form pairs with one sign each.
    """
    if not isinstance(value, Rotation):
        return value
    layout = value.layout
    here, there, sign = np.arange(layout.head_dim), layout.partner, layout.sign
    paired = np.array_equal(there[there], here) and (there != here).all() and (layout.pair[there] == layout.pair).all()
    if not paired or (np.abs(sign) != 1).any() or (sign[there] != -sign).any():
        raise ArgumentError("layout", "no pairs of channels", "pairs, a first and a second channel in each")
    first = np.where(sign < 0, here, there)
    return replace(value, cos=value.cos[:, first], sin=-value.sin[:, first] * sign)


def others(array: Array) -> Iterator[Array]:
    """Other contents of an array.

    For floats, one element becomes larger than all others, and then moves through the array by swaps, so that these
    contents have the same elements and sums. For integers, two elements of a row are swapped.
    """
    flat = np.array(array).reshape(-1)
    size = flat.size
    places = list(dict.fromkeys((size - 1, size // 2, size // 3, 2 * size // 3, 0))) if size else []
    if array.dtype.kind == "f":
        for number, place in enumerate(places):
            if number == 0:
                largest = np.abs(flat[np.isfinite(flat)]).max(initial=0)
                name = flat.dtype.name
                most = FLOATS[name].largest if name in FLOATS else float(np.finfo(flat.dtype).max)
                flat[place] = min(4 * float(largest) or 1.0, most / 4)
            else:
                before = places[number - 1]
                flat[[before, place]] = flat[[place, before]]
            yield flat.reshape(array.shape).copy()
        return
    width = max(1, array.shape[-1]) if array.ndim else 1
    for place in places:
        row = flat[place - place % width : place - place % width + width]
        different = np.flatnonzero(row != flat[place])
        if not different.size:
            row, different = flat, np.flatnonzero(flat != flat[place])
        if different.size:
            changed = flat.copy()
            other = int(different[-1]) + (place - place % width if row is not flat else 0)
            changed[[place, other]] = changed[[other, place]]
            yield changed.reshape(array.shape)


def assert_own_results(calls: Sequence[Call], given: Sequence[Any]) -> None:
    """Each result belongs to the contents that were in the arrays, and to no others.

    The result of an exact operation is the reference's. That of a bounded one need not be, but if the reference's
    results for two contents differ clearly, these must differ too.
    """
    __tracebackhide__ = True
    operation = OPERATIONS[calls[0].operation]
    right = [_right(call) for call in calls]
    for number, (mine, own) in enumerate(zip(given, right, strict=True)):
        text = "after other contents had lain in the same arrays"
        if isinstance(mine, Exception) or isinstance(own, Exception):
            if type(mine) is not type(own):
                raise BrokenPromiseError(f"WRONG: {mine!r:.200}, expected {own!r:.200}, {text}")
        elif operation.promise is not Promise.BOUNDED:
            if operation.id == "formats.dequantize":
                mine, own = unsigned_zeros(mine), _nearest_choice(calls[number], mine)
            if not same(mine, own):
                raise BrokenPromiseError(f"WRONG: {text}: {difference(mine, own)}")
        else:
            for before in range(number):
                if same(mine, given[before]) and _differ_clearly(own, right[before]):
                    raise BrokenPromiseError(
                        f"WRONG: the result is that of other contents, {number - before} calls before"
                    )


def _nearest_choice(call: Call, given: Array) -> Array:
    """A result that clause C1 of `formats.dequantize` allows; of several, the one that was returned."""
    weights, *named = call.arguments
    result: Result = named[0] if named else call.choices.get("result", "float32")
    reference, *others = map(unsigned_zeros, dequantized(weights, result))
    return next((each for each in others if np.array_equal(each, given)), reference)


def _right(call: Call) -> Any:
    arguments = call.arguments
    if isinstance(call.owner, RemoteLinear):
        arguments = call.arguments[0], call.owner.matrix
    try:
        with np.errstate(all="ignore"):
            return OPERATIONS[call.operation].reference(*arguments, **call.choices)
    except ArgumentError as error:
        return error


def _differ_clearly(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception) or one.shape != other.shape:
        return type(one) is not type(other) or np.shape(one) != np.shape(other)
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(
            np.max(np.abs(one - other), initial=0) > CLEARLY * np.max(np.abs(np.stack([one, other])), initial=0)
        )
