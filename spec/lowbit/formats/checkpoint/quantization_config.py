"""How a checkpoint was quantised, as its ``config.json`` says.

Tools that quantise a checkpoint leave a ``quantization_config`` there. Each has names of its own for the number of bits
and the weights of a group; `NUMBERS` lists them. What is missing or malformed is None: nothing is computed from these
numbers that the tensors do not confirm.

Source: transformers, ``utils/quantization_config.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.system.json_files import LARGEST_INTEGER, Fields

CONFIGS = ("quantization_config", "compression_config")
UNNAMED = "not named"
OLDER = "quantize_config.json"
"""Where AutoGPTQ kept the configuration before ``config.json`` had a place for it."""
_GROUP = ("config_groups", "group_0", "weights")
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
"""Where configurations keep their numbers."""
LABELS = (("checkpoint_format",), ("version",), ("format",), ("quant_algo",), ("bnb_4bit_quant_type",))
"""Where they name the layout of their tensors."""
IMPLIED = {"fp8": (8, None), "fbgemm_fp8": (8, None), "mxfp4": (4, 32), "NVFP4": (4, 16), "FP8": (8, None)}
"""Bits and group size of methods or labels that say neither."""


@dataclass(frozen=True)
class Method:
    """How a checkpoint was quantised, as its configuration says.

    Attributes:
        name: as it is spelled there, such as ``gptq``.
        bits: of a code; None if they are not given.
        group_size: weights with one scale, -1 for a whole row; None if it is not given.
        axis: of HQQ.
        label: its own name for the layout of its tensors; empty if it has none.
    """

    name: str
    bits: int | None = None
    group_size: int | None = None
    axis: int | None = None
    label: str = ""


def read_method(fields: Fields) -> Method | None:
    """The method that a ``config.json`` names; None for weights that are not quantised.

    >>> read_method(Fields("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    Method(name='gptq', bits=4, group_size=None, axis=None, label='')
    """
    nested = fields.values.get("text_config")
    places = (fields.values, nested if isinstance(nested, dict) else {})
    found = [each for place in places for key in CONFIGS if isinstance(each := place.get(key), dict)]
    return _method(found[0]) if found else None


def read_older(fields: Fields) -> Method:
    """The method of a ``quantize_config.json``, which is GPTQ where it names no other."""
    return _method({"quant_method": "gptq", **fields.values})


def _method(values: Mapping[str, Any]) -> Method:
    name, label = _text(values.get("quant_method")) or UNNAMED, _label(values)
    numbers = {number: _first_integer(values, paths) for number, paths in NUMBERS.items()}
    for loaded in (4, 8):
        if values.get(f"load_in_{loaded}bit") is True or values.get(f"_load_in_{loaded}bit") is True:
            name, numbers["bits"] = "bitsandbytes", loaded
    implied = IMPLIED.get(label) or IMPLIED.get(name) or (None, None)
    bits, group_size = (numbers[key] or other for key, other in zip(("bits", "group_size"), implied, strict=True))
    return Method(name, bits, group_size, numbers["axis"], label)


def _label(values: Mapping[str, Any]) -> str:
    return next((text for path in LABELS if (text := _text(_at(values, path)))), "")


def _text(value: object) -> str:
    return value[:40] if isinstance(value, str) else ""


def _first_integer(values: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> int | None:
    found = (_at(values, path) for path in paths)
    return next((each for each in found if type(each) is int and abs(each) <= LARGEST_INTEGER), None)


def _at(values: object, path: tuple[str, ...]) -> object:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values
