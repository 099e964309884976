"""Comments that silence a checker say why on the same line."""

import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from paths import ROOT

ROOT = ROOT
FOLDERS = ("spec", "backends", "conformance", "docs", "bench")
CODES = r"\[[\w, -]*\]|:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*"
SILENCED = re.compile(rf"#\s*(type: ignore|noqa)\b(?P<codes>{CODES})?(?P<reason>.*)")
LEAST = 8  # letters of a reason


def unexplained(source: str) -> Iterator[int]:
    """The lines of a program that silence a checker without codes or without a reason."""
    if not re.search("type: ignore|noqa", source):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        found = SILENCED.match(token.string) if token.type == tokenize.COMMENT else None
        if found and (not found["codes"] or len(re.findall("[A-Za-z]", found["reason"])) < LEAST):
            yield token.start[0]


@pytest.mark.parametrize(
    "comment",
    [
        "type: ignore",
        "noqa",
        "type: ignore[arg-type]",
        "noqa: B027",
        "noqa: B027 -",
        "type: ignore  # on purpose",
    ],
)
def test_what_is_not_explained_is_found(comment: str) -> None:
    """No codes, or no reason."""
    assert list(unexplained(f"x = 1  # {comment}\n")) == [1]


@pytest.mark.parametrize(
    "comment", ["type: ignore[arg-type]  # wrong on purpose", "noqa: B027 - most own nothing", "noqa: N801 (a name)"]
)
def test_what_is_explained_is_not(comment: str) -> None:
    """Codes and a reason."""
    explained = f"x = 1  # {comment} of theirs\n"
    assert not list(unexplained(explained))


def test_every_silenced_line_says_why() -> None:
    """In all programs of the repository."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")] + [ROOT / "noxfile.py"]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unexplained(path.read_text())]
    assert len(paths) > 100 and not found, found
