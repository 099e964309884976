"""Plain functions under the suite: from the command line, from Python, and as a test of pytest.

A function is given with the operation that it computes and what it handles (`lowbit.backend.function`).

>>> limits_of(["bits=4,8", "columns=*64", "rows=*32:128..4096", "format=q4_0"])  # doctest: +NORMALIZE_WHITESPACE
{'bits': (4, 8), 'columns': Range(multiple=64, least=1, most=None),
 'rows': Range(multiple=32, least=128, most=4096), 'format': ('q4_0',)}
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowbit.backend import Range
from lowbit.backend.declarations import LIMITS
from lowbit.backend.function import ARRAYS, Claim, described
from lowbit.contract.checks import check_choice, spoken
from lowbit.contract.operation import Promise
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.profiles import profile
from lowbit.tensor_formats.stored import FORMATS

WRITTEN = re.compile(r"(\w+)=(.+)")
SIZES = re.compile(r"(?:\*(\d{1,9}))?(?::?(\d{1,9})\.\.(\d{1,9})?)?")
ALLOWED = "NAME=VALUE, NAME=VALUE,VALUE, NAME=*MULTIPLE, NAME=LEAST..MOST or NAME=*MULTIPLE:LEAST..MOST"


def limits_of(texts: Iterable[str]) -> dict[str, object]:
    """The limits from options ``--limit``.

    Raises:
        ArgumentError: a text of another form.
    """
    found: dict[str, object] = {}
    for text in texts:
        named = WRITTEN.fullmatch(text)
        if named is None:
            raise ArgumentError("--limit", repr(text), ALLOWED)
        name, values = named.groups()
        sizes = SIZES.fullmatch(values)
        if sizes is not None:
            multiple, least, most = sizes.groups()
            found[name] = Range(int(multiple or 1), int(least or 1), None if most is None else int(most))
        else:
            found[name] = tuple(int(each) if each.isdigit() else each for each in values.split(","))
    return found


def function_target(
    function: str,
    operation: str | None,
    types: Mapping[str, str | None],
    limits: Iterable[str],
    arrays: str,
    device: str,
    profiles: Iterable[str] = (),
) -> tuple[tuple[str, ...], tuple[str, str]]:
    """How the command line names a function, and how the judge is told of it.

    Raises:
        ArgumentError: there is no operation or profile, or it does not exist; the format of a stored matrix is missing;
            a limit has another form.
    """
    promised, asked = claimed(profiles)
    operation = check_operation("--operation", operation or promised)
    if promised not in (None, operation):
        raise ArgumentError("--operation", operation, f"{promised}, which the profile is about")
    given = {name: each for name, each in types.items() if each is not None}
    words = ["--function", function, "--operation", operation]
    words += [word for name, each in given.items() for word in (f"--{name}", each)]
    words += [word for each in limits for word in ("--limit", each)]
    words += ["--arrays", arrays] * (arrays != "numpy") + ["--device", device] * (device != "cpu")
    handled = {**asked, **limits_of(limits), **with_result(given)}
    return tuple(words), ("--function", described(function, claim_of(operation, None, arrays, device, handled, "--")))


def claimed(profiles: Iterable[str]) -> tuple[str | None, dict[str, object]]:
    """The operation and limits of the profiles that a function claims; None and no limits without a profile.

    >>> claimed(["lowbit-1.1/q4_0-q8_0"])[1]["activations"]
    ('q8_0',)

    Raises:
        ArgumentError: no such profile, or one of several operations; two profiles at once.
    """
    names = list(profiles)
    if not names:
        return None, {}
    if len(names) > 1:
        raise ArgumentError("profiles of a function", len(names), "one")
    one = profile(names[0])
    if len(one.operations) > 1:
        raise ArgumentError("profile of a function", f"{one.id}, of {spoken(one.operations)}", "one of one operation")
    return one.operations[0], dict(one.parameters)


def with_result(types: Mapping[str, object]) -> dict[str, object]:
    """Add the default result type, that of the activations."""
    found = dict(types)
    if "activations" in found and "result" not in found:
        found["result"] = found["activations"]
    return found


def claim_of(
    operation: str,
    arithmetic: Arithmetic | None,
    arrays: str,
    device: str,
    limits: Mapping[str, object],
    before: str = "",
) -> Claim:
    """The claim of what a function computes; `before` precedes the names of arguments in messages.

    Raises:
        ArgumentError: the operation is unknown; the format of a stored matrix is missing, which determines the names
            and meaning of its arrays; an arithmetic is given for an exact operation.
    """
    check_operation(f"{before}operation", operation)
    if "format" in LIMITS.get(operation, ()) and "format" not in limits:
        known = spoken(list(FORMATS))
        sentence = f"{operation} needs {before}format, the format of the matrix that the function takes: {known}"
        raise ArgumentError(f"{before}format", "not given", known, sentence)
    given = limits.get("format", ())
    for each in given if isinstance(given, (tuple, list, set, frozenset)) else (given,):
        check_choice(f"{before}format", each, tuple(FORMATS))
    if arithmetic is not None and OPERATIONS[operation].promise is Promise.EXACT:
        raise ArgumentError("arithmetic", "given", "None", f"arithmetic must be None, since {operation} is exact")
    return Claim(operation, with_result(limits), arithmetic, check_choice(f"{before}arrays", arrays, ARRAYS), device)


def check_operation(argument: str, operation: str | None) -> str:
    """Check that a function can compute the operation."""
    check_choice(argument, operation, [name for name, each in OPERATIONS.items() if not each.stateful])
    return str(operation)


def name_of(function: Callable[..., Any] | str) -> str:
    """The name of a function in a report."""
    return function if isinstance(function, str) else str(getattr(function, "__qualname__", "function"))
