"""The examples of the docs in C, C++, Rust and over the line protocol: each is built as it says and passes the suite.

A language whose compiler is not installed is skipped, with the compiler's name as the reason.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from building import EXAMPLES, SOURCES, STRICT, build, c_library, compiler

QUICK = ["--quick"]
DECLARED = ("packing.pack", "packing.unpack", "linear.qgemv")


def build_c(target: Path) -> None:
    c_library(EXAMPLES / "c/mine.c", target)


def build_cpp(target: Path) -> None:
    cpp = compiler("c++", "g++", "clang++")
    build([cpp, "-std=c++17", "-O2", "-shared", "-fPIC", *STRICT, str(EXAMPLES / "cpp/mine.cpp"), "-o", str(target)])


def build_rust(target: Path) -> None:
    rust = [compiler("rustc"), "--edition", "2021", "-O", "--crate-type", "cdylib", "-C", "panic=abort"]
    build([*rust, "-D", "warnings", str(EXAMPLES / "rust/mine.rs"), "-o", str(target)])


def conform(option: str, value: str, *rest: str, declared: tuple[str, ...] = DECLARED) -> None:
    """`lowbit conformance` must pass, and have run every operation that the example declares."""
    chosen = [word for operation in declared for word in ("--op", operation)]
    words = [sys.executable, "-m", "lowbit", "conformance", option, value, *chosen, "--json", *rest]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["failures"][:3]
    rows = {row["operation"]: row for row in report["operations"] if row["passed"]}
    assert set(rows) - {"backend"} == set(declared)
    assert all(row["passed"] == row["declared"] for row in rows.values())


@pytest.mark.parametrize(("builder", "cases"), [(build_c, ["--seeds", "1"]), (build_cpp, QUICK), (build_rust, QUICK)])
def test_examples_pass_the_suite(builder, cases: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # one of three
    """The example compiles without a warning and passes what it declares.

    The one in C passes every case. The others have the same kernels behind the same header, and pass a few of every
    clause.
    """
    target = tmp_path / "libmine.so"
    builder(target)
    conform("--library", str(target), *cases)


def test_the_first_example_passes_the_suite(tmp_path: Path) -> None:
    """The smallest library, which has one operation at one width."""
    target = c_library(EXAMPLES / "c/first.c", tmp_path / "libfirst.so")
    conform("--library", str(target), "--quick", declared=("packing.unpack",))


def test_the_line_protocol_example_passes_the_suite() -> None:
    """A program in plain Python passes a few cases of every clause that it declares; all of them take it a minute."""
    conform("--command", f"'{sys.executable}' -I -S '{EXAMPLES / 'command/mine.py'}'", "--quick")


def test_blocks_cross_the_border() -> None:
    """A program gets blocks of integers with their matrix, and passes a few cases of each clause of their product."""
    program = SOURCES / "blocks.py"
    conform("--command", f"'{sys.executable}' '{program}'", "--quick", declared=("linear.qgemm_bfp",))


def test_the_c_example_keeps_to_its_memory(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers, on arrays of exactly their size, and without a leak."""
    program, sanitizers = tmp_path / "driver", "-fsanitize=address,undefined"
    sources = [str(SOURCES / "driver.c"), str(EXAMPLES / "c/mine.c")]
    c = compiler("gcc", "clang")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run([c, sanitizers, str(probe), "-o", str(program)], capture_output=True).returncode:
        pytest.skip(f"{c} has no sanitizers")
    build([c, "-std=c99", "-O1", "-g", sanitizers, "-fno-sanitize-recover=all", *STRICT, *sources, "-o", str(program)])
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept to its memory" in done.stdout


def test_the_driver_finds_what_it_looks_for(tmp_path: Path) -> None:
    """The same test on the example with one more word written, or one column not multiplied, fails."""
    text = (EXAMPLES / "c/mine.c").read_text()
    mistakes = {
        "words[(word + 1) * columns + n] |= ": "words[(word + 2) * columns + n] |= ",
        "for (n = 0; n < w->columns; n++) {": "for (n = 0; n < w->columns - 1; n++) {",
    }
    for number, (right, wrong) in enumerate(mistakes.items()):
        assert right in text
        source, program = tmp_path / f"wrong{number}.c", tmp_path / f"wrong{number}"
        source.write_text(text.replace(right, wrong))
        c = compiler("gcc", "clang")
        build(
            [
                c,
                "-std=c99",
                "-g",
                "-fsanitize=address",
                *STRICT,
                str(SOURCES / "driver.c"),
                str(source),
                "-o",
                str(program),
            ]
        )
        assert subprocess.run([str(program)], capture_output=True, timeout=60).returncode != 0
