"""Kernels become machine code once: what decides that is in the cache's key, and what is damaged is made anew."""

import hashlib
import json
from pathlib import Path

import pytest
from cuda_tools import needs_nvrtc
from port_contract import KERNELS

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.storage import CACHE_VARIABLE
from lowbit_cuda.cuda import compiler, driver
from lowbit_cuda.cuda.compiler import CompileError, choose_architecture, compile_source, digest, read_sources

SOURCE, ARCH = "contract.cuh", "sm_80"


@pytest.fixture
def cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which is the test's own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "cubins"


@needs_nvrtc
def test_a_kernel_is_compiled_once(cubins: Path) -> None:
    """The second time it comes from the cache, the same to the byte, and with what the assembler said."""
    made, found = compile_source(SOURCE, ARCH, folder=KERNELS), compile_source(SOURCE, ARCH, folder=KERNELS)
    assert (made.cached, found.cached) == (False, True)
    assert (made.code, made.usage, made.nvrtc) == (found.code, found.usage, found.nvrtc)
    assert set(made.usage) == {"contract_fill", "contract_add", "contract_turn"}
    assert all(usage.registers > 4 and usage.spill_stores == 0 for usage in made.usage.values())
    assert [path.suffix for path in cubins.iterdir()] == [".cubin"]
    assert not compile_source(SOURCE, ARCH, folder=KERNELS, keep=False).cached


@needs_nvrtc
@pytest.mark.parametrize("damage", ["truncated", "flipped", "no header", "another key", "another format", "empty"])
def test_a_damaged_entry_is_made_anew(cubins: Path, damage: str) -> None:
    """Whatever happened to the file, what is used is right, and the file is right again."""
    made = compile_source(SOURCE, ARCH, folder=KERNELS)
    (path,) = cubins.iterdir()
    sound = path.read_bytes()
    header, code = sound.split(b"\n", 1)
    told = json.loads(header)
    damaged = {
        "truncated": sound[:-100],
        "flipped": sound[:-100] + bytes([sound[-100] ^ 1]) + sound[-99:],
        "no header": code,
        "another key": json.dumps(told | {"key": "0" * 64}).encode() + b"\n" + code,
        "another format": json.dumps(told | {"version": 0}).encode() + b"\n" + code,
        "empty": b"",
    }
    path.write_bytes(damaged[damage])
    again = compile_source(SOURCE, ARCH, folder=KERNELS)
    assert not again.cached
    assert again.code == made.code
    assert compile_source(SOURCE, ARCH, folder=KERNELS).cached


@needs_nvrtc
def test_without_a_cache_it_is_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be kept: here a file is where the folder should be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    for _ in range(2):
        assert not compile_source(SOURCE, ARCH, folder=KERNELS).cached


def test_the_key_holds_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is included, the options, the architecture and the compiler each make another entry."""
    sources = {"a.cuh": b"#include <b.cuh>", "b.cuh": b"int b;"}
    keys = [
        digest("a.cuh", "sm_80", "13.0", sources),
        digest("b.cuh", "sm_80", "13.0", sources),
        digest("a.cuh", "sm_90", "13.0", sources),
        digest("a.cuh", "sm_80", "13.1", sources),
        digest("a.cuh", "sm_80", "13.0", sources | {"b.cuh": b"int c;"}),
        digest("a.cuh", "sm_80", "13.0", sources | {"c.cuh": b""}),
    ]
    monkeypatch.setattr(compiler, "OPTIONS", dict(compiler.OPTIONS) | {"fma": True})
    keys.append(digest("a.cuh", "sm_80", "13.0", sources))
    assert len(set(keys)) == len(keys)
    assert all(len(key) == len(hashlib.sha256().hexdigest()) for key in keys)


@needs_nvrtc
def test_what_the_options_say() -> None:
    """No contraction into fused operations, exact division and root, denormals kept: as NVRTC is told it."""
    from cuda.core import ProgramOptions

    told = ProgramOptions(arch=ARCH, **compiler.OPTIONS).as_bytes("nvrtc", "cubin")
    for option in (b"--fmad=false", b"--ftz=false", b"--prec-div=true", b"--prec-sqrt=true", b"--std=c++17"):
        assert option in told
    assert not any(b"fast" in option and not option.endswith(b"false") for option in told)


@needs_nvrtc
def test_an_error_in_a_kernel_can_be_read(tmp_path: Path, cubins: Path) -> None:
    """The file, the line and what is wrong, in one line; the rest is kept beside it; nothing is cached."""
    (tmp_path / "wrong.cuh").write_text('extern "C" __global__ void wrong(int* x) {\n    x[0] = y;\n    z();\n}\n')
    with pytest.raises(CompileError) as caught:
        compile_source("wrong.cuh", "sm_90", folder=tmp_path)
    assert str(caught.value) == (
        'wrong.cuh does not compile for sm_90: wrong.cuh(2): error: identifier "y" is undefined '
        "(and 1 more in the attribute log)"
    )
    assert 'identifier "z" is undefined' in caught.value.log
    assert not list(cubins.iterdir())


@needs_nvrtc
def test_what_cannot_be_compiled_is_refused() -> None:
    """A file that is not there, one outside the folder, an architecture that NVRTC does not know."""
    for source, arch in (("none.cuh", ARCH), ("../port_contract.py", ARCH), (SOURCE, "sm_1"), (SOURCE, "")):
        with pytest.raises(ArgumentError):
            compile_source(source, arch, folder=KERNELS)


def test_the_architecture_is_the_devices_or_an_older_of_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for 9.0 does not run on 10.0, nor code for 8.9 on 8.6."""
    monkeypatch.setattr(compiler, "architectures", lambda: ("sm_80", "sm_86", "sm_89", "sm_90"))
    monkeypatch.setattr(compiler, "compiler_version", lambda: (12, 4))
    chosen = [choose_architecture(capability) for capability in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (9, 1))]
    assert chosen == ["sm_80", "sm_86", "sm_86", "sm_89", "sm_90", "sm_90"]
    with pytest.raises(UnavailableError, match=r"NVRTC 12\.4 does not know the compute capability 10\.3"):
        choose_architecture((10, 3))


def test_without_the_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are looked for before anything is compiled."""
    monkeypatch.setattr(driver, "installed", lambda module: module != "cuda.core")
    compiler.compiler_version.cache_clear()
    with pytest.raises(UnavailableError) as caught:
        compiler.compiler_version()
    assert str(caught.value) == (
        "the compiler of the kernels is unavailable: the Python package cuda-core is not installed; "
        'pip install "lowbit[cuda]" (for drivers of CUDA 12: "lowbit[cuda12]")'
    )


def test_sources_are_read_by_name(tmp_path: Path) -> None:
    """Of a folder, only what can be compiled or included counts."""
    (tmp_path / "a.cuh").write_text("1")
    (tmp_path / "table.py").write_text("2")
    assert read_sources(tmp_path) == {"a.cuh": b"1"}
