"""``lowbit generate``, ``logits`` and ``perplexity`` on a checkpoint directory: as it is stored, and quantised."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from tiny_checkpoint import MIXTRAL, published, write
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.cli.options import chosen
from lowbit.errors import ArgumentError, FormatError
from lowbit.model.calibration import CalibrationText
from lowbit.model.decoder import Decoder
from lowbit.model.generation import generate
from lowbit.model.quantization_plan import Plan, Quantization, planned
from lowbit.runtime import StoredModel, load, open_model
from lowbit.system.storage import CACHE_VARIABLE

PLAN = Plan(Quantization(2, 16), Quantization(4, 32))
TRAINED = ROOT / "bench/mixtral/model"
OPTIONS = ["--bits", 4, "--group-size", 32, "--experts-bits", 2, "--experts-group-size", 16]
SIMULATED = ["--backend", "lowbit_gpusim.backend:NumpyOnSim"]
TEXT = "hello hall 12 of the hill, he said; hello.\r\n" * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: object) -> Result:
    """A command, on the backend numpy where it names none."""
    backend = [] if "--backend" in arguments or arguments[0] == "demo" else ["--backend", "numpy"]
    return CliRunner().invoke(app, [str(argument) for argument in [*arguments, *backend]])


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_generate_as_stored(model: Path, cache: Path) -> None:
    """Tokens are those of the decoder over the published weights, on the model's own end; nothing is kept."""
    found = answer("generate", "--model", model, "--prompt", "he", "--tokens", 9)
    loaded = open_model(model)
    assert found["prompt_tokens"] == [1, 259]
    assert found["tokens"] == [step.token for step in generate(Decoder(loaded.weights), [1, 259], 9, stop=(2,))]
    assert (found["model"], found["requantized"]) == ("tiny", None)
    spoken = run("generate", "--model", model, "--prompt", "he", "--tokens", 9)
    assert spoken.stdout == found["text"] + "\n" and "tiny as stored" in spoken.stderr
    assert not cache.exists()


@pytest.mark.parametrize("backend", ["numpy", "reference"])
def test_generate_quantised(backend: str, model: Path, cache: Path) -> None:
    """Experts and attention have their own bits and groups, on any backend, and the next run finds them kept."""
    arguments = ["generate", "--model", model, "--prompt", "he", "--tokens", 5, "--backend", backend, *OPTIONS]
    found = answer(*arguments)
    here = load(planned(open_model(model).weights, PLAN), backend)
    assert found["tokens"] == [step.token for step in here.generate([1, 259], 5, stop=(2,))]
    assert found["requantized"] == {
        "experts": {"bits": 2, "group_size": 16, "method": "nearest"},
        "attention": {"bits": 4, "group_size": 32, "method": "nearest"},
        "head": None,
    }
    assert found["matrices"] == here.account().fields["matrices"]
    assert found["matrices"]["by_backend"] == 2 * (4 + 4 * 3)
    (kept,) = (cache / "quantized").iterdir()
    times = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert answer(*arguments)["tokens"] == found["tokens"]
    assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == times
    said = "tiny quantised experts to 2 bits, groups of 16; attention to 4 bits, groups of 32"
    assert said in run(*arguments).stderr


def test_logits_and_perplexity(model: Path, tmp_path: Path) -> None:
    """The same options, the same weights."""
    stored = open_model(model)
    here = load(StoredModel("m", planned(stored.weights, PLAN), stored.tokenizer), "numpy")
    top = answer("logits", "--model", model, "--prompt", "he", "--top", 3, *OPTIONS)
    assert [row["token"] for row in top["top"]] == np.argsort(-here.logits([1, 259]))[:3].tolist()
    (tmp_path / "text").write_text(TEXT)
    found = answer("perplexity", "--model", model, "--text", tmp_path / "text", "--window", 8, "--tokens", 30, *OPTIONS)
    ids = stored.tokenizer.encode(TEXT.replace("\r\n", "\n"), begin=False)[:30]
    assert found["perplexity"] == here.perplexity(ids, 8).value


def test_gptq(model: Path, tmp_path: Path) -> None:
    """The first tokens of a text calibrate, in windows of the context; of that text itself a remark says so."""
    stored, text, other = open_model(model), tmp_path / "text", tmp_path / "other"
    text.write_text(TEXT)
    other.write_text("the hall of the hill, hello.\n" * 9)
    ids = stored.tokenizer.encode(text.read_text(), begin=False)
    plan = Plan.uniform(3, 16, "gptq", CalibrationText(tuple(ids[:40]), stored.config.context))
    here = load(StoredModel("m", planned(stored.weights, plan), stored.tokenizer), "numpy")
    options = ["--bits", 3, "--group-size", 16, "--method", "gptq", "--calibration", text, "--calibration-tokens", 40]
    given = ["perplexity", "--model", model, "--window", 8, *options, "--text"]
    found = answer(*given, other)
    assert found["perplexity"] == here.perplexity(stored.tokenizer.encode(other.read_text(), begin=False), 8).value
    assert found["requantized"] == plan.fields() and found["requantized"]["calibration"]["tokens"] == 40
    assert "calibrated on this text" not in run(*given, other).stderr
    assert "calibrated on this text" in run(*given, text).stderr


def test_the_trained_model_writes() -> None:
    """The repository's own Mixtral, in two shards: what it writes are words."""
    said = answer("generate", "--model", TRAINED, "--prompt", "Alice was beginning to get ", "--tokens", 40)
    assert said["text"].isascii() and len(said["text"]) == 40 and " the " in f" {said['text']} "


def test_what_bits_cost_the_trained_model(tmp_path: Path) -> None:
    """Its perplexity is that of a model which has learnt, 4 bits change it little, and 2-bit experts show."""
    (tmp_path / "text").write_text("The door was open, and they went on to the end of the hall.")
    found = {}
    for options in ([], ["--bits", 4, "--group-size", 32], ["--experts-bits", 2, "--experts-group-size", 16]):
        measured = answer("perplexity", "--model", TRAINED, "--text", tmp_path / "text", "--window", 60, *options)
        found[str(options[1:2])] = measured["perplexity"]
    stored, four, two = found.values()
    assert 1 < stored < 8  # of 256 bytes
    assert abs(four - stored) < 0.1 * stored < two - stored


def test_plans() -> None:
    """The experts take what is not said of them from the rest; they can also be quantised alone."""
    assert chosen(None, None) is None
    assert chosen(4, None) == Plan(Quantization(4, 64), Quantization(4, 64))
    assert chosen(4, 32, 2) == Plan(Quantization(2, 32), Quantization(4, 32))
    assert chosen(4, None, None, 16) == Plan(Quantization(4, 16), Quantization(4, 64))
    assert chosen(None, None, 3, None, "hqq") == Plan(Quantization(3, 64, "hqq"), None)


REFUSED: list[tuple[list[object], str]] = [
    (["--experts-bits", 5], "--experts-bits is 5; allowed: 2, 3, 4 or 8"),
    (["--experts-bits", 2, "--group-size", 8], "--group-size 8 applies only together with --bits"),
    (["--experts-group-size", 8], "--experts-group-size 8 applies only together with --bits or --experts-bits"),
    (["--method", "hqq"], "--method hqq applies only together with --bits or --experts-bits"),
    (["--bits", 4, "--method", "best"], "--method is 'best'; allowed: nearest, hqq or gptq"),
    (["--bits", 4, "--calibration", "a.txt"], "--calibration applies only to --method gptq"),
    (["--calibration-tokens", 9], "--calibration-tokens applies only to --method gptq"),
    (["--bits", 4, "--method", "gptq", "--calibration-tokens", 0], "--calibration-tokens is 0"),
    (["--experts-bits", 4, "--experts-group-size", 0], "--experts-group-size is 0"),
    (["--tokens", 9, "--bits", 4, "--group-size", 33], "group_size is 33; allowed: an integer from 1 to 32"),
    (["--tokens", 400], "--tokens is 400; allowed: at most 63 after a prompt of 2 tokens"),
    (["--prompt", "hello " * 99], "--prompt is 496 tokens; allowed: at most 64, the model's context"),
    ([*SIMULATED, "--cold-experts", "abacus"], "--cold-experts is 'abacus'; allowed: cppyy, cuda,"),
    ([*SIMULATED, "--device-memory", "1 gig"], "--device-memory is '1 gig'; allowed: a size in bytes"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_arguments(arguments: list[object], message: str, model: Path) -> None:
    """Each gets a line that names the option, what it was and what is allowed."""
    result = run("generate", "--model", model, "--prompt", "he", *arguments)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)


def test_directories_that_are_no_model(tmp_path: Path) -> None:
    """An empty one, one of another kind, and one for the demo, which certifies GGUF files."""
    (tmp_path / "empty").mkdir()
    result = run("generate", "--prompt", "x", "--model", tmp_path / "empty")
    assert isinstance(result.exception, ArgumentError) and "config.json" in str(result.exception)
    other = write(tmp_path / "other", published())
    (other / "config.json").write_text(json.dumps(MIXTRAL | {"model_type": "phimoe"}))
    result = run("generate", "--prompt", "x", "--model", other)
    assert isinstance(result.exception, FormatError) and "model_type is 'phimoe'" in str(result.exception)
    result = run("demo", "--model", other)
    assert isinstance(result.exception, ArgumentError) and "is a directory; the demo" in str(result.exception)
