"""The pages of the documentation: a chapter becomes its page, every module has one, and nothing needs a network."""

import re
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowbit_docs.names import full_name
from lowbit_docs.pages import Module, inside, write_pages
from paths import ROOT
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils
from typer.main import get_command

from lowbit.cli import app
from lowbit.cli.commands import Lazy

ROOT = ROOT

CHAPTER = '''r"""A chapter: with its first sentence as the title.

It opens with prose and :math:`x^2`.

Source: QIGen §2, equation 1.
"""

LIMIT = 3  # a constant

# **A lead.** Prose between functions, about `double`.


def double(x: int) -> int:
    """Twice the number.

    Args:
        x, y: a number
            and more.

    Raises:
        ValueError: never.

    Source: QIGen §3, Algorithm 1.
    """
    return 2 * x  # the code of it
'''

CONF = """
import sys
sys.path[:0] = [{ext!r}, {here!r}]
extensions = ["lowbit_docs", "sphinx.ext.mathjax"]
mathjax_path = "local.js"
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
"""


def build(folder: Path, chapter: str, name: str) -> tuple[str, str]:
    """The HTML of a page made from a chapter, and the warnings of the build."""
    (folder / f"{name}.py").write_text(chapter)
    (folder / "conf.py").write_text(CONF.format(ext=str(ROOT / "docs/_ext"), here=str(folder)))
    index = ".. source-index:: QIGen\n\n   :Equation 1: one.\n   :Algorithm 1: two.\n"
    (folder / "index.rst").write_text(f".. chapter:: {name}\n\nPlaces\n======\n\n{index}")
    warnings = StringIO()
    kept = list(sys.path)
    try:
        with patch_docutils(folder), docutils_namespace():
            app = Sphinx(folder, folder, folder / "out", folder / "trees", "html", status=None, warning=warnings)
            app.build()
    finally:
        sys.path[:] = kept
        sys.modules.pop(name, None)
    return (folder / "out/index.html").read_text(), warnings.getvalue()


# Extensions of Sphinx warn of things that are not ours; here only the pages are looked at.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def test_the_page_is_the_chapter(tmp_path: Path) -> None:
    """Title, prose, mathematics, constant, lead, signature, docstring and code appear in source order, each once."""
    html, warnings = build(tmp_path, CHAPTER, "fixture_chapter")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))
    assert warnings == ""
    places = [
        text.index(part)
        for part in ("It opens with prose", "LIMIT = 3", "A lead.", "Twice the number.", "return 2 * x")
    ]
    assert places == sorted(places)
    assert text.count("Twice the number.") == 1
    assert r"\(x^2\)" in html
    number = CHAPTER.splitlines().index("    return 2 * x  # the code of it") + 1
    assert f'<span class="linenos">{number}</span>' in html


def test_sources_become_an_index(tmp_path: Path) -> None:
    """Each place of a paper links to the chapter or function whose Source line names it."""
    html, _ = build(tmp_path, CHAPTER, "fixture_sources")
    entries = re.findall(r"<dt[^>]*>(Equation 1|Algorithm 1)</dt>(.*?)</dd>", html, re.DOTALL)
    assert [name for name, _ in entries] == ["Equation 1", "Algorithm 1"]
    assert "fixture_sources</span>" in entries[0][1]
    assert "fixture_sources.double</span>" in entries[1][1]


def test_a_mistake_is_reported_where_it_stands(tmp_path: Path) -> None:
    """A slip of reStructuredText in a docstring is a warning with the chapter's own file and line."""
    broken = CHAPTER.replace("Twice the number.", "Twice :nosuchrole:`the` number.")
    _, warnings = build(tmp_path, broken, "fixture_broken")
    assert "fixture_broken.py:14" in warnings
    assert "nosuchrole" in warnings


def test_every_module_has_a_page(tmp_path: Path) -> None:
    """Each module of the specification and of the backends is a page; the command line is not."""
    (tmp_path / "spec/lowbit/part").mkdir(parents=True)
    for name in ("__init__", "__main__", "one", "part/__init__", "part/two"):
        (tmp_path / f"spec/lowbit/{name}.py").touch()
    (tmp_path / "docs/reference/lowbit").mkdir(parents=True)
    (tmp_path / "docs/reference/lowbit/gone.rst").touch()
    app: Any = SimpleNamespace(srcdir=tmp_path / "docs")
    write_pages(app)
    written = {path.relative_to(tmp_path / "docs").as_posix() for path in tmp_path.rglob("*.rst")}
    inside = {"index", "one", "part/index", "part/two"}
    assert written == {f"reference/lowbit/{name}.rst" for name in inside}
    assert (tmp_path / "docs/reference/lowbit/part/two.rst").read_text() == ".. chapter:: lowbit.part.two\n"
    assert "      /reference/lowbit/part/two\n" in (tmp_path / "docs/reference/lowbit/part/index.rst").read_text()
    top = (tmp_path / "docs/reference/lowbit/index.rst").read_text()
    assert ":doc:`/reference/lowbit/part/index`" in top
    assert "      /reference/lowbit/part/index\n" not in top  # the front page lists the folders of the specification


def test_a_folder_is_listed_in_the_order_that_its_docstring_names() -> None:
    """What the docstring names comes first, in that order, and the rest by the alphabet; other folders stay out."""
    package = Module("lowbit.part", True, "A part.\n\nBegin with `two` and `lowbit.part.one`.")
    names = [f"lowbit.part.{name}" for name in ("five", "four", "one", "two")] + ["lowbit.six", "lowbit.part.two.deep"]
    found = {name: Module(name, False, "") for name in names}
    listed = [module.name.rpartition(".")[2] for module in inside(package, found)]
    assert listed == ["two", "one", "five", "four"]


def test_titles_in_the_sidebar_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another page calls a chapter by the words before its colon; the chapter's own page has the whole sentence."""
    for folder in ("docs", "spec/lowbit"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "spec/lowbit/fixture_title.py").write_text('"""Chapter: a sentence that goes on."""\n')
    page = "reference/lowbit/fixture_title"
    (tmp_path / "docs/index.rst").write_text(f"Top\n===\n\n.. toctree::\n\n   {page}\n")
    (tmp_path / "docs/conf.py").write_text(CONF.format(ext=str(ROOT / "docs/_ext"), here=str(tmp_path / "spec")))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with patch_docutils(tmp_path), docutils_namespace():
        docs, out = tmp_path / "docs", tmp_path / "out"
        Sphinx(docs, docs, out, tmp_path / "trees", "html", status=None, warning=None).build()
    listed = re.findall(r'toctree-l1"><a[^>]*>([^<]*)', (tmp_path / "out/index.html").read_text())
    assert set(listed) == {"Chapter"}
    assert "Chapter: a sentence that goes on" in (tmp_path / f"out/{page}.html").read_text()


def test_every_documented_option_exists() -> None:
    """Each `lowbit` command that the README or a page shows is a command, and has the options that are shown."""
    shown = [
        line for file in [ROOT / "README.md", *ROOT.glob("docs/*.rst")] for line in command_lines(file.read_text())
    ]
    assert any("kernel show" in line for line in shown)
    for line in shown:
        words = line.split()
        command: Any = get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
            command = command.imported() if isinstance(command, Lazy) else command
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word for word in words if word.startswith("--")}
        assert asked <= options | {"--help"}, line


def command_lines(text: str) -> list[str]:
    """What follows `lowbit` in each command of a text: in backticks, or at the beginning of an indented line.

    >>> command_lines("Say ``lowbit tune --all``:\\n\\n   X=1 lowbit backends  # which\\n")
    ['tune --all', 'backends']
    """
    quoted = re.findall(r"``?lowbit ([a-z][^`]*)`", text)
    listed = re.findall(r"^ +(?:[A-Z_]+=\S+ )?lowbit ([a-z].*)", text, re.MULTILINE)
    return [re.split(r"[#;|&(]", line)[0].strip() for line in (*quoted, *listed)]


def test_short_names_are_links_where_they_say_what_they_are() -> None:
    """Chapters and operations become links; an argument that happens to be called like a chapter does not."""
    linear = ("bounds", "linear", "linear.qgemv", "integer_bounds", "integer.qgemm_bfp")
    known = {
        "lowbit.linear",
        "lowbit.kernels.vector",
        "lowbit.moe.bounds",
        *(f"lowbit.linear.{name}" for name in linear),
    }
    assert full_name("vector", "the chapters bounds and ", known) == "lowbit.kernels.vector"
    assert full_name("linear", "the chapter ", known) == "lowbit.linear.linear"
    assert full_name("linear.qgemv", "", known) == "lowbit.linear.linear.qgemv"
    assert full_name("linear.qgemm_bfp", "", known) == "lowbit.linear.integer.qgemm_bfp"
    assert full_name("integer_bounds", "derived in ", known) == "lowbit.linear.integer_bounds"
    assert full_name("moe.bounds", "derived in ", known) == "lowbit.moe.bounds"
    assert full_name("bounds", "derived in the chapter ", known) is None
    assert full_name("vector", "the limits that ", known) is None
    assert full_name("no_such_chapter", "the chapter ", known) is None


def test_no_page_needs_a_network() -> None:
    """No page, style or drawing of ours names another host to load from; links that a reader follows are welcome."""
    folders = ("docs/*.rst", "docs/*.ipynb", "docs/_static/*", "docs/figures/*.svg", "docs/conf.py")
    sources = [file for pattern in folders for file in ROOT.glob(pattern)]
    loading = re.compile(r"""(src|href|url|mathjax_path)\s*[=(:]\s*["']?https?://""")
    assert [path.name for path in sources if path.is_file() and loading.search(path.read_text())] == []
