"""Compiled helpers are taken from the cache only if they are what was compiled, and nobody else could place them."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from building import build, compiler
from cuda_tools import needs, no_nvrtc

from lowbit.errors import UnavailableError
from lowbit_conformance.isolation import faults
from lowbit_cuda.cuda.compiler import compile_source
from lowbit_gpusim.shim import build as shim

SIMPLE = 'extern "C" __global__ void one(int* x) { x[0] = 1; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a home folder in which nothing may appear."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A library that notes that it was loaded, and the note."""
    source, library, marker = tmp_path / "planted.c", tmp_path / "planted.so", tmp_path / "marker"
    source.write_text(
        f"""#include <stdio.h>
        __attribute__((constructor)) static void run(void) {{ FILE* f = fopen("{marker}", "w"); if (f) fclose(f); }}"""
    )
    build([compiler("cc", "gcc"), "-shared", "-fPIC", str(source), "-o", str(library)])
    return library, marker


def fault_handler() -> str:
    return faults.handler()


def watched() -> str:
    source = Path(os.environ["LOWBIT_CACHE"]).parent / "one.cuh"
    source.write_text('#include "device.cuh"\n' + SIMPLE)
    return str(shim.build([source], shim.WATCHED))


HELPERS = [fault_handler, watched]


@pytest.mark.parametrize("helper", HELPERS)
def test_helpers_are_kept_in_the_named_cache(cache: Path, helper: Callable[[], str]) -> None:
    """LOWBIT_CACHE is obeyed, nothing is written to the home folder, and the second time nothing is compiled."""
    compiler("g++")
    path = helper()
    assert cache.resolve() in Path(path).parents
    assert list((cache.parent / "home").iterdir()) == []
    before = os.stat(path)
    assert helper() == path
    assert os.stat(path).st_ino == before.st_ino
    assert ctypes.CDLL(path)


@pytest.mark.parametrize("helper", HELPERS)
def test_a_damaged_or_planted_helper_is_compiled_again(
    cache: Path, planted: tuple[Path, Path], helper: Callable[[], str]
) -> None:
    """A file that was cut off, and one that somebody placed without a digest that matches."""
    compiler("g++")
    library, marker = planted
    path = Path(helper())
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", library.read_bytes()):
        path.write_bytes(content)
        assert helper() == str(path)
        assert path.read_bytes() == whole
    assert ctypes.CDLL(str(path)) and not marker.exists()


@pytest.mark.parametrize("helper", HELPERS)
def test_the_linker_takes_nothing_from_the_current_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: Callable[[], str]
) -> None:
    """A script of the system names libgcc_s.so.1 without a folder, so that one lying there would be linked in."""
    here, marker = tmp_path / "here", tmp_path / "marker"
    here.mkdir()
    source, library = tmp_path / "planted.c", tmp_path / "planted.so"
    functions = ("sigaction", "sigemptyset", "raise", "getenv", "memcpy", "memset", "malloc", "free", "abort", "strlen")
    source.write_text(
        f"""#include <fcntl.h>
        #include <unistd.h>
        {"".join(f"void *{name}(void) {{ return 0; }}" for name in functions)}
        __attribute__((constructor)) static void run(void) {{ close(open("{marker}", O_WRONLY | O_CREAT, 0600)); }}"""
    )
    words = [compiler("gcc"), "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(source), "-o"]
    build([*words, str(library)])
    (here / "libgcc_s.so.1").hardlink_to(library)
    monkeypatch.chdir(here)
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-P", "-c", load, helper()], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, marker.exists()) == (0, "", False)


@pytest.mark.parametrize("helper", HELPERS)
def test_compilers_put_nothing_aside_where_others_can_write(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: Callable[[], str]
) -> None:
    """A folder of TMPDIR without the sticky bit: another user could replace the assembly before it is assembled."""
    shared, tools, seen = tmp_path / "shared", tmp_path / "tools", tmp_path / "seen"
    shared.mkdir()
    shared.chmod(0o777)
    tools.mkdir()
    for name in ("cc", "g++"):
        (tools / name).write_text(f'#!/bin/sh\necho "$TMPDIR" >> "{seen}"\nexec {compiler(name)} "$@"\n')
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.delenv("CC", raising=False)
    assert helper()
    places = [Path(line) for line in seen.read_text().splitlines()]
    assert places and all(cache.resolve() in place.parents for place in places)


@pytest.mark.parametrize("folder", ["faults", "shim", ""])
def test_a_cache_that_others_can_write_to_holds_no_code(cache: Path, folder: str) -> None:
    """The suite goes on without the handler; the shim says what to do."""
    compiler("g++")
    (cache / "faults").mkdir(parents=True, mode=0o700)
    (cache / "shim").mkdir(mode=0o700)
    (cache / folder).chmod(0o775)
    if folder != "shim":
        assert faults.handler() == ""
    if folder != "faults":
        with pytest.raises(UnavailableError, match=r"mode 775.*chmod go-w"):
            watched()


@needs(no_nvrtc())
def test_cubins_are_kept_only_where_nobody_else_writes(cache: Path, tmp_path: Path) -> None:
    """Elsewhere the kernel is compiled each time, and nothing is read or written."""
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "one.cuh").write_text(SIMPLE)
    assert [compile_source("one.cuh", "sm_90", folder=kernels).cached for _ in range(2)] == [False, True]
    (cache / "cubins").chmod(0o777)
    assert [compile_source("one.cuh", "sm_90", folder=kernels).cached for _ in range(2)] == [False, False]
