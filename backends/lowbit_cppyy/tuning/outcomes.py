"""What a search found, kept on disk.

Each outcome is one JSON file below the user's cache folder for lowbit (``LOWBIT_CACHE``), one for each processor,
instruction set, width, class of group sizes, kind of scales, purpose and class of shapes. So two processes that write
at once write different files, or the same one after the other: a file is written under a temporary name and then takes
the place of the old one. A file counts only while what it was measured with is the same: the generator (all files
that shape a kernel, by their SHA-256) and cppyy. What is older is passed over in silence; what is damaged, newer or
not what its name says is passed over with a warning. None of it is an error: then the defaults are used.

Which recipe is taken decides in which order sums are added, so results can differ in their last bits from one machine
to another and before and after a search, as they do between instruction sets. Within a process they never change:
each file is read once. And they do not depend on the number of threads, so that is not among what tells outcomes
apart; it is written down for whoever reads them. ``LOWBIT_CPPYY_TUNED=off`` turns all of this off.
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
from lowbit_cppyy.layout.layout import PanelLayout
from lowbit_cppyy.recipe.recipe import METHODS_FOR, PANELS, PURPOSES, Recipe
from lowbit_cppyy.runtime.hardware import processor_key

VARIABLE = "LOWBIT_CPPYY_TUNED"
FORMAT, VERSION = "lowbit-tuned-kernel", 1
MOST_BYTES = 1 << 20
NARROW_BELOW = 2048
"""Columns below which laying out the activations is a large part of a call, and a matrix may stay in a cache."""

SHAPING = (
    *("recipe/recipe", "recipe/places", "recipe/unpacking", "layout/layout", "layout/streams", "layout/memory"),
    *("codegen/isa", "codegen/isa_plain", "codegen/microkernel", "codegen/integers", "codegen/lowering"),
    *("codegen/kernels", "lazily"),
)
"""The modules that shape a kernel of a matrix, or what it reads."""


class OutcomeWarning(UserWarning):
    """A file of a search is passed over."""


CLASSES = (16, 32, 64, 128)
SCALES = ("float32", "float16")


@dataclass(frozen=True)
class Key:
    """What an outcome is for.

    Attributes:
        processor: by `lowbit_cppyy.runtime.hardware.processor_key`.
        isa: the instruction set.
        bits: b, the width of a code.
        groups: the class of group sizes: up to 16, 32, 64, 128, or more.
        scales: dtype of the scales.
        convention: of the zeros.
        purpose: of `lowbit_cppyy.tuning.choices.PURPOSES`.
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


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        recipe: the fastest.
        block_groups: groups down a block of the Z-curve; ``None`` for column panels. It counts for ``vector``.
        block_panels: panels across it; 0 for column panels.
        evidence: what was measured and when, for whoever reads the file.
    """

    recipe: Recipe
    block_groups: int | None
    block_panels: int
    evidence: Mapping[str, Any]


# **Made with**: an outcome of another generator or compiler is none.


@cache
def generator_digest() -> str:
    """SHA-256 of all that shapes a kernel and its call."""
    here, digest = files("lowbit_cppyy"), hashlib.sha256()
    sources = [here / f"{name}.py" for name in SHAPING]
    sources += sorted((here / "cpp").iterdir(), key=lambda source: source.name)
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def made_with() -> dict[str, str]:
    """What has to be the same for an outcome to count."""
    try:
        return {"generator": generator_digest(), "cppyy": version("cppyy")}
    except PackageNotFoundError:
        return {"generator": generator_digest(), "cppyy": "none"}


# **Writing.**


def write(key: Key, outcome: Outcome) -> Path:
    """Keep an outcome in the place of an older one.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "made_with": made_with(),
        "key": asdict(key),
        "recipe": asdict(outcome.recipe),
        "block": {"groups": outcome.block_groups, "panels": outcome.block_panels},
        "evidence": dict(outcome.evidence),
    }
    text = json.dumps(document, indent=1) + "\n"
    with _in_words(key.path.parent):
        make_folder(key.path.parent)
        write_whole(key.path, text.encode())
    return key.path


def check_place(key: Key) -> None:
    """Refuse a folder in which an outcome could not be kept, before the search for it.

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
    """Say what to do about a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror}"
        raise UnavailableError("the outcome of the search", reason, "set LOWBIT_CACHE to another folder") from error


# **Reading.**


def read(key: Key) -> Outcome | None:
    """The outcome for a key, if there is one that counts; a file that should and does not is warned of."""
    path = key.path
    if not os.path.isfile(path):  # nor where the folder is another user's, as under sudo
        return None
    try:
        return _checked(key, parsed(path.name, read_bytes(path, MOST_BYTES, "cache")).values)
    except LowbitError as error:
        message = f"{cleaned(str(path))} is passed over, and default kernels are used: {cleaned(str(error))}"
        warnings.warn(message, OutcomeWarning, stacklevel=2)
        return None


def _checked(key: Key, document: Mapping[str, Any]) -> Outcome | None:
    """The outcome that a document states; ``None`` if it was made with something else."""
    if document.get("format") != FORMAT:
        raise ArgumentError("its format", "another one", f"the JSON object {FORMAT}")
    if document.get("version") != VERSION:
        raise ArgumentError("its version", shown(document.get("version")), f"{VERSION}, which this lowbit writes")
    if document.get("key") != asdict(key):
        raise ArgumentError("its key", "another one", "the one that its name says")
    if document.get("made_with") != made_with():
        return None
    block, evidence = document.get("block"), document.get("evidence")
    if not isinstance(block, dict) or not isinstance(evidence, dict):
        raise ArgumentError("block or evidence", "missing", "JSON objects")
    if block.get("groups") is not None:
        check_integer("block groups", block.get("groups"), 1, 1 << 20)
    check_integer("block panels", block.get("panels"), 0, 1 << 20)
    return Outcome(checked_recipe(document.get("recipe"), key), block.get("groups"), block["panels"], evidence)


def checked_recipe(stated: Any, key: Key) -> Recipe:
    """A recipe from JSON.

    Raises:
        ArgumentError: something is missing, or not what a recipe for this key can be.
    """
    names = set(Recipe.__dataclass_fields__)
    if not isinstance(stated, dict) or set(stated) != names:
        raise ArgumentError("recipe", "other fields", ", ".join(sorted(names)))
    for name, allowed in (("bits", BITS), ("scales", SCALES), ("convention", CONVENTIONS)):
        check_choice(name, stated[name], allowed)
        if stated[name] != getattr(key, name):
            raise ArgumentError(name, stated[name], f"{getattr(key, name)}, as its name says")
    purpose = next(purpose for purpose in PURPOSES if purpose == key.purpose)
    check_choice("method", stated["method"], METHODS_FOR[purpose])
    for name, least, most in _RANGES:
        check_integer(name, stated[name], least, most)
    check_choice("panel", stated["panel"], PANELS)  # or the kernels of other purposes would not fit the layout
    recipe = Recipe(**stated)
    if purpose != "vector":
        check_choice("chains", recipe.chains, (1,))  # or bits would depend on how many rows of x there are
    written = recipe.rows * recipe.registers * recipe.turn * recipe.unit_codes
    check_integer("products written out", written, 1, MOST_WRITTEN)  # or it would be compiled for minutes
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

_seen: dict[Path, Outcome | None] = {}
"""Filled without a lock, which a forked child would find held for ever. Of threads that read a file at once, the first
to come back decides."""


def active() -> bool:
    """Whether outcomes are used at all.

    Raises:
        UnavailableError: the environment variable says neither ``on`` nor ``off``.
    """
    wanted = os.environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise UnavailableError("backend cppyy", f"{VARIABLE} is {wanted[:40]!r}", "set it to on or off, or unset it")
    return wanted == "on"


def tuned(purpose: str, layout: PanelLayout, table: InstructionSet) -> Outcome | None:
    """The outcome for a matrix as it was when this process first asked; ``None`` where there is none."""
    return _found(Key.of(purpose, layout, table)) if active() else None


def _found(key: Key) -> Outcome | None:
    path = key.path
    return _seen[path] if path in _seen else _seen.setdefault(path, read(key))


def forget() -> None:
    """Read the files anew when they are next asked for; for tests."""
    _seen.clear()


def described(table: InstructionSet) -> str:
    """Which kernels are in use with an instruction set, in words: for reports."""
    if not active() or not os.path.isdir(folder(processor_key())):
        return "default"
    there = set(folder(processor_key()).glob(f"{table.name}_u*.json"))
    found = ((key, _found(key)) for key in every_key(table) if key.path in there)
    names = [f"{key.path.stem}: {outcome.recipe.name}" for key, outcome in found if outcome]
    return f"tuned: {'; '.join(sorted(names))}" if names else "default"


def every_key(table: InstructionSet) -> Iterator[Key]:
    """Every key that there can be for an instruction set on this processor."""
    classes = (*map(str, CLASSES), "more")
    for bits, groups, purpose, shape in product(BITS, classes, PURPOSES, ("narrow", "wide")):
        for scales, convention in product(SCALES, CONVENTIONS):
            yield Key(processor_key(), table.name, bits, groups, scales, convention, purpose, shape)
