"""The parts of a token: measured on a tiny model, summed up, drawn, and kept in the form of the schema."""

import json
from pathlib import Path

import jsonschema
import pytest
import token_parts
import token_parts_report
import whole_model
from paths import ROOT
from tiny_gguf import published, write

SCHEMA = json.loads((ROOT / "bench/schema/token_parts.schema.json").read_text())


def test_medians_and_sums() -> None:
    """The median of each number over repetitions; what parts have in common is summed."""

    def answer(ms: float) -> dict[str, object]:
        one = {"blocks": 2, "wait_ms": 1.0, "bytes": 0}
        parts = [one | {"part": "norm", "ms": ms}, one | {"part": "product by down, add", "ms": 2 * ms, "bytes": 3e6}]
        return {"threads": 2, "ms": 4 * ms, "outside_ms": 0.5, "parts": parts}

    run = token_parts.summed_up([answer(ms) for ms in (3.0, 1.0, 2.0)]) | {"read_gbps": 1.5}
    assert run["ms"] == 8.0 and [part["ms"] for part in run["parts"]] == [2.0, 4.0]
    shares = {"product by down": 4.0, "norms and rotations": 2.0, "waiting": 2.0, "outside the step": 0.5}
    assert token_parts_report.shares_of(run) == shares
    assert token_parts_report.reading_ms(run) == 2.0


@pytest.mark.toolchain
def test_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One thread and two, both contracts; the report keeps its schema, and the picture is written."""
    monkeypatch.setattr(token_parts, "AFTER", 5)
    monkeypatch.setattr(token_parts, "TOKENS", 3)
    monkeypatch.setattr("limits.ROTATION", 2**24)
    monkeypatch.setattr("limits.TRIAL", 2**20)
    runs = token_parts.runs_of(write(tmp_path / "tiny.gguf", published()), [1, 2], 2)
    options = token_parts.parsed(["--repetitions", "2"])
    report = whole_model.report_of("token-parts", options, ("repetitions",), runs) | {"model": "tiny.gguf"}
    jsonschema.validate(report, SCHEMA)
    assert [(run["contract"], run["threads"]) for run in runs] == [
        (contract, threads) for threads in (1, 2) for contract in ("float32", "integer")
    ]
    token_parts_report.show(report)
    assert "float32, 2 threads" in capsys.readouterr().out
    token_parts_report.draw(report, tmp_path / "parts.svg")
    assert (tmp_path / "parts.svg").read_text().rstrip().endswith("</svg>")


def test_the_kept_file_keeps_the_schema() -> None:
    jsonschema.validate(json.loads((ROOT / "docs/data/token_parts.json").read_text()), SCHEMA)
