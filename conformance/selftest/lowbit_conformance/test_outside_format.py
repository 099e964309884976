"""A format that somebody adds: one file on the path of the chapters, and nothing else is touched."""

import subprocess
import sys
from pathlib import Path

from paths import ROOT

CHAPTER = '''
"""Rows of bytes with a scale each, stored plus 128."""

from lowbit.tensor_formats.bits import exact
from lowbit.tensor_formats.table import Field, Format, Terms


def decode(tensors, at):
    scale = exact(tensors["scale"])
    return Terms((scale * tensors["codes"]).T.astype("float64"), (-128.0 * scale).T)


OURS = Format(
    name="ours",
    title="Bytes plus 128",
    fields=(
        Field("codes", "uint8", ("N", "K"), "codes", "the codes of a row, plus 128"),
        Field("scale", "float16", ("N", 1), "scale", "the scale of a row"),
    ),
    decode=decode,
    source="a test",
)
'''
PROGRAM = """
import sys
import lowbit.tensor_formats
lowbit.tensor_formats.__path__.append(sys.argv[1])

import numpy as np
from lowbit.backend.function import Claim, FunctionBackend
from lowbit_conformance.suite.clauses import load_suite
from lowbit_conformance.suite.marking import MARKS, Settings
from lowbit_conformance.testing import check


def right(x, codes, scale):
    return x @ (scale.astype(np.float32) * (codes.astype(np.float32) - 128)).T


def wrong(x, codes, scale):
    return x @ (scale.astype(np.float32) * codes.astype(np.float32)).T


LIMITS = {"format": "ours", "activations": "float32"}
load_suite()
cases = {
    mark.clause
    for mark in MARKS
    if mark.clause.startswith(("formats.dequantize", "linear.gem"))
    for case in mark.generator(mark.clause, Settings(range(1)))
    if getattr(case, "format", "") == "ours"
}
print(sorted(cases))
good, bad = check(right, "linear.gemm", **LIMITS), check(wrong, "linear.gemm", **LIMITS)
print(good.passed > 5, len(good.failures), len(bad.failures) > 3)

from lowbit.linear.stored import gemm
from lowbit.tensor_formats.stored import Stored
from lowbit_conformance.defects.diagnosis import common_defects
from lowbit_conformance.defects.seen import Seen
from lowbit_conformance.suite.explaining import Asked

rng = np.random.default_rng(1)
stored = Stored("ours", 64, 8, (rng.integers(0, 256, (8, 64), np.uint8), np.exp2(rng.normal(size=(8, 1))).astype("f2")))
x = rng.normal(size=(3, 64)).astype(np.float32)
seen = Seen.of("linear.gemm", Asked("linear.gemm", (x, stored), {}, wrong(x, **stored.by_name)))
print([each.name for each in common_defects("linear.gemm", [seen], [])])
"""

PAGE = """
import sys
import lowbit.tensor_formats
lowbit.tensor_formats.__path__.append({folder!r})
sys.path[:0] = {paths!r}
extensions = []


def setup(app):
    from lowbit_docs.formats import Formats
    app.add_directive("formats", Formats)
"""


def test_it_gets_operations_cases_defects_and_a_row(tmp_path: Path) -> None:
    """The right function passes, the wrong one is named, and the page of formats has a section of it."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters/ours.py").write_text(CHAPTER)
    command = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "chapters")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cases, checked, names = done.stdout.splitlines()
    clauses = [f"formats.dequantize/C{number}" for number in (1, 2)]
    clauses += [f"linear.{each}/C{number}" for each in ("gemm", "gemv") for number in (1, 2, 3, 4)]
    clauses += [f"linear.gemm_cast/C{number}" for number in (1, 2, 3)]
    assert cases == str(sorted(clauses))
    assert checked == "True 0 True"
    assert names == "['stored-offset-forgotten']"


def test_it_is_on_the_page_of_formats(tmp_path: Path) -> None:
    """Its fields stand there, as those of any other format."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters/ours.py").write_text(CHAPTER)
    paths = [str(ROOT / name) for name in ("docs/_ext", "bench", "conformance/selftest/support")]
    (tmp_path / "conf.py").write_text(PAGE.format(folder=str(tmp_path / "chapters"), paths=paths))
    (tmp_path / "index.rst").write_text("Formats\n=======\n\n.. formats::\n")
    command = [sys.executable, "-P", "-m", "sphinx", "-q", "-b", "text", str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out/index.txt").read_text()
    assert "Bytes plus 128." in page and "the codes of a row, plus 128" in page
