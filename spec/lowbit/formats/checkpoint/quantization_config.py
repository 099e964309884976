"""How a checkpoint was quantised, as its ``config.json`` says.

Tools that quantise a checkpoint leave a ``quantization_config`` there. Each has names of its own for the number of bits
and the weights of a group; `NUMBERS` lists them. What is missing is None, and what cannot be such a number is refused.
Nothing is computed from these numbers that the tensors do not confirm.

**The method** says how tensors are to be read: those of another method may have the same names and other numbers in
them. So a checkpoint is opened only if its method is one of `METHODS`, or has no name.

**Modules that stay floats**, such as the head or routers, stand in a list, for which each tool has another word. The
tensors show it too, so a list is only compared with them: a module that it names and that is quantised nevertheless is
refused. Some entries are patterns, regular expressions among them; those of a file are never run, and not compared.

**Other bits for some matrices** are what GPTQModel's ``dynamic`` and AutoRound's ``extra_config`` ask for, by patterns
as well, and other groups. The tensors show both for each matrix; `Method.allowed_bits` and `Method.group_sizes` hold
all that may come.

Source: transformers, ``utils/quantization_config.py``; GPTQModel, ``quantization/config.py`` (``dynamic``); AutoRound,
``export/export_to_autoround``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit.contract.checks import spoken
from lowbit.errors import FormatError
from lowbit.system.json_files import LARGEST_INTEGER, Fields, described, read_fields
from lowbit.tensor_formats.compressed_tensors import OPTIONS
from lowbit.text import quoted

CONFIGS = ("quantization_config", "compression_config")
UNNAMED = "not named"
METHODS = (
    *("gptq", "auto-round", "awq", "compressed-tensors", "modelopt", "fp8", "fbgemm_fp8"),
    *("bitsandbytes", "hqq", "mxfp4"),
)
"""The methods that are read, as ``quant_method`` spells them."""
COMPRESSED = "compressed-tensors"
OLDER = "quantize_config.json"
"""The file in which AutoGPTQ kept the configuration before ``config.json`` had a field for it."""
GROUPS, FIRST = "config_groups", "group_0"
_GROUP = (GROUPS, FIRST, "weights")
NUMBERS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "bits": (
        ("bits",),
        ("w_bit",),
        (*_GROUP, "num_bits"),
        ("quant_config", "weight_quant_params", "nbits"),
        ("nbits",),
    ),
    "group_size": (
        ("group_size",),
        ("q_group_size",),
        (*_GROUP, "group_size"),
        ("quant_config", "weight_quant_params", "group_size"),
    ),
    "axis": (("quant_config", "weight_quant_params", "axis"), ("axis",)),
}
"""The fields in which configurations keep their numbers."""
MOST_BITS = 16
ALLOWED: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "bits": (lambda bits: 1 <= bits <= MOST_BITS, f"an integer from 1 to {MOST_BITS}"),
    "group_size": (lambda size: size == -1 or 1 <= size <= LARGEST_INTEGER, "a positive integer, or -1 for whole rows"),
    "axis": (lambda axis: axis in (0, 1), "0 or 1"),
}
"""The allowed values, and their wording in errors."""
LABELS = tuple(
    (key,) for key in ("checkpoint_format", "packing_format", "version", "format", "quant_algo", "bnb_4bit_quant_type")
)
"""The fields that name the layout of the tensors."""
LAYOUTS = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "gemm",
}
"""AutoRound's names for the layouts of other tools."""
FLOATS = (
    "modules_to_not_convert",
    "ignore",
    "ignored_layers",
    "llm_int8_skip_modules",
    "skip_modules",
    "exclude_modules",
)
"""The lists of modules that stay floats."""
PATTERN = set("*?[]()|^$+\\:")
"""The characters that occur only in patterns."""
RULES = ("dynamic", "extra_config")
"""Objects of GPTQModel and AutoRound that give other bits to some matrices."""
REFUSED = ("transform_config", "sparsity_config")
"""Objects that require more than quantised matrices. Groups of matrices are refused if their formats differ."""
IMPLIED = {"fp8": (8, None), "fbgemm_fp8": (8, None), "mxfp4": (4, 32), "NVFP4": (4, 16), "FP8": (8, None)}
"""Bits and group size of methods or labels that give neither."""


@dataclass(frozen=True)
class Method:
    """How a checkpoint was quantised, as its configuration says.

    Attributes:
        name: its spelling there, such as ``gptq``.
        bits: of a code; None if they are not given.
        group_size: weights with one scale, -1 for a whole row; None if it is not given.
        axis: of HQQ.
        label: its own name for the layout of its tensors; empty if it has none.
        allowed_bits: the bits that its matrices may have; empty if not given.
        group_sizes: the same for `group_size`.
        floats: modules that stay floats, or the ends of their names.
        activations: how the tool casts activations, in words; empty if it does not.
        unsupported: the name of a part of the configuration that requires more than quantised matrices; else empty.
        file: the name of the file that says so.
    """

    name: str
    bits: int | None = None
    group_size: int | None = None
    axis: int | None = None
    label: str = ""
    allowed_bits: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()
    floats: tuple[str, ...] = ()
    activations: str = ""
    unsupported: str = ""
    file: str = "config.json"

    @property
    def layout(self) -> str:
        """The label in lower case, as the owner of the layout spells it.

        >>> Method("auto-round", label="auto_round:auto_gptq").layout
        'gptq'
        """
        return LAYOUTS.get(self.label.lower(), self.label.lower())

    def keeps_float(self, module: str) -> bool:
        """Whether the configuration says that a module stays a float.

        >>> method = Method("awq", floats=("lm_head", "mlp.gate"))
        >>> [method.keeps_float(each) for each in ("lm_head", "layers.0.mlp.gate", "layers.0.mlp.gate_proj")]
        [True, True, False]
        """
        return any(f".{each}." in f".{module}." for each in self.floats)

    def check(self) -> None:
        """Refuse a method that is not read, and bits that no format of compressed-tensors has.

        >>> Method("quark").check()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lowbit.errors.FormatError: config.json: quant_method is 'quark'; allowed: gptq, ...
        """
        if self.name not in (*METHODS, UNNAMED):
            raise FormatError(self.file, "quant_method", quoted(self.name), spoken(METHODS))
        stored = OPTIONS["bits"] or ()
        if self.name == COMPRESSED and (wrong := set(self.allowed_bits) - set(stored)):
            raise FormatError(self.file, f"number of bits of {COMPRESSED}", min(wrong), spoken(stored))


def method_of(folder: Path, fields: Fields) -> Method | None:
    """The method of a checkpoint directory, from its ``config.json`` or AutoGPTQ's own file; None for floats.

    Raises:
        ArgumentError: the older file cannot be read.
        FormatError: likewise, or a number of the configuration that cannot be one.
    """
    found = read_method(fields)
    return read_older(read_fields(folder / OLDER)) if found is None and (folder / OLDER).is_file() else found


def read_method(fields: Fields) -> Method | None:
    """The method that a ``config.json`` names; None for weights that are not quantised.

    Raises:
        FormatError: a number of it that cannot be one.

    >>> method = read_method(Fields("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    >>> method and (method.name, method.bits, method.allowed_bits)
    ('gptq', 4, (4,))
    """
    nested = fields.values.get("text_config")
    places = (fields.values, nested if isinstance(nested, dict) else {})
    found = [each for place in places for key in CONFIGS if isinstance(each := place.get(key), dict)]
    return _method(fields.file, found[0]) if found else None


def read_older(fields: Fields) -> Method:
    """The method of a ``quantize_config.json``, which is GPTQ unless it names another."""
    return _method(fields.file, {"quant_method": "gptq", **fields.values})


def _method(file: str, values: Mapping[str, Any]) -> Method:
    groups = values.get(GROUPS)
    schemes = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    differ = any(each.get("weights") != schemes[0].get("weights") for each in schemes)
    values = {**values, GROUPS: {FIRST: schemes[0]}} if schemes else values
    given, label = values.get("quant_method"), _label(values)
    name = UNNAMED if given is None else _text(given) or described(given)
    numbers = {number: _number(file, values, number) for number in NUMBERS}
    for loaded in (4, 8):
        if values.get(f"load_in_{loaded}bit") is True or values.get(f"_load_in_{loaded}bit") is True:
            name, numbers["bits"] = "bitsandbytes" if given is None else name, loaded
    implied = IMPLIED.get(label) or IMPLIED.get(name) or (None, None)
    bits, group_size = (numbers[key] or other for key, other in zip(("bits", "group_size"), implied, strict=True))
    return Method(
        name,
        bits,
        group_size,
        numbers["axis"],
        label,
        allowed_bits=_with_rules(file, values, "bits", bits),
        group_sizes=_with_rules(file, values, "group_size", group_size),
        floats=_floats(values),
        activations=_activations(values),
        unsupported=GROUPS if differ else next((key for key in REFUSED if _asks(values.get(key))), ""),
        file=file,
    )


def _with_rules(file: str, values: Mapping[str, Any], number: str, own: int | None) -> tuple[int, ...]:
    """A number of the method, and those that patterns give to some matrices; empty if the method gives none."""
    if own is None:
        return ()
    rules = [values.get(key) for key in RULES]
    named = [each for rule in rules if isinstance(rule, dict) for each in rule.values() if isinstance(each, dict)]
    return tuple(sorted({own} | {other for each in named if (other := _number(file, each, number)) is not None}))


def _floats(values: Mapping[str, Any]) -> tuple[str, ...]:
    listed = [each for key in FLOATS if isinstance(found := values.get(key), list) for each in found]
    listed += ["lm_head"] if values.get("lm_head") is False else []
    return tuple(each for each in listed if isinstance(each, str) and each and not PATTERN & set(each))


def _activations(values: Mapping[str, Any]) -> str:
    cast = _at(values, (GROUPS, FIRST, "input_activations"))
    if isinstance(cast, dict):
        bits = cast.get("num_bits")
        told = bits if type(bits) is int and 1 <= bits <= MOST_BITS else "other"
        return f"{_text(cast.get('type')) or 'another type'} of {told} bits"
    return "float8" if isinstance(values.get("activation_scheme"), str) else ""


def _asks(value: object) -> bool:
    """Whether an object requires anything; those of the format ``dense`` have no effect."""
    return isinstance(value, dict) and bool(value) and value.get("format") != "dense"


def _label(values: Mapping[str, Any]) -> str:
    return next((text for path in LABELS if (text := _text(_at(values, path)))), "")


def _text(value: object) -> str:
    return value[:40] if isinstance(value, str) else ""


def _number(file: str, values: Mapping[str, Any], number: str) -> int | None:
    """One of `NUMBERS`; None if it is not given.

    Raises:
        FormatError: the value cannot be such a number.
    """
    may_be, allowed = ALLOWED[number]
    for path in NUMBERS[number]:
        if (found := _at(values, path)) is not None:
            if type(found) is not int or not may_be(found):
                raise FormatError(file, ".".join(path), described(found), allowed)
            return found
    return None


def _at(values: object, path: tuple[str, ...]) -> object:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values
