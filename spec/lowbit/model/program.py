r"""Programs: the lines in which the step of a decoder is written.

A program is a list of lines such as ``query = product(normed; query)``. A line names an operation, the values that it
reads, a parameter among the weights (`lowbit.model.weights`) and the value that it writes. A value is a matrix with a
row for each of the :math:`T` tokens of the call; heads lie side by side in its columns. No value is written twice.

The chapter `step` has the programs of the models, and checks programs of others.
"""

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from lowbit.attention.rope import Frequencies
from lowbit.attention.rope_scaling import Scaling
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError

Kind = Literal[
    "embed",
    "norm",
    "product",
    "bias",
    "rotate",
    "rotate_sorted",
    "append",
    "attend",
    "attend_shaped",
    "swiglu",
    "geglu",
    "clamped_swiglu",
    "gate",
    "experts",
    "add",
    "scale",
    "soft_cap",
]
ANY: tuple[str | None, ...] = ()
NONE: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Form:
    """The form of the lines of a kind.

    Attributes:
        operation: the operation of the specification; None for a copy or one rounding.
        said: what the lines do, in a phrase.
        inputs: the number of values that they read.
        parameters: the parameters that they may have, None for no parameter; empty if they may have any but None.
        settings: the names of the settings that they must have.
        optional: the names of those that they may have.
    """

    operation: str | None
    said: str
    inputs: int = 1
    parameters: tuple[str | None, ...] = NONE
    settings: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


FORMS: Mapping[Kind, Form] = MappingProxyType(
    {
        "embed": Form(None, "rows of the embedding, times a factor", parameters=("embedding",), settings=("scale",)),
        "norm": Form("blocks.rms_norm", "RMSNorm of runs as long as the gain", parameters=ANY, settings=("epsilon",)),
        "product": Form("linear.gemm", "a linear layer", parameters=ANY),
        "bias": Form(None, "a vector added to every row", parameters=ANY),
        "rotate": Form(
            "rope.rotate", "heads rotated by their positions", settings=("head_dim", "base"), optional=("scaling",)
        ),
        "rotate_sorted": Form(
            "rope.rotate",
            "the same, of heads whose channels stand in another order",
            parameters=("key_order",),
            settings=("head_dim", "base", "heads"),
            optional=("scaling",),
        ),
        "append": Form(None, "keys and values go to the cache", inputs=2),
        "attend": Form(
            "attention.attend",
            "attention over the cache, these tokens included",
            settings=("head_dim",),
            optional=("window",),
        ),
        "attend_shaped": Form(
            "attention.attend_shaped",
            "the same with a factor, a soft cap and sinks",
            parameters=("sinks", None),
            settings=("head_dim",),
            optional=("window", "scale", "cap"),
        ),
        "swiglu": Form("blocks.swiglu", "silu of the first times the second", inputs=2),
        "geglu": Form("blocks.geglu", "gelu of the first times the second", inputs=2),
        "clamped_swiglu": Form("blocks.clamped_swiglu", "the clamped unit of both", inputs=2, settings=("limit",)),
        "gate": Form("routing.gate", "the scores of the experts", parameters=("feed_forward.router",)),
        "experts": Form(
            "routing.sparse",
            "the experts that scores choose, weighted",
            inputs=2,
            parameters=("feed_forward.experts",),
            settings=("top_k", "softmax", "activation"),
            optional=("limit", "biases"),
        ),
        "add": Form(None, "the sum of two values", inputs=2),
        "scale": Form(None, "a value times a factor", settings=("factor",)),
        "soft_cap": Form("blocks.soft_cap", "numbers kept between a cap and its negative", settings=("cap",)),
    }
)
"""The form of each kind of line. Backends compute operations only. The operation of a product follows from the format
of its matrix and the contract."""

BEGIN, END = "x", "result"
"""The residual stream before a block, and after it."""


Setting = int | float | str | Scaling


@dataclass(frozen=True)
class Line:
    """One line of a program.

    Attributes:
        kind: what it does, one of `FORMS`.
        out: the value that it writes; empty for ``append``, which writes to the cache.
        inputs: the values that it reads.
        parameter: its weights, by their name in the block; None if it has none.
        settings: numbers and choices of the model, by name; such as ``epsilon`` of a norm.
    """

    kind: Kind
    out: str
    inputs: tuple[str, ...]
    parameter: str | None = None
    settings: tuple[tuple[str, Setting], ...] = ()

    def setting(self, name: str) -> Any:
        """One of its settings; None if it has none of this name."""
        return dict(self.settings).get(name)

    @property
    def frequencies(self) -> Frequencies:
        """Those of a rotation."""
        return Frequencies(self.setting("base"), self.setting("scaling"))

    def __str__(self) -> str:
        """Its printed form.

        >>> str(Line("attend", "mixed", ("query_rotated",), settings=(("head_dim", 64), ("window", 512))))
        'mixed = attend(query_rotated; head_dim 64, window 512)'
        """
        behind = [] if self.parameter is None else [self.parameter]
        behind += [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in self.settings
        ]
        call = f"{self.kind}({', '.join(self.inputs)}{'; ' if behind else ''}{', '.join(behind)})"
        return f"{self.out} = {call}" if self.out else call


Program = tuple[Line, ...]


TYPES: Mapping[str, type] = MappingProxyType({"softmax": str, "activation": str, "biases": str, "scaling": Scaling})
"""The types of settings that are no numbers."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
"""Names of values: some readers write them into source code."""


def check_form(line: Line) -> None:
    """Refuse a line that does not have the form of its kind.

    >>> check_form(Line("norm", "normed", ("x",), "attention_norm"))
    Traceback (most recent call last):
    ...
    lowbit.errors.ArgumentError: line of a program is 'normed = norm(x; attention_norm)'; allowed: the setting epsilon

    Raises:
        ArgumentError: there is no such kind; it reads another number of values; it lacks a parameter or a setting, or
            has one that its kind has not; it has a name of another kind than `NAME`.
    """
    form = FORMS.get(line.kind)
    if form is None:
        raise unsound(line, f"a kind among {spoken([*FORMS])}")
    if len(line.inputs) != form.inputs:
        raise unsound(line, f"{form.inputs} {'value' if form.inputs == 1 else 'values'} to read")
    fits = line.parameter in form.parameters if form.parameters else line.parameter is not None
    if not fits:
        allowed = ["no parameter" if name is None else f"the parameter {name}" for name in form.parameters]
        raise unsound(line, spoken(allowed) or "a parameter")
    for name in (*line.inputs, line.out):
        if name and not NAME.fullmatch(name):
            raise unsound(line, f"names of lower-case letters, digits and underscores, not {name!r}")
    if (line.kind == "append") != (not line.out):
        raise unsound(line, "no value to write" if line.kind == "append" else "a value to write")
    _check_settings(line, form)


def _check_settings(line: Line, form: Form) -> None:
    given, known = [name for name, _ in line.settings], (*form.settings, *form.optional)
    for name in form.settings:
        if name not in given:
            raise unsound(line, f"the setting {name}")
    for name, value in line.settings:
        if name not in known or given.count(name) > 1:
            raise unsound(line, f"{spoken(known) or 'no setting'}, once, not {name}")
        if name in TYPES:
            if not isinstance(value, TYPES[name]):
                raise unsound(line, f"{name} of the type {TYPES[name].__name__}")
        elif not isinstance(value, int | float) or not math.isfinite(value) or (value <= 0 and name != "factor"):
            raise unsound(line, f"{name} {'a finite number' if name == 'factor' else 'a finite number above 0'}")


def unsound(line: Line, allowed: str) -> ArgumentError:
    """The error for a line of a program that is not sound."""
    return ArgumentError("line of a program", repr(str(line)), allowed)


def overwritten(program: Program, places: Mapping[str, Hashable]) -> Line | None:
    """The first line that reads a value whose place another value has overwritten; None if there is none.

    >>> program = Line("norm", "a", ("x",)), Line("norm", "b", ("x",)), Line("add", "result", ("x", "a"))
    >>> str(overwritten(program, {"x": 0, "a": 1, "b": 1, "result": 0}))
    'result = add(x, a)'

    Args:
        program: a sound one.
        places: where a reader keeps each value.
    """
    held = {places[BEGIN]: BEGIN}
    for line in program:
        if any(held.get(places[name]) != name for name in line.inputs):
            return line
        if line.out:
            held[places[line.out]] = line.out
    return None
