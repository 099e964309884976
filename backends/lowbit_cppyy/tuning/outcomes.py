"""The outcomes of searches, kept on disk.

Each outcome is one JSON file below the user's cache folder for lowbit (``LOWBIT_CACHE``). There is one for each
processor, instruction set, width, class of group sizes, dtype of scales, convention, purpose and class of shapes. So
two processes that write at once write different files, or the same one after the other: a file is written under a
temporary name and then replaces the old one. A file is valid only for the generator (all files that shape a kernel, by
their SHA-256) and the cppyy that it was measured with. An older file is ignored in silence. A file that is damaged,
newer, or inconsistent with its name is ignored with a warning. In none of these cases is there an error: the defaults
are used.

The recipe decides in which order sums are added. So results can differ in their last bits from one machine to another
and before and after a search, as they do between instruction sets. Within a process they never change: each file is
read once. They do not depend on the number of threads, so it is not part of the key; the file only records it.
``LOWBIT_CPPYY_TUNED=off`` disables all outcomes.
"""

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError, LowbitError, UnavailableError
from lowbit.quantization.affine import CONVENTIONS
from lowbit.quantization.packing import BITS
from lowbit.system.json_files import described as shown
from lowbit.system.json_files import parsed, read_bytes
from lowbit.system.storage import cache_folder, make_folder, write_whole
from lowbit.text import cleaned
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import METHODS_FOR, PANELS, PURPOSES, Recipe
from lowbit_cppyy.runtime.hardware import processor_key

VARIABLE = "LOWBIT_CPPYY_TUNED"
FORMAT, VERSION = "lowbit-tuned-kernel", 1
MOST_BYTES = 1 << 20
NARROW_BELOW = 2048
"""With fewer columns, laying out the activations takes much of the time of a call, and the matrix may stay in a
cache."""

SHAPING = (
    *("caching", "recipe", "layout/interleaving", "layout/memory", "layout/panels"),
    *("codegen/broadcasts", "codegen/floats", "codegen/integers"),
    *("codegen/isa", "codegen/isa_neon", "codegen/isa_plain"),
    *("codegen/kernels", "codegen/lowering"),
    *("codegen/microkernel", "codegen/steps", "codegen/unpacking", "runtime/activations"),
)
"""The modules that determine the kernel of a matrix, or the data that it reads."""


class OutcomeWarning(UserWarning):
    """Warns that a file of a search is ignored."""


CLASSES = (16, 32, 64, 128)
SCALES = ("float32", "float16")


@dataclass(frozen=True)
class Key:
    """The matrices and the machine to which an outcome applies.

    Attributes:
        processor: by `lowbit_cppyy.runtime.hardware.processor_key`.
        isa: the instruction set.
        bits: b, the width of a code.
        groups: the class of group sizes: up to 16, 32, 64, 128, or more.
        scales: dtype of the scales.
        convention: of the zeros.
        purpose: of `lowbit_cppyy.recipe.PURPOSES`.
        shape: ``narrow`` or ``wide``, by columns.
    """

    processor: str
    isa: str
    bits: int
    groups: str
    scales: str
    convention: str
    purpose: str
    shape: str

    @classmethod
    def of(cls, purpose: str, layout: PanelLayout, table: InstructionSet) -> "Key":
        """The key for a matrix."""
        return cls(
            processor_key(),
            table.name,
            layout.bits,
            group_class(layout.group_size),
            layout.scales,
            layout.convention,
            purpose,
            "narrow" if layout.columns < NARROW_BELOW else "wide",
        )

    @property
    def path(self) -> Path:
        """The file of the outcome."""
        parts = (self.isa, f"u{self.bits}", f"g{self.groups}", self.scales, self.convention, self.purpose, self.shape)
        return folder(self.processor) / ("_".join(parts).replace(" ", "-") + ".json")


def group_class(group_size: int) -> str:
    """The class of a group size.

    >>> [group_class(size) for size in (7, 16, 48, 128, 4096)]
    ['16', '16', '64', '128', 'more']
    """
    return next((str(most) for most in CLASSES if group_size <= most), "more")


def folder(processor: str) -> Path:
    """The folder of a processor's outcomes."""
    name = re.sub("[^a-z0-9]+", "-", processor.split(";")[0].lower()).strip("-")[:40]
    return cache_folder() / "tuned" / f"{name}-{hashlib.sha256(processor.encode()).hexdigest()[:8]}"


# **Made with**: an outcome of another generator or compiler is not used.


@cache
def generator_digest() -> str:
    """SHA-256 of all files that determine a kernel and its call."""
    here, digest = files("lowbit_cppyy"), hashlib.sha256()
    sources = [here / f"{name}.py" for name in SHAPING]
    sources += sorted((here / "cpp").iterdir(), key=lambda source: source.name)
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def made_with() -> dict[str, str]:
    """The versions that must match for an outcome to be used."""
    try:
        return {"generator": generator_digest(), "cppyy": version("cppyy")}
    except PackageNotFoundError:
        return {"generator": generator_digest(), "cppyy": "none"}


# **Writing.**


FILE_FIELDS = {"unroll": "turn"}
"""Fields of a recipe with a different name in files; the names in files do not change."""


def write(key: Key, recipe: Recipe, evidence: Mapping[str, Any]) -> Path:
    """Write the outcome of a search; it replaces an older one.

    Args:
        key: what it is for.
        recipe: the fastest.
        evidence: what was measured and when, for human readers of the file.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "made_with": made_with(),
        "key": asdict(key),
        "recipe": {FILE_FIELDS.get(name, name): choice for name, choice in asdict(recipe).items()},
        "evidence": dict(evidence),
    }
    text = json.dumps(document, indent=1) + "\n"
    with _in_words(key.path.parent):
        make_folder(key.path.parent)
        write_whole(key.path, text.encode())
    return key.path


def check_place(key: Key) -> None:
    """Refuse a folder to which an outcome cannot be written, before the search.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    folder = key.path.parent
    with _in_words(folder):
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """Turn a failure to write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror}"
        raise UnavailableError("the outcome of the search", reason, "set LOWBIT_CACHE to another folder") from error


# **Reading.**


def read(key: Key) -> Recipe | None:
    """The recipe of the outcome for a key, if there is a valid one. Warns of a damaged file."""
    path = key.path
    if not os.path.isfile(path):  # false also if the folder is another user's, as under sudo
        return None
    try:
        return _checked(key, parsed(path.name, read_bytes(path, MOST_BYTES, "cache")).values)
    except LowbitError as error:
        message = f"{cleaned(str(path))} is ignored, and default kernels are used: {cleaned(str(error))}"
        warnings.warn(message, OutcomeWarning, stacklevel=2)
        return None


def _checked(key: Key, document: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a document; ``None`` if it was made with another generator or compiler."""
    if document.get("format") != FORMAT:
        raise ArgumentError("its format", "another one", f"the JSON object {FORMAT}")
    if document.get("version") != VERSION:
        raise ArgumentError("its version", shown(document.get("version")), f"{VERSION}, which this lowbit writes")
    if document.get("key") != asdict(key):
        raise ArgumentError("its key", "another one", "the one of its file name")
    if document.get("made_with") != made_with():
        return None
    return checked_recipe(document.get("recipe"), key)


def checked_recipe(stated: Any, key: Key) -> Recipe:
    """A recipe from JSON, checked.

    Raises:
        ArgumentError: a field is missing, or not allowed in a recipe for this key.
    """
    names = {FILE_FIELDS.get(name, name) for name in Recipe.__dataclass_fields__}
    if not isinstance(stated, dict) or set(stated) != names:
        raise ArgumentError("recipe", "other fields", ", ".join(sorted(names)))
    for name, allowed in (("bits", BITS), ("scales", SCALES), ("convention", CONVENTIONS)):
        check_choice(name, stated[name], allowed)
        if stated[name] != getattr(key, name):
            raise ArgumentError(name, stated[name], f"{getattr(key, name)}, as in its file name")
    purpose = next(purpose for purpose in PURPOSES if purpose == key.purpose)
    check_choice("method", stated["method"], METHODS_FOR[purpose])
    for name, least, most in _RANGES:
        check_integer(name, stated[name], least, most)
    check_choice("panel", stated["panel"], PANELS)  # otherwise kernels of other purposes would not fit the layout
    recipe = Recipe(**{name: stated[FILE_FIELDS.get(name, name)] for name in Recipe.__dataclass_fields__})
    if purpose != "vector":
        check_choice("chains", recipe.chains, (1,))  # otherwise bits would depend on the number of rows of x
    written = recipe.rows * recipe.registers * recipe.unroll * recipe.unit_codes
    check_integer("products written out", written, 1, MOST_WRITTEN)  # otherwise compiling it would take minutes
    return recipe


MOST_WRITTEN = 2048


_RANGES = (
    ("rows", 1, 16),
    ("registers", 1, 8),
    ("chains", 1, 8),
    ("turn", 1, 64),
    ("ahead", 0, 1 << 16),
)


# **Looking up**, once in a process for each file.

_seen: dict[Path, Recipe | None] = {}
"""Filled without a lock, because a forked child might inherit it locked. If several threads read a file at once, the
first result is kept."""


def active() -> bool:
    """Whether outcomes are used.

    Raises:
        UnavailableError: the environment variable is neither ``on`` nor ``off``.
    """
    wanted = os.environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise UnavailableError("backend cppyy", f"{VARIABLE} is {wanted[:40]!r}", "set it to on or off, or unset it")
    return wanted == "on"


def tuned(purpose: str, layout: PanelLayout, table: InstructionSet) -> Recipe | None:
    """The recipe of the outcome for a matrix, as this process first read it; ``None`` if there was none."""
    return _found(Key.of(purpose, layout, table)) if active() else None


def _found(key: Key) -> Recipe | None:
    path = key.path
    return _seen[path] if path in _seen else _seen.setdefault(path, read(key))


def forget() -> None:
    """Forget the outcomes that were read; for tests."""
    _seen.clear()


def described(table: InstructionSet) -> str:
    """The kernels in use with an instruction set, as text for reports."""
    if not active() or not os.path.isdir(folder(processor_key())):
        return "default"
    there = set(folder(processor_key()).glob(f"{table.name}_u*.json"))
    found = ((key, _found(key)) for key in _every_key(table) if key.path in there)
    names = [f"{key.path.stem}: {recipe.name}" for key, recipe in found if recipe]
    return f"tuned: {'; '.join(sorted(names))}" if names else "default"


def _every_key(table: InstructionSet) -> Iterator[Key]:
    """Every possible key for an instruction set on this processor."""
    classes = (*map(str, CLASSES), "more")
    for bits, groups, purpose, shape in product(BITS, classes, PURPOSES, ("narrow", "wide")):
        for scales, convention in product(SCALES, CONVENTIONS):
            yield Key(processor_key(), table.name, bits, groups, scales, convention, purpose, shape)
