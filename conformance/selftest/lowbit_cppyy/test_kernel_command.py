"""``lowbit kernel``: names are parsed by their grammar, and kernels are printed without a compiler."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import published, write
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit_cppyy.cli.tune import layout_of
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.names import EXAMPLE, kernel_of
from lowbit_cppyy.recipe import PURPOSES
from lowbit_cppyy.runtime.toolchain import has_headers
from lowbit_cppyy.tuning.choices import default_recipe


def answer(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["kernel", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("isa", sorted(TABLES))
def test_every_name_is_read_back(isa: str) -> None:
    """The default kernels of every width, purpose and kind of scales."""
    for bits in (2, 3, 4, 8):
        for scales in ("float16", "float32"):
            for convention in ("minimum", "zero_point"):
                layout = layout_of(bits, 128, "4096x11008", scales, convention)
                for purpose in PURPOSES:
                    kernel = Kernel(default_recipe(purpose, layout, TABLES[isa]), TABLES[isa])
                    assert kernel_of(kernel.name) == kernel


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gemv", "gemx", "product of the kernel's name is 'gemx'; allowed: gemv or gemm"),
        ("gemv", "gemm", "allowed: gemv_"),
        ("f32", "bfp16", "allowed: gemv_f32"),
        ("u4", "u5", "codes of the kernel's name"),
        ("s16z", "s8z", "scales of the kernel's name"),
        ("fold", "unfold", "method of the kernel's name"),
        ("1x4", "0x4", "tile of the kernel's name"),
        ("1x4c2t1", "9999x9999c1t1", "tile of the kernel's name"),
        ("1x4", "1x3", "do not divide a panel"),
        ("a1024", "a01024", "stream of the kernel's name"),
        ("avx512", "avx51", "instruction set of the kernel's name"),
        ("_avx512", "", "eight parts"),
        ("avx512", "avx512\n", "instruction set of the kernel's name"),
    ],
)
def test_a_wrong_name_is_refused_by_its_wrong_part(old: str, new: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        kernel_of(EXAMPLE.replace(old, new, 1))


def test_show_prints_the_kernel_and_with_its_prelude_what_it_calls() -> None:
    """The text is the same by name and by choices, and a pipe gets no colours."""
    name = Kernel(
        default_recipe("vector", layout_of(4, 128, "4096x11008", "float16", "zero_point"), TABLES["avx2"]),
        TABLES["avx2"],
    ).name
    shown = answer("show", name)
    assert shown == answer("show", "--bits", "4", "--isa", "avx2") == kernel_of(name).source
    assert "\x1b" not in shown and "_mm256" not in shown
    whole = answer("show", name, "--prelude")
    assert whole.endswith(shown) and "_mm256_fmadd_ps" in whole


def test_kernels_of_stored_formats_are_printed() -> None:
    """By the name of a format, with their programs."""
    shown = answer("show", "--format", "q4_k", "--isa", "avx512")
    assert re.search("inline void stored_f32_u4_s16u32m_(fold|subnormal|table)_1x4c1_p64a[0-9]+_avx512\\(", shown)
    told = json.loads(answer("program", "--format", "gguf-mxfp4", "--purpose", "integer vector", "--json"))
    assert re.fullmatch("stored_q8_t4_e8_dot4_1x8c1_p64a[0-9]+_avx2", told["kernel"])  # processors differ in the rest
    assert any("lookup_bytes" in line for line in told["program"])


def test_program_prints_every_step_and_the_counts() -> None:
    shown = answer("program", EXAMPLE)
    program = kernel_of(EXAMPLE).program
    lines = [line.strip() for line in shown.splitlines()]
    assert sum("fmadd" in line for line in lines) >= sum(step.word == "fmadd" for step in program.instructions())
    assert "for u in 0 … turns[g]:" in lines and any("need a register; there are 32" in line for line in lines)
    told = json.loads(answer("program", EXAMPLE, "--json"))
    assert told["kernel"] == EXAMPLE and told["words_of_a_group"]["fmadd"] == 128 * 4 + 2 * 4
    assert told["predicted"]["registers"] == 9


def test_the_step_of_a_model_is_printed(tmp_path: Path) -> None:
    """Its C++, with the lines of its program."""
    shown = answer("step", "--model", str(write(tmp_path / "tiny.gguf", published())), "--isa", "avx512")
    assert shown.startswith("namespace lowbit::avx512 {") and "// query = product(normed; query)\n" in shown


def test_list_has_every_default_and_names_that_can_be_shown() -> None:
    told = json.loads(answer("list", "--json"))["kernels"]
    assert len(told) == len(TABLES) * 4 * len(PURPOSES)
    for each in told:
        assert kernel_of(each["kernel"]).name == each["kernel"]
    assert len(answer("list", "--isa", "plain", "--bits", "3").splitlines()) == 1 + len(PURPOSES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "gemv"], "eight parts"),
        (["show", "--bits", "5"], "--bits"),
        (["show", "--isa", "sse"], "--isa"),
        (["show", "--purpose", "all"], "--purpose"),
        (["program", "--group", "-1"], "--group"),
        (["list", "--scales", "float64"], "--scales"),
    ],
)
def test_wrong_arguments_are_refused_in_words(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["kernel", *arguments])
    assert isinstance(done.exception, ArgumentError) and said in str(done.exception)


def test_nothing_here_needs_cppyy_archspec_or_matplotlib() -> None:
    """In a Python in which none of these modules can be imported."""
    script = """
        import sys
        for name in ("cppyy", "archspec", "archspec.cpu", "matplotlib"):
            sys.modules[name] = None
        from typer.testing import CliRunner
        from lowbit.cli import app
        for command in ("show", "program", "list"):
            done = CliRunner().invoke(app, ["kernel", command])
            print(done.exit_code, len(done.stdout) > 500, done.exception)
        """
    source = "\n".join(line[8:] for line in script.splitlines())
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 True None\n" * 3, done.stderr


def test_assembly_is_that_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plain table, which every compiler accepts; without a compiler there is an error."""
    if not has_headers(__import__("os").environ["PATH"]):
        pytest.skip("no C++ compiler")
    shown = answer("show", "--assembly", "--isa", "plain", "--purpose", "rows", "--bits", "2")
    assert "gemm_f32_u2" in shown.splitlines()[0] and "ret" in shown
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(app, ["kernel", "show", "--assembly"])
    assert "no command c++" in str(done.exception)
