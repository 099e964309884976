"""Which mistake was made: wrong results are compared with the results of every defect that could explain them.

Failing cases give arguments and what came back. Each arithmetical defect of the operation is run on the same arguments;
one whose results are equal in every case names the mistake. Where results are floats, two count as equal if they differ
by no more than rounding may explain, and if what came back lies many times nearer to the defect's result than to what
is right. If no defect explains the results, `lowbit_conformance.defects.description` says what can be seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.operation import Promise
from lowbit.numbers.floats import rounded
from lowbit.operations import OPERATIONS
from lowbit.tensor_formats.stored import RESULTS
from lowbit_conformance.defects import places
from lowbit_conformance.defects.bank import BANK
from lowbit_conformance.defects.cache_family import of_caches
from lowbit_conformance.defects.cast_fields import of_casts_to_formats
from lowbit_conformance.defects.cast_located import of_wrong_fields
from lowbit_conformance.defects.cast_scales import of_scales_of_casts
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.families import relatives
from lowbit_conformance.defects.narrow import FORMATS
from lowbit_conformance.defects.old_output import of_added
from lowbit_conformance.defects.residual_family import of_residuals
from lowbit_conformance.defects.running import of_running
from lowbit_conformance.defects.stage_table import of_stages
from lowbit_conformance.defects.stored_factors import of_factors
from lowbit_conformance.defects.stored_family import of_matrices, of_scales
from lowbit_conformance.defects.stored_solved import of_solved
from lowbit_conformance.defects.stored_tables import of_codes_read
from lowbit_conformance.defects.tolerances import UNDERFLOW, UNIT, limits_of
from lowbit_conformance.defects.unwritten import of_clamped, of_unwritten

MOST_NAMED = 2
NOTHING = "result-taken-as-0"
POWER = "-times-a-power"
FACTOR_NEARER = 4096.0
"""Times smaller must squares of distances be, so that a factor is named in the place of what was found."""
PART = "-in-part"
NARROWED = "stored-weights-in-"
LOST = "subnormals-lost"
"""Of the names of defects whose weights may be 0 where right ones are not."""
LEAST_SPOILT = 3  # failures, from which a defect is named that is wrong where the backend was right
MANY = 256
"""Wrong elements, on which what several defects give is the same: they are one mistake."""
MANY_FLOATS = 8
"""The same of elements that were computed with roundings, each of which says more than a code."""
SLACK = 4.0  # of the bound of an honest float32 sum; a defect's own sums have other terms
STORED = ("linear.gemv", "linear.gemm", "linear.gemm_cast")
CLOSE = 0.25  # of the size of results: beyond that narrow numbers are not what is wrong with them
CLOSE_IN_HALF = 1 / 32  # the same of results in float16, which lie in that type whatever is wrong with them
MOST_SEARCHED = 1 << 16  # elements of the arguments of a failure for which hundreds of changes are tried
MOST_READ = 1 << 18  # the same of a stored matrix, of which few changes are tried
LARGER = 2.0**-16  # of a result
UNITS: Mapping[str | None, float] = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDING = 1e-3  # of the distance from what is right: further away on the lattice others are tried, too
ALIKE = 16.0
"""Times smaller than the largest error of a result may errors be that say as much as this one."""
MUCH = 0.25  # of that distance: so much nearer must be what is tried then
COMPUTED = 2.0**-60
"""Of a limit: roundings of its sum leave nothing so small, and then what is not 0 was multiplied by a small number."""
NEARER = 16.0  # times, than what is right, must a result lie to what a defect gives


@dataclass(frozen=True, eq=False)
class Seen:
    """A call beside what is right.

    Attributes:
        operation: its id.
        arguments: of the call; for a product x and the matrix; for a stateful operation those that open it.
        choices: those given by name.
        given: what came back; of a stateful operation the answers to all steps.
        steps_taken: of a stateful operation, the arguments of each step.
        right: what the reference answers.
        limits: how far a right result may lie from that; None where results are compared by their bits alone.
        wrong: how many elements are visibly wrong.
        unequal: how many elements have other bits than what is right, rounded to their precision.
        exact: what the reference answers, before it is rounded to the type of a narrow result.
        call: the call itself.
    """

    operation: str
    arguments: tuple[Any, ...]
    choices: Mapping[str, Any]
    given: Any
    steps_taken: tuple[tuple[Any, ...], ...]
    right: Any
    limits: Array | None
    wrong: int
    unequal: int
    exact: Any = None
    call: Any = None

    @classmethod
    def of(cls, operation: str, call: Any) -> "Seen":
        """A call with `arguments`, `choices`, what was `given` and the `steps` of a session."""
        right = _answer(OPERATIONS[operation].reference, call.arguments, call.choices, call.steps)
        limits = limits_of(operation, call.arguments, call.choices, right)
        if limits is None and isinstance(right, np.ndarray) and floating(right):
            limits = np.zeros(right.shape)  # a mistake may be made with another rounding
        wrong = unequal = 0
        if not _identical(call.given, right):
            wrong, unequal = _count(call.given, right, limits), max(1, _count(call.given, right, None))
            wrong = wrong if OPERATIONS[operation].promise is Promise.BOUNDED else unequal
        exact = right
        if narrow := narrow_type(operation, call.given):
            right = rounded(right, narrow).astype(np.float64)  # so that no rounding is a mistake
        given, arguments = compared(operation, call.given), tuple(compared(operation, each) for each in call.arguments)
        choices = {name: compared(operation, each) for name, each in call.choices.items()}
        return cls(operation, arguments, choices, given, call.steps, right, limits, wrong, unequal, exact, call)

    @property
    def size(self) -> int:
        """How many numbers the arguments have, those of all steps included."""
        return sum(np.size(part) for value in (*self.arguments, *self.steps_taken) for _, part in leaves(value))

    @property
    def finite(self) -> bool:
        """Whether there is neither NaN nor infinity in what was given and what is right."""
        return self.meant_finite and all_finite(self.given)

    @property
    def meant_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in what is right."""
        return all_finite(self.right)

    @property
    def telling(self) -> int:
        """How many elements say which mistake was made: those visibly wrong, and those wrong by nearly as much.

        A bound may hide most of a vector whose errors are all alike.
        """
        arrays = isinstance(self.given, np.ndarray) and isinstance(self.right, np.ndarray)
        if not self.wrong or not arrays or self.given.shape != self.right.shape or not floating(self.given):
            return self.wrong
        with np.errstate(all="ignore"):
            errors = np.abs(self.given.astype(np.float64) - self.right.astype(np.float64))
        errors = errors[np.isfinite(errors)]
        return max(self.wrong, int((errors > errors.max(initial=0.0) / ALIKE).sum()))

    @property
    def unit(self) -> float:
        """Of a result that a defect gives: how much further the sums of another order may lie, once rounded."""
        return UNITS.get(narrow_type(self.operation, getattr(self.call, "given", None)), LARGER)

    def explained(self, defect: Defect) -> bool:
        """Whether the defect gives this wrong result."""
        return _gives(self.outcome(defect), self.given, self.right, self.limits, self.unit)

    @cached_property
    def on_the_lattice(self) -> bool:
        """Whether what is right needs no rounding: then a defect gives what came back to the bit, or nearly."""
        if not (isinstance(self.exact, np.ndarray) and isinstance(self.call.given, np.ndarray)):
            return False
        name = self.call.given.dtype.name
        return name in RESULTS and bool((rounded(self.exact.astype(np.float64), name) == self.exact).all())

    def away(self, defect: Defect) -> float:
        """How far the result lies from what the defect gives, in parts of how far it lies from what is right.

        0 where rounding may explain it.
        """
        wrong = self.outcome(defect) if self.on_the_lattice else None
        if not isinstance(wrong, np.ndarray) or _identical(self.given, wrong):
            return 0.0
        own, other = _squares(self.given, wrong.astype(np.float32), self.right)
        return float(np.sqrt(own / other)) if other > 0 else 0.0

    def outcome(self, defect: Defect) -> Any:
        """What the defect gives, rounded to the type of what came back where that is a narrow one."""
        wrong = _outcome(defect, self.operation, self.arguments, self.choices, self.steps_taken)
        narrow = narrow_type(self.operation, getattr(self.call, "given", None))
        if narrow and isinstance(wrong, np.ndarray):
            return rounded(wrong.astype(np.float64), narrow).astype(np.float64)
        return wrong

    def underflows(self, defect: Defect) -> bool:
        """Whether what the defect gives is not 0 before it is rounded to the type of the result."""
        wrong = _outcome(defect, self.operation, self.arguments, self.choices, self.steps_taken)
        return isinstance(wrong, np.ndarray) and bool(wrong.any())

    def unspoilt(self, defect: Defect) -> bool:
        """Whether the defect, too, is right here, or gives what came back where the case did not judge the numbers."""
        wrong = self.outcome(defect)
        if self.wrong:
            return _gives(wrong, self.given, self.right, self.limits, self.unit)
        if OPERATIONS[self.operation].promise is not Promise.BOUNDED:
            return _identical(wrong, self.given)
        return nearly(wrong, self.right, self.limits) or (wrong is not None and _identical(self.given, wrong))


def all_finite(value: Any) -> bool:
    """Whether no float of a value is NaN or infinite."""
    parts = [part for _, part in leaves(value)]
    return all(np.isfinite(part).all() for part in parts if isinstance(part, np.ndarray) and floating(part))


def narrow_type(operation: str, given: Any) -> Literal["float16", "bfloat16"] | None:
    """The type of a result of 16 bits of a product with a stored matrix."""
    name = given.dtype.name if operation in STORED and isinstance(given, np.ndarray) else ""
    return "float16" if name == "float16" else "bfloat16" if name == "bfloat16" else None


def compared(operation: str, value: Any) -> Any:
    """An argument or a result as defects of products with stored matrices compare them: 16-bit numbers as float32.

    Limits know the types; results that a defect gives are not rounded to them.
    """
    if operation not in STORED:
        return value
    if isinstance(value, np.ndarray) and value.dtype.name in RESULTS:
        return value.astype(np.float32)
    return "float32" if isinstance(value, str) and value in RESULTS else value


def common_defects(
    operation: str, failures: list[Seen], passes: list[Seen], most: int = MOST_NAMED
) -> tuple[Defect, ...]:
    """The defects that give every one of the wrong results; none if there are too many to mean one.

    Those that leave right what the backend had right go before others. The others count only where enough results say
    the same: few results resemble those of many mistakes. Where the bank has no name, `families` and then `places` may
    have one; of their many members only those count that spoil nothing that was right. A defect that comes near the
    results, but not to the bit where it should, is one as long as no other comes much nearer. Last, the part that is
    wrong is `located`.
    """
    return known_defects(operation, failures, passes, most) or located(operation, failures, passes)


def known_defects(
    operation: str, failures: list[Seen], passes: list[Seen], most: int = MOST_NAMED
) -> tuple[Defect, ...]:
    """The same without what only has a place in common."""
    named = _explaining([defect for defect in BANK.values() if operation in defect.wrong], failures)
    fitting = _fitting(named, passes) or (named if len(failures) >= LEAST_SPOILT else [])
    found, away = _nearest(fitting, failures)
    least = min((each.size for each in failures), default=0)
    bad = [*failures, *(each for each in passes if each.wrong)]  # a case may judge only a part of its calls
    families: tuple[tuple[Callable[[str], Iterable[Defect]], float], ...] = (
        (relatives, np.inf),
        (partial(of_casts_to_formats, failures), np.inf),
        (partial(of_scales_of_casts, bad), np.inf),
        (places.of_results, np.inf),
        (partial(of_running, bad), MOST_SEARCHED),
        (partial(of_scales if least > MOST_SEARCHED else of_matrices, failures), MOST_READ),
        (partial(of_caches, failures), MOST_SEARCHED),
        (partial(of_residuals, failures), MOST_SEARCHED),
        (partial(of_factors, failures), MOST_READ),
        (partial(of_codes_read, failures), MOST_SEARCHED),
        (of_stages, MOST_SEARCHED),
        (places.of_arguments, MOST_SEARCHED),
    )
    for family, largest in families:
        if least > largest or (found and away <= 0 and (family is not relatives or len(found) <= most)):
            continue
        others, further = _nearest(_fitting(_explaining(family(operation), failures), passes), failures)
        if others and (further <= away / NEARER or (away >= ROUNDING and further <= away * MUCH)):
            found, away = others, further
    if not found and (narrow := _computed_in(failures, passes)):
        return (narrow,)
    if found and least <= MOST_READ:
        found = _much_nearer(operation, list(found.values()), failures, passes) or found
    found = plainest(found)
    if found and least <= MOST_READ and (vanishing := _vanishing(operation, failures, passes)):
        nothing = {name: each for name, each in found.items() if name == NOTHING}
        found = nothing | {each.name: each for each in vanishing}
    floats = all(isinstance(each.given, np.ndarray) and floating(each.given) for each in failures)
    enough = MANY_FLOATS if floats else MANY
    many = len(failures) >= LEAST_SPOILT or sum(each.telling for each in failures) >= enough
    if len(found) > most and many:  # they cannot be told apart: one mistake by several names
        return tuple(found.values())[:1]
    return tuple(found.values()) if len(found) <= most else ()


def _much_nearer(operation: str, found: list[Defect], failures: list[Seen], passes: list[Seen]) -> dict[str, Defect]:
    """Factors of what codes or zeros add, where these come much nearer to the results than all that was found.

    Where results are rounded, what a small factor leaves may be within what rounding explains. Results of 0 say nothing
    of factors.
    """
    if not any(isinstance(each.given, np.ndarray) and each.given.any() for each in failures):
        return {}
    others = _fitting(_explaining(of_factors(failures, operation), failures), passes)
    least = min((_distance(each, failures) for each in found), default=0.0)
    return {each.name: each for each in others if FACTOR_NEARER * _distance(each, failures) < least}


def _distance(defect: Defect, failures: list[Seen]) -> float:
    """How far the results lie from what a defect gives: the sum of squares; 0 where it gives no array."""
    outcomes = [(each, each.outcome(defect)) for each in failures]
    return sum(
        _squares(each.given, wrong.astype(np.float32), each.right)[0]
        for each, wrong in outcomes
        if isinstance(wrong, np.ndarray) and wrong.shape == each.right.shape
    )


def plainest(found: dict[str, Defect]) -> dict[str, Defect]:
    """Without those that say of zeros, too, what another says of codes or scales alone: there are no zeros, then.

    Those that say of a part of a matrix what another says of all are left out as well.
    """
    shorter = {name: name.replace("-and-zeros", "").replace("-and-zero", "") for name in found}
    shorter |= {name: name.removesuffix(PART) for name in found if name.endswith(PART)}
    return {name: each for name, each in found.items() if shorter[name] == name or shorter[name] not in found}


def _vanishing(operation: str, failures: list[Seen], passes: list[Seen]) -> list[Defect]:
    """Where all results are 0: the mistake whose numbers are too small for their type, if there is one."""
    if operation not in STORED or any(not isinstance(each.given, np.ndarray) or each.given.any() for each in failures):
        return []
    named: dict[str, Defect] = {}
    for defect in of_matrices(failures, operation):
        lost = defect.name.startswith(NARROWED) or defect.name.endswith(LOST)
        vanishes = lost or all(each.underflows(defect) for each in failures)
        if vanishes and all(each.explained(defect) for each in failures):
            named.setdefault(defect.name, defect)
    fitting = _fitting(list(named.values()), passes)
    narrowed = [each for each in fitting if each.name.startswith(NARROWED)]
    rest = [
        each for each in fitting if not each.name.endswith(POWER)
    ] or fitting  # any power that is small enough is one
    return narrowed[:1] or (rest if len(rest) == 1 else [])  # the widest type goes first


def located(operation: str, failures: list[Seen], passes: list[Seen]) -> tuple[Defect, ...]:
    """What wrong results have in common: places where nothing was written, or the one part that was read wrong."""
    least = min((each.size for each in failures), default=0)
    bad = [*failures, *(each for each in passes if each.wrong)]
    solved = of_solved(bad, operation) if least <= MOST_READ else ()
    seen = chain(of_clamped(bad, operation), of_added(bad, operation), of_unwritten(bad, operation, passes))
    last = chain(seen, of_wrong_fields(bad, operation), solved)
    return next(((each,) for each in last if _fitting(_explaining([each], failures), passes)), ())


def unwritten(operation: str, failures: list[Seen], passes: list[Seen]) -> tuple[Defect, ...]:
    """The places that all wrong elements have in common, if a loop may leave these out."""
    bad = [*failures, *(each for each in passes if each.wrong)]
    found = of_unwritten(bad, operation, passes) if failures else ()
    return next(((each,) for each in found if _fitting(_explaining([each], failures), passes)), ())


def _nearest(defects: list[Defect], failures: list[Seen]) -> tuple[dict[str, Defect], float]:
    """Those that come nearest to the results, by name, and how far from them they are where that is furthest."""
    away = [max(each.away(one) for each in failures) for one in defects]
    least = min(away, default=np.inf)
    room = ROUNDING if least > 0 else 0.0
    found: dict[str, Defect] = {}
    for one, far in zip(defects, away, strict=True):
        if far <= least + room:
            found.setdefault(one.name, one)  # of several ways to make one mistake the first says it most simply
    return found, least


def _computed_in(failures: list[Seen], passes: list[Seen]) -> Defect | None:
    """A narrow format in which all results lie, where right ones do not; their sums were rounded more than once."""
    types = {narrow_type(each.operation, getattr(each.call, "given", None)) for each in failures}
    if "bfloat16" in types:
        return None  # all such results lie in each of these formats
    near = CLOSE if types == {None} else CLOSE_IN_HALF
    results = [each.given for each in passes if isinstance(each.given, np.ndarray)]
    for format, (words, ways) in {"float32": ("rounded to float32", (_as_float32,)), **FORMATS}.items():
        if format == "normal-range" or any((ways[0](each) != each).any() for each in results):
            continue
        if failures and all(_lies_in(each, ways[0], format, near) for each in failures):
            cause = f"Every result is {words}, and more is lost than by one rounding: sums are kept so."
            return arithmetical(f"computed-in-{format}", cause, "", {})
    return None


def _as_float32(numbers: Array) -> Array:
    return numbers.astype(np.float32).astype(numbers.dtype)


def _lies_in(seen: Seen, way: Callable[[Array], Array], format: str, near: float) -> bool:
    given, right = seen.given, seen.exact
    if not (isinstance(given, np.ndarray) and isinstance(right, np.ndarray) and given.dtype.kind == "f"):
        return False
    if given.shape != right.shape or (format == "float32" and given.dtype != np.float64):
        return False
    other = right.astype(given.dtype)
    errors, sizes = np.linalg.norm(given.astype(np.float64) - right), np.linalg.norm(right.astype(np.float64))
    return bool((way(given) == given).all() and (way(other) != other).any() and errors < near * sizes)


def _fitting(defects: list[Defect], passes: list[Seen]) -> list[Defect]:
    """Those that leave right what the backend had right."""
    return [defect for defect in defects if all(passed.unspoilt(defect) for passed in passes)]


def _explaining(defects: Iterable[Defect], failures: list[Seen]) -> list[Defect]:
    """Those that give every one of the wrong results; the small results are looked at first."""
    left = list(defects)
    for failure in sorted(failures, key=lambda each: each.size):
        left = [defect for defect in left if failure.explained(defect)]
    return left


def sentence(defects: tuple[Defect, ...]) -> str:
    """What a report says of results that a defect explains.

    >>> sentence((BANK["result-doubled"],))
    'all wrong results are what result-doubled gives: Results are twice as large.'
    """
    names, causes = " or ".join(each.name for each in defects), " Or: ".join(each.cause for each in defects)
    return f"all wrong results are what {names} gives: {causes}"


def nearly(given: Any, other: Any, limits: Array | None) -> bool:
    """Whether two results are equal but for rounding."""
    return _identical(given, other) or (limits is not None and _close(given, other, limits, SLACK))


def _count(given: Any, right: Any, limits: Array | None) -> int:
    """How many elements of a result are wrong; 1 of one that is not of the right kind."""
    ours, theirs = list(leaves(given)), list(leaves(right))
    count = 0
    for (_, first), (_, second) in zip(ours, theirs, strict=False):
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.shape == second.shape:
            with np.errstate(all="ignore"):
                far = np.abs(first.astype(np.float64) - second) > (0.0 if limits is None else limits)
                count += int((far | (np.isfinite(first) != np.isfinite(second))).sum())
        else:
            count += not _same(("", first), ("", second))
    return max(count, int(len(ours) != len(theirs)))


def _outcome(
    defect: Defect,
    operation: str,
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    """What the defect answers; None if it fails."""
    try:
        return _answer(defect.wrong[operation], arguments, choices, steps_taken)
    except Exception:  # a defect may refuse what the reference takes
        return None


def _answer(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    choices: Mapping[str, Any],
    steps_taken: tuple[tuple[Any, ...], ...],
) -> Any:
    with np.errstate(all="ignore"):
        result = function(*arguments, **choices)
        return tuple(result.step(*each) for each in steps_taken) if steps_taken else result


# **Comparing**, leaf by leaf: arrays, fields of dataclasses, elements of tuples.


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays and numbers of a value, each with its place.

    >>> [path for path, _ in leaves((1, np.zeros(2)))]
    ['.length', '[0]', '[1]']
    """
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from leaves(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, (tuple, list)):
        yield f"{path}.length", len(value)
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def floating(array: Array) -> bool:
    """Whether its elements are floats, of which bfloat16 is one; numpy itself does not know that."""
    return array.dtype.kind == "f" or array.dtype.name in RESULTS


def _gives(wrong: Any, given: Any, right: Any, limits: Array | None, unit: float) -> bool:
    """Whether a defect's result explains what was given: the bits are equal, or as near as rounding allows."""
    if wrong is None or _identical(wrong, right):
        return False
    if _identical(given, wrong):
        return True
    if limits is None or not isinstance(wrong, np.ndarray) or wrong.shape != right.shape:
        return False
    if not wrong.any() and given.any():
        return False  # what is nearly 0 was computed
    if np.shape(given) == wrong.shape and ((wrong == 0) & (given != 0) & (np.abs(given) < COMPUTED * limits)).any():
        return False  # so was what is too small to be left by roundings
    # The terms of a wrong sum may be larger than those of the right one, or stand elsewhere.
    larger = max(1.0, _largest(wrong) / max(_largest(right), UNDERFLOW))
    widest = (
        limits.max(initial=0.0) * larger
        + UNDERFLOW
        + unit / SLACK * np.abs(np.nan_to_num(wrong, posinf=0.0, neginf=0.0))
    )
    return _close(given, wrong, widest, SLACK) and _nearer(given, wrong, right)


def _largest(numbers: Array) -> float:
    """The largest magnitude of those that are finite."""
    sizes = np.abs(numbers.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def _nearer(given: Array, wrong: Array, right: Array) -> bool:
    """Whether what was given lies much nearer to what the defect gives than to what is right."""
    own, other = _squares(given, wrong.astype(np.float32), right)
    return bool((np.isfinite(given) != np.isfinite(right)).any()) or own * NEARER**2 < other


def _squares(given: Array, wrong: Array, right: Array) -> tuple[float, float]:
    """The squares of the distances of what was given from what a defect gives, and from what is right."""
    with np.errstate(all="ignore"):
        wide = given.astype(np.float64)
        own, other = np.abs(wide - wrong), np.abs(wide - right)
        both = np.isfinite(own) & np.isfinite(other)
        return float(np.square(own[both]).sum()), float(np.square(other[both]).sum())


def _identical(given: Any, other: Any) -> bool:
    """Whether two results have equal bits, one that was computed in float64 rounded to the other's type."""
    if isinstance(given, np.ndarray) and isinstance(other, np.ndarray) and other.dtype == np.float64:
        with np.errstate(all="ignore"):
            other = rounded(other, given.dtype.name) if given.dtype.name in RESULTS else other
    if isinstance(other, np.ndarray) and isinstance(given, np.ndarray) and given.dtype == np.float64 != other.dtype:
        return False
    ours, theirs = list(leaves(given)), list(leaves(other))
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _same(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    (path, first), (other, second) = ours, theirs
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        bits = f"u{first.dtype.itemsize}"
        unequal = np.ascontiguousarray(first).view(bits) != np.ascontiguousarray(second).view(bits)
        return not (unequal & ~((first != first) & (second != second))).any()  # a NaN is a NaN
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return False
    return path == other and bool(first == second)


def _close(given: Any, other: Any, limits: Array, slack: float) -> bool:
    """Whether one result could be the other but for rounding."""
    if (
        not (isinstance(given, np.ndarray) and isinstance(other, np.ndarray))
        or given.shape != other.shape
        or not floating(given)
    ):
        return False
    with np.errstate(all="ignore"):
        near = other.astype(np.float32) if other.dtype != np.float32 else other
        finite = np.isfinite(given) & np.isfinite(near)
        odd = ~finite & ~((given == near) | (np.isnan(given) & np.isnan(near)))
        far = np.abs(given.astype(np.float64) - other) > slack * limits + 4 * UNIT * np.abs(other)
    return not (odd.any() or (far & finite).any())
