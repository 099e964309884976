"""Text from files and backends on a terminal: no control characters, no forged lines, no marks that turn direction."""

import io
import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, command_line
from rich.console import Console
from tiny_gguf import ALPHABET, MERGED, MERGES, write

from lowbit.cli.demo_certification import show_verdicts
from lowbit.cli.demo_generation import Continuation, Variant, show_continuations
from lowbit.cli.progress import changing_bar
from lowbit.errors import ArgumentError, FormatError, LowbitError, NotDeclaredError, UnavailableError, on_one_line
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.system.interpreters import python_command
from lowbit.text import UNSAFE, cleaned, one_line, quoted
from lowbit_cuda.port import DeviceError

NASTY = "a\x1b[31mb\x07c\u202ed\x1b]8;;http://x\x1b\\e\udc80f\x00g\x9bh\u2028i\nlowbit: passed\r\tj[red]k[/]"


def is_clean(text: str, lines: bool = True) -> bool:
    return not UNSAFE.search(text) and (lines or "\n" not in text)


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandLine]:
    with command_line("lowbit.cli.generate", "lowbit_numpy") as running:
        yield running


NUMPY = ("--backend", "numpy")  # which starts faster than the default


# The functions, and the errors.


def test_one_line() -> None:
    """Whatever is in it, on one line and with each control character spelt out; what is harmless stays."""
    assert is_clean(one_line(NASTY), lines=False) and is_clean(cleaned(NASTY)) and is_clean(quoted(NASTY), lines=False)
    assert one_line("naïve – 日本語 'x'  y") == "naïve – 日本語 'x'  y"
    assert one_line(" a \n\n b\tc\r\nd ") == "a b c d"
    assert one_line("\x1b" * 10_000).endswith("more characters)")
    assert is_clean(on_one_line(NASTY), lines=False) and len(on_one_line("x" * 1000)) == 120


@pytest.mark.parametrize(
    "error",
    [
        LowbitError(NASTY),
        ArgumentError(NASTY, NASTY, NASTY),
        FormatError(NASTY, NASTY, NASTY, NASTY),
        UnavailableError(NASTY, NASTY, NASTY),
        NotDeclaredError(NASTY, NASTY, NASTY),
        DeviceError(NASTY),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error(error: LowbitError) -> None:
    """Its sentence is one line without control characters, and its parts are as they were given."""
    assert is_clean(str(error), lines=False)
    assert NASTY in error.args and "lowbit: passed" in str(error)


# Files.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every string has control characters, down to its name."""
    folder = tmp_path_factory.mktemp("shown")
    words = NASTY.replace("\udc80", "")
    tokens = [f"<{words}>", f"<{words} too>", *ALPHABET, *MERGED]
    metadata = {"tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2), "general.name": words}
    made = write(folder / "plain.gguf", tokens=tokens, merges=MERGES, metadata=metadata)
    return made.rename(folder / os.fsdecode(b"m\x1b[31m\xff\n.gguf"))


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Status and standard output of a command that writes to a terminal."""
    ours, theirs = pty.openpty()
    command = python_command("-m", "lowbit", *map(str, arguments))
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        found = bytearray()
        try:
            while piece := os.read(ours, 2**16):
                found += piece
        except OSError:  # the end of a terminal
            pass
    os.close(ours)
    return process.returncode, found.decode().replace("\r\n", "\n")


def test_tokens(commands: CommandLine, model: Path) -> None:
    """A terminal is shown them with control characters spelt out; a pipe and JSON have them as they are."""
    arguments = ["generate", "--model", str(model), "--prompt", "hello", "--tokens", "58", *NUMPY]
    answer = json.loads(commands.run(*arguments, "--json").stdout)
    text = answer["text"]
    assert UNSAFE.search(text), "this model is to say control characters"
    assert commands.run(*arguments).stdout == text + "\n"
    status, shown = on_a_terminal(*arguments)
    assert status == 0 and is_clean(shown)
    assert shown == cleaned(text, len(text)) + "\n"


def test_notes_and_tables(commands: CommandLine, model: Path, tmp_path: Path) -> None:
    """What is said of a model names its file without obeying it, and a table shows tokens so too."""
    done = commands.run("logits", "--model", str(model), "--prompt", "hello", "--top", "263", *NUMPY)
    assert done.returncode == 0
    assert is_clean(done.stdout) and is_clean(done.stderr)
    assert all(line.startswith("lowbit: ") for line in done.stderr.splitlines())
    (text := tmp_path / "t\x1b[2J.txt").write_text("hello hall " * 9)
    sizes = ("--tokens", "20", "--window", "9")
    done = commands.run("perplexity", "--model", str(model), "--text", str(text), *sizes, *NUMPY)
    assert done.returncode == 0 and is_clean(done.stderr)


def test_strings_of_a_file_in_errors(model: Path, tmp_path: Path) -> None:
    """Every string of a header, put where it is refused, comes out clean."""
    words = NASTY.replace("\udc80", "")
    changes: list[dict[str, Any]] = [
        {"general.architecture": words},
        {"tokenizer.ggml.model": words},
        {"tokenizer.ggml.pre": words},
        {"llama.rope.scaling.type": words},
        {"llama.block_count": words},
        {words: 1, "llama.context_length": None},
        {"tokenizer.ggml.tokens": [words] * 263},
        {"tokenizer.ggml.merges": [words]},
    ]
    refused = 0
    for number, metadata in enumerate(changes):
        path = write(tmp_path / f"{number}.gguf", metadata=metadata)
        try:
            source = open_gguf(path.rename(tmp_path / f"{number}\x1b[31m\n.gguf"))
            read_tokenizer(source)
            read_llama(source)
        except LowbitError as error:
            refused += 1
            assert is_clean(str(error), lines=False), metadata
    assert refused >= len(changes) - 1
    sound, name = write(tmp_path / "tensor.gguf").read_bytes(), b"output_norm.weight"
    (tmp_path / "tensor.gguf").write_bytes(sound.replace(name, b"out\x1b[31m\n.weight".ljust(len(name), b"\x07")))
    with pytest.raises(FormatError) as caught:
        read_llama(open_gguf(tmp_path / "tensor.gguf"))
    assert is_clean(str(caught.value), lines=False)


@pytest.mark.parametrize("option", ["--prompt", "--model", "--backend", "--method"])
def test_bytes_of_a_command_line(option: str, commands: CommandLine, model: Path) -> None:
    """Bytes that are no UTF-8 and control characters in any argument: a message, clean, and status 2."""
    given = {"--prompt": "x", "--model": str(model), "--backend": "numpy", "--bits": "4", "--method": "hqq"}
    given[option] = os.fsdecode(b"x\xff\x1b[31m\nlowbit: passed")
    done = commands.run("logits", *(word for pair in given.items() for word in pair))
    said = done.stderr
    assert done.returncode == 2 and is_clean(said) and "Traceback" not in said
    assert "lowbit: passed" not in said.splitlines()


@pytest.mark.whole
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_that_lacks_characters(encoding: str, model: Path) -> None:
    """What it lacks is escaped, and no command fails for it. Those that take long are tried with the one that lacks
    most."""
    variables = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    commands = [["--help"], ["profiles"]]
    commands += [["generate", "--model", str(model), "--prompt", "hello", "--tokens", "58", *NUMPY]]
    if encoding == "ascii":
        page = str(model.with_name(f"{encoding}.html"))
        commands += [["backends", "numpy"], ["conformance", "numpy", "--quick", "--op", "packing.pack", "--html", page]]
    for command in commands:
        program = python_command("-m", "lowbit", *command)
        done = subprocess.run(program, env=os.environ | variables, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr and b"UnicodeEncodeError" not in done.stderr


# Tables and bars.


def test_the_demo(tmp_path: Path) -> None:
    """Names and texts with markup are shown as they are, with control characters spelt out, and raise nothing."""
    console = Console(record=True, width=300, file=io.StringIO())
    row = {"declared": 1, "bound_used": "", "operation": "linear.qgemv", "passed": 1, "specified": 1}
    verdict = {"backend": NASTY, "verdict": "failed", "operations": [row]}
    show_verdicts(console, [verdict])
    weights = read_llama(open_gguf(write(tmp_path / "m.gguf")))
    said = [Continuation(NASTY, "[/] and " + NASTY, 1.0, 1, NASTY)]
    show_continuations(console, Variant("as stored", weights), NASTY, said)
    text = console.export_text()
    assert is_clean(text) and "[red]k[/]" in text and "[/] and a" in text


def test_a_progress_label(capsys: pytest.CaptureFixture[str]) -> None:
    """It is one line."""
    with changing_bar() as report:
        report(NASTY, 0, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"lowbit: a\\x1b\[31mb", line) and is_clean(line)
