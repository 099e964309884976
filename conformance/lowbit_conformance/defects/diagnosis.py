"""Finding the mistake: wrong results are compared with the results of every defect that could explain them.

Failing cases supply arguments and results. Each arithmetical defect of the operation runs on the same arguments; one
whose results are equal in every case names the mistake. Two float results count as equal if they differ by no more than
rounding may explain, and if the actual result lies many times nearer to the defect's result than to the right one. If
no defect explains the results, `lowbit_conformance.defects.description` describes them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import numpy as np

from lowbit.arrays import Array
from lowbit_conformance.defects import places
from lowbit_conformance.defects.bank import BANK
from lowbit_conformance.defects.cache_family import of_caches
from lowbit_conformance.defects.cast_fields import of_casts_to_formats
from lowbit_conformance.defects.cast_located import of_wrong_fields
from lowbit_conformance.defects.cast_scales import of_scales_of_casts
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.families import relatives
from lowbit_conformance.defects.likeness import NEARER, floating, squares
from lowbit_conformance.defects.narrow import FORMATS
from lowbit_conformance.defects.old_output import of_added
from lowbit_conformance.defects.residual_family import of_residuals
from lowbit_conformance.defects.running import of_running
from lowbit_conformance.defects.seen import STORED, Seen, narrow_type
from lowbit_conformance.defects.stage_table import of_stages
from lowbit_conformance.defects.stored_factors import of_factors
from lowbit_conformance.defects.stored_family import of_matrices, of_scales
from lowbit_conformance.defects.stored_solved import of_solved
from lowbit_conformance.defects.stored_tables import of_codes_read
from lowbit_conformance.defects.unwritten import of_clamped, of_unwritten

MOST_NAMED = 2
NOTHING = "result-taken-as-0"
POWER = "-times-a-power"
FACTOR_NEARER = 4096.0
"""How many times smaller the squared distance must be for a factor to replace another diagnosis."""
PART = "-in-part"
NARROWED = "stored-weights-in-"
LOST = "subnormals-lost"
"""Parts of the names of defects whose weights may be 0 where right ones are not."""
LEAST_SPOILT = 3  # failures that suffice to name a defect that is wrong where the backend was right
MANY = 256
"""Number of wrong elements on which several defects must agree to count as one mistake."""
MANY_FLOATS = 8
"""The same for elements that were computed with roundings, each of which says more than a code."""
CLOSE = 0.25  # relative to the results: larger errors are not due to a narrow type
CLOSE_IN_HALF = 1 / 32  # the same for results in float16, which are always in that type
MOST_SEARCHED = 1 << 16  # elements of the arguments of a failure up to which hundreds of changes are tried
MOST_READ = 1 << 18  # the same for a stored matrix, with which few changes are tried
ROUNDING = 1e-3  # relative distance beyond which others are tried too, on the lattice
MUCH = 0.25  # fraction of that distance that those must reach


def common_defects(
    operation: str, failures: list[Seen], passes: list[Seen], most: int = MOST_NAMED
) -> tuple[Defect, ...]:
    """The defects that give every wrong result; none if too many do to mean one mistake.

    Defects that are right where the backend was right have priority. Others count only with enough results, because few
    results resemble those of many mistakes. If the bank has none, `families` and then `places` are searched; of their
    many members only those count that keep right results right. A defect that comes near the results, but does not give
    their bits where it should, counts if no other comes much nearer. Last, the wrong part is `located`.
    """
    return known_defects(operation, failures, passes, most) or located(operation, failures, passes)


def known_defects(
    operation: str, failures: list[Seen], passes: list[Seen], most: int = MOST_NAMED
) -> tuple[Defect, ...]:
    """The same without defects that only locate the wrong elements."""
    named = _explaining([defect for defect in BANK.values() if operation in defect.wrong], failures)
    fitting = _fitting(named, passes) or (named if len(failures) >= LEAST_SPOILT else [])
    found, away = _nearest(fitting, failures)
    least = min((each.size for each in failures), default=0)
    bad = [*failures, *(each for each in passes if each.wrong)]  # a case may judge only some of its calls
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
    if len(found) > most and many:  # they are indistinguishable: one mistake with several names
        return tuple(found.values())[:1]
    return tuple(found.values()) if len(found) <= most else ()


def _much_nearer(operation: str, found: list[Defect], failures: list[Seen], passes: list[Seen]) -> dict[str, Defect]:
    """Factors of the terms of codes or zeros, if these come much nearer to the results than all defects found.

    With rounded results, the error of a small factor may be within rounding. Results of 0 say nothing about factors.
    """
    if not any(isinstance(each.given, np.ndarray) and each.given.any() for each in failures):
        return {}
    others = _fitting(_explaining(of_factors(failures, operation), failures), passes)
    least = min((_distance(each, failures) for each in found), default=0.0)
    return {each.name: each for each in others if FACTOR_NEARER * _distance(each, failures) < least}


def _distance(defect: Defect, failures: list[Seen]) -> float:
    """The distance of the results from those of a defect: the sum of squares; 0 if these are not arrays."""
    outcomes = [(each, each.outcome(defect)) for each in failures]
    return sum(
        squares(each.given, wrong.astype(np.float32), each.right)[0]
        for each, wrong in outcomes
        if isinstance(wrong, np.ndarray) and wrong.shape == each.right.shape
    )


def plainest(found: dict[str, Defect]) -> dict[str, Defect]:
    """Without defects that name zeros too where another names codes or scales alone: there are no zeros then.

    Defects that name a part of a matrix where another names all of it are left out as well.
    """
    shorter = {name: name.replace("-and-zeros", "").replace("-and-zero", "") for name in found}
    shorter |= {name: name.removesuffix(PART) for name in found if name.endswith(PART)}
    return {name: each for name, each in found.items() if shorter[name] == name or shorter[name] not in found}


def _vanishing(operation: str, failures: list[Seen], passes: list[Seen]) -> list[Defect]:
    """If all results are 0: the mistake whose numbers are too small for their type, if there is one."""
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
    rest = [each for each in fitting if not each.name.endswith(POWER)] or fitting  # any small enough power is one
    return narrowed[:1] or (rest if len(rest) == 1 else [])  # the widest type first


def located(operation: str, failures: list[Seen], passes: list[Seen]) -> tuple[Defect, ...]:
    """What wrong results have in common: places where nothing was written, or the part that was read wrongly."""
    least = min((each.size for each in failures), default=0)
    bad = [*failures, *(each for each in passes if each.wrong)]
    solved = of_solved(bad, operation) if least <= MOST_READ else ()
    seen = chain(of_clamped(bad, operation), of_added(bad, operation), of_unwritten(bad, operation, passes))
    last = chain(seen, of_wrong_fields(bad, operation), solved)
    return next(((each,) for each in last if _fitting(_explaining([each], failures), passes)), ())


def unwritten(operation: str, failures: list[Seen], passes: list[Seen]) -> tuple[Defect, ...]:
    """The places that contain all wrong elements, if a loop may leave these out."""
    bad = [*failures, *(each for each in passes if each.wrong)]
    found = of_unwritten(bad, operation, passes) if failures else ()
    return next(((each,) for each in found if _fitting(_explaining([each], failures), passes)), ())


def _nearest(defects: list[Defect], failures: list[Seen]) -> tuple[dict[str, Defect], float]:
    """The defects that come nearest to the results, by name, and their largest distance from them."""
    away = [max(each.away(one) for each in failures) for one in defects]
    least = min(away, default=np.inf)
    room = ROUNDING if least > 0 else 0.0
    found: dict[str, Defect] = {}
    for one, far in zip(defects, away, strict=True):
        if far <= least + room:
            found.setdefault(one.name, one)  # of several ways to make one mistake the first is the simplest
    return found, least


def _computed_in(failures: list[Seen], passes: list[Seen]) -> Defect | None:
    """A narrow format that holds all results, though not the right ones; their sums were rounded more than once."""
    types = {narrow_type(each.operation, getattr(each.call, "given", None)) for each in failures}
    if "bfloat16" in types:
        return None  # each of these formats holds all such results
    near = CLOSE if types == {None} else CLOSE_IN_HALF
    results = [each.given for each in passes if isinstance(each.given, np.ndarray)]
    for format, (words, ways) in {"float32": ("rounded to float32", (_as_float32,)), **FORMATS}.items():
        if format == "normal-range" or any((ways[0](each) != each).any() for each in results):
            continue
        if failures and all(_lies_in(each, ways[0], format, near) for each in failures):
            cause = f"Every result is {words}, with more loss than by one rounding: sums are kept like this."
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
    """The defects that are right where the backend was right."""
    return [defect for defect in defects if all(passed.unspoilt(defect) for passed in passes)]


def _explaining(defects: Iterable[Defect], failures: list[Seen]) -> list[Defect]:
    """The defects that give every wrong result; small results are compared first."""
    left = list(defects)
    for failure in sorted(failures, key=lambda each: each.size):
        left = [defect for defect in left if failure.explained(defect)]
    return left


def sentence(defects: tuple[Defect, ...]) -> str:
    """The sentence of a report on results that a defect explains.

    >>> sentence((BANK["result-doubled"],))
    'all wrong results are what result-doubled gives: Results are twice as large.'
    """
    names, causes = " or ".join(each.name for each in defects), " Or: ".join(each.cause for each in defects)
    return f"all wrong results are what {names} gives: {causes}"
