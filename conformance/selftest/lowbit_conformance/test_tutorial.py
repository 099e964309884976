"""The tutorial is true: every command on the page is run and every listing is used, in an empty folder.

A block of the language ``sh`` is run, and must end with status 0 or, with the class ``status-N``, with N. A block
``text`` after it is what it prints, lines left out and ``…`` for anything. A block ``python`` with a caption is that
file; with the class ``as-written`` it must be what the file already says, to the last ``…``. A block ``diff`` with a
caption is a change of that file. A page with any other block fails.

Nothing comes from a network. Only one command is not run as it stands, ``pip install "lowbit[conformance]"``: the
installation that runs this test is made visible instead.
"""

import os
import re
import site
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from docutils import nodes
from docutils.core import publish_doctree
from docutils.parsers.rst import Directive, directives
from paths import ROOT
from sphinx.util.docutils import docutils_namespace

PAGE = ROOT / "docs/tutorial.rst"
INSTALL = 'pip install "lowbit[conformance]"\n'
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "COLUMNS": "100",
}
SCRIPTS = {"lowbit": "from lowbit.cli import main", "pytest": "from pytest import console_main as main"}


class CodeBlock(Directive):
    """``.. code-block::`` as Sphinx has it, as far as the page uses it."""

    has_content = True
    required_arguments = 1
    option_spec: ClassVar = {"caption": directives.unchanged, "class": directives.class_option}

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.content)
        block = nodes.literal_block(text, text, classes=self.options.get("class", []))
        block["language"], block["caption"] = self.arguments[0], self.options.get("caption", "")
        return [block]


def blocks() -> list[nodes.literal_block]:
    """The code blocks of the page, in order; Sphinx's own roles are none of this test's business."""
    with docutils_namespace():
        directives.register_directive("code-block", CodeBlock)
        page = publish_doctree(PAGE.read_text(), settings_overrides={"report_level": 5, "halt_level": 5})
    return [block for block in page.findall(nodes.literal_block) if "language" in block]


@dataclass
class Reader:
    """Someone who follows the page: a folder, an environment, and what the last command printed."""

    folder: Path
    environment: dict[str, str]
    printed: list[str] = field(default_factory=list)

    def follow(self, block: nodes.literal_block) -> None:
        language, text, classes = block["language"], block.astext() + "\n", block["classes"]
        if language == "sh":
            status = [int(word.removeprefix("status-")) for word in classes if word.startswith("status-")]
            self.type(text, status[0] if status else 0)
        elif language == "text":
            assert_printed(text, self.printed)
        elif language == "python" and "as-written" in classes:
            head = text.partition("…")[0]
            assert (self.folder / block["caption"]).read_text().startswith(head)
        elif language == "python":
            (self.folder / block["caption"]).write_text(text)
        elif language == "diff":
            change(self.folder / block["caption"], text)
        else:
            pytest.fail(f"a block of {language} is neither run nor compared")

    def type(self, commands: str, status: int) -> None:
        """Run commands in one shell; the next block finds its folder and variables as this one leaves them."""
        if INSTALL in commands:
            before, commands = commands.split(INSTALL)
            self.type(before, 0)
            make_visible(self.folder / ".venv")
        state = self.folder / ".state"
        keep = f"trap '{{ pwd; env -0; }} > {state}' EXIT\n"
        shell = ["bash", "-euo", "pipefail", "-c", keep + commands]
        run = subprocess.run(shell, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == status, f"{commands}{run.stdout}{run.stderr}"
        where, _, variables = state.read_text().partition("\n")
        state.unlink()
        self.folder = Path(where)
        self.environment = dict(line.partition("=")[::2] for line in variables.split("\0") if "=" in line)
        self.printed = run.stdout.splitlines()


def make_visible(environment: Path) -> None:
    """Let a virtual environment see the packages of this one, and give it their commands."""
    python = environment / "bin/python"
    packages = next(environment.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "installed.pth").write_text("\n".join(lines) + "\n")
    for name, load in SCRIPTS.items():
        script = environment / "bin" / name
        script.write_text(f"#!{python}\n{load}\nraise SystemExit(main())\n")
        script.chmod(0o755)


def assert_printed(text: str, printed: list[str]) -> None:
    """Each line of the text occurs among what was printed, in this order; ``…`` stands for anything in a line."""
    rest = iter(printed)
    for line in text.split("\n"):
        words = [re.escape(part.strip()) for part in line.split("…")]
        pattern = re.compile(".*".join(words))
        if line.strip() and not any(pattern.search(re.sub(r"\s+", " ", given)) for given in rest):
            pytest.fail("\n".join([f"not printed, or not in this order: {line}", *printed]))


def change(file: Path, text: str) -> None:
    """Apply a change without line numbers: what it takes away or keeps stands in the file once."""
    lines = text.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in "- ")
    new = "".join(line[1:] for line in lines if line[0] in "+ ")
    before = file.read_text()
    assert old and before.count(old) == 1, f"{file.name} does not have once:\n{old}"
    file.write_text(before.replace(old, new))


@pytest.mark.whole
def test_the_tutorial_works(tmp_path: Path) -> None:
    """From an empty folder to a certified backend, block by block."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    reader = Reader(tmp_path, kept | OFFLINE | {"PATH": path})
    followed = 0
    for block in blocks():
        reader.follow(block)
        followed += 1
    assert followed == PAGE.read_text().count(".. code-block::")
    assert "certified" in PAGE.read_text()


def test_a_page_that_says_something_else_fails() -> None:
    """What the tests of the page compare: lines in their order, and changes that fit."""
    assert_printed("b … d\nx\n", ["a", "  b  c  d  e", "", "x"])
    for wrong in ("x\nb …\n", "b d\n", "y\n"):
        with pytest.raises(pytest.fail.Exception, match="not printed"):
            assert_printed(wrong, ["a", "b c d", "x"])


def test_changes_fit_once(tmp_path: Path) -> None:
    """A change replaces what it names, and one that fits nowhere or twice is an error of the page."""
    file = tmp_path / "file"
    file.write_text("one\ntwo\none\n")
    change(file, "-two\n+three\n+four\n one\n")
    assert file.read_text() == "one\nthree\nfour\none\n"
    for wrong in ("-two\n+three\n", "-one\n+two\n"):
        with pytest.raises(AssertionError, match="does not have once"):
            change(file, wrong)


def sh_blocks() -> Iterator[str]:
    yield from (block.astext() for block in blocks() if block["language"] == "sh")


def test_the_page_is_the_path_of_new_backend() -> None:
    """The page uses the command that it is about, and the profile that it ends with."""
    commands = "\n".join(sh_blocks())
    assert "lowbit new-backend nibbles" in commands
    assert "--profile lowbit-1.1/qgemv-4" in commands
