"""Mutated files of vectors, and mutated trees of values, for `fuzzing`."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import Attempt, check_text
from mutations import mutated, part, places, spelled

from lowbit.backend.wire import Tree, as_json, from_json
from lowbit.operations import OPERATIONS
from lowbit_conformance.suite.cases import CONCURRENT
from lowbit_conformance.suite.marking import Settings
from lowbit_conformance.vectors import checking, files
from lowbit_conformance.vectors.record import marks_of, vectors_of

CASES = 1
"""Of each test of the suite, from the first on."""
MOST_CHARACTERS = 10_000


def corpus() -> dict[str, list[Tree]]:
    """Some small vectors of every operation: the first cases of every test of the suite, or its smallest vector."""
    found: dict[str, list[Tree]] = {operation: [] for operation in sorted(OPERATIONS)}
    for operation in found:
        large: list[Tree] = []
        for mark in marks_of(operation):
            for case in islice(mark.generator(mark.clause, Settings(range(1))), CASES):
                if case.variant != CONCURRENT:
                    these = list(vectors_of(case, mark, Counter()))
                    found[operation] += [each for each in these if len(str(each)) < MOST_CHARACTERS][:2]
                    large += these[:1]
        found[operation] = found[operation] or sorted(large, key=lambda each: len(str(each)))[:1]
    assert all(found.values())
    return found


def vectors(folder: Path) -> Attempt:
    """A file with one mutated vector, or with one vector in a mutated file."""
    every, path = corpus(), folder / "vectors.json"
    operations = list(every)

    def attempt(chance: random.Random) -> str:
        operation = chance.choice(operations)
        vector = chance.choice(every[operation])
        document: Tree = {"schema": files.SCHEMA, "operation": operation, "vectors": [vector]}
        if chance.randrange(15):
            document["vectors"] = [mutated(vector, chance, chance.choice((1, 1, 1, 2, 4)))]
        else:
            document = mutated(document, chance)
        path.write_bytes(spelled(document, chance))
        found = list(checking.disagreements(files.read(path)))
        for id, text in found:
            check_text(id)
            check_text(text)
        return "disagree" if found else "agree"

    return attempt


def sizes(folder: Path) -> Attempt:
    """A vector of which one size is absurd: an integer among its arguments, or the shape of an array."""
    every, path = corpus(), folder / "vectors.json"
    operations = list(every)

    def attempt(chance: random.Random) -> str:
        operation = chance.choice(operations)
        vector = chance.choice(every[operation])
        vector = json.loads(json.dumps(vector))
        at = [where for where in places(vector) if type(part(vector, where)) is int and set(where) & {"arguments"}]
        if not at:
            return "no size"
        where = chance.choice(at)
        part(vector, where[:-1])[where[-1]] = chance.choice((2**20, 2**26, 2**28, 2**30, 2**31, 2**32, 2**36, 2**40))
        path.write_text(json.dumps({"schema": files.SCHEMA, "operation": operation, "vectors": [vector]}))
        return "disagree" if list(checking.disagreements(files.read(path))) else "agree"

    return attempt


def trees(folder: Path) -> Attempt:
    """The tree of one value, mutated: what is read has a tree, and comes back from it the same."""
    every = [
        tree
        for these in corpus().values()
        for vector in these
        for tree in (*vector["arguments"].values(), vector.get("result", 0))
    ]

    def attempt(chance: random.Random) -> str:
        value = from_json(mutated({"it": chance.choice(every)}, chance, chance.choice((1, 2))).get("it"))
        again: Any = as_json(value)
        with np.errstate(all="ignore"):
            assert as_json(from_json(again)) == again
        return "read"

    return attempt
