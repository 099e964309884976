"""Certificates: proofs that were found before.

A certificate is a JSON file in the cache folder of lowbit, with the theorem, a digest of its subject and of all code
that defines its meaning, and the solver. It is accepted only if none of these has changed; so a change of a program, of
a word's definition, of the prover or of the solver requires another proof. No other user can write to the folder
(`lowbit.system.storage.own_folder`). Only proofs are kept.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import z3

from lowbit.errors import UnavailableError
from lowbit.system.storage import cache_folder, own_folder, read_own, write_whole
from lowbit_prove.theorem import WAYS, Proof, Theorem

VERSION = 1
MOST_BYTES = 1 << 16
MEANING = (
    *("lowbit.kernels", "lowbit.quantization", "lowbit.tensor_formats", "lowbit.numbers", "lowbit.linear"),
    *("lowbit_cppyy.codegen", "lowbit_cppyy.layout", "lowbit_cppyy.runtime", "lowbit_cppyy.stored", "lowbit_prove"),
    *("lowbit.moe", "lowbit.model", "lowbit_cppyy.step", "lowbit_cuda.engine"),
)
"""The packages whose code defines what theorems mean and how they are proved."""


@dataclass(frozen=True)
class Certificate:
    """The record of a proof.

    Attributes:
        theorem: its id.
        statement: what was proved.
        subject: SHA-256 of the theorem's subject.
        meaning: SHA-256 of the code that gives the statement its meaning.
        solver: name and version.
        version: of the certificate format.
    """

    theorem: str
    statement: str
    subject: str
    meaning: str
    solver: str
    version: int = VERSION

    @property
    def key(self) -> str:
        """A key shared by theorems with the same proof: everything except the name."""
        parts = [self.theorem.partition("/")[0], self.statement, self.subject, self.meaning, self.solver]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def solver() -> str:
    """The solver's name and version."""
    return f"z3 {z3.get_version_string()}"


@cache
def meaning() -> str:
    """The digest of all code on which a theorem's meaning depends."""
    total = hashlib.sha256()
    for package in MEANING:
        for path, content in sorted(_sources(files(package), package)):
            total.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(content).digest())
    return total.hexdigest()


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _sources(each, f"{name}.{each.name}")
        elif each.name.endswith(".py"):
            yield f"{name}.{each.name}", each.read_bytes()


def certificate(theorem: Theorem) -> Certificate:
    """The certificate that a proof of a theorem would have."""
    subject = hashlib.sha256(theorem.subject().encode()).hexdigest()
    return Certificate(theorem.id, theorem.statement, subject, meaning(), solver())


def kept(wanted: Certificate) -> Proof | None:
    """The proof of an earlier run, if its certificate matches in every field."""
    with suppress(OSError, UnavailableError, ValueError):
        document = json.loads(read_own(_path(wanted), MOST_BYTES))
        return _believed(document, wanted)
    return None


def _believed(document: Any, wanted: Certificate) -> Proof | None:
    same = {name: value for name, value in asdict(wanted).items() if name != "theorem"}
    if not isinstance(document, dict) or any(document.get(name) != value for name, value in same.items()):
        return None
    steps, by = document.get("steps"), document.get("by")
    if type(steps) is not int or steps < 1:
        return None
    return next((Proof(steps, way) for way in WAYS if way == by), None)


def keep(wanted: Certificate, proof: Proof) -> None:
    """Write a certificate; does nothing without a folder for it."""
    text = json.dumps({**asdict(wanted), **asdict(proof)}, indent=1) + "\n"
    with suppress(OSError, UnavailableError):
        write_whole(_path(wanted), text.encode(), 0o644)


def any_kept() -> bool:
    """Whether an earlier run has left any certificate."""
    folder = cache_folder() / "proofs"
    return folder.is_dir() and next(folder.iterdir(), None) is not None


def _path(wanted: Certificate) -> Path:
    return own_folder(cache_folder() / "proofs", "the certificates of proofs") / f"{wanted.key}.json"
