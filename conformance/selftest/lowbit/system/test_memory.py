"""Too little memory is a sentence, and never a signal, a traceback, or memory that other programs need."""

import os
import resource
import struct
import subprocess
from pathlib import Path

import pytest
import tiny_checkpoint
import tiny_gguf

from lowbit.errors import UnavailableError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tensors import read_floats
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.system import memory as host_memory
from lowbit.system.interpreters import python_command
from lowbit.system.memory import available_bytes, check_address_space, check_memory

TIB, MIB = 2**40, 2**20


def run(script: str, *arguments: object, limit: int | None = None) -> "subprocess.CompletedProcess[str]":
    """A program, with a limit on its address space in bytes."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [*python_command("-c", script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, preexec_fn=limited)


def sentence(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line that an error of the command line is."""
    assert (done.returncode, done.stdout) == (2, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("lowbit: reading")]
    assert len(lines) == 1 and lines[0].startswith("lowbit: "), done.stderr
    return lines[0]


# What is available.


def test_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, each control group of either version, and the limit on the address space."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path / "groups")
    assert available_bytes() == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("7:cpu,memory:/one\n0::/a/b\n")
    for folder, files in {
        "a": {"memory.max": "max\n", "memory.current": "5", "memory.stat": ""},
        "a/b": {"memory.max": "7000\n", "memory.current": "3000", "memory.stat": "inactive_file 500\nanon 9\n"},
    }.items():
        (tmp_path / "groups" / folder).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "groups" / folder / name).write_text(text)
    assert available_bytes() == 7000 - 3000 + 500
    (one := tmp_path / "groups/memory/one").mkdir(parents=True)
    for name, text in (("limit_in_bytes", "4000"), ("usage_in_bytes", "3990"), ("stat", "active_file 1")):
        (one / f"memory.{name}").write_text(text)
    assert available_bytes() == 11
    (one / "memory.usage_in_bytes").write_text("9999")
    assert available_bytes() == 0


def test_a_control_group_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit counts like any other's."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\xc2\x85\n")
    group = tmp_path / "groups" / os.fsdecode(b"\xff\xc2\x85")
    group.mkdir(parents=True)
    for name, text in (("max", "7000\n"), ("current", "3000\n"), ("stat", "")):
        (group / f"memory.{name}").write_text(text)
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path / "groups")
    assert available_bytes() == 4000


def test_where_the_system_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused."""
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", tmp_path)
    assert available_bytes() is None
    check_memory("everything", 2**70)


def test_an_address_space() -> None:
    """The need and what is left are named, in MiB."""
    check_address_space("anything", 2**70)  # where there is no limit
    script = "import resource; from lowbit.system.memory import check_address_space as check\n"
    script += f"resource.setrlimit(resource.RLIMIT_AS, ({4096 * MIB},) * 2); check('it', {1024 * MIB})\n"
    script += f"try: check('it', {4097 * MIB})\nexcept RuntimeError as error: print(error)"
    said = run(script).stdout
    assert said.startswith("it is unavailable: it needs 4097 MiB of address space, and the limit leaves ")


# Files that claim much.


def sparse_gguf(path: Path, tmp_path: Path) -> Path:
    """A model whose embedding is a terabyte of holes."""
    whole = bytearray(tiny_gguf.write(tmp_path / "sound.gguf").read_bytes())
    info = open_gguf(tmp_path / "sound.gguf").header.tensors
    name = b"token_embd.weight"
    place = whole.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    start = min(each.offset for each in info.values())
    rows = TIB // (4 * tiny_gguf.CONFIG.hidden)
    beyond = -(-(len(whole) - start) // 32) * 32
    whole[place : place + 32] = struct.pack("<IQQIQ", 2, tiny_gguf.CONFIG.hidden, rows, 0, beyond)
    path.write_bytes(whole)
    with path.open("r+b") as stream:
        stream.truncate(start + beyond + TIB)
    return path


def test_a_terabyte_of_holes(tmp_path: Path) -> None:
    """A sparse file is refused before memory is asked for, the tensor and the model, and so by the command."""
    path = sparse_gguf(tmp_path / "model.gguf", tmp_path)
    source = open_gguf(path)
    with pytest.raises(UnavailableError, match=r"memory for tensor 'token_embd.weight' .* \d+ MiB are needed and"):
        source.tensor("token_embd.weight")
    with pytest.raises(UnavailableError, match=r"memory for model model\.gguf is unavailable: \d+ MiB are needed"):
        read_llama(source)
    script = "import sys; from lowbit.__main__ import main; main()"
    done = run(script, "logits", "--model", path, "--prompt", "he", limit=4096 * MIB)
    assert "unavailable" in sentence(done) or "allowed" in sentence(done)
    path.unlink()


def test_a_terabyte_of_a_checkpoint(tmp_path: Path) -> None:
    """The same of a tensor in a sparse shard."""
    table = open_checkpoint(tiny_checkpoint.write(tmp_path / "m")).table
    name = next(iter(table))
    place = type(table[name])(table[name].shard, "F32", (TIB // 4,), table[name].offset)
    with pytest.raises(UnavailableError, match=r"memory for tensor 'model\.embed_tokens\.weight'"):
        read_floats({name: place}, name)


# What ends in MemoryError, or in worse.

FAILING = """
import sys
from lowbit.cli import logits, main
import numpy as np
def fail(path, *more, **options):
    {statement}
logits.opened = fail
sys.argv = ["lowbit", "logits", "--model", "x", "--prompt", "y"]
main()
"""


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("np.empty(2**60, np.uint8)", "out of memory: Unable to allocate 1.00 EiB for an array with shape"),
        ("bytearray(2**62)", "out of memory: an allocation failed; free some, or ask for less"),
        ("fail(path)", "the input is nested too deeply"),
        ('raise RuntimeError("can\'t start new thread")', "out of memory or of threads"),
    ],
    ids=["numpy", "Python", "recursion", "threads"],
)
def test_errors_without_words(statement: str, said: str) -> None:
    """Each is a line, and status 2."""
    assert said in sentence(run(FAILING.format(statement=statement)))


def test_another_error_is_not_hidden() -> None:
    """What is a defect stays a traceback."""
    done = run(FAILING.format(statement="raise RuntimeError('a defect')"))
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize("command", [["profiles"], ["logits", "--prompt", "x"], ["conformance", "numpy"]])
def test_too_little_to_import_numpy(command: list[str]) -> None:
    """OpenBLAS would end the process, or send it an interrupt."""
    done = run("from lowbit.__main__ import main; main()", *command, limit=100 * MIB)
    assert "lowbit is unavailable: it needs " in sentence(done)


def test_too_little_for_the_suite() -> None:
    """The suite maps its arena before anything else; this is said before a process is started."""
    done = run("from lowbit.__main__ import main; main()", "conformance", "numpy", limit=2048 * MIB)
    assert "the conformance suite is unavailable: it needs " in sentence(done)


CPPYY = """
import resource, sys
import numpy as np
from lowbit.quantization.affine import quantize
from lowbit.backend import load
from lowbit.system.memory import available_bytes
import lowbit_cppyy.runtime.compiler
def limit(left):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
def multiply(bits):
    prepared = backend.prepare(quantize(np.ones((64, 64), np.float32), bits=bits, group_size=64))
    return prepared.qgemv(np.ones(64, np.float32))
backend = load("cppyy")
for left in {limits}:
    limit(left)
    try:
        multiply(4)
    except RuntimeError as error:
        print(type(error).__name__, error)
limit(2**32)
assert multiply(4).shape == (64,)
limit(40 * 2**20)
try:
    multiply(3)
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def test_too_little_for_cppyy() -> None:
    """Its compiler would abort the process: at the start, and later, for one more kernel."""
    pytest.importorskip("cppyy_backend", reason="needs cppyy")
    limits = [size * MIB for size in (0, 50, 100, 200, 300, 383)]
    done = run(CPPYY.format(limits=limits))
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert len(lines) == len(limits) + 1
    for line in lines[:-1]:
        assert line.startswith("UnavailableError backend cppyy is unavailable: it needs 384 MiB of address space, and")
    assert lines[-1].startswith("UnavailableError compiling a kernel is unavailable: it needs 64 MiB of address space")
