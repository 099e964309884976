"""Reports of the comparison with other projects, from numbers that are written down here."""

import io
import json
from pathlib import Path
from typing import Any

import accuracy
import decode_report
import goals
import growth_report
import jsonschema
import matplotlib.pyplot as plt
import peers_report
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from paths import ROOT
from rich.console import Console

SCHEMAS = ROOT / "bench/schema"


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
        "arithmetic": 0.91,
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
        row("lowbit-avx2-integer-4", 0.75, 6e-3),
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
    problem("QIGen, 2 bits", row("lowbit-avx2-float32-2-g64", 0.5, 2e-7), row("qigen-2-g64", 0.6, 2e-7, "QIGen")),
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
    assert found["llama.cpp's q4_0 over our AVX2, integer"].value == 1.6
    assert not found["groups of 16 over groups of 128, by byte, 4 bits"].met
    assert found["share of the read limit, q4_K, AVX-512"].met and not found["share of the read limit, q8_0, AVX2"].met
    assert found["llama.cpp's q4_K over ours"].value == 1.4
    assert found["share of the read limit, q8_0, 8 bits"].met and "llama.cpp's q8_0 over ours" not in found
    assert (found["PyTorch's gptq over ours"].value, found["PyTorch's gptq over ours"].met) == (1.2, False)
    authors = found["qigen-2-g64: its time over ours"]
    assert (authors.value, authors.met) == (1.2, False)


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
    run |= {
        "turns": 12,
        "free_turns": 11,
        "prompt_tokens": 128,
        "generators": generators,
        "equal_tokens": [64, 3],
        "absent": {"other": "not there"},
    }
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
    assert "11 of 12 turns on free cores" in " ".join(text.split())
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
