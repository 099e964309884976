"""Rotary embedding of a checkpoint: the base, and how the frequencies are scaled for a longer context.

The base is ``rope_theta``. A scaling is an object ``rope_scaling`` whose ``rope_type``, in older files ``type``, names
the rule; the numbers of the rule stand beside it. Newer files keep both in one object, ``rope_parameters``. Where a
model has local layers with a base of their own, that is ``rope_local_base_freq``, and the newer object holds one such
object for each of the two kinds of layers.

`RULES` lists the rules that are supported with their numbers. Any other rule or number is refused, because it would be
another rotation: *dynamic* and *longrope* choose their factors by the length of the text.

Source: the published ``config.json`` of Llama 3.1, Qwen 2.5 and Gemma 3; the ``transformers`` library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowbit.attention.rope import Scaling, linear_scaling, llama3_scaling, yarn_scaling
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.system.json_files import Fields, described
from lowbit.text import quoted

KEPT = "rope_parameters"
FULL, LOCAL = "full_attention", "sliding_attention"
BASE, LOCAL_BASE = "rope_theta", "rope_local_base_freq"
ORIGINAL = "original_max_position_embeddings"
ALWAYS = ("rope_type", "type", BASE, "partial_rotary_factor")


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model: the base and the scaling, and the base of local layers if they have one."""

    base: float
    scaling: Scaling | None = None
    local_base: float | None = None


def read_rotary(fields: Fields, head_dim: int, default: float | None) -> Rotary:
    """The rotary embedding that a configuration describes.

    Args:
        fields: of ``config.json``.
        head_dim: channels of a head.
        default: the base where no field gives it; None where one must.

    Raises:
        FormatError: a rule or a number that is not supported, two different answers, or no base.
    """
    kept = fields.optional(KEPT, dict) or {}
    old, local_base = fields.optional("rope_scaling", dict), fields.optional(LOCAL_BASE, float)
    if FULL in kept or LOCAL in kept:
        if kept.keys() - {FULL, LOCAL}:
            raise FormatError(fields.file, KEPT, described(kept), f"{FULL} and {LOCAL}")
        both = Fields(fields.file, kept)
        kept, local = both.value(FULL, dict), both.value(LOCAL, dict)
        local_fields = Fields(f"{fields.file}: {KEPT}.{LOCAL}", local)
        if _scaling(local_fields, head_dim, 1.0) is not None:
            raise FormatError(local_fields.file, "rope_type", described(local), "'default'")
        local_base = _same(fields.file, LOCAL_BASE, [local_base, local_fields.optional(BASE, float)])
    parts = [Fields(f"{fields.file}: {key}", part) for key, part in (("rope_scaling", old or {}), (KEPT, kept))]
    base = _same(fields.file, BASE, [part.optional(BASE, float) for part in (fields, *parts)])
    base = default if base is None else base
    if base is None or not base > 0:
        raise FormatError(fields.file, BASE, "missing" if base is None else base, "a number above 0")
    scalings = [_scaling(part, head_dim, base) for part in parts]
    given = [scaling for scaling in scalings if scaling is not None]
    if len(set(given)) > 1:
        raise FormatError(fields.file, "rope_scaling", "another than rope_parameters", "the same scaling")
    return Rotary(base, given[0] if given else None, local_base)


def _same(file: str, key: str, given: list[float | None]) -> float | None:
    """The number on which all fields that give one agree."""
    numbers = [number for number in given if number is not None]
    if len(set(numbers)) > 1:
        raise FormatError(file, key, " and ".join(map(str, dict.fromkeys(numbers))), "one number")
    return numbers[0] if numbers else None


# **The rules.**

CALLED = {
    **{"low": "low_freq_factor", "high": "high_freq_factor", "original": ORIGINAL},
    **{"slow": "beta_slow", "fast": "beta_fast", "magnitude": "attention_factor", "base": BASE},
}
"""What the arguments of the chapter `lowbit.attention.rope` are called in the file."""


def _linear(fields: Fields, head_dim: int, base: float) -> Scaling:
    return linear_scaling(head_dim, fields.value("factor", float))


def _llama3(fields: Fields, head_dim: int, base: float) -> Scaling:
    low, high = (fields.value(f"{which}_freq_factor", float) for which in ("low", "high"))
    return llama3_scaling(head_dim, base, fields.value("factor", float), low, high, fields.value(ORIGINAL, int))


def _yarn(fields: Fields, head_dim: int, base: float) -> Scaling:
    slow, fast = fields.value("beta_slow", float, 1.0), fields.value("beta_fast", float, 32.0)
    magnitude, original = fields.optional("attention_factor", float), fields.value(ORIGINAL, int)
    return yarn_scaling(head_dim, base, fields.value("factor", float), original, slow, fast, magnitude)


RULES: dict[str, tuple[Callable[[Fields, int, float], Scaling | None], tuple[str, ...]]] = {
    "default": (lambda fields, head_dim, base: None, ()),
    "linear": (_linear, ("factor",)),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": (_yarn, ("factor", "beta_slow", "beta_fast", "attention_factor", ORIGINAL)),
}
"""For each rule the function that reads it, and the names of its numbers."""


def _scaling(fields: Fields, head_dim: int, base: float) -> Scaling | None:
    """The scaling that an object describes."""
    given: dict[str, Any] = {name: value for name, value in fields.values.items() if value is not None}
    rule = fields.value("rope_type", str, fields.value("type", str, "default"))
    if rule not in RULES or fields.value("type", str, rule) != rule:
        raise FormatError(fields.file, "rope_type", quoted(rule), spoken([repr(name) for name in RULES]))
    read, numbers = RULES[rule]
    for name in sorted(given.keys() - {*ALWAYS, *numbers}):
        raise FormatError(fields.file, name, described(given[name]), f"absent from a scaling of type '{rule}'")
    if (part := fields.value("partial_rotary_factor", float, 1.0)) != 1:
        raise FormatError(fields.file, "partial_rotary_factor", part, "1.0")
    try:
        return read(fields, head_dim, base)
    except ArgumentError as error:
        called = CALLED.get(error.argument, error.argument)
        raise FormatError(fields.file, called, error.given, error.allowed) from error
