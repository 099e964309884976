"""Commands and backends of other packages: a broken one breaks itself, by name, and nothing else."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, command_line
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.cli import backends as command

BROKEN = {
    "absent": ("no_such_module_at_all:run", "fails with ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    "syntax": ("strangers.syntax:run", "fails with SyntaxError: "),
    "imports": ("strangers.imports:run", "fails with ImportError: cannot import name 'nothing'"),
    "exits": ("strangers.exits:run", "fails with SystemExit: 0"),
    "raises": ("strangers.raises:run", "fails with Odd: two lines lowbit: passed"),
    "mute": ("strangers.mute:run", "fails with Mute, whose text cannot be made (ZeroDivisionError)"),
    "lacks": ("strangers.good:lacks", "fails with AttributeError: "),
    "value": ("strangers.good:NUMBER", "is of type int, not a function or a typer.Typer"),
    "signature": ("strangers.good:unsuitable", "is not a command: "),
    "malformed": ("no entry at all", "fails with "),
}
Run = Callable[..., "subprocess.CompletedProcess[str]"]
GOOD = """
import typer
NUMBER = 5
app = typer.Typer(help="An app of two [red]commands[/].")
def run(name: str = "nobody"):
    '''Greet somebody.'''
    print("hello", name)
def warn():
    '''Warn twice.'''
    import warnings
    warnings.warn("two\\nlines", UserWarning)
    warnings.warn("old", FutureWarning)
def unsuitable(given: "list[dict[str, object]]"):
    pass
@app.command()
def one(): print("one")
@app.command()
def two(): print("two")
"""
MODULES = {
    "__init__": "",
    "good": GOOD,
    "syntax": "def run(:\n",
    "imports": "from os import nothing\n",
    "exits": "raise SystemExit(0)\n",
    "raises": "class Odd(BaseException): pass\nraise Odd('two lines\\nlowbit: passed')\n",
    "mute": "class Mute(Exception):\n def __str__(self): return 1 // 0\nraise Mute\n",
    "backends": """
from lowbit.backend import Availability, Backend, Capabilities, Declaration
class Silent(Backend):
    name = "silent"
    def availability(self):
        print("words of a backend")
        raise SystemExit("not today")
    def capabilities(self): return Capabilities({})
class Odd(Backend):
    name = "odd"
    def capabilities(self): return Capabilities({"packing.pack": Declaration({"bits": (object(),)})})
class Words(Backend):
    name = "words"
    def availability(self):
        return Availability(False, "no [red]beads[/]\\n│ numpy │ yes │\\x1b]8;;http://x\\x1b\\\\", "buy\\rsome\\x07")
    def capabilities(self): return Capabilities({})
""",
}


def package(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """A distribution as an installer leaves it, with these entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in found.items())
        for group, found in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "strangers").mkdir()
    for name, source in MODULES.items():
        (folder / "strangers" / f"{name}.py").write_text(source)
    commands = {name: value for name, (value, _) in BROKEN.items()}
    commands |= {"greet": "strangers.good:run", "many": "strangers.good:app", "generate": "strangers.exits:run"}
    commands |= {"warn": "strangers.good:warn"}
    commands |= {"two words": "strangers.good:run", "esc\x1b[31m": "strangers.good:run", "twice": "strangers.good:run"}
    backends = {"silent": "strangers.backends:Silent", "odd": "strangers.backends:Odd"}
    backends |= {"words": "strangers.backends:Words", "exits": "strangers.exits:Gone"}
    package(folder, "strangers", {"lowbit.commands": commands, "lowbit.backends": backends})
    package(folder, "others", {"lowbit.commands": {"twice": "strangers.good:app"}})
    return folder


@pytest.fixture(scope="module")
def fewer(strangers: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same path behind a package that hides the other backends of lowbit, so that fewer are asked."""
    own = {"numpy": "lowbit_numpy:NumpyBackend", "reference": "lowbit.backend.reference:ReferenceBackend"}
    folder = tmp_path_factory.mktemp("few")
    package(folder, "lowbit", {"lowbit.backends": own})
    return f"{folder}:{strangers}"


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandLine]:
    with command_line("lowbit.cli.profiles", "lowbit.cli.backends", "lowbit.cli.generate") as running:
        yield running


@pytest.fixture
def run(commands: CommandLine) -> Run:
    return lambda path, *arguments: commands.run(*arguments, path=path, variables={"COLUMNS": "200"})


def test_help_names_them_all(run: Run, strangers: Path) -> None:
    """No package is imported for it: what it says of a command is read from its source."""
    done = run(strangers, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in (*BROKEN, "greet", "many", "generate", "conformance", "'two words'"):
        assert f"│ {name} " in done.stdout, name
    assert "Greet somebody." in done.stdout
    assert "An app of two [red]commands[/]." in done.stdout
    assert "offered by several packages" in done.stdout
    assert done.stdout.count("Continue a prompt") == 1  # lowbit's own, which nobody replaces
    assert "\x1b" not in done.stdout and r"\x1b" in done.stdout


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_command_is_named(run: Run, name: str, strangers: Path) -> None:
    """It is one line that says what is broken and what to do, with status 2."""
    value, reason = BROKEN[name]
    done = run(strangers, name)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lowbit: command '{name}' is unavailable: {value} {reason}")
    assert line.endswith("; repair or reinstall its package")


def test_commands_that_work(run: Run, strangers: Path) -> None:
    """Beside all the others: a function, one of an app's commands, one whose name has a blank, and help."""
    assert run(strangers, "greet", "--name", "you").stdout == "hello you\n"
    assert run(strangers, "many", "two").stdout == "two\n"
    assert run(strangers, "two words").stdout == "hello nobody\n"
    assert "--name" in run(strangers, "greet", "--help").stdout
    assert "--prompt" in run(strangers, "generate", "--help").stdout
    assert json.loads(run(strangers, "profiles", "--json").stdout)


def test_two_packages_with_one_name(run: Run, strangers: Path) -> None:
    """Neither is chosen."""
    done = run(strangers, "twice")
    assert done.returncode == 2
    assert "several packages offer it: strangers.good:app, strangers.good:run" in done.stderr


def test_a_list_of_entries_that_cannot_be_read(run: Run, fewer: str, tmp_path: Path) -> None:
    """A package whose list is no list has no entries, and the others have theirs."""
    package(tmp_path, "damaged", {})
    (tmp_path / "damaged-1.0.dist-info/entry_points.txt").write_bytes(
        b"[lowbit.commands]\n\xff\xfe = x\nno equals sign\n"
    )
    assert "numpy" in json.loads(run(f"{tmp_path}:{fewer}", "backends", "--json").stdout)
    assert "conformance" in run(tmp_path, "--help").stdout


@pytest.fixture(scope="module")
def listing(commands: CommandLine, fewer: str) -> "subprocess.CompletedProcess[str]":
    return commands.run("backends", "--json", path=fewer)


def test_broken_backends_are_listed(listing: "subprocess.CompletedProcess[str]") -> None:
    """Each is not usable, with its reason; the others are as they are."""
    assert (listing.returncode, listing.stderr) == (0, "words of a backend\n")
    found = json.loads(listing.stdout)  # where what a backend prints would be in the way
    assert found["numpy"]["usable"] and found["reference"]["usable"]
    reasons = {name: found[name]["reason"] for name in ("silent", "odd", "exits")}
    assert reasons["silent"] == "it fails with SystemExit: not today"
    assert reasons["odd"].startswith("it fails with TypeError: ")
    assert reasons["exits"] == "strangers.exits:Gone fails with SystemExit: 0"


def test_a_broken_backend_is_named(run: Run, strangers: Path) -> None:
    """``generate`` with it is a line; without it nothing is imported of it."""
    for name, said in {"exits": "fails with SystemExit", "words": "no [red]beads[/] │ numpy │ yes │\\x1b]8;;"}.items():
        done = run(strangers, "generate", "--prompt", "x", "--backend", name, "--model", "absent")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"lowbit: backend {name} is unavailable: ") and said in line
    assert "absent" in run(strangers, "generate", "--prompt", "x", "--model", "absent").stderr


def test_the_words_of_a_backend(listing: "subprocess.CompletedProcess[str]", monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table they forge no row, colour nothing and ring no bell."""
    found = [(name, description, "") for name, description in json.loads(listing.stdout).items()]
    monkeypatch.setattr(command, "ask", lambda names: found)
    done = CliRunner().invoke(app, ["backends"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "no [red]beads[/] │ numpy │ yes │\\x1b]8;;http://x\\x1b\\; buy some\\x07" in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("│ numpy │ yes")]
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout


def test_a_warning_is_a_line_as_remarks_are(run: Run, strangers: Path) -> None:
    """One that is meant for users has no place in the code."""
    done = run(strangers, "warn")
    assert (done.returncode, done.stdout) == (0, "")
    meant, other = done.stderr.splitlines()
    assert meant == "lowbit: two lines"
    assert other.startswith("lowbit: old (") and "good.py:" in other
