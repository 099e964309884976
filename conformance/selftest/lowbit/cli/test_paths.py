"""Paths where there is no model: every command says in one sentence what is there and what may be."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError
from lowbit.runtime import inspect

MODEL = "a GGUF file or a checkpoint directory"
NEED_A_MODEL = {
    "inspect": ["{path}"],
    "generate": ["--prompt", "x", "--model", "{path}"],
    "chat": ["--message", "x", "--model", "{path}"],
    "logits": ["--prompt", "x", "--model", "{path}"],
    "perplexity": ["--model", "{path}", "--text", "{text}"],
    "compare": ["{path}", "{path}", "--text", "{text}"],
    "step": ["show", "--model", "{path}"],
    "quantize": ["{path}", "--bits", "4", "--group-size", "32", "-o", "{free}"],
    "convert": ["{path}", "--format", "floats", "-o", "{free}"],
    "ksort": ["{path}", "-o", "{free}"],
    "pool": ["{path}", "--kv-heads", "1", "-o", "{free}"],
}
KINDS = {
    "nothing": "which does not exist",
    "broken link": "a link to what does not exist",
    "link to itself": "a link to what does not exist",
    "pipe": "which is neither a plain file nor a directory",
}


def made(kind: str, path: Path) -> Path:
    if "link" in kind:
        path.symlink_to(path if "itself" in kind else path.with_name("nowhere"))
    elif kind == "pipe":
        os.mkfifo(path)
    return path


def refused(*arguments: object) -> str:
    """The sentence by which a command refuses its arguments."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert isinstance(result.exception, ArgumentError), result.exception
    return str(result.exception)


@pytest.mark.parametrize("command", NEED_A_MODEL)
def test_every_command_says_that_there_is_no_model(command: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("seven words of a text, more or less")
    places = {"path": tmp_path / "none", "text": tmp_path / "text", "free": tmp_path / "free"}
    said = refused(command, *(each.format(**places) for each in NEED_A_MODEL[command]))
    assert said == f"model is '{tmp_path}/none', which does not exist; allowed: {MODEL}"
    assert not (tmp_path / "free").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_said(kind: str, tmp_path: Path) -> None:
    path = made(kind, tmp_path / "m.gguf")
    assert refused("inspect", path) == f"model is '{path}', {KINDS[kind]}; allowed: {MODEL}"


@pytest.mark.parametrize("kind", [*KINDS, "directory"])
def test_a_text_is_a_plain_file(kind: str, tmp_path: Path) -> None:
    path = made(kind, tmp_path / "text")
    if kind == "directory":
        path.mkdir()
    found = KINDS.get(kind, "which is a directory")
    assert refused("perplexity", "--text", path) == f"text is '{path}', {found}; allowed: a text file"


@pytest.mark.parametrize("content", [b"", b"GG", b"text"])
def test_a_file_of_another_kind_is_told_by_how_it_begins(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=rf"m\.gguf: magic is {content!r}; allowed: b'GGUF'"):
        inspect(path)
