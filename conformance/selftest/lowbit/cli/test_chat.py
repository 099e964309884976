"""``lowbit chat`` on a tiny model: the tokens are those of the template's text, answers stream, the history grows."""

import json
from pathlib import Path
from typing import Any

import pytest
from scored_gguf import scored
from tiny_gguf import write
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.formats.chat import Message
from lowbit.runtime import load

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("chat") / "tiny.gguf", metadata={"tokenizer.chat_template": TEMPLATE})


def run(*arguments: object, typed: str | bytes | None = None) -> Result:
    words = ["chat", *map(str, arguments), "--backend", "numpy"]
    return CliRunner().invoke(app, words, input=typed)


def test_an_answer_continues_the_text_of_the_template(model: Path) -> None:
    """Special tokens are no part of it."""
    loaded = load(model, "numpy")
    ids = loaded.tokenizer.encode("s:be;u:hi;a:", begin=False)
    tokens = [step.token for step in loaded.generate(ids, 6)]
    expected = loaded.tokenizer.decode(tokens, special=False)
    assert "".join(loaded.answer([Message("system", "be"), Message("user", "hi")], 6)) == expected
    result = run("--model", model, "--message", "hi", "--system", "be", "--tokens", 6)
    assert result.stdout == expected + "\n"


def test_a_conversation_is_read_from_standard_input(model: Path) -> None:
    """Each message is answered with all that came before; empty lines are no messages."""
    found = run("--model", model, "--tokens", 2, "--json", typed="hi\n\nyo\n").stdout
    lines: list[dict[str, Any]] = [json.loads(line) for line in found.splitlines()]
    first, second = (line["message"] for line in lines if "message" in line)
    loaded = load(model, "numpy")
    talk = [Message("user", "hi"), Message("assistant", first["content"]), Message("user", "yo")]
    assert first == {"role": "assistant", "content": "".join(loaded.answer(talk[:1], 2))}
    assert second == {"role": "assistant", "content": "".join(loaded.answer(talk, 2))}
    pieces = "".join(line["text"] for line in lines if "text" in line)
    assert pieces == first["content"] + second["content"]


def test_undecodable_bytes_on_standard_input_are_refused(model: Path) -> None:
    """Bytes that are no UTF-8, where standard input is decoded strictly."""
    result = run("--model", model, "--tokens", 2, typed=b"hi\n\xff\xfe\nok\n")
    assert isinstance(result.exception, ArgumentError)
    assert str(result.exception) == "message is undecodable; allowed: text in UTF-8"


def test_an_answer_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no character become replacement characters, and the answer goes on."""
    path = scored(tmp_path / "s.gguf", chat="{{ messages[0].content }}")
    result = run("--model", path, "--message", "ab", "--tokens", 40, "--temperature", 2, "--seed", 4)
    assert result.exit_code == 0, result.output
    assert "\ufffd" in result.stdout


def test_an_answer_ends_before_a_stop_string(model: Path) -> None:
    whole = run("--model", model, "--message", "hi", "--tokens", 12).stdout
    stop = whole[3:5]
    cut = run("--model", model, "--message", "hi", "--tokens", 12, "--stop", stop).stdout
    assert cut == whole[: whole.index(stop)] + "\n"


def test_what_is_refused(model: Path, tmp_path: Path) -> None:
    without = write(tmp_path / "b.gguf")
    for arguments, told in (
        (["--model", without, "--message", "hi"], "b.gguf has no chat template; continue a text with lowbit generate"),
        (["--model", model, "--message", "x" * 99], "conversation is 104 tokens; allowed: at most 64 tokens"),
        (["--model", model, "--message", "x", "--stop", ""], "--stop is ''; allowed: a text of at least one character"),
        (["--model", model, "--message", "x", "--tokens", "0"], "--tokens is 0"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, ArgumentError)
        assert told in str(result.exception)
    with pytest.raises(ArgumentError, match="has no chat template; give it a prompt"):
        load(without, "numpy").answer([Message("user", "hi")])
