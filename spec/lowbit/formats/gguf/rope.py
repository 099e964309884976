"""Rotary embedding of a GGUF file: how metadata and tensors scale the frequencies.

A converter writes the rule *linear* or *yarn* with its numbers among the metadata. The factors of other rules are
tensors: one list for Llama 3.1, and two for Phi-3, one for texts up to the context of the first training and one for
longer texts. Which of the two is used depends on the context with which the file is opened, as in
`lowbit.formats.checkpoint.rope`. A file whose ``rope.dimension_count`` is less than a head rotates the first channels
of each head alone.

Source: the GGUF specification of the ggml project and its converter.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from lowbit.arrays import F32
from lowbit.attention.rope_scaling import Scaling, linear_scaling, partial_scaling, yarn_scaling
from lowbit.contract.checks import check_integer, spoken
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.gguf.architectures import LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS, Architecture
from lowbit.formats.gguf.header import Header
from lowbit.text import quoted

Kind = TypeVar("Kind", bool, int, float, str, list[str])

ORIGINAL = "rope.scaling.original_context_length"


class Source(Protocol):
    """What is read of a file."""

    @property
    def file(self) -> str:
        """Its name, for messages."""

    @property
    def header(self) -> Header:
        """Its metadata and its table of tensors."""

    def value(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind:
        """A metadata value."""

    def vector(self, name: str) -> F32:
        """A tensor of one dimension."""


@dataclass(frozen=True)
class Rotary:
    """The longest text, and the scaling of frequencies for texts up to it; None for none."""

    context: int
    scaling: Scaling | None


def read_rotary(source: Source, name: str, architecture: Architecture, head_dim: int, asked: int | None) -> Rotary:
    """The rotary embedding of a file.

    Args:
        source: the file.
        name: of its architecture, under which its keys are.
        architecture: the kind of model.
        head_dim: channels of a head.
        asked: the longest text that the caller requests; None for the default.

    Raises:
        ArgumentError: a context that the model does not have.
        FormatError: a rule that is not supported, or a number that is missing or out of range.
    """
    most = usual = source.value(f"{name}.context_length", int)
    if _has_lists(source, architecture):
        usual = min(most, source.value(f"{name}.{ORIGINAL}", int))
    if asked is not None:
        check_integer("context", asked, 1, most)
    context = usual if asked is None else asked
    channels = source.value(f"{name}.rope.dimension_count", int, head_dim)
    if channels != head_dim and not architecture.partial:
        raise FormatError(source.file, f"{name}.rope.dimension_count", channels, str(head_dim))
    try:
        scaling = _scaling(source, name, architecture, channels, context)
        return Rotary(context, scaling if channels == head_dim else partial_scaling(head_dim, channels, scaling))
    except ArgumentError as error:
        raise FormatError(source.file, error.argument, error.given, error.allowed) from error


def _has_lists(source: Source, architecture: Architecture) -> bool:
    lists = {SHORT_FACTORS, LONG_FACTORS}
    return lists <= set(architecture.rotary_factors) and not lists.isdisjoint(source.header.tensors)


def _scaling(source: Source, name: str, architecture: Architecture, channels: int, context: int) -> Scaling | None:
    """The scaling for the rotated channels of a head."""
    rule = source.value(f"{name}.rope.scaling.type", str, "none")
    if _has_lists(source, architecture):
        _check_rule(source, name, rule, ("none", "longrope"))
        lists = [tuple(source.vector(tensor).tolist()) for tensor in (SHORT_FACTORS, LONG_FACTORS)]
        chosen = lists[context > source.value(f"{name}.{ORIGINAL}", int)]
        return Scaling(chosen, source.value(f"{name}.rope.scaling.attn_factor", float))
    if ROTARY_FACTORS in architecture.rotary_factors and ROTARY_FACTORS in source.header.tensors:
        _check_rule(source, name, rule, ("none",))
        return Scaling(tuple(source.vector(ROTARY_FACTORS).tolist()))
    _check_rule(source, name, rule, architecture.rules)
    if rule == "none":
        return None
    factor = source.value(f"{name}.rope.scaling.factor", float)
    return linear_scaling(channels, factor) if rule == "linear" else _yarn(source, name, architecture, channels, factor)


def _check_rule(source: Source, name: str, rule: str, allowed: tuple[str, ...]) -> None:
    if rule not in allowed:
        named = spoken([repr(each) for each in allowed])
        raise FormatError(source.file, f"{name}.rope.scaling.type", quoted(rule), named)


ONLY = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Numbers of YaRN that change its mix or its magnitude, each with its only supported value."""


def _yarn(source: Source, name: str, architecture: Architecture, channels: int, factor: float) -> Scaling:
    for key, only in ONLY.items():
        if (given := source.value(f"{name}.rope.scaling.{key}", float, only)) != only:
            raise FormatError(source.file, f"{name}.rope.scaling.{key}", given, str(only))
    slow, fast = (
        source.value(f"{name}.rope.scaling.yarn_beta_{which}", float, usual)
        for which, usual in (("slow", 1.0), ("fast", 32.0))
    )
    base, original = source.value(f"{name}.rope.freq_base", float), source.value(f"{name}.{ORIGINAL}", int)
    return yarn_scaling(channels, base, factor, original, slow, fast, whole=architecture.whole_ramp)
