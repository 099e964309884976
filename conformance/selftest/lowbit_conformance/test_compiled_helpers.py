"""Compiled helpers are taken from the cache only if they are what was compiled, and nobody else could place them."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Compiled:
    """A helper that was compiled once, in a place made to lead a compiler astray.

    Attributes:
        helper: the function that compiles it.
        path: of the library.
        folder: with the cache, the home folder, what was planted, and notes of what happened.
    """

    helper: Callable[[], str]
    path: str
    folder: Path


@pytest.fixture(scope="module", params=HELPERS)
def compiled_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A helper compiled in a folder with a planted library, with a TMPDIR that others can write to.

    Of TMPDIR: it has no sticky bit, so another user could replace the assembly before it is assembled. The compilers
    note which one they get.
    """
    folder = tmp_path_factory.mktemp("compiled")
    for name in ("home", "here", "shared", "tools"):
        (folder / name).mkdir()
    (folder / "shared").chmod(0o777)
    for name in ("cc", "gcc", "g++"):
        tool = folder / "tools" / name
        tool.write_text(f'#!/bin/sh\necho "$TMPDIR" >> "{folder / "seen"}"\nexec {compiler(name)} "$@"\n')
        tool.chmod(0o700)
    plant_libgcc(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_CACHE", str(folder / "cache"))
        patch.setenv("HOME", str(folder / "home"))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setenv("PATH", f"{folder / 'tools'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("TMPDIR", str(folder / "shared"))
        patch.delenv("CC", raising=False)
        patch.chdir(folder / "here")
        return Compiled(request.param, request.param(), folder)


@pytest.fixture
def compiled(compiled_once: Compiled, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The helper, whose cache and compilers are in use."""
    monkeypatch.setenv("PATH", f"{compiled_once.folder / 'tools'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("LOWBIT_CACHE", str(compiled_once.folder / "cache"))
    monkeypatch.setenv("HOME", str(compiled_once.folder / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return compiled_once


def plant_libgcc(folder: Path) -> None:
    """Place a libgcc_s.so.1 in the folder `here` that leaves a marker if it is loaded."""
    marker = folder / "marker"
    source, library = folder / "planted.c", folder / "planted.so"
    functions = ("sigaction", "sigemptyset", "raise", "getenv", "memcpy", "memset", "malloc", "free", "abort", "strlen")
    source.write_text(
        f"""#include <fcntl.h>
        #include <unistd.h>
        {"".join(f"void *{name}(void) {{ return 0; }}" for name in functions)}
        __attribute__((constructor)) static void run(void) {{ close(open("{marker}", O_WRONLY | O_CREAT, 0600)); }}"""
    )
    words = [compiler("gcc"), "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(source), "-o"]
    build([*words, str(library)])
    (folder / "here/libgcc_s.so.1").hardlink_to(library)


def loaded_apart(library: str | Path) -> tuple[int, str]:
    """The status and the errors of a process that loads a library. A test may cut the file off, and a process that has
    loaded it would get a bus error."""
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    words = [sys.executable, "-P", "-c", load, str(library)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_helpers_are_kept_in_the_named_cache(compiled: Compiled) -> None:
    """LOWBIT_CACHE is obeyed, nothing is written to the home folder, and the second time nothing is compiled."""
    assert (compiled.folder / "cache").resolve() in Path(compiled.path).parents
    assert list((compiled.folder / "home").iterdir()) == []
    before = os.stat(compiled.path)
    assert compiled.helper() == compiled.path
    assert os.stat(compiled.path).st_ino == before.st_ino
    assert loaded_apart(compiled.path) == (0, "")


def test_the_linker_takes_nothing_from_the_current_folder(compiled: Compiled) -> None:
    """A script of the system names libgcc_s.so.1 without a folder, so that one lying there would be linked in."""
    assert loaded_apart(compiled.path) == (0, "")
    assert not (compiled.folder / "marker").exists()


def test_compilers_put_nothing_aside_where_others_can_write(compiled: Compiled) -> None:
    """Each compiler is given a TMPDIR in the cache."""
    places = [Path(line) for line in (compiled.folder / "seen").read_text().splitlines()]
    assert places and all((compiled.folder / "cache").resolve() in place.parents for place in places)


def test_a_damaged_or_planted_helper_is_compiled_again(compiled: Compiled, planted: tuple[Path, Path]) -> None:
    """A file that was cut off, and one that somebody placed without a digest that matches.

    Both helpers are kept in the same way, so the one that compiles slowly is damaged once.
    """
    library, marker = planted
    path = Path(compiled.path)
    whole = path.read_bytes()
    damaged = [whole[: len(whole) // 2], b""] if compiled.helper is fault_handler else []
    for content in (*damaged, library.read_bytes()):
        path.write_bytes(content)
        assert compiled.helper() == str(path)
        assert path.read_bytes() == whole
    assert loaded_apart(path) == (0, "") and not marker.exists()


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
