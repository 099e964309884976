"""Packages of strangers, from their lists of entries to what they do while they are imported.

A list that is no ordinary file is named and skipped. A backend that ends its process, waits, forks or closes streams
breaks its own line of ``lowbit backends``.
"""

import json
import os
import shlex
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import CommandLine, command_line
from typer.testing import CliRunner

from lowbit.backend import asking
from lowbit.cli import app
from lowbit.cli import backends as command
from lowbit.system.entries import MOST_LIST_BYTES, entries, read
from lowbit.system.interpreters import python_command

LIST = "[lowbit.backends]\nfrom-list = strangers.good:Good\n"
GOOD = """
import os, signal, subprocess, sys
from lowbit.backend import Backend, Capabilities
class Good(Backend):
    name = "good"
    def capabilities(self): return Capabilities({})
"""
USABLE = {"usable": True, "operations": {}, "prepares_stored": False, "details": {}}
ENDED = "its process ended {} and gave no answer"
BACKENDS: dict[str, tuple[str, str]] = {
    "good": ("", ""),
    "leaves": ("os._exit(0)", ENDED.format("with status 0")),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", ENDED.format("by SIGKILL")),
    "becomes": ("os.execvp('true', ['true'])", ENDED.format("with status 0")),
    "exits": ("sys.exit(0)", "strangers.exits:Good fails with SystemExit: 0"),
    "interrupts": ("raise KeyboardInterrupt", "it fails with KeyboardInterrupt: "),
    "remembers": ("raise MemoryError('none')", "it fails with MemoryError: none"),
    "raises": ("raise type('Odd', (BaseException,), {})('odd')", "strangers.raises:Good fails with Odd: odd"),
    "closes": ("sys.stdout.close(); sys.stderr = None; os.close(1); os.close(2)", ""),
    "closes-all": ("os.closerange(0, 100)", ENDED.format("with status 0")),
    "answers": ("os.write(int(sys.argv[2]), b'{} '); os._exit(0)", ENDED.format("with status 0")),
    "claims": ("os.write(int(sys.argv[2]), b'{\"usable\": true}'); os._exit(0)", ENDED.format("with status 0")),
    "forks": ("print(f'forked', flush=True); os.fork()", ""),
    "reads": ("assert sys.stdin.read() == ''", ""),
    "leaves-a-thread": ("import threading, time; threading.Thread(target=time.sleep, args=(3600,)).start()", ""),
    "writes": ("os.write(1, b'one \\x1b[31m'); os.system('echo two')", ""),
    "floods": ("print('x' * 10_000_000)", ""),
}


def package(folder: Path, name: str, listed: str | None = None) -> Path:
    """The metadata of an installed package; the path of its list of entries."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if listed is not None:
        (info / "entry_points.txt").write_text(listed)
    return info / "entry_points.txt"


def few(folder: Path) -> Path:
    """The same folder with a package that hides the other backends of lowbit, so that fewer are asked."""
    own = "numpy = lowbit_numpy:NumpyBackend\nreference = lowbit.backend.reference:ReferenceBackend\n"
    commands = "".join(f"{entry.name} = {entry.value}\n" for entry in entries("lowbit.commands"))
    package(folder, "lowbit", f"[lowbit.backends]\n{own}[lowbit.commands]\n{commands}")
    return folder


@pytest.fixture(scope="module")
def lowbit() -> Iterator[CommandLine]:
    """Runs commands."""
    with command_line("lowbit.cli.profiles", "lowbit.cli.backends", "lowbit_conformance.cli.conformance") as running:
        yield running


def table(descriptions: dict[str, asking.Description], monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``lowbit backends`` prints of descriptions that ``lowbit backends --json`` has given."""
    found = [(name, description, "") for name, description in descriptions.items()]
    monkeypatch.setattr(command, "ask", lambda names: found)
    done = CliRunner().invoke(app, ["backends"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    return done.stdout


# **Lists of entries.**


def sparse(path: Path, size: int) -> None:
    """A file of many bytes, none of which is on the disk."""
    path.touch()
    os.truncate(path, size)


MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "is not a regular file"),
    "folder": (Path.mkdir, "is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be read: Too many levels of symbolic links"),
    "long": (lambda path: path.write_bytes(b" " * (MOST_LIST_BYTES + 1)), f"has more than {MOST_LIST_BYTES} bytes"),
    "sparse": (lambda path: sparse(path, 2**40), f"has more than {MOST_LIST_BYTES} bytes"),
    "bytes": (lambda path: path.write_bytes(b"[lowbit.backends]\n\xff = a:b\n"), "is not UTF-8 text"),
    "words": (lambda path: path.write_text("[lowbit.backends]\nwords\n"), "is no list of entries: "),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_list_that_cannot_be_read_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is skipped, and those before and after it are not."""
    make, said = MALFORMED[kind]
    package(tmp_path, "aa", "[lowbit.backends]\nfirst = a:b\n")
    make(package(tmp_path, "broken"))
    package(tmp_path, "zz", "[lowbit.backends]\nlast = a:b\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read("lowbit.backends")
    assert {"first", "last", "numpy"} <= {entry.name for entry in found.entries}
    (sentence,) = found.broken
    assert sentence.startswith(f"package 'broken' is skipped: its entry_points.txt {said}")
    assert sentence.endswith("; repair or uninstall it")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_a_list_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own reader takes it for absent."""
    package(tmp_path, "secret", LIST).chmod(0)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "Permission denied" in read("lowbit.backends").broken[0]


def test_commands_with_a_list_that_is_a_pipe(lowbit: CommandLine, tmp_path: Path) -> None:
    """Nothing waits for it: one sentence on standard error, and the answer on standard output."""
    os.mkfifo(package(few(tmp_path), "bro\x1bken"))
    sentence = "lowbit: package 'bro\\x1bken' is skipped: its entry_points.txt is not a regular file; "
    for arguments in (["--help"], ["profiles", "--json"], ["backends", "--json"]):
        done = lowbit.run(*arguments, path=tmp_path)
        assert (done.returncode, done.stderr) == (0, sentence + "repair or uninstall it\n")
        assert done.stdout


def test_other_files_of_a_package_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that is a pipe is not opened, nor is a pipe on the path of imports."""
    listed = package(tmp_path, "odd", LIST)
    (listed.parent / "METADATA").unlink()
    os.mkfifo(listed.parent / "METADATA")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "other-1.0.dist-info")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "pipe"))
    found = read("lowbit.backends")
    assert "from-list" in {entry.name for entry in found.entries}
    assert found.broken == []


def test_archives_and_several_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in an archive count, one that expands without end is refused, and the first of a name hides the others."""
    for name, text in {"small": LIST.encode(), "large": LIST.encode() + b"\n" * MOST_LIST_BYTES}.items():
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}-1.0.dist-info/entry_points.txt", text)
        monkeypatch.syspath_prepend(str(tmp_path / f"{name}.zip"))
    found = read("lowbit.backends")
    assert [entry.value for entry in found.entries if entry.name == "from-list"] == ["strangers.good:Good"]
    assert found.broken == [
        f"package 'large' is skipped: its entry_points.txt has more than {MOST_LIST_BYTES} bytes; "
        "repair or uninstall it"
    ]
    package(tmp_path, "Small")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "from-list" not in {entry.name for entry in entries("lowbit.backends")}


# **Backends.**


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: one with a module for each kind of backend."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "strangers").mkdir()
    names = {name: name.replace("-", "_") for name in BACKENDS}
    for name, module in names.items():
        (folder / "strangers" / f"{module}.py").write_text(f"{GOOD}{BACKENDS[name][0]}\n")
    listed = "".join(f"{name} = strangers.{module}:Good\n" for name, module in names.items())
    package(folder, "strangers", f"[lowbit.backends]\n{listed}here:Class = strangers.good:Good\n")
    return few(folder)


@pytest.fixture(scope="module")
def listing(lowbit: CommandLine, strangers: Path) -> "subprocess.CompletedProcess[str]":
    """What the command answers."""
    return lowbit.run("backends", "--json", path=strangers)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_breaks_its_own_line(name: str, listing: "subprocess.CompletedProcess[str]") -> None:
    """It is listed with the reason, or as it is where what it does harms nobody."""
    reason = BACKENDS[name][1]
    found = json.loads(listing.stdout)[name]
    assert found == ({"usable": False, "reason": reason, "remedy": asking.REMEDY} if reason else USABLE)


def test_the_others_are_listed(listing: "subprocess.CompletedProcess[str]") -> None:
    """Once, in one line of JSON; what backends print is on standard error, bounded and without control characters."""
    assert listing.returncode == 0
    assert len(listing.stdout.splitlines()) == 1
    found = json.loads(listing.stdout)
    assert found["numpy"]["usable"] and found["reference"]["usable"]
    assert "here:Class" not in found  # a name that would be looked for in the current folder
    assert listing.stderr.count("forked") == 1
    assert "one \\x1b[31mtwo" in listing.stderr and "\x1b" not in listing.stderr
    assert len(listing.stderr) < 2 * asking.MOST_SAID


def test_the_table_lists_them_too(listing: "subprocess.CompletedProcess[str]", monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in words."""
    shown = table(json.loads(listing.stdout), monkeypatch)
    assert "leaves" in shown and ENDED.format("with status 0") in shown
    assert "reference" in shown


WAITING = {"sleeps": "import time; time.sleep(3600)", "stops": "os.kill(os.getpid(), signal.SIGSTOP)"}
STARTING = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "3600"])
with open({path!r} + ".new", "w") as file:
    file.write(str(child.pid))
os.rename({path!r} + ".new", {path!r})
"""


@pytest.mark.parametrize("name", WAITING)
def test_a_backend_that_waits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a deadline, which is over here once it waits; what it started is ended with it."""
    started = tmp_path / "started"
    (tmp_path / f"{name}.py").write_text(f"{STARTING.format(path=str(started))}{WAITING[name]}\n")
    package(tmp_path, name, f"[lowbit.backends]\n{name} = {name}:Good\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: 1000.0 * started.exists()))
    ((asked, found, _),) = asking.ask([name])
    assert asked == name
    assert found == {"usable": False, "reason": "it gave no answer within 60 seconds", "remedy": asking.REMEDY}
    child = int(started.read_text())
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("what it started still runs")


def is_running(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_names_that_no_command_line_can_hold() -> None:
    """A name is passed whole, or the process is not started."""
    ((_, nul, _), (_, long, _)) = asking.ask(["a\0b", "x" * 200_000])
    assert "backend is 'a\\x00b'; allowed: " in nul["reason"]
    assert long["reason"] == "its process cannot be started: Argument list too long"


def test_asking_leaves_nothing_open() -> None:
    """No descriptor and no child, whatever comes of it."""
    before = set(os.listdir("/proc/self/fd"))
    asked = asking.ask(["reference", "x" * 200_000, "reference", "reference"])
    next(asked)
    asked.close()  # type: ignore[attr-defined]  # a generator
    assert set(os.listdir("/proc/self/fd")) == before


# **Standard output that nobody reads.**

COMMANDS = [["--help"], ["profiles"], ["profiles", "--json"], ["backends"], ["backends", "--json"]]
COMMANDS += [["conformance", "numpy", "--op", "packing.unpack", "--quick"], ["kernel", "list"], ["vectors", "--help"]]
QUICK = [arguments for arguments in COMMANDS if arguments[0] not in ("backends", "conformance")]
UNREAD = [(arguments, "1") for arguments in COMMANDS] + [(arguments, "") for arguments in QUICK]


@pytest.mark.parametrize(("arguments", "unbuffered"), UNREAD, ids=lambda value: " ".join(value))
def test_an_answer_that_nobody_reads(
    lowbit: CommandLine, tmp_path: Path, arguments: list[str], unbuffered: str
) -> None:
    """As behind `| head`: no message, and status 1, whether the text is written at once or at the end.

    What is written at the end is written by the same lines for all commands, so those that take long do it at once.
    """
    reader, writer = os.pipe()
    os.close(reader)
    done = lowbit.run(*arguments, path=few(tmp_path / "few"), stdout=writer, variables={"PYTHONUNBUFFERED": unbuffered})
    os.close(writer)
    assert (done.returncode, done.stderr.strip()) == (1, "")  # a progress bar leaves an empty line


def test_a_program_whose_answer_nobody_reads() -> None:
    """The same for the whole program, to Python's own end."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(python_command("-m", "lowbit", "--help"), stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# **Variables and folders that are not as they should be.**


@pytest.mark.parametrize("width", ["0", "1", "99999999999", "²", "x", "-5"])
@pytest.mark.parametrize("variable", ["COLUMNS", "TERMINAL_WIDTH"])
def test_a_width_that_no_terminal_has(
    variable: str, width: str, lowbit: CommandLine, usual: dict[str, tuple[int, str, str]]
) -> None:
    """The answer is what it is without the variable, not empty, and no trace.

    The variables are read before it is known which command is asked for; so one width is tried with the others too.
    """
    for word, answer in usual.items():
        if word == "--help" or width == "0":
            done = lowbit.run(word, variables={"COLUMNS": "", variable: width})
            assert (done.returncode, done.stdout, done.stderr) == answer


@pytest.fixture(scope="module")
def usual(lowbit: CommandLine) -> dict[str, tuple[int, str, str]]:
    """The status and the texts of an answer, an answer in a table, and an error."""
    done = {word: lowbit.run(word, variables={"COLUMNS": ""}) for word in ("--help", "profiles", "no-such-command")}
    assert [each.returncode for each in done.values()] == [0, 0, 2]
    assert done["--help"].stdout and done["profiles"].stdout and done["no-such-command"].stderr
    return {word: (each.returncode, each.stdout, each.stderr) for word, each in done.items()}


def test_a_narrow_terminal_without_unicode(tmp_path: Path) -> None:
    """Twenty columns of ASCII."""
    variables = {"COLUMNS": "20", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(few(tmp_path))}
    for word in ("--help", "profiles", "backends"):
        program = python_command("-m", "lowbit", word)
        done = subprocess.run(program, env=os.environ | variables, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout and done.stdout.isascii()


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    """What needs none works, and the others say it."""
    gone = tmp_path / "gone"
    command = shlex.join(python_command("-m", "lowbit"))
    for words, status, said in (
        ("profiles", 0, ""),
        ("conformance numpy --op packing.unpack --quick", 2, "lowbit: the current folder no longer exists; "),
        ("new-backend mine", 2, "lowbit: the current folder no longer exists; "),
    ):
        gone.mkdir()
        line = f"cd {shlex.quote(str(gone))} && rmdir {shlex.quote(str(gone))} && {command} {words}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=100, check=False)
        assert (done.returncode, done.stderr.strip()) == (status, f"{said}change to another one" if said else "")


ODD_NAMES = ["", "[red]x[/]", "--json", "\u202eback", "\x9b31m", "\x00", "x" * 5000, "a:b", "__main__"]


def test_names_of_entries_that_are_odd(lowbit: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are listed without control characters, and break nothing."""
    listed = "".join(f"{name} = strangers.absent:x\n" for name in ODD_NAMES)
    package(few(tmp_path), "odd", f"[lowbit.commands]\n{listed}[lowbit.backends]\n{listed}")
    told = lowbit.run("--help", path=tmp_path)
    done = lowbit.run("backends", "--json", path=tmp_path)
    assert (told.returncode, told.stderr, done.returncode, done.stderr) == (0, "", 0, "")
    found = json.loads(done.stdout)
    assert not set(told.stdout + table(found, monkeypatch)) & {"\u202e", "\x9b", "\x00"}
    assert found["numpy"]["usable"]
    assert not any(found[name]["usable"] for name in ODD_NAMES if name.strip() and name in found)
