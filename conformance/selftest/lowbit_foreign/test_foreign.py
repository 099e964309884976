"""The examples of the docs in C, C++, Rust and over the line protocol: each is built as it says and passes the suite.

Those of stored matrices (Q4_0, GPTQ, MXFP4, AWQ) also fail it with a mistake planted, and the diagnosis names it.

A language whose compiler is not installed is skipped, with the compiler's name as the reason.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from building import EXAMPLES, SOURCES, STRICT, build, c_library, compiler

QUICK = ["--quick"]
DECLARED = ("packing.pack", "packing.unpack", "linear.qgemv")


def library(source: Path, target: Path) -> Path:
    """The shared library of one file in C, C++ or Rust."""
    if source.suffix == ".c":
        return c_library(source, target, "-O2", libraries=("-lm",))
    if source.suffix == ".cpp":
        cpp = compiler("c++", "g++", "clang++")
        build([cpp, "-std=c++17", "-O2", "-shared", "-fPIC", *STRICT, str(source), "-o", str(target)])
    else:
        rust = [compiler("rustc"), "--edition", "2021", "-O", "--crate-type", "cdylib", "-C", "panic=abort"]
        build([*rust, "-D", "warnings", str(source), "-o", str(target)])
    return target


def command_line(source: Path) -> str:
    return f"'{sys.executable}' -I -S '{source}'"


def run(option: str, value: str, operations: tuple[str, ...], *rest: str) -> tuple[int, dict[str, Any]]:
    """The status and the report of `lowbit conformance`."""
    chosen = [word for operation in operations for word in ("--op", operation)]
    words = [sys.executable, "-m", "lowbit", "conformance", option, value, *chosen, "--json", *rest]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


def conform(option: str, value: str, *rest: str, declared: tuple[str, ...] = DECLARED) -> None:
    """`lowbit conformance` must pass, and have run every operation that the example declares."""
    status, report = run(option, value, declared, *rest)
    assert status == 0, report["failures"][:3]
    rows = {row["operation"]: row for row in report["operations"] if row["passed"]}
    assert set(rows) - {"backend"} == set(declared)
    assert all(row["passed"] == row["declared"] for row in rows.values())


@pytest.mark.parametrize(
    ("source", "cases"),
    [
        pytest.param("c/mine.c", ["--seeds", "1"], marks=pytest.mark.whole),
        ("c/mine.c", QUICK),
        pytest.param("cpp/mine.cpp", QUICK, marks=pytest.mark.whole),
        pytest.param("rust/mine.rs", QUICK, marks=pytest.mark.whole),
    ],
)
def test_examples_pass_the_suite(source: str, cases: list[str], tmp_path: Path) -> None:
    """The example compiles without a warning and passes what it declares.

    All pass a few cases of every clause, and the one in C passes every case too, in `nox -s conformance`. The others
    have the same kernels behind the same header.
    """
    target = library(EXAMPLES / source, tmp_path / "libmine.so")
    conform("--library", str(target), *cases)


STORED = {
    "c/q4_0.c": "lowbit-1.1/q4_0-q8_0",
    "cpp/gptq.cpp": "lowbit-1.1/gptq-v2-gemv-fp16",
    "rust/mxfp4.rs": "lowbit-1.1/mxfp4-gemv-bf16",
    "command/awq.py": "lowbit-1.1/awq-gemv-bf16",
}
"""The examples of stored matrices, and the profile that each claims."""


def stored_example(source: Path, folder: Path) -> tuple[str, str]:
    """The option and value by which the suite is given an example."""
    if source.suffix == ".py":
        return "--command", command_line(source)
    return "--library", str(library(source, folder / "libmine.so"))


@pytest.mark.parametrize("source", STORED)
@pytest.mark.whole
def test_examples_of_stored_matrices_are_certified(source: str, tmp_path: Path) -> None:
    """Q4_0 with Q8_0, GPTQ in float16, MXFP4 and AWQ in bfloat16: all cases of the profile pass in all seeds."""
    assert STORED[source] in (EXAMPLES / source).read_text()
    status, report = run(*stored_example(EXAMPLES / source, tmp_path), (), "--profile", STORED[source])
    assert status == 0, report["failures"][:3]
    assert [(each["profile"], each["certified"]) for each in report["certificates"]] == [(STORED[source], True)]


def test_the_second_product_of_an_example_passes_the_suite(tmp_path: Path) -> None:
    """Q4_0 in C also multiplies activations in float32, of which no profile speaks."""
    conform(*stored_example(EXAMPLES / "c/q4_0.c", tmp_path), *QUICK, declared=("linear.gemv",))


MISTAKES = {
    "c/q4_0.c": ("element < 16", "element >= 16", "stored-nibbles-swapped"),
    "cpp/gptq.cpp": ("g_idx[k]", "g_idx[k] * 0 + k / (K / 8)", "stored-group-index-ignored"),
    "rust/mxfp4.rs": ("scales[k / 32]", "scales[0]", "stored-scale-of-the-first"),
    "command/awq.py": ("* (code - zero)", "* code", "stored-offset-forgotten"),
}
"""In each example a piece of text, the mistake in its place, and the defect that it is."""


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_in_an_example_is_named(source: str, tmp_path: Path) -> None:
    """The example with one mistake fails, and the diagnosis says which mistake it is."""
    right, wrong, defect = MISTAKES[source]
    text = (EXAMPLES / source).read_text()
    assert right in text
    spoilt = tmp_path / Path(source).name
    spoilt.write_text(text.replace(right, wrong))
    status, report = run(*stored_example(spoilt, tmp_path), ("linear.gemv/C2",))
    assert status == 1
    assert any(defect in failure["diagnosis"] for failure in report["failures"]), report["failures"][:3]


def test_the_first_example_passes_the_suite(tmp_path: Path) -> None:
    """The smallest library, which has one operation at one width."""
    target = library(EXAMPLES / "c/first.c", tmp_path / "libfirst.so")
    conform("--library", str(target), "--quick", declared=("packing.unpack",))


def test_the_line_protocol_example_passes_the_suite() -> None:
    """A program in plain Python passes a few cases of every clause that it declares; all of them take it a minute."""
    conform("--command", command_line(EXAMPLES / "command/mine.py"), "--quick")


def test_blocks_cross_the_border() -> None:
    """A program gets blocks of integers with their matrix, and passes a few cases of each clause of their product."""
    program = SOURCES / "blocks.py"
    conform("--command", f"'{sys.executable}' '{program}'", "--quick", declared=("linear.qgemm_bfp",))


@pytest.mark.parametrize(
    ("driver", "source"), [("driver.c", "c/mine.c"), ("stored.c", "c/q4_0.c"), ("stored.c", "cpp/gptq.cpp")]
)
def test_examples_keep_to_their_memory(driver: str, source: str, tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers, on arrays of exactly their size, and without a leak."""
    program, sanitizers = tmp_path / "driver", "-fsanitize=address,undefined"
    c, cpp = (compiler("gcc", "clang"), compiler("g++", "clang++"))
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([c, sanitizers, str(probe), "-o", str(program)], capture_output=True).returncode:
        pytest.skip(f"{c} has no sanitizers")
    words = ["-O1", "-g", sanitizers, "-fno-sanitize-recover=all", *STRICT]
    which = ["-DGPTQ"] if source.endswith(".cpp") else []
    build([c, "-std=c99", *words, *which, "-c", str(SOURCES / driver), "-o", f"{program}.o"])
    own = [cpp, "-std=c++17"] if source.endswith(".cpp") else [c, "-std=c99"]
    build([*own, *words, f"{program}.o", str(EXAMPLES / source), "-o", str(program), "-lm"])
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept to its memory" in done.stdout


DRIVEN = [
    ("driver.c", "c/mine.c", "words[(word + 1) * columns + n] |= ", "words[(word + 2) * columns + n] |= "),
    ("driver.c", "c/mine.c", "n < w->columns; n++) {", "n < w->columns - 1; n++) {"),
    ("stored.c", "c/q4_0.c", "(n * count + b) * Q4_0", "(n * count + b + 1) * Q4_0"),
    ("stored.c", "c/q4_0.c", "n < columns; n++) {", "n < columns - 1; n++) {"),
]
"""A driver, an example, a piece of its text, and the mistake in its place."""


@pytest.mark.parametrize(("driver", "example", "right", "wrong"), DRIVEN, ids=range(len(DRIVEN)))
def test_the_driver_finds_what_it_looks_for(driver: str, example: str, right: str, wrong: str, tmp_path: Path) -> None:
    """The same test fails on the example with one element written or read beside its array, or one column left out."""
    text = (EXAMPLES / example).read_text()
    assert right in text
    source, program = tmp_path / "wrong.c", tmp_path / "wrong"
    source.write_text(text.replace(right, wrong))
    words = [compiler("gcc", "clang"), "-std=c99", "-g", "-fsanitize=address", *STRICT]
    build([*words, str(SOURCES / driver), str(source), "-o", str(program), "-lm"])
    assert subprocess.run([str(program)], capture_output=True, timeout=60).returncode != 0
