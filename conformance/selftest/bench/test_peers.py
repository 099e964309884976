"""The comparison with other projects, without them: its statistics, its counts, its order of measuring."""

from math import comb
from typing import Any

import accuracy
import compare
import contests
import measure
import numpy as np
import pytest
import worker
from peers import checkpoints, qigen
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights
from peers.registry import CHECKPOINTS, NUMPY, STORED, Entry

from lowbit.arrays import F32
from lowbit.quantization import affine
from lowbit_bench import intervals

# Statistics.


@pytest.mark.parametrize("n", [6, 9, 30, 47, 60])
def test_the_interval_holds_the_median_often_enough(n: int) -> None:
    """The binomial sum of what the interval leaves out is at most 5 %, and one rank further in it is more."""
    k = intervals.rank(n)
    outside = [2 * sum(comb(n, heads) for heads in range(rank)) / 2**n for rank in (k, k + 1)]
    assert outside[0] <= 0.05 < outside[1]


def test_the_interval_covers_in_trials() -> None:
    """Of 400 samples from a skewed distribution at least 93 % have the true median in their interval."""
    rng = np.random.default_rng(3)
    held = 0
    for sample in rng.exponential(size=(400, 30)):
        found = intervals.interval(sample.tolist())
        held += found.low <= np.log(2) <= found.high
    assert held >= 0.93 * 400


def test_few_values_give_their_range() -> None:
    """Where no interval reaches 95 %, it is all that was seen."""
    assert intervals.interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


# Accuracy, against roundings that are really made.


def bfloat16(x: F32) -> F32:
    """Rounded to the nearest bfloat16; ties do not occur among random values."""
    raised: F32 = ((x.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    return raised


def in_bytes(x: F32, block: int) -> F32:
    """Rounded to steps of 1/127 of the largest in each block."""
    blocks = x.reshape(-1, block)
    step = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    rounded: F32 = (np.rint(blocks / step) * step).reshape(x.shape).astype(np.float32)
    return rounded


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", "float32"),
        ("float16", "16 bits"),
        ("bfloat16", "16 bits"),
        ("bytes of 16", "8 bits"),
        ("bytes of 256", "8 bits"),
        ("bytes of all", "8 bits"),
        ("nibbles", "coarser"),
    ],
)
def test_a_product_is_put_into_the_class_of_its_activations(name: str, expected: str) -> None:
    """Rounded activations, multiplied exactly, fall into the class named after them."""
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((2, 4096), np.float32), rng.standard_normal((4096, 128), np.float32)
    rounded: dict[str, F32] = {
        "float32": x,
        "float16": x.astype(np.float16).astype(np.float32),
        "bfloat16": bfloat16(x),
        "bytes of 16": in_bytes(x, 16),
        "bytes of 256": in_bytes(x, 256),
        "bytes of all": in_bytes(x, 4096),
        "nibbles": (np.rint(x * 2) / 2).astype(np.float32),
    }
    exact = x.astype(np.float64) @ matrix
    result = (rounded[name] @ matrix).astype(np.float32)
    assert accuracy.class_of(accuracy.error(result, exact).rms) == expected


def test_what_is_not_finite_is_of_no_class() -> None:
    """One NaN makes the error infinite and the class coarser."""
    found = accuracy.error(np.array([np.nan, 1], np.float32), np.array([1.0, 1.0]))
    assert found.rms == float("inf") and accuracy.class_of(found.rms) == accuracy.COARSER


def test_the_derived_constants_are_those_of_rounding() -> None:
    """The cost of float16 and of bytes in blocks of 16, as the chapter derives them, within 3 % of what is seen."""
    x = np.random.default_rng(1).standard_normal(2**16, np.float32)
    for rounded, derived in ((x.astype(np.float16), accuracy.FLOAT16), (in_bytes(x, 16), accuracy.BYTE_AT_BEST)):
        seen = float(np.sqrt(np.mean((rounded.astype(np.float64) - x) ** 2) / np.mean(x.astype(np.float64) ** 2)))
        assert seen == pytest.approx(derived, rel=0.03)


# What is measured, and in which order.


class Still(Contestant):
    """A contestant that computes nothing and notes when it ran."""

    def __init__(self, name: str, log: list[str], nbytes: int = 100, bursts: int = 4) -> None:
        self.name, self.log, self.nbytes, self.products, self.bursts = name, log, nbytes, 2, bursts

    def prepare(self, x: F32) -> None:
        self.x = x

    def run(self) -> None:
        self.log.append(f"run {self.name}")

    def rest(self) -> None:
        self.log.append(f"rest {self.name}")

    def result(self) -> F32:
        return self.x

    def held(self) -> F32:
        return np.eye(8, dtype=np.float32)


class Instruments:
    """A reader, a watch and a clock that note what they are asked.

    Args:
        log: where they note it.
        fast: the answers to whether a spin is fast, then always yes.
        alone: the answers to whether others had little of the machine, then always yes.
        step: by how much the clock goes on each time that it is read.
    """

    def __init__(self, log: list[str], fast: list[bool], alone: list[bool], step: float) -> None:
        self.log, self._fast, self._alone, self._step, self._now = log, iter(fast), iter(alone), step, 0.0

    def seconds(self, nbytes: int) -> float:
        self.log.append(f"read {nbytes}")
        return 1.0

    def fast(self) -> bool:
        return next(self._fast, True)

    def alone(self) -> bool:
        self.log.append("alone?")
        return next(self._alone, True)

    def wait(self, patience: float) -> float:
        self.log.append(f"wait {patience:.0f}")
        passed = min(patience, 25.0)
        self._now += passed
        return passed

    def clock(self) -> float:
        self._now += self._step
        return self._now


def measured(
    log: list[str],
    pairs: int,
    fast: list[bool] | None = None,
    alone: list[bool] | None = None,
    step: float = 1e-3,
    patience: float = 60,
) -> measure.Rounds:
    """Two contestants, measured by instruments that give these answers; the wait before the first round takes 25 s."""
    two: list[Contestant] = [Still("a", log), Still("b", log, nbytes=7)]
    tools: Any = Instruments(log, fast or [], [True, *(alone or [])], step)
    return measure.measure(two, tools, tools, pairs, lambda done, total: None, tools.clock, patience)


def waits(log: list[str]) -> list[str]:
    """The waits after the one before the first round."""
    return [each for each in log if each.startswith("wait")][1:]


def test_every_run_has_a_reading_of_its_own_bytes_before_it() -> None:
    """Read, run untimed, run, rest; the bytes are those of the burst; the order changes from round to round."""
    log: list[str] = []
    rounds = measured(log, pairs=2)
    turn_a, turn_b = (
        [f"read {2 * nbytes}", f"run {name}", f"run {name}", f"rest {name}"] for name, nbytes in (("a", 100), ("b", 7))
    )
    first, second = [*turn_a, *turn_b, "alone?"], [*turn_b, *turn_a, "alone?"]
    assert log == ["run a", "run b", "wait 60", "alone?", *first, *second]
    assert [len(times.runs) for times in rounds.times] == [len(times.reads) for times in rounds.times] == [2, 2]


def test_long_runs_are_not_warmed() -> None:
    """A call of 30 ms runs once a turn."""
    log: list[str] = []
    measured(log, pairs=1, step=0.03)
    assert log.count("run a") == 2  # the first tells how long it takes


def test_a_turn_on_a_busy_core_is_made_again() -> None:
    """After a wait for free cores; neither the time of its run nor that of its reading is kept."""
    log: list[str] = []
    rounds = measured(log, pairs=2, fast=[True, False, False, True])
    assert rounds.again == 2 and rounds.free == [True, True]
    assert [len(times.runs) for times in rounds.times] == [len(times.reads) for times in rounds.times] == [2, 2]
    assert log.count("run b") == 1 + 2 * (1 + 2 + 1) and log.count("run a") == 1 + 2 * 2
    assert waits(log) == ["wait 35", "wait 10"]


def test_when_patience_is_over_busy_turns_count_and_mark_their_rounds() -> None:
    """A round with such a turn is busy, and so is one in which others had much of the machine. For each busy round one
    is added, to four times as many at most; only the free ones count if they are enough."""
    log: list[str] = []
    rounds = measured(log, pairs=2, fast=[False, True, True, True], alone=[True, False, True, True], patience=0)
    assert rounds.free == [False, False, True, True] and rounds.again == 0 and not waits(log)
    assert rounds.kept(2) == [2, 3]
    busy = measured(log, pairs=2, fast=[False] * 99, patience=50)
    assert busy.free == [False] * 8 and busy.kept(2) == list(range(8))
    assert busy.again == 1 and waits(log)[1:] == ["wait 25"]  # the first is the one before the first round


def test_a_turn_that_leaves_threads_awake_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would keep the cores from being free for as long as the patience lasts."""
    monkeypatch.setattr(measure, "settle", lambda: False)
    log: list[str] = []
    rounds = measured(log, pairs=1, fast=[False] * 99)
    assert rounds.free == [False] * 4 and rounds.restless == 8 and not waits(log)


def test_a_resumed_run_measures_busy_problems_again() -> None:
    """Those with fewer free rounds than are wanted, once; the report with more free rounds is kept."""

    def problem(batch: int, free: int, threads: int = 1) -> dict[str, Any]:
        return {"contest": "4 bits", "batch": batch, "threads": threads, "free_rounds": free}

    earlier = [problem(1, 30), problem(4, 12), problem(16, 20), problem(1, 3, threads=2)]
    run = compare.Run(compare.options(["--pairs", "30"]), problems=list(earlier))
    assert run.done(1) == ["4 bits 1"] and run.done(2) == []
    for batch, free in ((4, 30), (16, 19), (128, 0)):
        run.take(problem(batch, free))
    assert run.done(1) == ["4 bits 1", "4 bits 4", "4 bits 16", "4 bits 128"]
    assert run.problems == [problem(1, 30), problem(4, 30), *earlier[2:], problem(128, 0)]


@pytest.mark.parametrize("given", ("-1", "nan", "inf", "3601"))
def test_a_patience_that_is_no_time_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.options([f"--patience={given}"])
    assert f"--patience is {given}; allowed: 0 to 3600 seconds" in capsys.readouterr().err
    assert compare.options(["--patience", "240"]).patience == 240


def test_bytes_between_two_uses_count_all_that_is_read() -> None:
    """Two contestants of 4 bursts of 200 bytes, run twice a turn, beside readings: 2 rounds of 1200 bytes."""
    alone: Any = [Still("a", []), Still("b", [])]
    assert contests.between(alone, [True, True]) == [2400, 2400]
    assert contests.between(alone, [False, False]) == [3200, 3200]

    class Shared(Still):
        store = "one store"

    shared: Any = [Shared("a", []), Shared("b", [])]
    assert contests.between(shared, [True, True]) == [1200, 1200]


def test_a_plan_fills_its_rotation_and_its_bursts() -> None:
    """Copies times bytes are at least the rotation, and products of a burst move at least the burst."""
    plan = Plan(threads=1, rotation=1000, burst=64)
    for nbytes in (1, 10, 63, 64, 65, 5000):
        products, bursts = plan.products(nbytes), plan.bursts(nbytes)
        assert products * nbytes >= 64 and products * bursts * nbytes >= 1000 and bursts >= 4


def test_contests_cover_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shapes in two families, the headline by groups and by types, a quick run of one; parts of names select."""
    monkeypatch.delenv(qigen.CLONE, raising=False)
    full = contests.contests(False, (), contests.BATCHES)
    assert len(full) == 2 * len(contests.SHAPES) + 4 + len(STORED) + len(CHECKPOINTS)
    assert [contest.id for contest in contests.contests(True, (), (1, 4))] == ["2048x2048 4 bits"]
    chosen = contests.contests(False, ("11008x4096", "groups of 3"), (1,))
    assert [contest.id for contest in chosen] == [
        "11008x4096 4 bits",
        "11008x4096 other widths",
        "4096x11008 groups of 3 bits",
    ]


def test_the_authors_kernels_take_part_where_a_clone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside lowbit's with the same instructions, groups of 128 and whole columns; without a clone they are absent."""
    monkeypatch.setenv(qigen.CLONE, "/nowhere")
    chosen = contests.contests(False, ("QIGen",), (1,))
    assert [contest.id for contest in chosen] == [f"4096x11008 QIGen, {bits} bits" for bits in (4, 3, 2)]
    assert [entry.id for entry in chosen[1].entries()] == [
        "lowbit-avx2-float32-3-g128",
        "qigen-3-g128",
        "lowbit-avx2-float32-3-g4096",
        "qigen-3-g4096",
    ]
    monkeypatch.delenv(qigen.CLONE)
    assert not contests.contests(False, ("QIGen",), (1,))
    with pytest.raises(AbsentError, match="names no clone"):
        chosen[0].entries()[1].build(Weights(4096, 128, 128), Plan(1, 1, 1))


def test_small_memory_means_fewer_copies() -> None:
    """The rotation is a gigabyte where memory allows it for everyone; contracts that share weights count once."""
    contest = contests.Contest(4096, 4096, "4 bits", (1,))
    entries = [Entry(id, NUMPY, "", 4, lambda weights, plan: Still("a", [])) for id in ("a-float32", "a-integer", "b")]
    assert contest.rotation(2**40, entries) == 2**30
    assert contest.rotation(2**30, entries) == int(0.85 * 2**30) // 2


def test_the_weights_of_all_columns_repeat_the_tile() -> None:
    """A matrix quantised as a tile and spread is what quantising all columns gives, column by column."""
    weights = Weights(128, 700, 64)
    tile = weights.quantized(3)
    whole, dense = weights.whole(tile), affine.dequantize(tile)
    assert whole.columns == 700 and np.array_equal(affine.dequantize(whole), dense[:, weights.source])
    assert np.array_equal(weights.spread(weights.tile, 1)[:, 600], weights.tile[:, 600 - 512])


def test_a_rotation_goes_round() -> None:
    """Everything once, then again from the first."""
    turns = Rotation([1, 2, 3])
    assert [turns.next() for _ in range(5)] == [1, 2, 3, 1, 2]


def test_who_cannot_be_built_is_absent_with_the_reason() -> None:
    """A failure, a refusal and a crash of an earlier process each become a line; the others are built and closed."""
    closed: list[str] = []

    class Closing(Still):
        def close(self) -> None:
            closed.append(self.name)

    def failing(weights: Weights, plan: Plan) -> Contestant:
        raise ValueError("no such\nkernel")

    def refusing(weights: Weights, plan: Plan) -> Contestant:
        raise AbsentError("its blocks do not fit")

    builds: dict[str, Any] = {"a": failing, "b": refusing, "c": lambda weights, plan: Closing("c", [])}
    entries = [Entry(id, NUMPY, id, 4, build) for id, build in (builds | {"d": failing}).items()]
    given = {"threads": 1, "rotation": 1, "left_out": {"d": "the process ended with SIGFPE"}, "not_installed": {}}
    missing: dict[str, str] = {}
    contest = contests.Contest(64, 64, "4 bits", (1,))
    with worker.built(contest, entries, given, missing, lambda event, **fields: None) as present:
        assert [entry.id for entry, _ in present] == ["c"] and not closed
    assert closed == ["c"]
    assert missing == {
        "a": "ValueError: no such kernel",
        "b": "its blocks do not fit",
        "d": "the process ended with SIGFPE",
    }


@pytest.mark.parametrize("kind", checkpoints.MAKERS)
def test_checkpoints_hold_the_weights_of_their_peers(kind: str) -> None:
    """The tile and all columns that repeat it, in the bytes of GPTQ and of AWQ, decoded by the specification."""
    weights = Weights(256, 1040, 128)
    tile, whole = checkpoints.matrices(kind, weights)
    expected = affine.dequantize(weights.quantized(4, scale_dtype="float16"))
    np.testing.assert_array_equal(tile.values, expected)
    np.testing.assert_array_equal(whole.values, weights.spread(expected, 1))


def test_who_would_take_too_long_is_left_out_with_the_reason() -> None:
    """By what a smaller batch took, a measurement of more than half a second is not made thirty times."""
    rows = [{"id": "a", "products": 1, "ms": [20.0, 19, 21]}, {"id": "b", "products": 3, "ms": [1.0, 1, 1]}]
    known = [{"batch": 1, "contestants": rows}]
    assert worker.too_slow(known, 16) == {}
    reason = "a measurement would take about 2.6 s, as a product of one row takes 20 ms"
    assert worker.too_slow(known, 128) == {"a": reason}
