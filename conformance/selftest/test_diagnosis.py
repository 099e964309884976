"""The diagnosis of failures: on mistakes that were written without the bank, and on results that change.

The whole list is measured by running this file: it prints a line for each mistake that is not named rightly.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from mistaken import MISTAKES, judged, verdict
from mistakes_products import Mistake
from test_seal import hosted

from lowbit.affine import quantize
from lowbit_conformance.bank import BANK
from lowbit_conformance.explaining import Asked, Explainer, asked_of
from lowbit_conformance.verdicts import BrokenPromiseError

SAMPLE = MISTAKES[::8]
LEAST_RIGHT, MOST_WRONG = 0.8, 0.02

RNG = np.random.default_rng(5)
FIRST, SECOND = (quantize(RNG.normal(size=(16, 5)).astype(np.float32), bits=4, group_size=8) for _ in range(2))
X = np.arange(1, 17, dtype=np.float32)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an unregistered backend is looked for."""
    monkeypatch.chdir(Path(__file__).parent)


def test_the_list_is_long_and_its_names_exist() -> None:
    """At least a hundred mistakes, each of another name; the right names are the bank's, as far as it has one."""
    assert len(MISTAKES) >= 100
    assert len({each.name for each in MISTAKES}) == len(MISTAKES)
    unknown = {name for each in MISTAKES for name in each.right} - BANK.keys()
    assert not unknown, unknown


def test_mistakes_are_named_rightly() -> None:
    """Of every eighth mistake: all are found, enough are named rightly, and none is given a wrong name."""
    said = [verdict(mistake, judged(mistake)) for mistake in SAMPLE]
    assert "survived" not in said
    assert said.count("right") >= LEAST_RIGHT * len(said), said
    assert said.count("wrong") <= MOST_WRONG * len(said), said


@pytest.mark.parametrize("name", ["one-element:linear.qgemv", "lanes-unpacked:linear.qgemv", "abs:linear.qgemv"])
def test_what_has_no_name_is_described(name: str) -> None:
    """A mistake that the bank does not have is given no name."""
    mistake = next(each for each in MISTAKES if each.name == name)
    outcome = judged(mistake)
    assert outcome.failed and not outcome.names
    assert outcome.text.startswith("no known mistake explains this result; ")


def test_one_wrong_element_has_no_name() -> None:
    """Too many mistakes would give it."""
    explainer = Explainer()
    words = np.array([[0x21]], np.uint32)
    given = np.array([[2], *[[0]] * 7], np.uint8)
    asked = Asked("packing.unpack", (words[:1], 4), {}, np.where(given == 0, given, np.uint8(1)))
    explainer.note("packing.unpack/C1/lattice/x-s0", [asked], wrong=True)
    for _, told in explainer.explanations():
        assert not told.defects


def test_failures_that_no_one_mistake_explains_have_no_name() -> None:
    """Two mistakes of one operation: each case has its own, and a name would be wrong for the other."""
    explainer = Explainer()
    from lowbit.packing import unpack

    words = RNG.integers(0, 2**32, (2, 6), np.uint32)
    swapped, signed = (BANK[name].wrong["packing.unpack"] for name in ("nibbles-swapped", "most-significant-first"))
    for number, wrong in enumerate((swapped, signed)):
        assert not np.array_equal(wrong(words, 4), unpack(words, 4))
        asked = Asked("packing.unpack", (words, 4), {}, wrong(words, 4))
        explainer.note(f"packing.unpack/C1/lattice/{number}-s0", [asked], wrong=True)
    told = dict(explainer.explanations())
    assert len(told) == 2
    assert all(not each.defects and "no known mistake" in each.diagnosis for each in told.values())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ByTime", "NONDETERMINISTIC: the same call again gives other bits"),
        ("EveryFifth", "NONDETERMINISTIC: the same call again gives other bits"),
        ("ByAddress", "NONDETERMINISTIC: the result changes with the addresses"),
    ],
)
def test_time_is_told_from_addresses(kind: str, words: str) -> None:
    """Both placements are repeated in turn: only what depends on them gives the same two results each time."""
    with hosted(f"moody:{kind}") as remote:
        prepared = remote.prepare(FIRST)
        with pytest.raises(BrokenPromiseError) as caught:
            for _ in range(3):
                prepared.qgemv(X)
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("KeepsByShape", "the result is that of a matrix that was prepared before"),
        ("KeepsX", "the result is that of the activations of a call before"),
    ],
)
def test_stale_results_are_named(kind: str, words: str) -> None:
    """Numbers that belong to the matrix or the activations before are said to be theirs."""
    explainer = Explainer()
    with hosted(f"moody:{kind}") as remote:
        for number, (matrix, x) in enumerate(((FIRST, X), (SECOND, 2 * X + 1))):
            with remote.recording() as calls:
                remote.prepare(matrix).qgemv(x)
            explainer.note(f"linear.qgemv/C1/lattice/{number}-s0", asked_of(calls), wrong=number > 0)
    told = dict(explainer.explanations())
    assert [each.diagnosis for each in told.values()] == [words]


def main(mistakes: list[Mistake]) -> None:
    """Print what is not named rightly, and the rates."""
    counts: dict[str, int] = {}
    for mistake in mistakes:
        outcome = judged(mistake)
        said = verdict(mistake, outcome)
        counts[said] = counts.get(said, 0) + 1
        if said != "right":
            sys.stdout.write(f"{said} {mistake.name}: {', '.join(outcome.names)}; fits: {', '.join(mistake.right)}\n")
    sys.stdout.write(f"{counts} of {len(mistakes)}\n")


if __name__ == "__main__":
    main(MISTAKES)
