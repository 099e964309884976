"""The comparison with other projects, without them: its statistics, its counts, its order of measuring, its reports."""

import io
import itertools
import json
from math import comb
from pathlib import Path
from typing import Any

import accuracy
import contests
import decode_report
import goals
import growth_report
import jsonschema
import matplotlib.pyplot as plt
import measure
import numpy as np
import peers_report
import pytest
import worker
from matplotlib.figure import Figure
from matplotlib.text import Text
from paths import ROOT
from peers import checkpoints
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights
from peers.registry import CHECKPOINTS, NUMPY, STORED, Entry
from rich.console import Console

from lowbit.arrays import F32
from lowbit.quantization import affine
from lowbit_bench import intervals

SCHEMAS = ROOT / "bench/schema"


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
    """A reader and a watch that note what they are asked."""

    def __init__(self, log: list[str], free: list[bool]) -> None:
        self.log, self._free = log, iter(free)

    def seconds(self, nbytes: int) -> float:
        self.log.append(f"read {nbytes}")
        return 1.0

    def free(self) -> bool:
        return next(self._free, True)


def measured(log: list[str], free: list[bool], pairs: int, step: float = 1e-3) -> measure.Rounds:
    """Two contestants, measured by a clock that goes on by `step` each time it is read."""
    ticks, tools = itertools.count(), Instruments(log, free)
    two: Any = [Still("a", log), Still("b", log, nbytes=7)]
    other: Any = tools
    return measure.measure(two, other, other, pairs, lambda done, total: None, lambda: step * next(ticks))


def test_every_run_has_a_reading_of_its_own_bytes_before_it() -> None:
    """Read, run untimed, run, rest; the bytes are those of the burst; the order changes from round to round."""
    log: list[str] = []
    rounds = measured(log, [], pairs=2)
    turn_a, turn_b = (
        [f"read {2 * nbytes}", f"run {name}", f"run {name}", f"rest {name}"] for name, nbytes in (("a", 100), ("b", 7))
    )
    assert log == ["run a", "run b", *turn_a, *turn_b, *turn_b, *turn_a]
    assert [len(times.runs) for times in rounds.times] == [len(times.reads) for times in rounds.times] == [2, 2]


def test_long_runs_are_not_warmed() -> None:
    """A call of 30 ms runs once a turn."""
    log: list[str] = []
    measured(log, [], pairs=1, step=0.03)
    assert log.count("run a") == 2  # the first tells how long it takes


def test_busy_rounds_are_made_up_for_and_marked() -> None:
    """For each busy round one is added, to twice as many at most; only the free ones count if they are enough."""
    rounds = measured([], [True, False, True, True], pairs=2)
    assert rounds.free == [False, True, True]
    assert rounds.kept(2) == [1, 2]
    busy = measured([], [False] * 9, pairs=2)
    assert busy.free == [False] * 4 and busy.kept(2) == [0, 1, 2, 3]


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


def test_contests_cover_what_is_asked() -> None:
    """All shapes in two families, the headline by groups and by types, a quick run of one; parts of names select."""
    full = contests.contests(False, (), contests.BATCHES)
    assert len(full) == 2 * len(contests.SHAPES) + 4 + len(STORED) + len(CHECKPOINTS)
    assert [contest.id for contest in contests.contests(True, (), (1, 4))] == ["2048x2048 4 bits"]
    chosen = contests.contests(False, ("11008x4096", "groups of 3"), (1,))
    assert [contest.id for contest in chosen] == [
        "11008x4096 4 bits",
        "11008x4096 other widths",
        "4096x11008 groups of 3 bits",
    ]


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


# Reports, from numbers that are written down here.


def row(id: str, ms: float, rms: float, project: str = "lowbit", share: float = 0.8) -> dict[str, Any]:
    return {
        "id": id,
        "project": project,
        "title": id,
        "bits": 4,
        "bytes": 1000,
        "products": 1,
        "rotation_bytes": 4000,
        "bytes_between_uses": 9000,
        "ms": [ms, 0.9 * ms, 1.1 * ms],
        "share": [share, share, share],
        "read_gbps": 50.0,
        "gbps": 40.0,
        "error": {"rms": rms, "max": 5 * rms},
        "original": {"rms": 0.1, "max": 0.4},
        "accuracy": accuracy.class_of(rms),
    }


def problem(family: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "contest": f"4096x11008 {family}",
        "rows": 4096,
        "columns": 11008,
        "family": family,
        "batch": 1,
        "threads": 2,
        "spin_before": 1.98,
        "spin_after": 1.2,
        "rounds": 40,
        "free_rounds": 31,
        "restless_turns": 0,
        "reader": "plain loop",
        "contestants": list(rows),
        "absent": [{"id": "openvino-default", "reason": "openvino is not installed"}],
        "seconds": 1.0,
    }


PROBLEMS = [
    problem(
        "4 bits",
        row("lowbit-avx512-float32-4", 0.5, 2e-7, share=0.7),
        row("lowbit-avx2-float32-4", 0.8, 2e-7),
        row("lowbit-avx512vnni-integer-4", 0.4, 6e-3, share=0.96),
        row("onnxruntime-0", 2.0, 2e-7, "ONNX Runtime"),
        row("onnxruntime-4", 0.45, 6e-3, "ONNX Runtime"),
        row("ggml-q4_0", 1.2, 6e-3, "llama.cpp"),
    ),
    problem(
        "groups of 4 bits", row("lowbit-avx2-float32-4-g16", 1.4, 2e-7), row("lowbit-avx2-float32-4-g128", 1, 2e-7)
    ),
    problem(
        "stored q4_K",
        row("lowbit-avx512-float32-q4_K", 0.6, 2e-7, share=0.66),
        row("lowbit-avx512vnni-integer-q4_K", 0.5, 6e-3, share=0.85),
        row("ggml-q4_K", 0.7, 6e-3, "llama.cpp", share=0.6),
    ),
    problem(
        "stored q8_0",
        row("lowbit-avx2-float32-q8_0", 0.9, 2e-7, share=0.45),
        row("lowbit-avxvnni-integer-q8_0", 0.5, 6e-3, share=0.92),
        row("ggml-q8_0", 0.55, 6e-3, "llama.cpp", share=0.8),
    ),
    problem(
        "stored gptq",
        row("lowbit-avx512-bfloat16-gptq", 0.5, 2e-3, share=0.8),
        row("torch-bfloat16", 0.6, 2e-3, "PyTorch", share=0.7),
    ),
]


def whole_report() -> dict[str, Any]:
    machine = dict.fromkeys(("system", "python", "numpy", "huge_pages", "compiler"), "x")
    return {
        "schema": "lowbit-bench-peers/1",
        "started": "2026-01-01T00:00:00+00:00",
        "machine": machine
        | {"cpu": "some cpu", "cores": 2, "flags": [], "caches": {"L2": "1M"}, "memory_gib": 8.0}
        | {"ceilings": {"2": {"float32, AVX2": 2e11}}},
        "projects": [
            {"name": "lowbit", "versions": {"cppyy": "3.5.0"}, "details": {}},
            {"name": "OpenVINO", "versions": {}, "absent": "no matching distribution"},
        ],
        "settings": {"pairs": 30, "threads": [2], "batch": [1], "rotation": 1024},
        "seconds": {"all": 3.0},
        "conformance": {"avx2": "passed 0123456789abcdef"},
        "goals": [vars(goal) for goal in goals.goals(PROBLEMS)],
        "problems": PROBLEMS,
        "failures": [],
    }


def test_goals_are_judged_by_the_numbers() -> None:
    """Shares, classes, rivals and groups: met and missed, each by whose value."""
    found = {goal.goal: goal for goal in goals.goals(PROBLEMS)}
    missed = found["share of the read limit, 4 bits, AVX-512, float32"]
    assert (missed.value, missed.wanted, missed.met, missed.by) == (0.7, ">= 0.75", False, "lowbit-avx512-float32-4")
    assert found["share of the read limit, 4 bits, AVX-512, integer"].met
    assert found["fastest of class float32: its time over ours"].value == 4
    assert found["fastest of class 8 bits: its time over ours"].value == 1.125
    assert not found["float32 against the fastest of 8 bits: its time over ours"].met
    assert found["ONNX Runtime's float32 over ours"].met
    assert found["llama.cpp's q4_0 over our AVX2"].value == 1.5
    assert not found["groups of 16 over groups of 128, by byte, 4 bits"].met
    assert found["share of the read limit, q4_K, AVX-512"].met and not found["share of the read limit, q8_0, AVX2"].met
    assert found["llama.cpp's q4_K over ours"].value == 1.4
    assert found["share of the read limit, q8_0, 8 bits"].met and "llama.cpp's q8_0 over ours" not in found
    assert (found["PyTorch's gptq over ours"].value, found["PyTorch's gptq over ours"].met) == (1.2, False)


@pytest.mark.parametrize("kind", checkpoints.MAKERS)
def test_checkpoints_hold_the_weights_of_their_peers(kind: str) -> None:
    """The tile and all columns that repeat it, in the bytes of GPTQ and of AWQ, decoded by the specification."""
    weights = Weights(256, 1040, 128)
    tile, whole = checkpoints.matrices(kind, weights)
    expected = affine.dequantize(weights.quantized(4, scale_dtype="float16"))
    np.testing.assert_array_equal(tile.values, expected)
    np.testing.assert_array_equal(whole.values, weights.spread(expected, 1))


def test_the_report_keeps_its_schema_and_breaks_it_when_something_is_missing() -> None:
    """A whole report is valid; one contestant without its error is not, nor is an absent one without a reason."""
    schema, report = json.loads((SCHEMAS / "peers.schema.json").read_text()), whole_report()
    jsonschema.validate(report, schema)
    without = json.loads(json.dumps(report))
    del without["problems"][0]["contestants"][0]["error"]
    silent = json.loads(json.dumps(report))
    silent["problems"][0]["absent"][0]["reason"] = ""
    for broken in (without, silent):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_the_table_fits_80_columns_and_names_the_absent() -> None:
    """Every contestant has a line, no line is longer than 80 columns, absent projects and peers stand with reasons."""
    shown = io.StringIO()
    peers_report.show(whole_report(), Console(file=shown, width=80))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for row in PROBLEMS[0]["contestants"]:
        assert row["id"].removeprefix("lowbit-") in text
    assert "absent: OpenVINO: no matching distribution" in text
    assert "absent openvino-default: openvino is not installed" in text
    assert "31 free of 40 rounds" in text and "passed 0123456789abcdef" in text


def test_pictures_are_drawn_from_a_report(tmp_path: Path) -> None:
    """Both are written whole, and hold every contestant of the headline as text or path."""
    peers_report.draw(whole_report(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers-error.svg", "peers-roofline.svg"]
    assert all(path.read_text().rstrip().endswith("</svg>") for path in tmp_path.iterdir())


def words_of(figure: Figure) -> list[Text]:
    """Every text of a figure other than the numbers at its axes."""
    texts = {text: None for text in figure.findobj(Text)}  # in order
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            for text in axis.findobj(Text):
                if text is not axis.label:
                    texts.pop(text, None)
    return [text for text in texts if isinstance(text, Text) and text.get_text().strip()]


@pytest.mark.parametrize("picture", (peers_report.roofline, peers_report.speed_against_error))
def test_no_words_of_a_picture_overlap(picture: Any) -> None:
    """Of the measurement on the page and of the report of these tests, and every word lies inside the picture."""
    kept = json.loads((Path(__file__).parents[3] / "docs/data/peers.json").read_text("utf-8"))
    for report in (kept, whole_report()):
        figure = picture(report, peers_report.headline(report))
        figure.canvas.draw()
        boxes = [(text.get_text(), text.get_window_extent()) for text in words_of(figure)]
        assert len(boxes) > 6
        for index, (word, box) in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, word
            assert [other for other, place in boxes[index + 1 :] if box.overlaps(place)] == [], word
        plt.close(figure)


def test_who_would_take_too_long_is_left_out_with_the_reason() -> None:
    """By what a smaller batch took, a measurement of more than half a second is not made thirty times."""
    rows = [{"id": "a", "products": 1, "ms": [20.0, 19, 21]}, {"id": "b", "products": 3, "ms": [1.0, 1, 1]}]
    known = [{"batch": 1, "contestants": rows}]
    assert worker.too_slow(known, 16) == {}
    reason = "a measurement would take about 2.6 s, as a product of one row takes 20 ms"
    assert worker.too_slow(known, 128) == {"a": reason}


def test_decoding_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of two generators keeps its schema; the table has both, and the picture is written."""
    generators = [
        {
            "name": name,
            "first_seconds": [0.2, 0.1, 0.3],
            "tokens_per_second": [speed, 0.9 * speed, 1.1 * speed],
            "read_gbps": 40.0,
            "repetitions": [],
        }
        for name, speed in (("lowbit avx2", 100.0), ("llama.cpp", 90.0))
    ]
    run = {"threads": 2, "spin_before": 2.0, "spin_after": 2.0, "model": "m.gguf", "model_bytes": 10**8}
    run |= {"prompt_tokens": 128, "generators": generators, "equal_tokens": [64, 3], "absent": {"other": "not there"}}
    report: dict[str, Any] = {
        "schema": "lowbit-bench-decode/1",
        "started": "2026-01-01T00:00:00+00:00",
        "projects": [],
        "runs": [run],
    }
    report |= {"machine": {"cpu": "c", "cores": 2}, "settings": {"repetitions": 5, "tokens": 64, "prompt": 128}}
    jsonschema.validate(report, json.loads((SCHEMAS / "decode.schema.json").read_text()))
    decode_report.show(report)
    decode_report.draw(report, tmp_path / "decode.svg")
    text = capsys.readouterr().out
    assert "lowbit avx2" in text and "llama.cpp" in text and "absent other: not there" in text
    assert (tmp_path / "decode.svg").read_text().rstrip().endswith("</svg>")


def test_growth_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of two engines keeps its schema; the tables have every point, and the picture is written."""
    points: list[dict[str, Any]] = []
    for engine, speed in (("lowbit avx2 float32", 100.0), ("llama.cpp", 90.0)):
        rates = {"tokens_per_second": [speed, 0.9 * speed, 1.1 * speed], "read_gbps": 40.0}
        points += [{"engine": engine, "context": 64, "prompt_per_second": [7 * speed] * 3} | rates]
        points += [{"engine": engine, "batch": batch} | rates for batch in (1, 8)]
    run = {
        "threads": 2,
        "spin_before": 2.0,
        "spin_after": 2.0,
        "model": "m.gguf",
        "model_bytes": 10**8,
        "points": points,
    }
    run |= {"commands": [{"contract": "float32", "first_token_seconds": [0.7, 0.6, 0.8], "peak_megabytes": 230}]}
    report: dict[str, Any] = {
        "schema": "lowbit-bench-growth/1",
        "started": "2026-01-01T00:00:00+00:00",
        "projects": [],
        "runs": [run | {"absent": {"other": "not there"}}],
    }
    report |= {"machine": {"cpu": "c", "cores": 2}, "settings": {"repetitions": 5, "contexts": [64], "batches": [1, 8]}}
    jsonschema.validate(report, json.loads((SCHEMAS / "growth.schema.json").read_text()))
    growth_report.show(report)
    growth_report.draw(report, tmp_path / "growth.svg")
    text = capsys.readouterr().out
    assert "avx2 float32" in text and "700.0" in text and "first token 0.70 s" in text
    assert "absent other: not there" in text
    assert (tmp_path / "growth.svg").read_text().rstrip().endswith("</svg>")
