"""Layouts: what a directory or file of quantised weights looks like, for the tools that load it.

================== ============================== =================================================================
layout             loaded by                      holds
================== ============================== =================================================================
gptq-v2            GPTQModel, vLLM                2, 3, 4, 8 bits, other bits for some matrices, act-order
gptq-v1            AutoGPTQ and all that read it  the same, but no zero of 0
awq                AutoAWQ (gemm), vLLM           4 bits
compressed-tensors vLLM (pack-quantized)          2, 3, 4, 8 bits
hqq                hqq, along axis 1              2, 3, 4, 8 bits, zeros that are no whole numbers
gguf               llama.cpp                      up to 4 bits, 8 symmetric ones; groups of whole blocks of 32
floats             transformers, vLLM             no codes: the numbers themselves, for ``lowbit convert``
================== ============================== =================================================================

All but ``gguf``, which is one file, are directories. A layout defines the formats (`lowbit.tensor_formats`) of its
tensors, their names, and their ``quantization_config``. The reader, `lowbit.formats.checkpoint`, knows many more
layouts.

Source: the chapters of `lowbit.tensor_formats` name the owners; transformers, ``utils/quantization_config.py``.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version as version_of
from typing import Any

import numpy as np

from lowbit.arrays import Array
from lowbit.contract.checks import check_choice, spoken
from lowbit.errors import ArgumentError
from lowbit.quantization.coded import CodedMatrix
from lowbit.rewriting.blocks import BLOCK
from lowbit.rewriting.packers import stored_of
from lowbit.tensor_formats.stored import FORMATS, Stored


@dataclass(frozen=True)
class Description:
    """The description of the matrices in the configuration of a directory.

    Attributes:
        bits: those of the most weights.
        group_size: rows of a group.
        symmetric: whether every zero is the middle of the codes.
        act_order: whether groups may differ from runs of rows.
        floats: the modules that stay floats.
        other_bits: the bits of matrices that have others, by patterns (regular expressions) of their modules.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    floats: tuple[str, ...] = ("lm_head",)
    other_bits: Mapping[str, int] = field(default_factory=dict)


Config = Callable[[Description], dict[str, Any]]
Formats = Callable[[str, int, bool], tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """A layout of a directory or file.

    Attributes:
        name: as in ``--format``.
        formats: those that may hold a matrix, by the type of its scales, its bits, and whether all matrices are
            symmetric; the first that does is used.
        config: the ``quantization_config``; None for a layout without one.
        bits: the supported ones.
        has_order: whether groups may be other than runs of rows.
        has_real_zeros: whether zeros may be any float16 number.
        mixes_bits: whether matrices may have different bits.
        is_file: whether it is one file, of GGUF.
        files: further files, by name, each with the function that makes its content.
    """

    name: str
    formats: Formats
    config: Config | None
    bits: tuple[int, ...] = (2, 3, 4, 8)
    has_order: bool = False
    has_real_zeros: bool = False
    mixes_bits: bool = False
    is_file: bool = False
    files: Mapping[str, Config] = field(default_factory=dict)

    def stored(self, coded: CodedMatrix, *, symmetric: bool) -> Stored:
        """A matrix in the first of its formats that holds it.

        Args:
            coded: the matrix.
            symmetric: whether the zeros of all matrices of the model are the middle of the codes.

        Raises:
            ArgumentError: no format holds it; the error is that of the last one.
        """
        formats = self.formats(coded.scales.dtype.name, coded.bits, symmetric)
        for format in formats[:-1]:
            try:
                return stored_of(coded, format)
            except ArgumentError:
                continue
        return stored_of(coded, formats[-1])

    def check(self, what: str, bits: int, group_size: int, rows: int, columns: int) -> None:
        """Refuse a matrix that the layout cannot hold, by its sizes.

        Args:
            what: the matrix, for the message.
            bits, group_size: of its codes.
            rows, columns: K and N.

        Raises:
            ArgumentError: it cannot hold it.
        """
        table = FORMATS[self.formats("float16", bits, False)[-1]]
        numbers = {"bits": bits, "group_size": group_size}
        try:
            if bits not in self.bits:
                raise ArgumentError("bits", bits, spoken([str(each) for each in self.bits]))
            if group_size > rows:
                raise ArgumentError("group_size", group_size, f"at most its {rows} rows")
            if rows % group_size and not self.has_order:
                raise ArgumentError("group_size", group_size, f"a divisor of its {rows} rows")
            if self.is_file and group_size % BLOCK:
                raise ArgumentError("group_size", group_size, f"a multiple of {BLOCK}, the elements of a block")
            sizes = table.sizes(rows, columns, {name: numbers[name] for name in table.options})
            for each in table.tensors:
                each.sizes(sizes)
        except ArgumentError as error:
            sentence = f"{what}, {rows} x {columns}, does not fit the layout {self.name}: {error}"
            raise ArgumentError(what, f"{rows} x {columns}", f"sizes that {self.name} holds", sentence) from error

    def tensors(self, module: str, matrix: Stored) -> Iterator[tuple[str, Array]]:
        """The tensors of a matrix by their names in a file."""
        for name, array in matrix.by_name.items():
            yield f"{module}.{name}", array
        if self.name == "compressed-tensors":
            yield f"{module}.weight_shape", np.array([matrix.columns, matrix.rows])
        if self.name == "hqq":
            yield from ((f"{module}.{name}", array) for name, array in state_of_hqq(matrix))


# **Configurations.**


def pattern_of(module: str) -> str:
    """The regular expression of one module."""
    return re.escape(module) + "$"


def _gptq(version: str, told: Description) -> dict[str, Any]:
    rules: dict[str, Any] = {f"-:{pattern_of(name)}": {} for name in told.floats if name != "lm_head"}
    rules |= {f"+:{pattern}": {"bits": bits} for pattern, bits in told.other_bits.items()}
    return {
        "quant_method": "gptq",
        "bits": told.bits,
        "group_size": told.group_size,
        "desc_act": told.act_order,
        "sym": told.symmetric,
        "lm_head": False,
        "checkpoint_format": version,
        **({"dynamic": rules} if rules else {}),
        "meta": {"quantizer": [f"lowbit:{version_of('lowbit')}"]},
    }


def _awq(told: Description) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": told.bits,
        "group_size": told.group_size,
        "zero_point": not told.symmetric,
        "version": "gemm",
        "modules_to_not_convert": list(told.floats),
    }


def _compressed(told: Description) -> dict[str, Any]:
    weights = {"num_bits": told.bits, "type": "int", "strategy": "group", "group_size": told.group_size}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": told.symmetric}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized",
        "ignore": list(told.floats),
        "config_groups": {"group_0": group},
    }


def _hqq(told: Description) -> dict[str, Any]:
    numbers = {"nbits": told.bits, "group_size": told.group_size, "axis": 1}
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": numbers},
        "skip_modules": list(told.floats),
    }


def state_of_hqq(matrix: Stored) -> Iterator[tuple[str, Array]]:
    """What hqq's loader requires besides codes, scales and zeros, each number and text as an array.

    Source: hqq ``core/quantize.py`` (HQQLinear.state_dict) and ``core/utils.py`` (encode_safetensor_type).
    """
    bits = dict(matrix.options).get("bits", 3)
    numbers = {"nbits": bits, "group_size": dict(matrix.options)["group_size"], "axis": 1}
    yield from ((name, np.array(number, np.int32)) for name, number in numbers.items())
    yield "shape", np.array([matrix.columns, matrix.rows])
    texts = {
        "packing": "3bit_32" if bits == 3 else f"{bits}bit_u8",
        "unpack_view_dtype": "torch.int32" if bits == 3 else "torch.uint8",
        "compute_dtype": "torch.float16",
    }
    yield from ((name, np.frombuffer(text.encode("ascii"), np.uint8)) for name, text in texts.items())
    flags = dict.fromkeys(("encoded_state_dict", "stores_quant_config", "channel_wise"), True)
    flags |= dict.fromkeys(("view_as_float", "quant_scale", "quant_zero", "offload_meta"), False)
    flags |= dict.fromkeys(("optimize", "round_zero"), False)  # of the rounding, which is done
    yield from ((name, np.array(flag, np.uint8)) for name, flag in flags.items())


def _gptq_layout(version: str, label: str) -> Layout:
    config, name = partial(_gptq, label), f"gptq-{version}"

    def formats(dtype: str, bits: int, symmetric: bool) -> tuple[str, ...]:
        return (f"{name}-bf16", name) if dtype == "bfloat16" else (name,)

    more = {"quantize_config.json": config}
    return Layout(name, formats, config, has_order=True, mixes_bits=True, files=more)


def _packed(dtype: str, bits: int, symmetric: bool) -> tuple[str, ...]:
    return (f"ct-pack{'' if symmetric else '-asym'}{'' if dtype == 'bfloat16' else '-f16'}",)


def _blocks(dtype: str, bits: int, symmetric: bool) -> tuple[str, ...]:
    return ("q4_0", "q4_1", "q5_0", "q8_0")


def _along_rows(dtype: str, bits: int, symmetric: bool) -> tuple[str, ...]:
    return ("hqq-axis1-3bit" if bits == 3 else "hqq-axis1",)


LAYOUTS: Mapping[str, Layout] = {
    each.name: each
    for each in (
        _gptq_layout("v2", "gptq_v2"),
        _gptq_layout("v1", "gptq"),
        Layout("awq", lambda dtype, bits, symmetric: ("awq-gemm",), _awq, bits=(4,)),
        Layout("compressed-tensors", _packed, _compressed),
        Layout("hqq", _along_rows, _hqq, has_real_zeros=True),
        Layout("gguf", _blocks, None, mixes_bits=True, is_file=True),
    )
}
"""The layouts of codes by name; the first is the default."""
FLOATS = Layout("floats", lambda dtype, bits, symmetric: (), None, bits=())
"""A directory without codes."""


def layout_of(name: str, *, of_codes: bool = True) -> Layout:
    """A layout by name.

    Args:
        name: as in ``--format``.
        of_codes: whether it must hold codes.

    Raises:
        ArgumentError: there is none of this name.
    """
    known = LAYOUTS if of_codes else {**LAYOUTS, FLOATS.name: FLOATS}
    return known[check_choice("--format", name, list(known))]
