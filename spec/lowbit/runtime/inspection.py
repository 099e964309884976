"""What a model file contains, read from headers: its shape, its bytes by part and storage type, and how it is
quantised.

No weights are read, so a file of any size takes a moment. The one exception is a few zeros of GPTQ checkpoints, which
reveal the version (`lowbit.formats.checkpoint.gptq_version`). Models that lowbit cannot run are described as well, with
the error of the reader that refuses them. Only a file that is damaged is an error.

Tensors are sorted into *parts* by their names, which differ between GGUF and checkpoints and little beyond that.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Self

from lowbit.contract.operation import Parameters
from lowbit.errors import LowbitError
from lowbit.formats.checkpoint import tokenizer as checkpoint_tokenizer
from lowbit.formats.checkpoint.architectures import FUSED
from lowbit.formats.checkpoint.config import claimed_shape as shape_of_config
from lowbit.formats.checkpoint.gptq_version import Zeros, of_version, sampled_zeros
from lowbit.formats.checkpoint.prequantized import Packed, packed_matrices
from lowbit.formats.checkpoint.quantization_config import UNNAMED, Method, method_of
from lowbit.formats.checkpoint.reader import CONFIG, open_checkpoint
from lowbit.formats.checkpoint.stacked import GATE_UP
from lowbit.formats.checkpoint.stored_matrix import OF_16_BITS
from lowbit.formats.checkpoint.tensors import SUFFIX, WIDTHS, Place, Table, read_header, read_table
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.architectures import ARCHITECTURES, held_together
from lowbit.formats.gguf.config import claimed_shape as shape_of_gguf
from lowbit.formats.gguf.header import TensorInfo
from lowbit.formats.gguf.reader import JOINED, SPLIT_COUNT, GGUFFile, check_model, open_gguf
from lowbit.formats.gguf.tensors import choices_of
from lowbit.system.json_files import Fields, read_fields
from lowbit.text import quoted, shortened

PARTS = {
    "norms": r"norm|\bln_",
    "router": r"ffn_gate_inp|\.gate(\.weight)?$|\brouter\b|shared_expert_gate",
    "embedding": r"token_embd|embed_tokens|\bwte\b|word_embeddings",
    "head": r"^output\.|lm_head|embed_out",
    "experts": r"_exps\b|_shexp\b|experts?\b",
    "attention": r"attn|attention",
    "feed-forward": r"ffn|mlp|feed_forward",
}
"""Parts of a model and substrings of their tensors' names; the first match counts."""
OTHER = "other"
ORDER = ("embedding", "attention", "feed-forward", "experts", "router", "norms", "head", OTHER)
_PATTERNS = {part: re.compile(pattern) for part, pattern in PARTS.items()}
MULTIPLIED = ("attention", "feed-forward", "experts", "head")
BIAS = "bias"
"""The biases of stacked experts are tensors of two dimensions."""
QUERY = "query"
MOST_SHOWN = 60


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to.

    >>> [part_of(name) for name in ("blk.0.attn_q.weight", "model.layers.0.mlp.gate.weight", "output_norm.weight")]
    ['attention', 'router', 'norms']
    """
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class Held:
    """A tensor of the file, the tensors of a quantised matrix, or the total of a part in one storage type.

    Attributes:
        part: one of `ORDER`.
        type: how it is stored, such as ``Q4_K``, ``BF16`` or ``gptq-v1``.
        tensors: how many tensors it is.
        parameters: the number of model parameters that it represents.
        nbytes: of all its tensors.
    """

    part: str
    type: str
    tensors: int
    parameters: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per parameter, including scales and zeros; None if there are no parameters."""
        return 8 * self.nbytes / self.parameters if self.parameters else None


@dataclass(frozen=True)
class Matrices:
    """Matrices of one type and the same choices, used in products.

    Attributes:
        type: as in `Held`.
        choices: the names and values under which a backend declares products; None for types that lowbit does not read
            as matrices. The format is empty if no chapter describes the bytes.
        count: how many there are.
    """

    type: str
    choices: Parameters | None
    count: int


@dataclass(frozen=True)
class Tokens:
    """The tokenizer: its kind, and whether it comes with a chat template."""

    kind: str
    chat_template: bool


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised.

    Attributes:
        method: the method in its configuration.
        formats: how many matrices are in each format; an empty name for those that no chapter describes.
        group_size: of the first matrix that has groups, or the configuration's; None if neither gives it.
        bits: the configuration's, or those of the first matrix; None if neither gives them.
        zeros: the evidence of a GPTQ checkpoint's zeros on its version; None for other methods.
    """

    method: Method
    formats: Mapping[str, int]
    bits: int | None
    group_size: int | None
    zeros: Zeros | None = None


@dataclass(frozen=True)
class Inspection:
    """The contents of a model file.

    Attributes:
        name: of the file or directory.
        kind: ``GGUF file``, ``safetensors file`` or ``checkpoint directory``.
        file_bytes: of the file, or of all files with tensors.
        architecture: as the file names it; None if it does not.
        problem: why lowbit cannot run it here; empty if it can.
        shape: numbers by the names of `lowbit.model.config.LlamaConfig`; None for those missing from the file.
        tokenizer: None if there is none.
        held: every tensor.
        matrices: those used in products.
        quantisation: of a quantised checkpoint.
        remedy: how to make lowbit run it, in words; empty if it runs or no way is known.
    """

    name: str
    kind: str
    file_bytes: int
    architecture: str | None
    problem: str
    shape: Mapping[str, int | None]
    tokenizer: Tokens | None
    held: tuple[Held, ...]
    matrices: tuple[Matrices, ...]
    quantisation: Quantisation | None = None
    remedy: str = ""

    @property
    def rows(self) -> list[Held]:
        """The table by part and storage type."""
        sums: dict[tuple[str, str], list[int]] = {}
        for each in self.held:
            found = sums.setdefault((each.part, each.type), [0, 0, 0])
            for place, number in enumerate((each.tensors, each.parameters, each.nbytes)):
                found[place] += number
        ordered = sorted(sums, key=lambda key: (ORDER.index(key[0]), -sums[key][2]))
        return [Held(*key, *sums[key]) for key in ordered]

    @property
    def total(self) -> Held:
        """All rows added up."""
        numbers = [sum(getattr(each, name) for each in self.held) for name in ("tensors", "parameters", "nbytes")]
        return Held("total", "", *numbers)


def inspect(path: Path) -> Inspection:
    """Describe a GGUF file, a safetensors file, or a directory with ``config.json`` and safetensors.

    Raises:
        ArgumentError: there is no such file or directory, or it lacks a file.
        FormatError: it is damaged.
    """
    if os.path.isdir(path):  # `Path.is_dir` raises where a folder on the way may not be entered
        return _of_directory(path)
    return _of_safetensors(path) if path.suffix == SUFFIX else _of_gguf(open_gguf(path))


def _problem(read: Callable[[], object]) -> str:
    """The message with which a reader refuses a model; empty if it accepts it."""
    try:
        read()
    except LowbitError as error:
        return str(error)
    return ""


Shape = Mapping[str, int | None]
"""As in `Inspection`."""


class _Counted:
    """Matrices, counted by their type and choices."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[tuple[str, object], ...] | None], int] = {}

    def add(self, type: str, choices: Parameters | None, count: int = 1) -> None:
        key = type, None if choices is None else tuple(choices.items())
        self._counts[key] = self._counts.get(key, 0) + count

    def add_together(
        self, type: str, choices: Parameters | None, count: int, names: Sequence[str], shape: Shape
    ) -> None:
        """Add matrices that share a tensor, which takes part in as many products as there are names."""
        columns = None if choices is None else choices.get("columns")
        for own in _columns(names, columns, shape) if isinstance(columns, int) else [None] * len(names):
            self.add(type, choices if own is None else {**(choices or {}), "columns": own}, count)

    def matrices(self) -> tuple[Matrices, ...]:
        return tuple(
            Matrices(type, None if choices is None else dict(choices), count)
            for (type, choices), count in self._counts.items()
        )


def _columns(names: Sequence[str], columns: int, shape: Shape) -> list[int]:
    """The columns of each matrix that shares a tensor: equal for all, except that queries may have more than keys.

    A configuration that claims more heads than the tensor has columns for is ignored.
    """
    others = (len(names) - 1) * [(shape.get("kv_heads") or 0) * (shape.get("head_dim") or 0)]
    if QUERY in names and all(each > 0 for each in others) and sum(others) < columns:
        return [columns - sum(others), *others]
    return [columns // len(names)] * len(names)


# **GGUF.**


def _of_gguf(source: GGUFFile) -> Inspection:
    tensors, counted, shape = source.header.tensors, _Counted(), shape_of_gguf(source)
    tied = "output.weight" not in tensors
    architecture = source.header.metadata.get("general.architecture")
    known = ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    together = {} if known is None else known.held
    for name, info in tensors.items():
        is_multiplied = part_of(name) in MULTIPLIED or (tied and name == "token_embd.weight")
        if len(info.shape) > 1 and is_multiplied and not name.endswith(BIAS):
            names = together.get(name.removesuffix(".weight").rpartition(".")[2], [name])
            counted.add_together(info.type.name, choices_of(info), prod(info.shape[:-2]), names, shape)
    return Inspection(
        name=source.file,
        kind="GGUF file",
        file_bytes=source.on_disk.size,
        architecture=shortened(architecture, MOST_SHOWN) if isinstance(architecture, str) else None,
        problem=_problem(partial(_run_gguf, source)),
        shape=shape,
        tokenizer=_gguf_tokens(source.header.metadata),
        held=tuple(_held_in_gguf(info) for info in tensors.values()),
        matrices=counted.matrices(),
        remedy=_joining(source.header.metadata),
    )


def _joining(metadata: Mapping[str, Any]) -> str:
    """How to make a part of a split model run; empty for a file that is not a part."""
    parts = metadata.get(SPLIT_COUNT)
    return f"Join the parts: {JOINED}." if isinstance(parts, int) and parts > 1 else ""


def _run_gguf(source: GGUFFile) -> None:
    """Read everything that a model needs besides its weights."""
    check_model(source)
    gguf_tokenizer.read_tokenizer(source)


def _held_in_gguf(info: TensorInfo) -> Held:
    return Held(part_of(info.name), info.type.name, 1, prod(info.shape), info.nbytes)


def _gguf_tokens(metadata: Mapping[str, Any]) -> Tokens | None:
    kind, words = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if not isinstance(kind, str):
        return None
    kind += f" ({words})" if isinstance(words, str) else ""
    return Tokens(shortened(kind, MOST_SHOWN), isinstance(metadata.get("tokenizer.chat_template"), str))


# **Safetensors.**


OF_FLOATS = {**OF_16_BITS, "F32": "float32"}


TOGETHER = held_together(FUSED) | {f"experts.{GATE_UP}": ["gate", "up"]}
"""Tensors of several matrices, and those; of stacked experts the gate and its other side are such a tensor as well."""


def _together(name: str) -> Sequence[str]:
    """The matrices of a tensor; most are one."""
    module = name.removesuffix(".weight")
    return next((names for tensor, names in TOGETHER.items() if module.endswith(tensor)), [module])


def _floats(place: Place) -> tuple[Parameters | None, int]:
    """The choices of the matrices of a tensor, as in `Matrices`, and their number.

    Stacked experts have inputs before outputs.
    """
    *stack, first, second = place.shape
    rows, columns = (first, second) if stack else (second, first)
    known = {"format": OF_FLOATS[place.type], "rows": rows, "columns": columns} if place.type in OF_FLOATS else None
    return known, prod(stack)


@dataclass(frozen=True)
class _Content:
    """The tensors of safetensors files: the quantised matrices among them, and all others."""

    table: Table
    plain: Table
    packed: list[Packed]
    quantisation: Quantisation | None

    @classmethod
    def of(cls, table: Table, folder: Path) -> Self:
        """Sort the tensors, and see how they were quantised; the configuration is in the folder, if anywhere."""
        named = method_of(folder, read_fields(folder / CONFIG) if (folder / CONFIG).is_file() else Fields(CONFIG, {}))
        method = named or Method(UNNAMED)
        packed = packed_matrices(table, method)
        zeros = sampled_zeros(table, packed, has_label=bool(method.label))
        if zeros is not None and zeros.version:
            packed = of_version(packed, zeros.version)
        inside = {name for each in packed for name in each.tensors.values()}
        plain = {name: place for name, place in table.items() if name not in inside}
        quantised = named is not None or bool(packed)
        return cls(table, plain, packed, _quantisation(method, packed, zeros) if quantised else None)

    def held(self) -> Iterator[Held]:
        """Every tensor."""
        for name, place in self.plain.items():
            yield Held(part_of(name), place.type, 1, prod(place.shape), place.nbytes)
        for each in self.packed:
            yield Held(part_of(each.module), self._type(each), len(each.tensors), each.layout.weights, each.nbytes)

    def matrices(self, whole: bool, shape: Shape) -> tuple[Matrices, ...]:
        """Those that are multiplied by; where these are all tensors of a `whole` model, a head that is missing is the
        embedding."""
        tied = whole and all(part_of(name) != "head" for name in self.table)
        counted, multiplied = _Counted(), [*MULTIPLIED, *(["embedding"] if tied else [])]
        for name, place in self.plain.items():
            if len(place.shape) > 1 and part_of(name) in multiplied and not name.endswith(BIAS):
                counted.add_together(place.type, *_floats(place), _together(name), shape)
        for each in self.packed:
            layout = each.layout
            counted.add_together(self._type(each), layout.choices, layout.matrices, _together(each.module), shape)
        return counted.matrices()

    def _type(self, matrix: Packed) -> str:
        """What a quantised matrix is called: its format, or the method where no chapter describes it."""
        assert self.quantisation is not None
        return matrix.layout.format or self.quantisation.method.name


def _of_safetensors(path: Path) -> Inspection:
    content = _Content.of(read_header(path, tuple(WIDTHS)).table, path.parent)
    where = f"{quoted(str(path.parent))} is one" if (path.parent / CONFIG).is_file() else "there is none beside it"
    return Inspection(
        name=path.name,
        kind="safetensors file",
        file_bytes=path.stat().st_size,
        architecture=None,
        problem=f"a single safetensors file does not say its model; lowbit runs directories with {CONFIG}, and {where}",
        shape={},
        tokenizer=None,
        held=tuple(content.held()),
        matrices=content.matrices(whole=False, shape={}),
        quantisation=content.quantisation,
    )


def _of_directory(folder: Path) -> Inspection:
    fields = read_fields(folder / CONFIG)
    content = _Content.of(read_table(folder, tuple(WIDTHS)), folder)
    shape = shape_of_config(fields)
    shards = {place.shard.path: place.shard.size for place in content.table.values()}
    return Inspection(
        name=folder.resolve().name,
        kind="checkpoint directory",
        file_bytes=sum(shards.values()),
        architecture=_architecture(fields),
        problem=_problem(partial(_run_directory, folder)),
        shape=shape,
        tokenizer=_directory_tokens(folder),
        held=tuple(content.held()),
        matrices=content.matrices(whole=True, shape=shape),
        quantisation=content.quantisation,
        remedy=_remedy(folder),
    )


def _remedy(folder: Path) -> str:
    """What makes a directory run that lacks nothing but the file of its tokenizer; empty for all others."""
    if (folder / checkpoint_tokenizer.FILE).exists() or _problem(partial(open_checkpoint, folder)):
        return ""
    file = checkpoint_tokenizer.FILE
    return f"{file} is missing. Put that of the model from which these weights were made into the directory."


def _run_directory(folder: Path) -> None:
    """Read everything that a model needs besides its weights."""
    checkpoint_tokenizer.read_tokenizer(open_checkpoint(folder))


def _architecture(fields: Fields) -> str | None:
    named = fields.values.get("architectures")
    first = named[0] if isinstance(named, list) and named else fields.values.get("model_type")
    return shortened(first, MOST_SHOWN) if isinstance(first, str) else None


def _quantisation(method: Method, packed: Iterable[Packed], zeros: Zeros | None) -> Quantisation:
    counts: dict[str, int] = {}
    for each in packed:
        count = each.layout.matrices * len(_together(each.module))
        counts[each.layout.format] = counts.get(each.layout.format, 0) + count
    options = next((each.layout.options for each in packed if each.layout.options), {})
    bits = method.bits or options.get("bits")
    group_size = method.group_size or options.get("group_size") or options.get("blocksize")
    return Quantisation(method, counts, bits, group_size, zeros)


def _directory_tokens(folder: Path) -> Tokens | None:
    settings, template = folder / checkpoint_tokenizer.SETTINGS, folder / checkpoint_tokenizer.TEMPLATE
    told = read_fields(settings).values.get("chat_template") if settings.is_file() else None
    if (folder / checkpoint_tokenizer.FILE).is_file():
        model = read_fields(folder / checkpoint_tokenizer.FILE, checkpoint_tokenizer.MOST_BYTES).values.get("model")
        kind = model.get("type") if isinstance(model, dict) else None
        kind = shortened(kind, MOST_SHOWN) if isinstance(kind, str) else "of no named kind"
    elif (folder / "tokenizer.model").is_file():
        kind = "tokenizer.model"
    else:
        return None
    return Tokens(kind, template.is_file() or bool(told))
