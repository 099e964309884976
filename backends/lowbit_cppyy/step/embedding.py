"""The embedding of a model, described for ``cpp/embedding.h``.

A call that generates several tokens needs the row of a token as soon as it has chosen it. So C++ decodes rows itself,
from where they are stored, and with the bits that `lowbit.model.matrices` gives. Floats, codes with scales and zeros,
and the blocks of ggml's types that have kernels are described here. Rows of other formats are decoded in Python, and
such a call ends after one token.

**Blocks.** Where the bits of a code lie in a block is found by trial: of two blocks that differ in one bit, the
functions of `lowbit_cppyy.stored.formats` give codes that differ in the number to which that bit belongs. The same is
done for the integers of runs. So the layout of a format is written down once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import I64, Array
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Rows
from lowbit.model.matrices import Embedding
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.dense import NAMES
from lowbit.tensor_formats.stored import FORMATS, Stored
from lowbit.tensor_formats.table import Format
from lowbit_cppyy.stored.formats import GGUF, TABLES, Tensors
from lowbit_cppyy.stored.types import TYPES

KINDS = ("none", "floats", "codes", "blocks")
VALUES = ("codes", "signed", "table")
OFFSETS = ("none", "center", "number", "minimum")


def _fields(names: str, **structs: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([*((name, np.int64) for name in names.split()), *structs.items()])


NUMBERS = _fields("bits parts base")
CODE = _fields("columns bits group_size scales zeros type minimum")
BLOCK = np.dtype(
    [
        *_fields("elements bytes run", codes=NUMBERS, integers=NUMBERS).descr,
        *_fields("values table offset center scale exponents second").descr,
    ]
)
LAYOUT = _fields("kind hidden scale data row_bytes type", code=CODE, block=BLOCK)
"""``Embedding`` of ``cpp/embedding.h``: integers of 64 bits."""


@dataclass(frozen=True, eq=False)
class Description:
    """An embedding as C++ reads it.

    Attributes:
        record: of type `LAYOUT`, without addresses.
        arrays: those whose addresses belong into it, by the names of their fields.
    """

    record: Any
    arrays: Mapping[tuple[str, ...], Array]

    @property
    def complete(self) -> bool:
        """Whether C++ can decode rows."""
        return bool(self.arrays)

    def fields(self, address: Callable[[Array], int]) -> I64:
        """The record with addresses, int64; the arrays must stay alive as long as it is used."""
        found = self.record.copy().reshape(1)
        for names, array in self.arrays.items():
            place = found
            for name in names[:-1]:
                place = place[name]
            place[names[-1]] = address(array)
        fields: I64 = found.view(np.int64)
        return fields


UNKNOWN = Description(np.zeros((), LAYOUT), {})
Place = tuple[tuple[str, ...], Array, np.dtype[Any], tuple[int, ...]]
"""The names of a field, the array whose address it holds, and the type and shape that C++ relies on."""


def described(rows: Rows, config: LlamaConfig) -> Description:
    """The description of a decoder's rows, times its factor; `UNKNOWN` if Python has to decode them."""
    table = rows.matrix if isinstance(rows, Embedding) else None
    if isinstance(table, Stored):
        return of_stored(table.format, table.tensors[0], config)
    if isinstance(table, QuantizedMatrix):
        own = {"bits": table.bits, "group_size": table.group_size, "convention": table.convention}
        return of_codes((table.words, table.scales, table.zeros), own, config)
    return of_floats(rows, config) if isinstance(rows, np.ndarray) else UNKNOWN


def of_floats(rows: Array, config: LlamaConfig) -> Description:
    """Rows of floats of a type."""
    if rows.dtype not in TYPES:
        return UNKNOWN
    own = {"type": TYPES[rows.dtype]}
    return _described("floats", config, own, [(("data",), rows, rows.dtype, (config.vocabulary, config.hidden))])


def of_stored(name: str, tensor: Array, config: LlamaConfig) -> Description:
    """The tensor of a stored matrix, a row for each token."""
    if name in NAMES:
        return of_floats(tensor, config)
    if name not in GGUF:
        return UNKNOWN
    block, arrays = _block(name)
    size = config.hidden // int(block["elements"]) * int(block["bytes"])
    places = [(names, array, array.dtype, array.shape) for names, array in arrays.items()]
    rows = ("data",), tensor, np.dtype(np.uint8), (config.vocabulary, size)
    return _described("blocks", config, {"block": block}, [rows, *places])


def of_codes(arrays: tuple[Array, Array, Array], own: Mapping[str, Any], config: LlamaConfig) -> Description:
    """Words, scales and zeros of a `QuantizedMatrix`, with its bits, group size and convention."""
    words, scales, zeros = arrays
    if scales.dtype not in TYPES:
        return UNKNOWN
    bits, minimum, columns = own["bits"], own["convention"] == "minimum", config.vocabulary
    groups = -(-config.hidden // own["group_size"]), columns
    code = np.zeros((), CODE)
    code["columns"], code["bits"], code["group_size"] = columns, bits, own["group_size"]
    code["type"], code["minimum"] = TYPES[scales.dtype], minimum
    places: list[Place] = [
        (("data",), words, np.dtype(np.uint32), (config.hidden * bits // 32, columns)),
        (("code", "scales"), scales, scales.dtype, groups),
        (("code", "zeros"), zeros, scales.dtype if minimum else np.dtype(np.uint8), groups),
    ]
    return _described("codes", config, {"code": code}, places)


def _described(kind: str, config: LlamaConfig, own: Mapping[str, Any], places: Sequence[Place]) -> Description:
    """`UNKNOWN` if an array is not what it should be: C++ relies on it, and Python says what is wrong."""
    found = np.zeros((), LAYOUT)
    scale = np.float64(config.embedding_scale).view(np.int64)
    found["kind"], found["hidden"], found["scale"] = KINDS.index(kind), config.hidden, scale
    for name, value in own.items():
        found[name] = value
    for _, array, dtype, shape in places:
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            return UNKNOWN
    found["row_bytes"] = 0 if kind == "codes" else places[0][1].strides[0]
    return Description(found, {names: array for names, array, _, _ in places})


# **Blocks.**


@cache
def _block(name: str) -> tuple[Any, Mapping[tuple[str, ...], Array]]:
    """The record of a type of ggml, and its arrays."""
    own, table = GGUF[name], FORMATS[name]
    structure, places = own.structure, {field: int(at[1]) for field, at in (table.record.fields or {}).items()}
    assert table.block is not None
    block = np.zeros((), BLOCK)
    block["elements"], block["bytes"] = table.block, table.record.itemsize
    block["run"], block["center"] = structure.run or table.block, own.center
    block["values"], block["offset"] = VALUES.index(structure.values), OFFSETS.index(structure.offset)
    block["exponents"] = structure.scale == "exponent"
    block["scale"] = places["e" if structure.scale == "exponent" else "d"]
    block["second"] = places.get("m" if structure.offset == "number" else "dmin", 0)
    arrays: dict[tuple[str, ...], Array] = {}
    functions = {"codes": own.codes, "integers": lambda fields: _joined(own.inner(fields))}
    for field, function in functions.items():
        bits, base = _numbers(function, table)
        block[field] = 0, bits.shape[1], base
        if bits.size:
            arrays["block", field, "bits"] = bits
    if own.table:
        arrays["block", "table"] = TABLES[own.table]
    return block, arrays


def _joined(numbers: tuple[Array, ...]) -> Array:
    return np.concatenate([each.view(np.uint8) for each in numbers], axis=-1) if numbers else np.zeros((1, 0), np.uint8)


def _numbers(function: Callable[[Tensors], Array], table: Format) -> tuple[Array, int]:
    """Where the bits of numbers of a block lie: int32, numbers × parts × (byte, shift down, mask, shift up), and the
    value of numbers without any bit.

    Args:
        function: from the fields of blocks to their numbers, as bytes, blocks × 1 × numbers.
        table: the format.
    """
    places = 8 * table.record.itemsize
    blocks = np.zeros((places + 1, table.record.itemsize), np.uint8)
    blocks[np.arange(places), np.arange(places) // 8] = 1 << np.arange(places) % 8
    numbers = function(table.fields_of({"blocks": blocks})).reshape(places + 1, -1)
    if not numbers.shape[1]:
        return np.zeros((0, 0, 4), np.int32), 0
    weights = numbers[:-1] - numbers[-1]  # modulo 256
    parts: list[list[list[int]]] = [[] for _ in range(numbers.shape[1])]
    for number, place in np.argwhere(weights.T):
        byte, low, up = place // 8, place % 8, int(weights[place, number]).bit_length() - 1
        last = parts[number][-1] if parts[number] else None
        if last and last[0] == byte and up - last[3] == low - last[1] == last[2].bit_length():
            last[2] = 2 * last[2] + 1
        else:
            parts[number].append([byte, low, 1, up])
    most = max(map(len, parts))
    padded = [own + [[0, 0, 0, 0]] * (most - len(own)) for own in parts]
    return np.array(padded, np.int32), int(numbers[-1, 0])
