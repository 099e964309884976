r"""Checkpoints that are quantised already: by which method, and the format of each of their matrices.

Such a directory has a ``quantization_config`` in its ``config.json``, and in place of a matrix a few tensors: codes,
scales, perhaps zeros. The configuration names the *method*. The tensors say more exactly what the bytes are: each
recogniser below knows one family by the names and types of its tensors, and gives the format of
`lowbit.tensor_formats`, with its sizes and options, from the header alone.

========================== =========================================================== ==========================
method                     tensors of a matrix                                         formats
========================== =========================================================== ==========================
gptq, auto-round           ``qweight``, ``qzeros``, ``scales``, ``g_idx``              gptq-v1, gptq-v2
gptq, marlin               ``B``, ``s``                                                marlin
awq                        ``qweight``, ``qzeros``, ``scales``                         awq-gemm, awq-gemv
compressed-tensors         ``weight_packed`` or ``weight``, ``weight_scale``           ct-pack, ct-int, fp8, mxfp4
nvfp4                      the same in bytes, and a second scale                       nvfp4, nvfp4-pack
fp8                        ``weight``, ``weight_scale`` or ``weight_scale_inv``        fp8-tensor, -channel, -block
bitsandbytes               ``weight``, ``weight.absmax``, ``weight.nested_absmax``     nf4, fp4
hqq                        ``W_q``, ``scale``, ``zero``                                hqq-axis0, hqq-axis1
mxfp4                      ``..._blocks``, ``..._scales``                              mxfp4
========================== =========================================================== ==========================

Source: the chapters of `lowbit.tensor_formats` name the owners; their checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

from lowbit.formats.checkpoint.quantization_config import Method
from lowbit.formats.checkpoint.tensors import Place, Table
from lowbit.tensor_formats.stored import FORMATS

CODES = ("qweight", "B", "weight_packed", "W_q", "blocks")
"""The tensors that only a quantised matrix has. A ``weight`` counts if its type is not one of plain weights."""
IN_ORDER = ("gptq", "auto-round")
"""Methods with GPTQ's layout, whose groups are consecutive if there is no ``g_idx``."""
STATE = "weight.quant_state.bitsandbytes__"
"""The prefix of the tensor in which bitsandbytes keeps the numbers of a matrix, as JSON."""
PLAIN = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Layout:
    """The meaning of the tensors of a matrix.

    Attributes:
        format: a name of `lowbit.tensor_formats.stored.FORMATS`; empty if no chapter describes them.
        weights: how many numbers they represent.
        sizes: rows K and columns N; None if the header does not give them.
        options: of the format.
        matrices: how many matrices of these sizes they are.
    """

    format: str
    weights: int
    sizes: tuple[int, int] | None = None
    options: Mapping[str, int] = field(default_factory=dict)
    matrices: int = 1

    @property
    def choices(self) -> dict[str, object]:
        """The choices of its products, by the names under which a backend declares them; the format may be empty."""
        sizes = {} if self.sizes is None else dict(zip(("rows", "columns"), self.sizes, strict=True))
        return {"format": self.format, **self.options, **sizes}


@dataclass(frozen=True)
class Packed:
    """A quantised matrix of a checkpoint.

    Attributes:
        module: the common beginning of its tensors' names.
        tensors: their names, by the rest of each.
        nbytes: of all of them.
        layout: the meaning of its tensors.
    """

    module: str
    tensors: Mapping[str, str]
    nbytes: int
    layout: Layout

    @property
    def format(self) -> str:
        """The name of its format; empty if no chapter describes it."""
        return self.layout.format


Parts = Mapping[str, Place]
"""The tensors of a matrix by the ends of their names."""


def _of_sizes(format: str, rows: int, columns: int, matrices: int = 1, **options: int) -> Layout:
    return Layout(format, rows * columns * matrices, (rows, columns), options, matrices)


def split_name(name: str) -> tuple[str, str]:
    """The module of a tensor, and the rest of its name.

    >>> split_name("a.q_proj.qweight"), split_name("a.q_proj.weight.absmax"), split_name("a.gate_up_proj_blocks")
    (('a.q_proj', 'qweight'), ('a.q_proj', 'weight.absmax'), ('a.gate_up_proj', 'blocks'))
    """
    for end in ("blocks", "scales"):
        if name.endswith(f"_{end}"):
            return name.removesuffix(f"_{end}"), end
    module, of_weight, part = name.partition(".weight.")
    if of_weight:
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    return module, part


def packed_matrices(table: Table, method: Method) -> list[Packed]:
    """The quantised matrices of a checkpoint; all other tensors are plain weights."""
    modules: dict[str, dict[str, str]] = {}
    for name in table:
        module, part = split_name(name)
        modules.setdefault(module, {})[part] = name
    found = []
    for module, names in modules.items():
        names.pop("bias", None)
        parts = {part: table[name] for part, name in names.items()}
        if not _is_packed(parts):
            continue
        known = next((each for recognise in RECOGNISERS if (each := recognise(parts, method)) is not None), None)
        layout = known or Layout("", _weights_of_unknown(parts, method))
        found.append(Packed(module, names, sum(place.nbytes for place in parts.values()), layout))
    return found


def _is_packed(parts: Parts) -> bool:
    return any(codes in parts for codes in CODES) or ("weight" in parts and parts["weight"].type not in PLAIN)


def _weights_of_unknown(parts: Parts, method: Method) -> int:
    """The number of weights, from the bits of the method."""
    codes = next(parts[each] for each in (*CODES, "weight") if each in parts)
    return 8 * codes.nbytes // (method.bits or 8)


def _have(parts: Parts, **types: str) -> bool:
    """Whether there are tensors of these names, types and, after a colon, numbers of dimensions."""
    for name, told in types.items():
        kinds, _, dimensions = told.partition(":")
        place = parts.get(name)
        if place is None or place.type not in kinds.split() or (dimensions and len(place.shape) != int(dimensions)):
            return False
    return True


def _gptq(parts: Parts, method: Method) -> Layout | None:
    if not _have(parts, qweight="I32:2", qzeros="I32:2", scales="F16 BF16:2"):
        return None
    words, columns = parts["qweight"].shape
    if _have(parts, g_idx="I32:1"):
        rows = prod(parts["g_idx"].shape)
        bits = 32 * words // max(1, rows)
    elif method.name in IN_ORDER and method.bits and "g_idx" not in parts and parts["scales"].shape[1] == columns:
        rows, bits = 32 * words // method.bits, method.bits  # groups are consecutive
    else:
        return None
    version = "gptq-v2" if method.layout == "gptq_v2" else "gptq-v1"
    name = version + ("-bf16" if parts["scales"].type == "BF16" else "")
    if bits not in (FORMATS[name].options["bits"] or ()):
        return None
    return _of_sizes(name, rows, columns, bits=bits, group_size=_group(method, rows, parts["scales"].shape[0]))


def _group(method: Method, rows: int, groups: int) -> int:
    """The weights of a group: those of the method, if they give as many groups as there are."""
    told = rows if method.group_size == -1 else method.group_size or 0
    return told if told > 0 and -(-rows // told) == groups else -(-rows // max(1, groups))


def _awq(parts: Parts, method: Method) -> Layout | None:
    if "g_idx" in parts or not _have(parts, qweight="I32:2", qzeros="I32:2", scales="F16:2"):
        return None
    (high, wide), scales = parts["qweight"].shape, parts["scales"].shape
    label = method.layout
    if label in ("", "gemm") and scales[1] == 8 * wide:
        return _of_sizes("awq-gemm", high, 8 * wide, group_size=_group(method, high, scales[0]))
    allowed = FORMATS["awq-gemv"].options["group_size"] or ()
    if label in ("", "gemv") and scales[0] == high and method.group_size in allowed:
        return _of_sizes("awq-gemv", 8 * wide, high, group_size=method.group_size or 0)
    return None


def _marlin(parts: Parts, method: Method) -> Layout | None:
    if not _have(parts, B="I32:2", s="F16:2"):
        return None
    rows, (groups, columns) = 16 * parts["B"].shape[0], parts["s"].shape
    if groups <= 1:
        return _of_sizes("marlin-channel", rows, columns)
    return _of_sizes("marlin", rows, columns, group_size=rows // groups)


def _compressed_integers(parts: Parts, method: Method) -> Layout | None:
    if "weight_g_idx" in parts or not _have(parts, weight_scale="BF16 F16:2"):
        return None  # the formats here do not have rows in another order
    scales, groups = parts["weight_scale"].type, parts["weight_scale"].shape[1]
    suffix, stored = "-f16" if scales == "F16" else "", FORMATS["ct-pack"].options["bits"] or ()
    if method.bits is not None and method.bits not in stored:
        return None
    if _have(parts, weight="I8:2") and "weight_zero_point" not in parts:
        columns, rows = parts["weight"].shape
        return _of_sizes(f"ct-int{suffix}", rows, columns, group_size=_group(method, rows, groups))
    if not _have(parts, weight_packed="I32:2") or method.bits is None:
        return None
    columns, words = parts["weight_packed"].shape
    rows = 32 * words // method.bits
    name = ("ct-pack-asym" if _have(parts, weight_zero_point="I32:2") else "ct-pack") + suffix
    return _of_sizes(name, rows, columns, bits=method.bits, group_size=_group(method, rows, groups))


def _four_bit_floats(parts: Parts, method: Method) -> Layout | None:
    """Two elements in a byte, with a scale for every 16 or 32."""
    for codes, second, name in (
        ("weight_packed", "weight_global_scale", "nvfp4-pack"),
        ("weight", "weight_scale_2", "nvfp4"),
    ):
        if _have(parts, **{codes: "U8:2", "weight_scale": "F8_E4M3:2", second: "F32"}):
            return _of_sizes(name, 2 * parts[codes].shape[1], parts[codes].shape[0])
    if _have(parts, weight_packed="U8:2", weight_scale="U8 F8_E8M0:2"):
        columns, half = parts["weight_packed"].shape
        return _of_sizes("mxfp4", 2 * half, columns)
    if _have(parts, blocks="U8:4", scales="U8 F8_E8M0:3"):
        experts, columns, groups, half = parts["blocks"].shape
        return _of_sizes("mxfp4", 2 * half * groups, columns, experts)
    return None


def _fp8(parts: Parts, method: Method) -> Layout | None:
    if not _have(parts, weight="F8_E4M3:2"):
        return None
    columns, rows = parts["weight"].shape
    scale = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    if not _have(parts, **{scale: "F32 BF16 F16 F8_E8M0"}) or "weight_zero_point" in parts:
        return None
    shape = parts[scale].shape
    if shape in ((), (1,)):
        return _of_sizes("fp8-tensor", rows, columns)
    if shape in ((columns,), (columns, 1)) and scale == "weight_scale":
        return _of_sizes("fp8-channel", rows, columns)
    return _of_sizes("fp8-block", rows, columns) if len(shape) == 2 else None


def _bitsandbytes(parts: Parts, method: Method) -> Layout | None:
    if not _have(parts, weight="U8", **{"weight.absmax": "U8 F32"}):
        return None
    table = "fp4" if f"{STATE}fp4" in parts else "nf4"
    weights, blocks = 2 * prod(parts["weight"].shape), prod(parts["weight.absmax"].shape)
    name = f"{table}-double" if "weight.nested_absmax" in parts else table
    sizes = FORMATS[name].options["blocksize"] or ()
    fitting = [size for size in sizes if -(-weights // size) == blocks]
    return Layout(name, weights, options={"blocksize": fitting[0]}) if fitting else None


def _hqq(parts: Parts, method: Method) -> Layout | None:
    if not _have(parts, W_q="U8 I32:2", **dict.fromkeys(("scale", "zero"), "F16 BF16 F32")):
        return None
    if method.axis not in (0, 1) or method.bits is None:
        return None
    group_size = method.group_size or 0
    name = f"hqq-axis{method.axis}" + ("-3bit" if method.bits == 3 else "")
    allowed = FORMATS[name].options.get("bits") or (3,)
    if group_size < 1 or method.bits not in allowed:
        return None
    bits = {} if method.bits == 3 else {"bits": method.bits}
    return Layout(name, group_size * prod(parts["scale"].shape), options={**bits, "group_size": group_size})


RECOGNISERS: tuple[Callable[[Parts, Method], Layout | None], ...] = (
    _gptq,
    _awq,
    _marlin,
    _compressed_integers,
    _four_bit_floats,
    _fp8,
    _bitsandbytes,
    _hqq,
)
