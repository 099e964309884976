"""``lowbit compare`` on tiny models: the table, the JSON answer, the page, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write as write_checkpoint
from tiny_gguf import GGML_F32, TOKENS, published, write
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.runtime import load

TEXT = "hello hello\nhall 12 of the hill, he said; hello.\n" * 3
WINDOW = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one tokenizer, a checkpoint directory, a text."""
    place = tmp_path_factory.mktemp("compare")
    for seed in (0, 1):
        write(place / f"{seed}.gguf", published(seed))
    write_checkpoint(place / "directory")
    (place / "text.txt").write_bytes(TEXT.encode())
    return place


def run(folder: Path, a: str, b: str, *arguments: object) -> Result:
    """A comparison on the numpy backend."""
    words = ["compare", folder / a, folder / b, "--text", folder / "text.txt", "--backend", "numpy", *arguments]
    return CliRunner().invoke(app, [str(word) for word in words])


def answer(folder: Path, a: str, b: str, *arguments: object) -> dict[str, Any]:
    result = run(folder, a, b, "--window", WINDOW, "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=int)  # which refuses what is no JSON
    return found


def test_json(folder: Path) -> None:
    """Perplexities are those of the models alone; sums of windows give the means."""
    found = answer(folder, "0.gguf", "1.gguf", "--tokens", 50)
    for letter, file in zip("ab", ("0.gguf", "1.gguf"), strict=True):
        model = load(folder / file, "numpy")
        alone = model.perplexity(model.tokens_of(TEXT, begin=False)[:50], WINDOW)
        assert found["perplexity"][letter]["mean"] == pytest.approx(alone.value, rel=1e-9)
        assert found["scored"] == alone.count
    assert [model["model"] for model in found["models"]] == ["0.gguf", "1.gguf"]
    assert (found["tokens"], found["window"], found["text"], len(found["windows"])) == (50, WINDOW, "text.txt", 3)
    for name in ("kl_divergence", "same_likeliest_token"):
        whole = sum(window[name] for window in found["windows"]) / found["scored"]
        assert found[name]["mean"] == pytest.approx(whole, rel=1e-12)
    a, b = (found["nll"][letter]["mean"] for letter in "ab")
    assert found["difference"]["mean"] == pytest.approx(b - a, rel=1e-9)
    assert len(found["layers"]) == 2 and all(error > 0 for error in found["layers"])


def test_table(folder: Path) -> None:
    """It has the numbers of the JSON answer, and no line is longer than 80 columns."""
    found = answer(folder, "0.gguf", "1.gguf")
    result = run(folder, "0.gguf", "1.gguf", "--window", WINDOW)
    assert max(map(len, result.stdout.splitlines())) <= 80
    for shown in (
        f"{found['perplexity']['b']['mean']:.4f}",
        f"{found['kl_divergence']['mean']:.5f} ± {found['kl_divergence']['standard_error']:.5f}",
        f"{found['layers'][1]:.3e}",
        f"{found['scored']} of the first {found['tokens']} tokens of text.txt scored, 5 windows of 20",
    ):
        assert shown in result.stdout
    assert result.stderr.count("as stored") == 2


def test_perplexities_beyond_float64(folder: Path) -> None:
    """They are null in the answer, whose other numbers stay, and said in words in a table of 80 columns."""
    huge = published(0, head_kind=GGML_F32, tied=False)
    huge.tensors["output"] = huge.tensors["output"] * np.float32(1e4)
    write(folder / "huge.gguf", huge)
    found = answer(folder, "huge.gguf", "1.gguf")
    assert found["perplexity"]["a"] == {"mean": None, "standard_error": None}
    assert found["perplexity"]["b"]["mean"] > 1 and found["nll"]["a"]["mean"] > 710
    said = run(folder, "huge.gguf", "1.gguf", "--window", WINDOW).stdout
    assert max(map(len, said.splitlines())) <= 80
    row = next(line for line in said.splitlines() if line.startswith("perplexity"))
    assert row.split()[1:] == [">1.8e+308", f"{found['perplexity']['b']['mean']:.4f}"]
    assert "A perplexity beyond float64 is e to the power of its nats a token." in said


def test_large_perplexities_keep_the_table_narrow(folder: Path) -> None:
    """Those of 200 digits are in scientific notation."""
    large = published(0, head_kind=GGML_F32, tied=False)
    large.tensors["output"] = large.tensors["output"] * np.float32(100)
    write(folder / "large.gguf", large)
    mean = answer(folder, "large.gguf", "1.gguf")["perplexity"]["a"]["mean"]
    assert mean > 1e20
    said = run(folder, "large.gguf", "1.gguf", "--window", WINDOW).stdout
    assert f"{mean:.4e}" in said and max(map(len, said.splitlines())) <= 80


def test_one_window(folder: Path) -> None:
    """There are no standard errors, and the answer says why."""
    result = run(folder, "0.gguf", "0.gguf", "--window", 60, "--tokens", 60)
    assert "One window gives no standard errors" in result.stdout and "±" not in result.stdout
    found = answer(folder, "0.gguf", "0.gguf", "--tokens", WINDOW)
    assert found["difference"] == {"mean": 0.0, "standard_error": None}


def test_page(folder: Path, tmp_path: Path) -> None:
    """--out writes a page with the numbers, and a plot."""
    out = tmp_path / "out"
    found = answer(folder, "0.gguf", "1.gguf", "--out", out)
    page = (out / "comparison.html").read_text()
    assert f"{found['kl_divergence']['mean']:.5f}" in page and "0.gguf" in page and 'src="comparison.png"' in page
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert found["files"] == {"report": str(out / "comparison.html"), "plot": str(out / "comparison.png")}


def test_models_of_other_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    """Sizes of vocabularies, or the tokens of the text, before any weight is read."""
    error = run(folder, "0.gguf", "directory").exception
    assert isinstance(error, ArgumentError) and "a vocabulary of" in str(error)
    order = [*TOKENS[:-4], TOKENS[-3], TOKENS[-4], *TOKENS[-2:]]
    write(tmp_path / "other.gguf", tokens=order)
    error = run(folder, "0.gguf", str(tmp_path / "other.gguf"), "--window", WINDOW).exception
    assert isinstance(error, ArgumentError) and "different tokens of the text" in str(error)


@pytest.mark.parametrize(
    ("window", "tokens", "named"),
    [(1, 50, "--window"), (65, 50, "--window"), (WINDOW, 1, "tokens"), (WINDOW, 0, "tokens")],
)
def test_refused(folder: Path, window: int, tokens: int, named: str) -> None:
    """Windows that do not fit, called by their option, and texts that are too short."""
    error = run(folder, "0.gguf", "1.gguf", "--window", window, "--tokens", tokens).exception
    assert isinstance(error, ArgumentError) and named in error.argument
