"""What the tests of commands on models share: tiny models, calls, and runs that are killed."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoint
import tiny_gguf
from paths import SUPPORT
from typer.testing import CliRunner, Result

from lowbit.arrays import F32, Array
from lowbit.cli import app
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.system.interpreters import python_command
from lowbit.system.tasks import Executor, Item, Results, Work
from lowbit.system.tasks import Result as Outcome

TEXT = "hello hall 12 of the hill, he said; hello.\n" * 8


def sources_in(folder: Path) -> dict[str, Path]:
    """A GGUF file, a directory of experts, a dense one, and a text."""
    (folder / "text").write_text(TEXT)
    return {
        "gguf": tiny_gguf.write(folder / "model.gguf"),
        "sparse": tiny_checkpoint.write(folder / "sparse"),
        "dense": tiny_checkpoint.write(folder / "dense", tiny_checkpoint.published(tiny_checkpoint.DENSE)),
        "text": folder / "text",
    }


def run(command: str, *arguments: object) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def answer(command: str, *arguments: object) -> dict[str, Any]:
    """The JSON answer of a command that has to succeed."""
    result = run(command, *arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def fused_in(folder: Path) -> Path:
    """A Phi-3 of GPTQ, whose queries, keys and values are one tensor of codes, with a tokenizer that fits."""
    stored = SUPPORT.parent / "lowbit/formats/checkpoint/quantised/gptq-v1-8-phi3"
    folder.mkdir()
    for file in stored.glob("*.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = {**tiny_checkpoint.TOKENIZER, "added_tokens": [], "post_processor": None}
    letters = {chr(97 + number): number for number in range(26)}
    tokenizer["model"] = {**tokenizer["model"], "vocab": letters, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "phi3"
    return folder


def floats(weights: LlamaWeights) -> dict[str, F32]:
    """All matrices of the blocks, and routers."""
    return {
        f"layers[{number}].{name}": to_float(matrix)
        for number, layer in enumerate(weights.layers)
        for name, matrix in layer.linears().items()
    }


def ends(weights: LlamaWeights) -> list[Array]:
    """Embedding, norm and head."""
    return [np.asarray(weights.embedding), weights.norm, to_float(weights.head)]


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of all files of a directory by name."""
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.is_dir() else {"": path.read_bytes()}


COUNTED = """
import os, signal, sys
sys.path[:0] = {path!r}
import resource
import lowbit.cli, lowbit.cli.quantize, lowbit.cli.convert, tiny_gguf
events, last, place = 0, {last!r}, {place!r}
def count(event, arguments):
    global events
    if event.startswith(("os.", "open", "shutil.", "fcntl.")) and any(place in str(each) for each in arguments):
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
if most := {most!r}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
sys.argv = ["lowbit", *{arguments!r}]
try:
    lowbit.cli.main()
finally:
    print("events", events, file=sys.stderr)
"""


def run_counted(folder: Path, *arguments: object, last: int | None = None, most: int | None = None) -> tuple[int, str]:
    """Run a command in a process that counts what it does with files whose path has `folder` in it.

    Args:
        folder: where the command writes.
        arguments: of ``lowbit``.
        last: the process kills itself at this event, counted from 1; None for never.
        most: no file may get more bytes, as on a full disk; None for no limit.

    Returns:
        The exit status, below 0 for a signal, and standard error, whose last line names the number of events.
    """
    given = {"path": [str(SUPPORT)], "last": last, "most": most, "place": str(folder)}
    program = COUNTED.format(arguments=[str(each) for each in arguments], **given)
    done = subprocess.run(python_command("-c", program), capture_output=True, check=False, text=True)
    return done.returncode, done.stderr


def events_of(folder: Path, *arguments: object) -> int:
    """The number of events of a command that succeeds."""
    status, said = run_counted(folder, *arguments)
    assert status == 0, said
    return int(said.rsplit("events ", 1)[1])


def killed(folder: Path, last: int, *arguments: object) -> None:
    """Run a command that kills itself at an event."""
    status, said = run_counted(folder, *arguments, last=last)
    assert status == -signal.SIGKILL, said


class Here(Executor):
    """Tasks in this process, the last first: no answer may depend on their order."""

    def run(self, work: Work[Item, Outcome], items: Sequence[Item]) -> Results[Item, Outcome]:
        for item in reversed(items):
            yield item, work(item, 1)
