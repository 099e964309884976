"""What the site promises beside its chapters: five lines that run, pictures with words, a notebook without results."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

FIVE_LINES = ROOT / "docs/examples/five_lines.py"
PYTHON = [*ROOT.glob("docs/figures/*.py")]


@pytest.mark.whole
def test_the_five_lines_run(tmp_path: Path) -> None:
    """The lines on the front page quantise, multiply and certify."""
    run = subprocess.run([sys.executable, FIVE_LINES], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (run.stderr, run.stdout) == ("", "passed\n")


@pytest.mark.toolchain
def test_the_block_of_the_docs_runs(tmp_path: Path) -> None:
    """A program beside weights runs by formulas, by operations and as a compiled step."""
    example = ROOT / "docs/examples/parallel_block.py"
    run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    error, bits = run.stdout.splitlines()
    assert (run.stderr, bits.rpartition(" ")[2]) == ("", "True") and float(error.rpartition(" ")[2]) < 1e-5


@pytest.mark.parametrize("page", ["README.md", "docs/index.rst", "docs/getting-started.rst"])
def test_every_entrance_shows_the_five_lines(page: str) -> None:
    """The README has the lines themselves; pages take them from the file."""
    text = (ROOT / page).read_text()
    shown = FIVE_LINES.read_text() if page.endswith(".md") else ".. literalinclude:: examples/five_lines.py"
    assert shown in text
    code = [line for line in FIVE_LINES.read_text().splitlines() if line]
    assert len(code) == 5


@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.stem)
def test_a_figure_says_what_it_shows(script: Path) -> None:
    """The docstring is the alternative text: it describes the picture, and then what a reader sees in it."""
    said = ast.get_docstring(ast.parse(script.read_bytes())) or ""
    assert len(re.findall(r"\.(\s|$)", said)) >= 2, said


@pytest.mark.parametrize("drawing", [*ROOT.glob("docs/figures/*.svg")], ids=lambda path: path.stem)
def test_a_drawing_has_no_colours_of_its_own(drawing: Path) -> None:
    """Colours come from the page, light or dark, and the drawing is no wider than a telephone."""
    text = drawing.read_text()
    assert not re.search(r"(fill|stroke|style|font-family)=", text)
    assert re.search(r'viewBox="0 0 360 \d+"', text)


def test_the_notebook_is_kept_without_results() -> None:
    """The build runs it, so what it shows is what this version does."""
    cells = json.loads((ROOT / "docs/first-steps.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_glossary_defines_each_term_once() -> None:
    """No term has two entries, and each entry says something."""
    text = (ROOT / "docs/glossary.rst").read_text().partition(":sorted:")[2]
    entries = re.findall(r"^   (\S.*)\n((?:      .+\n)+)", text, re.MULTILINE)
    terms = [term for term, _ in entries]
    assert len(terms) > 50
    assert len(set(terms)) == len(terms)
    assert len(terms) == len(re.findall(r"^   \S", text, re.MULTILINE))
