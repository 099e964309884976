"""Rotary embedding of a checkpoint: the base, and how the frequencies are scaled for a longer context.

The base is ``rope_theta``. A scaling is an object ``rope_scaling`` whose ``rope_type``, in older files ``type``, names
the rule; the numbers of the rule stand beside it. Newer files keep both in one object, ``rope_parameters``. Where a
model has local layers with a base of their own, that is ``rope_local_base_freq``, and the newer object holds one such
object for each of the two kinds of layers; each may have a rule of its own.

`RULES` lists the rules that are supported with their numbers. Any other rule or number is refused, because it would be
another rotation. ``partial_rotary_factor`` is the fraction of a head that is rotated; only some kinds of model rotate a
part of a head, and under the rule *proportional* any kind may.

**The context decides.** *dynamic* and *longrope* choose their factors by the length of the text, which is not known
when the first token is rotated. Here the context with which the model is opened decides for all texts. By default it is
the length :math:`L` that the model was first trained on, and a caller may ask for more: then the factors are those of
a text of that length. The ``transformers`` library decides by the length of each call; both agree where the context is
the length of the text, and where both are at most :math:`L`.

Source: the published ``config.json`` of Llama 3.1, Qwen 2.5, Gemma 3 and Phi-3; the ``transformers`` library.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowbit.attention.rope_scaling import (
    Scaling,
    dynamic_scaling,
    linear_scaling,
    llama3_scaling,
    long_scaling,
    partial_scaling,
    proportional_scaling,
    yarn_scaling,
)
from lowbit.contract.checks import check_integer, spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.system.json_files import Fields, described
from lowbit.text import quoted

KEPT, OLD = "rope_parameters", "rope_scaling"
FULL, LOCAL = "full_attention", "sliding_attention"
BASE, LOCAL_BASE = "rope_theta", "rope_local_base_freq"
CONTEXT, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
PART = "partial_rotary_factor"
ALWAYS = ("rope_type", "type", BASE, PART)


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model.

    Attributes:
        base: of the frequencies.
        context: the longest text.
        scaling: of the frequencies; None if they are not scaled.
        local_base: the base in local layers, if they have their own.
        local_scaling: of the frequencies in these layers.
    """

    base: float
    context: int
    scaling: Scaling | None = None
    local_base: float | None = None
    local_scaling: Scaling | None = None


@dataclass(frozen=True)
class Head:
    """What a rule needs besides its own numbers.

    Attributes:
        channels: of a head.
        base: of the frequencies.
        most: the context that the file gives.
        original: the context of the first training, if the file gives it outside the objects; else None.
        partial: whether every rule may rotate only a part of a head in this kind of model.
        part: the fraction of a head that is rotated, if the object does not give it.
    """

    channels: int
    base: float
    most: int
    original: int | None
    partial: bool
    part: float


def read_rotary(
    fields: Fields, head_dim: int, default: float | None, context: int | None = None, *, partial: bool = False
) -> Rotary:
    """The rotary embedding that a configuration describes.

    Args:
        fields: of ``config.json``.
        head_dim: channels of a head.
        default: the base if no field gives it; None if one must.
        context: the longest text that the caller requests; None for the default.
        partial: whether the kind of model may rotate a part of a head.

    Raises:
        ArgumentError: a context that the model does not have.
        FormatError: a rule or a number that is not supported, two different answers, or no base.
    """
    kept = fields.optional(KEPT, dict) or {}
    old, local_base, local = fields.optional(OLD, dict), fields.optional(LOCAL_BASE, float), None
    if FULL in kept or LOCAL in kept:
        if kept.keys() - {FULL, LOCAL}:
            raise FormatError(fields.file, KEPT, described(kept), f"{FULL} and {LOCAL}")
        both = Fields(fields.file, kept)
        kept, local = both.value(FULL, dict), Fields(f"{fields.file}: {KEPT}.{LOCAL}", both.value(LOCAL, dict))
        local_base = _same(fields.file, LOCAL_BASE, [local_base, local.optional(BASE, float)])
    parts = [Fields(f"{fields.file}: {key}", part) for key, part in ((OLD, old or {}), (KEPT, kept))]
    base = _same(fields.file, BASE, [part.optional(BASE, float) for part in (fields, *parts)])
    base = default if base is None else base
    if base is None or not base > 0:
        raise FormatError(fields.file, BASE, "missing" if base is None else base, "a number above 0")
    most, original = fields.value(CONTEXT, int), fields.optional(ORIGINAL, int)
    head = Head(head_dim, base, most, original, partial, fields.value(PART, float, 1.0))
    objects = [part for part in parts if part.values] or parts[:1]
    length = _length([*objects, *([local] if local else [])], head, context)
    given = [scaling for part in objects if (scaling := _scaling(part, head, length)) is not None]
    if len(set(given)) > 1:
        raise FormatError(fields.file, OLD, f"another than {KEPT}", "the same scaling")
    local_scaling = _scaling(local, replace(head, base=local_base or base), length) if local else None
    return Rotary(base, length, given[0] if given else None, local_base, local_scaling)


def _same(file: str, key: str, given: list[float | None]) -> float | None:
    """The number on which all fields that give one agree."""
    numbers = [number for number in given if number is not None]
    if len(set(numbers)) > 1:
        raise FormatError(file, key, " and ".join(map(str, dict.fromkeys(numbers))), "one number")
    return numbers[0] if numbers else None


# **The context.**


def _length(objects: list[Fields], head: Head, asked: int | None) -> int:
    """The longest text: the requested one, or the default length of every rule."""
    limits = [_limits(each, _rule(each), head) for each in objects]
    if asked is None:
        return min(usual for usual, _ in limits)
    check_integer("context", asked, 1, min(most for _, most in limits))
    return asked


def _limits(fields: Fields, rule: str, head: Head) -> tuple[int, int]:
    """The default and the longest length under a rule."""
    if rule == "dynamic":
        return head.most, int(min(fields.value("factor", float), 2.0**20) * head.most)
    return (min(head.most, _original(fields, head)) if rule == "longrope" else head.most), head.most


def _original(fields: Fields, head: Head) -> int:
    """The context of the first training, given inside or outside the object."""
    found = _same(fields.file, ORIGINAL, [head.original, fields.optional(ORIGINAL, int)])
    return fields.value(ORIGINAL, int) if found is None else int(found)


# **The rules.**

CALLED = {
    **{"low": "low_freq_factor", "high": "high_freq_factor", "original": ORIGINAL},
    **{"slow": "beta_slow", "fast": "beta_fast", "magnitude": "attention_factor", "base": BASE},
    **{"channels": PART, "pairs": PART},
}
"""The file's names for the arguments of the chapter `lowbit.attention.rope_scaling`."""

LISTS = ("short_factor", "long_factor")


def _linear(fields: Fields, head: Head, length: int) -> Scaling:
    return linear_scaling(head.channels, fields.value("factor", float))


def _llama3(fields: Fields, head: Head, length: int) -> Scaling:
    low, high = (fields.value(f"{which}_freq_factor", float) for which in ("low", "high"))
    factor, original = fields.value("factor", float), fields.value(ORIGINAL, int)
    return llama3_scaling(head.channels, head.base, factor, low, high, original)


def _yarn(fields: Fields, head: Head, length: int) -> Scaling:
    slow, fast = fields.value("beta_slow", float, 1.0), fields.value("beta_fast", float, 32.0)
    magnitude, original = fields.optional("attention_factor", float), fields.value(ORIGINAL, int)
    whole, factor = fields.value("truncate", bool, True), fields.value("factor", float)
    return yarn_scaling(head.channels, head.base, factor, original, slow, fast, magnitude, whole=whole)


def _dynamic(fields: Fields, head: Head, length: int) -> Scaling:
    return dynamic_scaling(head.channels, fields.value("factor", float), head.most, length)


def _longrope(fields: Fields, head: Head, length: int) -> Scaling:
    lists = [_factors(fields, name, head.channels // 2) for name in LISTS]
    original, factor = _original(fields, head), fields.optional("factor", float)
    times = head.most / max(1, original) if factor is None else factor
    return long_scaling(lists[length > original], times, original, fields.optional("attention_factor", float))


def _factors(fields: Fields, name: str, pairs: int) -> list[float]:
    """A list of factors, one for each pair that is rotated."""
    given = fields.value(name, list)
    if len(given) != pairs:
        allowed = f"{pairs} numbers, one for each pair of channels that is rotated"
        raise FormatError(fields.file, name, f"a list of {len(given)}", allowed)
    named = Fields(fields.file, {f"{name}[{number}]": each for number, each in enumerate(given)})
    return [named.value(each, float) for each in named.values]


Rule = Callable[[Fields, Head, int], Scaling | None]

RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "default": (lambda fields, head, length: None, ()),
    "linear": (_linear, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": (_yarn, ("factor", "beta_slow", "beta_fast", "attention_factor", "truncate", ORIGINAL)),
    "dynamic": (_dynamic, ("factor",)),
    "longrope": (_longrope, (*LISTS, "factor", "attention_factor", ORIGINAL)),
    "proportional": (lambda fields, head, length: None, ("factor",)),
}
"""For each rule, the function that reads it, given the rotated channels and the longest text, and the names of its
numbers. *proportional* concerns the whole head and is read by `_scaling`."""

ALSO_CALLED = {"su": "longrope"}
"""Older names of rules."""


def _rule(fields: Fields) -> str:
    """The rule of an object, a key of `RULES`."""
    names = [fields.value(key, str, "default") for key in ("rope_type", "type") if fields.values.get(key) is not None]
    names = [ALSO_CALLED.get(name, name) for name in names] or ["default"]
    if names[0] not in RULES or names[-1] != names[0]:
        raise FormatError(fields.file, "rope_type", quoted(names[0]), spoken([repr(name) for name in RULES]))
    return names[0]


def _scaling(fields: Fields, head: Head, length: int) -> Scaling | None:
    """The scaling that an object describes, for texts up to a length."""
    given: dict[str, Any] = {name: value for name, value in fields.values.items() if value is not None}
    rule = _rule(fields)
    read, numbers = RULES[rule]
    for name in sorted(given.keys() - {*ALWAYS, *numbers}):
        raise FormatError(fields.file, name, described(given[name]), f"absent from a scaling of type '{rule}'")
    part = fields.value(PART, float, head.part)
    if not 0 < part <= 1:
        raise FormatError(fields.file, PART, part, "a number above 0 and at most 1")
    try:
        if rule == "proportional":
            return proportional_scaling(
                head.channels, int(part * head.channels // 2), fields.value("factor", float, 1.0)
            )
        if part == 1:
            return read(fields, head, length)
        if not head.partial:
            raise FormatError(fields.file, PART, part, "1.0 for this kind of model, unless the rule is 'proportional'")
        channels = int(part * head.channels)
        partial_scaling(head.channels, channels)  # refuses a wrong number of channels before the rule reads it
        return partial_scaling(head.channels, channels, read(fields, replace(head, channels=channels), length))
    except ArgumentError as error:
        called = CALLED.get(error.argument, error.argument)
        raise FormatError(fields.file, called, error.given, error.allowed) from error
