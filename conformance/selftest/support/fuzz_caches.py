"""Mutated files that lowbit writes for itself and reads again, for `fuzzing`."""

import json
import os
import random
import warnings
import zipfile
from pathlib import Path

import numpy as np
from fuzzing import Attempt, check_text
from kills import matrix
from mixtral.recordings import AHEAD, GUESSED, Recordings
from mutations import mangled, mutated, spelled

from lowbit_conformance.report import gather
from lowbit_cppyy.recipe import METHODS_FOR, Recipe
from lowbit_cppyy.runtime import hardware
from lowbit_cppyy.tuning import outcomes
from lowbit_cuda.cuda import compiler


def outcome(folder: Path) -> Attempt:
    """What a search found: it counts, or is passed over with a warning of one line."""
    os.environ["LOWBIT_CACHE"] = str(folder)
    for module in (outcomes, hardware):
        vars(module).update(processor_key=lambda: "Abacus 3000; avx2; L1 49152")
    key = outcomes.Key(hardware.processor_key(), "avx2", 4, "128", "float16", "minimum", "vector", "wide")
    recipe = Recipe(4, "float16", "minimum", METHODS_FOR["vector"][0])
    path = outcomes.write(key, recipe, {"seconds": 1.0})
    sound = json.loads(path.read_text())

    def attempt(chance: random.Random) -> str:
        path.write_bytes(spelled(mutated(sound, chance), chance))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = outcomes.read(key)
        for warning in caught:
            assert warning.category is outcomes.OutcomeWarning
            check_text(str(warning.message))
        return "read" if found else "warned" if caught else "passed over"

    return attempt


def cubin(folder: Path) -> Attempt:
    """An entry of the cache of compiled kernels: it is what was kept, or it is none."""
    path, code, key = folder / "kernel.cubin", b"\x7fELF" + bytes(range(256)), "0" * 64
    compiler._write(path, key, compiler.Cubin("kernel.cu", "sm_90", "12.9", code, "log"))
    head, _, _ = path.read_bytes().partition(b"\n")

    def attempt(chance: random.Random) -> str:
        if chance.randrange(2):
            path.write_bytes(spelled(mutated(json.loads(head), chance), chance) + b"\n" + code)
        else:
            path.write_bytes(mangled(head + b"\n" + code, chance))
        found = compiler._read(path, key)
        assert found is None or found.code == code
        return "none" if found is None else "read"

    return attempt


def kills(folder: Path) -> Attempt:
    """A kill matrix that was begun."""
    path = folder / "kills.json"
    suite, machine = gather.suite(), gather.machine()  # which take longer than all else
    vars(matrix).update(suite=lambda: suite, machine=lambda: machine)
    begun = matrix.Matrix(path, 2, "claims")
    begun.add("nibbles-swapped", "", {"killed": True, "verdict": "WRONG", "case": "x", "clauses": {"c": {"killed": 1}}})
    begun.add("none", "packing.pack", {"killed": False, "clauses": {}})
    begun.save()
    sound = json.loads(path.read_text())
    parts = [name for name in sound if name in ("control", "defects")] * 3 + list(sound)

    def attempt(chance: random.Random) -> str:
        name = chance.choice(parts)
        changed = sound | mutated({name: sound[name]}, chance, chance.choice((1, 2)))
        path.write_bytes(spelled(changed, chance))
        found = matrix.Matrix(path, 2, "claims")
        list(found.complaints())
        return "resumed" if found.content["defects"] else "begun anew"

    return attempt


def recordings(folder: Path) -> Attempt:
    """An archive of arrays: their headers, the archive's own tables, and what it compresses."""
    path = folder / "routings.npz"
    layers, length = 12, 3
    chosen = np.zeros((1, layers, length, 2), np.uint8)
    guesses = {ahead: np.zeros((1, layers - ahead, length, GUESSED), np.uint8) for ahead in AHEAD}
    Recordings({"read": "alice"}, np.zeros((1, length), np.uint8), chosen, guesses, guesses).save(path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def attempt(chance: random.Random) -> str:
        if chance.randrange(3):
            changed = dict(members)
            name = chance.choice(list(changed))
            changed[name] = mangled(changed[name], chance) if chance.randrange(2) else headed(chance)
            changed |= {"extra.npy": b"", "../x.npy": b""} if not chance.randrange(9) else {}
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for each, data in changed.items():
                    archive.writestr(each, data)
        else:
            path.write_bytes(mangled(content, chance))
        found = Recordings.load(path)
        assert found.chosen.nbytes < 1 << 20
        return "read"

    return attempt


DTYPES = ("'|O'", "'<f8'", "'|u1'", "'<U9'", "[('a', '<f8', (1000000,))]", "'|V8'", "'" + "x" * 9000 + "'", "(((")
SIZES = ("()", "(1, 3)", "(1099511627776,)", "(-1,)", "(4294967296, 4294967296, 4294967296)", "(0, 99)", "(1.5,)", "3")


def headed(chance: random.Random) -> bytes:
    """An array file of numpy whose header says something absurd."""
    text = f"{{'descr': {chance.choice(DTYPES)}, 'fortran_order': {chance.choice((True, False, 1))}, "
    text += f"'shape': {chance.choice(SIZES)}, }}" + " " * chance.choice((0, 60, 70_000)) + "\n"
    version = chance.choice((1, 1, 2, 3, 9))
    size = (
        len(text).to_bytes(2 if version == 1 else 4, "little", signed=False) if len(text) < 65_536 else b"\xff\xff\0\0"
    )
    return b"\x93NUMPY" + bytes((version, 0)) + size + text.encode() + b"\0" * chance.choice((0, 3, 4096))
