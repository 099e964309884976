"""The demo on a tiny model: its steps, and what it says where two backends disagree."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from tiny_gguf import published, write
from typer.testing import CliRunner, Result

from lowbit.backend import Capabilities, Declaration, PreparedLinear, registry
from lowbit.backend.reference import ReferenceBackend, ReferenceLinear
from lowbit.cli import app, demo, demo_certification, demo_generation, demo_report
from lowbit.cli.demo_certification import PROFILE, lacking
from lowbit.cli.demo_generation import Variant, compare, continuations
from lowbit.cli.demo_report import write_report
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit.model.quantization_plan import Plan, planned
from lowbit.profiles import PROFILES
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.runtime import load, open_model
from lowbit.runtime.elementwise import needed

SIMULATED = "lowbit_gpusim.backend:NumpyOnSim"
ARGUMENTS = ["demo", "--prompt", "hello", "--tokens", "4", "--text-tokens", "32"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", published())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("hello hello 12 hello\r\n" * 20)
    return path


def verdict(name: str, outcome: str) -> dict[str, Any]:
    row = {"operation": "linear.qgemv", "passed": 1, "declared": 1, "specified": 1, "bound_used": "1%"}
    passed = 3 if outcome == "passed" else 1
    counts = {"passed": passed, "declared": 3, "specified": 3}
    return {"backend": name, "verdict": outcome, "operations": [row], "counts": counts}


def asked(monkeypatch: pytest.MonkeyPatch, outcome: str, *, profile: bool | None = None) -> list[tuple[str, ...]]:
    """Let the suite answer at once, with this outcome for numpy, and this one for the profile where it is another;
    returns the list of what it is asked for."""
    calls: list[tuple[str, ...]] = []

    def suite(name: str, *arguments: str) -> dict[str, Any]:
        calls.append((name, *arguments))
        passes = outcome == "passed" or name != "numpy"
        granted = passes if profile is None or name != "numpy" else profile
        certificate = {"certified": granted, "profile": PROFILE}
        return verdict(name, "passed" if passes else outcome) | {
            "certificates": [certificate] if "--profile" in arguments else []
        }

    monkeypatch.setattr(registry, "names", lambda: ["numpy", "reference"])
    monkeypatch.setattr(demo_certification, "suite", suite)
    return calls


def run(model: Path, text: Path, out: Path, *more: str) -> Result:
    arguments = [*ARGUMENTS, "--model", str(model), "--text", str(text), "--out", str(out), *more]
    return CliRunner().invoke(app, arguments)


def test_the_demo_compares_what_is_certified(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certified backends generate equal tokens; one that failed is left out, and the status says so."""
    for outcome, status in (("passed", 0), ("failed", 1)):
        asked(monkeypatch, outcome)
        result = run(model, text, tmp_path / outcome, "--reference", "--json")
        assert result.exit_code == status, result.output
        answer = json.loads(result.stdout)
        said = {name: [each["backend"] for each in each_said] for name, each_said in answer["generation"].items()}
        expected = ["reference", "numpy"] if outcome == "passed" else ["reference"]
        assert said == dict.fromkeys(("as stored", "re-quantised: 4 bits, groups of 64"), expected)
        assert [row["weights"][:12] for row in answer["perplexity"]] == ["as stored", *["re-quantised"] * 3]
        if outcome == "passed":
            assert all("all 4 tokens equal" in each[1]["agreement"] for each in answer["generation"].values())


def test_the_steps_are_announced_and_summed_up(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step says what it does and how long it takes; the end names the files, which are there."""
    calls = asked(monkeypatch, "passed")
    monkeypatch.setenv("COLUMNS", "200")
    result = run(model, text, tmp_path / "out", "--reference")
    steps = [line for line in result.stdout.splitlines() if re.match(r"\d+\. ", line)]
    assert [line.partition(".")[0] for line in steps] == [str(number + 1) for number in range(len(steps))]
    assert all(re.search(r"\(about \d+ s on two processors\)$", line) for line in steps)
    assert steps[0].startswith(f"1. Certify reference, numpy for {PROFILE}, and generate a text")
    assert result.stdout.index("numpy: certified for") < result.stdout.index("2. ")
    _, _, summary = result.stdout.partition("Summary\n")
    assert all(f"{name}: certified for {PROFILE}; 6 cases passed" in summary for name in ("reference", "numpy"))
    for name, file in (("report", "report.html"), ("plot", "plot.png")):
        assert f"{name}: {tmp_path / 'out' / file}" in summary
    assert (tmp_path / "out/plot.png").read_bytes().startswith(b"\x89PNG")
    pages = [words[words.index("--html") + 1] for words in calls if "--html" in words]
    assert sorted(Path(page).name for page in pages) == ["conformance-numpy.html", "conformance-reference.html"]


@pytest.mark.parametrize(
    ("outcome", "profile", "line"),
    [
        ("failed", True, "numpy: failed, and so not compared; 2 of 3 cases did not pass"),
        ("passed", False, f"numpy: not certified for {PROFILE}, and so not compared"),
    ],
)
def test_the_summary_counts_no_cases_of_a_backend_that_is_left_out(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, profile: bool, line: str
) -> None:
    """A backend that fails either step is not compared, and the summary and the page say which step that is."""
    asked(monkeypatch, outcome, profile=profile)
    monkeypatch.setenv("COLUMNS", "200")
    result = run(model, text, tmp_path / "out", "--reference")
    assert result.exit_code == 1
    _, _, summary = result.stdout.partition("Summary\n")
    page = (tmp_path / "out/report.html").read_text("utf-8")
    for place in (summary, page):
        assert line in place and f"reference: certified for {PROFILE}; 6 cases passed" in place
    assert page.count("<h2>Generation") == 1 and "<td>numpy</td>" not in page.partition("<h2>Generation")[2]


def test_the_reference_takes_part_only_when_it_is_asked_to(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes minutes. Without it, the others are compared with numpy, and their heads with the specification."""
    calls = asked(monkeypatch, "passed")
    answer = json.loads(run(model, text, tmp_path / "out", "--json").stdout)
    assert {name for name, *_ in calls} == {"numpy"}
    (said,) = answer["generation"]["as stored"]
    assert said["backend"] == "numpy"
    assert re.search(r"the head's 32 highest logits use [\d.]+% of the bound", said["agreement"])


def test_perplexities_beyond_float64(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are null in the answer, and the plot leaves them out."""
    asked(monkeypatch, "passed")
    huge = published(0, head_kind=GGMLQuantizationType.F32, tied=False)
    huge.tensors["output"] = huge.tensors["output"] * np.float32(1e4)
    result = run(write(tmp_path / "huge.gguf", huge), text, tmp_path / "out", "--json")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    stored = found["perplexity"][0]
    assert stored["weights"] == "as stored" and stored["perplexity"] is None
    assert Path(found["files"]["plot"]).exists()


def test_the_report_escapes_what_it_shows(tmp_path: Path) -> None:
    """Names and texts of models and backends are text in the page, and the plot is where the page looks for it."""
    bad = "<script>x</script>"
    said = {"backend": bad, "text": bad, "tokens_per_second": 1.0, "read_bytes": 1, "agreement": bad}
    widths = [{"weights": name, "bytes": 10**6, "perplexity": 9.0} for name in ("as stored", bad)]
    answer: dict[str, Any] = {"model": bad, "prompt": bad, "profile": bad, "with_profile": {}, "certified": []}
    answer |= {"conformance": [verdict(bad, bad)]}
    files = write_report(answer | {"generation": {bad: [said]}, "perplexity": widths}, tmp_path)
    page = Path(files["report"]).read_text("utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
    assert f'src="{Path(files["plot"]).name}"' in page


def test_without_matplotlib_there_is_no_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written all the same, and refers to none."""
    monkeypatch.setattr(demo_report, "can_draw", lambda: False)
    answer = {"model": "m", "prompt": "p", "conformance": [], "certified": [], "generation": {}, "perplexity": []}
    assert list(write_report(answer, tmp_path)) == ["report"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "<img" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_folder_that_cannot_be_made_is_refused(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is certified."""
    calls = asked(monkeypatch, "passed")
    (tmp_path / "file").touch()
    result = run(model, text, tmp_path / "file")
    assert isinstance(result.exception, ArgumentError) and str(result.exception).startswith("--out is ")
    assert calls == []


def test_a_backend_that_does_not_hold_the_model_is_not_shown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without products, and one that lacks the model's bits, are left out with the reason."""
    narrow = Capabilities({"linear.qgemv": Declaration({"bits": (2,)}, Arithmetic("factored"))})
    assert lacking(ReferenceBackend(), open_model(model).weights) is None
    for declared, reason in ((Capabilities({}), "linear.qgemv"), (narrow, "linear.qgemv for bits 4")):
        monkeypatch.setattr(ReferenceBackend, "capabilities", lambda self, declared=declared: declared)
        missing = lacking(ReferenceBackend(), open_model(model).weights)
        assert str(missing) == f"backend reference does not declare {reason}"


def test_a_backend_that_runs_whole_models_generates_by_its_certified_products(model: Path) -> None:
    """What has been certified is what is compared, and the bytes that a token reads are known."""
    loaded = open_model(model)
    variant = Variant("4 bits", planned(loaded.weights, Plan.uniform(4, 32)))
    (said,) = continuations(variant, [SIMULATED], loaded, "hello", 2, demo.BY_LAYER)
    assert said.backend == SIMULATED and said.read_bytes > 0


class Tilted(ReferenceBackend):
    """The reference with a head that prefers another token."""

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        return TiltedLinear(matrix)


class TiltedLinear(ReferenceLinear):
    def _qgemv(self, x: Any, out: Any) -> None:
        super()._qgemv(x, out)
        if self.columns > 200:  # the head
            out[7] = np.max(out) + 1


def test_the_first_difference_is_shown_with_its_logits_and_bound(model: Path) -> None:
    """Where tokens part, the report names both tokens, both logits and what the head's own product may err by."""
    loaded = open_model(model)
    ids, reference, tilted = loaded.tokenizer.encode("hello"), ReferenceBackend(), Tilted()
    expected = list(load(loaded.weights, reference).generate(ids, 3))
    tilting = load(loaded.weights, tilted)
    steps = list(tilting.generate(ids, 3))
    said = compare(("reference", expected), steps, tilting, tilted, loaded.weights, ids, loaded)
    own, other = steps[0].logits[7], steps[0].logits[expected[0].token]
    assert f"token 1 is {loaded.tokenizer.decode([7])!r}, that of reference is" in said
    assert f"logits {own:.5f} and {other:.5f}" in said
    assert "the head's product alone may err by" in said


def test_a_head_that_leaves_its_bound_is_seen(model: Path) -> None:
    """The share of the bound is below one for the reference, and far above it where a logit is wrong."""
    loaded = open_model(model)
    ids, shares = loaded.tokenizer.encode("hello"), []
    for backend in (ReferenceBackend(), Tilted()):
        ready = load(loaded.weights, backend)
        steps = list(ready.generate(ids, 3))
        said = demo_generation.head_check(ready.decoder, loaded.weights, backend, ids, steps)
        found = re.search(r"use ([\d.]+)% of the bound", said)
        assert found is not None
        shares.append(float(found[1]))
    assert shares[0] <= 100 < shares[1]


def test_the_profile_of_the_first_step_can_be_certified() -> None:
    """It is the current name, and not one that has a successor."""
    assert PROFILE in PROFILES


def test_the_default_order_chooses_who_shows_the_first_text() -> None:
    """The first backend of the default order that is certified; the first of all where none is in it."""
    assert demo.preferred(["numpy", "cppyy", "other"]) == "cppyy"
    assert demo.preferred(["other", "another"]) == "other"


def test_perplexity_is_measured_with_what_is_fastest() -> None:
    """The fastest backend of all texts; None, the default, where nothing was generated."""
    said = [{"backend": "slow", "tokens_per_second": 1.0}, {"backend": "quick", "tokens_per_second": 2.0}]
    assert demo.fastest({"as stored": said, "4 bits": said[:1]}) == "quick"
    assert demo.fastest({"as stored": []}) is None


def test_only_attention_joins_the_products_for_perplexity(model: Path) -> None:
    """Where no step is compiled. Whatever runs on a backend has been certified."""
    with load(model, "numpy", demo.WITH_ATTENTION) as ready:
        assert ready.account().fields["steps_on_backend"] == ["attention.attend"]
    assert {"attention.attend", *needed(ready.config)} <= set(demo_certification.operations_of(ready.config))
