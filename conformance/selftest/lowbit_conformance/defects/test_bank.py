"""The bank of defects: each is what it says, is found for its own reason, and is named by the diagnosis."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import failures
from kills import bank, matrix
from kills.bank import ALL, HABITUAL
from kills.trial import cases_of, try_out

from lowbit.contract.operation import HABITS
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import quantize
from lowbit_conformance.defects import steps
from lowbit_conformance.defects.backends import right, rounded
from lowbit_conformance.defects.bank import BANK, MODULES
from lowbit_conformance.defects.defect import COMMON, Defect
from lowbit_conformance.defects.description import describe
from lowbit_conformance.defects.diagnosis import common_defects
from lowbit_conformance.defects.seen import Seen
from lowbit_conformance.packing import pack
from lowbit_conformance.suite.explaining import Asked

NAMES = list(BANK)
SOURCE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|errata [QMHBG]\d+, .+")
SEARCHED = 3  # failing cases in which a defect is looked for


@pytest.mark.parametrize("defect", ALL.values(), ids=lambda defect: defect.name)
def test_a_defect_is_well_formed(defect: Defect) -> None:
    """Its name is one, its source is an issue or a ruling, and the clauses that it breaks are of its operations."""
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", defect.name)
    assert defect.cause.endswith(".") and len(defect.cause) < 120
    assert defect.seen == COMMON or SOURCE.fullmatch(defect.seen)
    assert defect.operations and set(defect.operations) <= OPERATIONS.keys()
    assert defect.verdicts and defect.clauses
    for clause in defect.clauses:
        operation, _, number = clause.rpartition("/")
        assert operation in defect.operations
        assert clause in OPERATIONS[operation].clauses or number in HABITS


def test_every_operation_has_a_defect_of_its_own() -> None:
    """No operation is broken by the defect that checks nothing alone."""
    assert {name for defect in BANK.values() for name in defect.operations} == OPERATIONS.keys()


def test_every_clause_has_a_defect() -> None:
    """Each clause of each operation, and of the habits that have cases of their own, is broken by some defect."""
    broken = {clause for defect in ALL.values() for clause in defect.clauses}
    for name, operation in OPERATIONS.items():
        own = [*operation.clauses, "H6"] if operation.stateful else [*operation.clauses, "H4", "H6"]
        assert {f"{name}/{clause.rpartition('/')[2]}" for clause in own} <= broken


def test_the_bank_is_as_large_as_promised() -> None:
    """Sixty defects at least, and none twice."""
    assert len(ALL) >= 60
    assert len({(defect.cause, defect.operations) for defect in ALL.values()}) == len(ALL)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if not OPERATIONS[name].stateful])
def test_what_is_not_spoilt_is_right(operation: str) -> None:
    """The bank's own quick functions give the reference's results, to the bit or to a rounding of float32."""
    found = 0
    for mark, case in islice(cases_of((f"{operation}/C1",), (operation,), 0), 6):
        for _, called in _calls(mark, case):
            mine = rounded(operation, right(operation)(*called.arguments, **called.choices))
            assert Seen.of(operation, Asked(operation, called.arguments, called.choices, mine)).wrong == 0
            found += 1
    assert found


def _calls(mark: Any, case: Any) -> Any:
    from in_process import InProcess
    from kills.trial import run

    owner: Any = InProcess("none")
    assert run(mark, case, owner) == ""
    return [(case, owner.last)] if owner.last else []


@pytest.mark.parametrize(  # those of stored matrices have by far the most relatives
    "name", [pytest.param(name, marks=pytest.mark.whole) if name.startswith("stored-") else name for name in NAMES]
)
def test_the_diagnosis_names_the_defect(name: str) -> None:
    """The first cases that a defect fails are all explained by it, so it is named, alone or beside its equals."""
    defect = BANK[name]
    for operation in defect.operations:
        own = tuple(clause for clause in defect.clauses if clause.startswith(f"{operation}/"))
        if OPERATIONS[operation].stateful or not own:
            continue
        seen = []
        for _, called in failures(name, operation, own):
            with suppress(ArgumentError):  # what the reference refuses has no right answer
                here = Seen.of(operation, Asked(operation, called.arguments, called.choices, called.given))
                seen += [here] if here.unequal else []
            if len(seen) == SEARCHED:
                break
        assert seen, operation
        assert all(each.explained(defect) for each in seen), operation


def test_a_session_is_diagnosed() -> None:
    """The answers to all steps of a stateful operation name its defect."""
    from lowbit.moe.offload import Arrangement, Request

    arrangement = Arrangement(layers=1, experts=4, slots=2)
    requests = [Request(0, needed) for needed in ((0, 1), (0,), (2,), (0,))]
    engine = BANK["lru-as-fifo"].wrong["offload.engine"](arrangement)
    given = tuple(engine.step(request) for request in requests)
    asked = Asked("offload.engine", (arrangement,), {}, given, tuple((each,) for each in requests))
    assert BANK["lru-as-fifo"] in common_defects("offload.engine", [Seen.of("offload.engine", asked)], [])


# **What is seen where no defect explains a result.**


def dequantized() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    matrix_of_codes = quantize(rng.normal(size=(24, 10)).astype(np.float32), bits=4, group_size=6)
    return matrix_of_codes, steps.RIGHT.weights(matrix_of_codes)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w[6:12].__imul__(3), ["whole rows", "whole groups 1", "factor 3"]),
        (lambda w: w[:, 8:].fill(0), ["whole columns 8, 9", "past the last whole 8", "all of them are 0"]),
        (lambda w: w[1::8].fill(np.nan), ["NaN", "at bit 4 of a word each time"]),
        (lambda w: w.__setitem__(..., np.roll(w, 1, axis=1)), ["1 later along axis 1"]),
        (lambda w: w.__setitem__(..., w.astype(np.float16)), ["float16's rounding"]),
        (lambda w: w.__setitem__(..., w.T.copy().reshape(w.shape)), ["transposed"]),
        (lambda w: w.__setitem__(..., w[np.random.default_rng(4).permutation(24)]), ["another order"]),
    ],
)
def test_a_pattern_is_described(spoil: Any, words: list[str]) -> None:
    """Whole groups, tails, factors, NaN, shifts and roundings are recognised, with the place of the first."""
    matrix_of_codes, expected = dequantized()
    given = expected.copy()
    spoil(given)
    seen = describe("affine.dequantize", (matrix_of_codes,), given, expected)
    assert all(word in seen.text for word in words), seen.text
    assert {"row", "column", "group", "word", "bit"} <= seen.where.keys()


def test_one_missing_product_is_found_in_a_sum() -> None:
    """A sum that lacks the product of one row names the row and its group."""
    matrix_of_codes, weights = dequantized()
    x = np.arange(1, 25, dtype=np.float32)
    expected = x.astype(np.float64) @ weights
    given = expected.copy()
    given[4] -= float(x[13]) * float(weights[13, 4])
    where = describe("linear.qgemv", (x, matrix_of_codes), given, expected).where
    assert (where["column"], where["row"], where["group"], where["its product"]) == (4, 13, 2, "missing")


def test_a_wrong_word_names_its_bit() -> None:
    """A flipped bit of a word is given with the row whose code it belongs to."""
    codes = np.arange(48, dtype=np.uint8).reshape(16, 3) % 16
    expected = pack(codes, 4)
    given = expected.copy()
    given[1, 2] ^= 1 << 9
    where = describe("packing.pack", (codes, 4), given, expected).where
    assert (where["word"], where["column"], where["bit"], where["row"]) == (1, 2, 9, 10)


@pytest.mark.parametrize("given", [None, 3, "words", (), [1, 2], np.zeros(3), np.zeros((2, 2), np.uint32)])
def test_any_result_can_be_looked_at(given: Any) -> None:
    """What is no array, or has another shape, has no diagnosis, and is described without an error."""
    codes = np.arange(48, dtype=np.uint8).reshape(16, 3) % 16
    seen = Seen.of("packing.pack", Asked("packing.pack", (codes, 4), {}, given))
    assert seen.wrong and common_defects("packing.pack", [seen], []) == ()
    assert describe("packing.pack", (codes, 4), given, pack(codes, 4)).text


# **Against the suite.** All defects are tried by `kills.matrix`; here a cross-section of them: the
# first of each module of arithmetical ones, and for each verdict the first habit.


def cross_section() -> list[str]:
    """Names of defects."""
    chosen = [module.DEFECTS[0].name for module in MODULES]
    habits = [defect for module in HABITUAL for defect in module.DEFECTS]
    by_verdict = {defect.verdicts: defect.name for defect in reversed(habits)}
    return [*chosen, *sorted(by_verdict.values())]


@pytest.mark.parametrize("name", cross_section())
def test_the_suite_finds_it_for_its_own_reason(name: str) -> None:
    """The suite fails a backend with the defect, with the verdict that the bank expects."""
    entry = matrix.described(name) | matrix.entry_of(try_out(name, seeds=1))
    assert matrix.fair(entry), entry


@pytest.mark.parametrize("operation", ["packing.unpack", "bfp.total", "routing.top_k"])
@pytest.mark.whole
def test_the_control_is_found_right(operation: str) -> None:
    """The backend without a defect passes every case of an operation, its habits among them."""
    trial = try_out("none", seeds=1, operations=(operation,))
    assert not trial.killed, trial.first
    assert f"{operation}/H6" in trial.findings


def conformance(*arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "lowbit", "conformance", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.whole
def test_the_command_knows_the_bank() -> None:
    """A defect is a name of the command: it fails, the control passes, and an unknown one is a wrong use."""
    status, answer, _ = conformance("bank:zero-plus-one", "--op", "linear.qgemv/C1", "-x")
    assert (status, answer["failures"][0]["verdict"]) == (1, "WRONG")
    status, answer, _ = conformance("bank:none", "--op", "routing.top_k", "--quick")
    assert (status, answer["verdict"]) == (0, "passed")
    status, _, error = conformance("bank:two-left-feet")
    assert status == 2 and "two-left-feet" in error


def test_an_unknown_defect_is_refused() -> None:
    """The message says where they are listed, and which are like it."""
    with pytest.raises(ArgumentError, match="kill matrix in the docs"):
        bank.backend("two-left-feet")
    with pytest.raises(ArgumentError, match=r"the nearest are .*nibbles-swapped"):
        bank.backend("nibble-swap")


# **The matrix.**


def test_the_matrix_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """What the file holds is not done again; under other settings it is."""
    file = tmp_path / "kill.json"
    begun = matrix.Matrix(file, 2, "claims")
    everything = begun.missing()
    killed = {"killed": True, "verdict": "WRONG", "case": "x", "clauses": {}}
    begun.add("nibbles-swapped", "", killed)
    begun.add("none", "packing.pack", {"killed": False, "clauses": {}})
    begun.save()
    again = matrix.Matrix(file, 2, "claims")
    assert set(everything) - set(again.missing()) == {("nibbles-swapped", ""), ("none", "packing.pack")}
    assert matrix.Matrix(file, 3, "claims").missing() == everything
    assert [path.name for path in tmp_path.iterdir()] == ["kill.json"]


def test_a_sample_of_the_matrix_is_always_the_same(tmp_path: Path) -> None:
    """Every third defect by its order in the bank, and every third operation of the control."""
    missing = matrix.Matrix(tmp_path / "kill.json", 2, "first-kill", sample=3).missing()
    assert [name for name, _ in missing if name != "none"] == list(ALL)[::3]
    assert [operation for name, operation in missing if name == "none"] == list(OPERATIONS)[::3]


def test_the_matrix_complains(tmp_path: Path) -> None:
    """A survivor, a defect found for another reason, one that could not be tried, and a false alarm are named."""
    made = matrix.Matrix(tmp_path / "kill.json", 2, "claims")
    made.add("nibbles-swapped", "", {"killed": False})
    made.add("hangs", "", {"killed": True, "verdict": "WRONG", "case": "x"})
    made.add("prints", "", {"killed": False, "error": "OSError: no room"})
    clauses = {clause: {"killed": 1} for clause in BANK["zero-plus-one"].clauses[1:]}
    made.add("zero-plus-one", "", {"killed": True, "verdict": "WRONG", "case": "x", "clauses": clauses})
    made.add("none", "packing.pack", {"killed": True, "verdict": "WRONG", "case": "packing.pack/C1"})
    lines = [line.partition(" (")[0] for line in made.complaints()]
    assert lines == [
        "false alarm: WRONG in packing.pack/C1",
        "survivor: nibbles-swapped",
        "found for another reason: hangs is WRONG in x",
        "survivor: prints",
        "not found by every clause: zero-plus-one by affine.dequantize/C2",
    ]
