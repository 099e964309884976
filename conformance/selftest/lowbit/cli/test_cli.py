"""The command line itself: answers, errors in one line, exit statuses, and an interrupt."""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import CommandLine, command_line
from paths import SUPPORT
from rich.console import Console
from typer.testing import CliRunner

import lowbit
from lowbit.backend import Availability
from lowbit.backend.asking import describe
from lowbit.cli import app, progress
from lowbit.cli import backends as command
from lowbit.errors import ArgumentError
from lowbit_numpy import NumpyBackend

LOWBIT = [sys.executable, "-m", "lowbit"]


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandLine]:
    with command_line("lowbit.cli.generate", "lowbit_conformance.cli.conformance") as running:
        yield running


def test_backends_says_what_each_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lists every installed backend; one that cannot run says why and what to do, in the table too."""
    monkeypatch.setattr(NumpyBackend, "availability", lambda self: Availability(False, "no beads", "buy an abacus"))
    found = {name: describe(name) for name in ("numpy", "reference")}
    monkeypatch.setattr(command, "ask", lambda names: [(name, found[name], "") for name in found])
    answer = json.loads(CliRunner().invoke(app, ["backends", "--json"]).stdout)
    assert answer["numpy"] == {"usable": False, "reason": "no beads", "remedy": "buy an abacus"}
    assert answer["reference"]["operations"]["packing.pack"] == {}
    shown = CliRunner().invoke(app, ["backends"]).stdout
    assert "no beads; buy an abacus" in shown
    limited = sum(map(bool, answer["reference"]["operations"].values()))
    assert f"{len(answer['reference']['operations'])} operations, {limited} of them with limits" in shown


def test_backends_that_are_named_are_shown_with_their_limits() -> None:
    """Each once, in the given order and no other; a name that nobody offers is refused before any is asked."""
    answer = CliRunner().invoke(app, ["backends", "reference", "numpy", "reference", "--json"]).stdout
    assert list(json.loads(answer)) == ["reference", "numpy"]
    shown = CliRunner().invoke(app, ["backends", "numpy", "absent:Backend"], env={"COLUMNS": "2000"}).stdout
    assert (
        "packing.unpack" in shown
        and "blocking.apply, blocking.invert: order column_panels, z_curve or nested_panels" in shown
    )
    assert "there is no module 'absent' in this folder or on Python's path" in shown
    refused = CliRunner().invoke(app, ["backends", "numpy", "abacus"])
    assert isinstance(refused.exception, ArgumentError) and "backend is 'abacus'" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--prompt", "x", "--backend", "abacus"], "lowbit: backend is 'abacus'; allowed: "),
        (["generate", "--prompt", "x", "--model", "absent.gguf"], "absent.gguf"),
        (["generate", "--prompt", "x", "--bits", "5"], "lowbit: --bits is 5; allowed: 2, 3, 4 or 8"),
        (["logits", "--prompt", "x", "--top", "0"], "lowbit: --top is 0; allowed: an integer of at least 1"),
        (["conformance", "numpy", "--op", "linear.magic"], "--op is linear.magic; allowed: "),
        (["conformance", "numpy", "--case", "nonsense"], "--case is nonsense; allowed: "),
        (["conformance", "numpy", "--case", "linear.qgemv/C1/x-s0"], "--case is linear.qgemv/C1/x-s0; allowed: "),
        (["conformance", "numpy", "--case", "linear.qgemv/C1/x-s²"], "allowed: the id of a case"),
        (["conformance", ""], "lowbit: backend is ''; allowed: "),
        (["conformance", ":"], "lowbit: backend is ':'; allowed: "),
        (["conformance", "numpy", "--model", "absent.gguf"], "absent.gguf"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_wrong_argument_is_one_line_and_status_2(commands: CommandLine, arguments: list[str], said: str) -> None:
    """The message names the argument and what is allowed, without a traceback, on standard error."""
    done = commands.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version() -> None:
    """One line, and no command is needed."""
    done = subprocess.run([*LOWBIT, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lowbit {lowbit.__version__}\n", "")
    assert lowbit.__version__ == version("lowbit")


def test_the_package_is_the_only_way_to_run_the_command_line(tmp_path: Path) -> None:
    """`python -m lowbit` drops the current folder from the path before it imports anything that could lie there."""
    (tmp_path / "typer.py").write_text("print('a typer of the current folder')")
    command = [sys.executable, "-m", "lowbit", "profiles", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)
    assert find_spec("lowbit.cli.__main__") is None


def test_a_bar_starts_no_thread_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some backends must start while there is one thread; on a terminal a bar is drawn by another."""
    monkeypatch.setattr(Console, "is_terminal", True)
    before = threading.active_count()
    with progress.changing_bar() as report:
        assert threading.active_count() == before
        report("reading", 0, 2)
        assert threading.active_count() == before + 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    """The command does its work; no file that it opens takes the number of a stream, which others may write to."""
    observe = "import os, lowbit.__main__ as m; m._open_standard_streams(); print(os.open('/dev/null', 0) > 2)"
    for words in (["-m", "lowbit", "profiles"], ["-c", f"{observe}; os.write(2, b'x'); os.write(1, b'x')"]):
        command = shlex.join([sys.executable, "-P", *words])
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        if ">&-" not in closed.replace("2>&-", ""):
            assert done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_error_that_cannot_be_written() -> None:
    """The status is still the one of an error, not the one of a check that failed."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*LOWBIT, "generate", "--prompt", "x", "--model", "/nonexistent"], stderr=full)
    assert done.returncode == 2


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    """Services and scripts start programs so; the status is that of the command."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *LOWBIT, "conformance", "numpy", "--case"]
    case = "packing.unpack/C1/lattice/b2-16x1-s0"
    done = subprocess.run([*shell, case], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_an_interrupt_ends_cleanly(tmp_path: Path) -> None:
    """Ctrl-C during the suite, inside a call, ends it and its process at once, with status 130 and one line."""
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    command = [*LOWBIT, "conformance", "misbehaving:WaitsInACall", "--op", "linear.qgemv/C1", "--deadline", "600"]
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(
        [*command, "--json"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(SUPPORT), "HAS_BEGUN": str(pipe)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    ) as process:
        try:
            assert select.select([reader], [], [], 60)[0], "no call was made"
            assert os.read(reader, 1) == b"x"
            os.killpg(process.pid, signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(reader)
    assert process.returncode == 130
    assert error.strip().splitlines()[-1] == "lowbit: interrupted"
    assert "Traceback" not in error
