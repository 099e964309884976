"""The cppyy backend from outside: what it chooses, what it refuses, and when its threads start and end."""

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from lowbit.backend import find, load
from lowbit.contract.rounding import Arithmetic, checked_gamma
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import QuantizedMatrix, quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.backend import integer_roundings, roundings
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.runtime import compiler, processor, toolchain
from lowbit_cppyy.tuning import outcomes


@pytest.fixture(autouse=True)
def nothing_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do not depend on searches on this machine."""
    monkeypatch.setenv(outcomes.VARIABLE, "off")


def some_matrix(rows: int = 64, columns: int = 1000, bits: int = 4, group_size: int = 32) -> QuantizedMatrix:
    weights = np.random.default_rng(rows + columns).standard_normal((rows, columns)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=group_size)


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new Python process, because it ends, forks or crashes."""
    common = """
        import os, signal, sys, threading, time
        import numpy as np
        from lowbit.quantization.affine import quantize
        from lowbit_cppyy import CppyyBackend
        matrix = quantize(np.ones((4096, 512), np.float32), bits=4, group_size=128)
        x = np.ones(4096, np.float32)
        """
    source = textwrap.dedent(common) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


# What it chooses.


EVERYTHING = {feature for table in TABLES.values() for feature in table.requires}


def processor_with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    """Pretend to be on a processor with these features and no others."""
    monkeypatch.setattr(processor, "has", lambda feature: feature in features)


def test_the_best_instruction_set_of_the_processor_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first table whose features are all present."""
    monkeypatch.delenv(processor.ISA_VARIABLE, raising=False)
    avx2, avx512 = ("avx2", "fma", "f16c"), ("avx512f", "avx512bw", "avx512vl")
    for features, best in (
        (EVERYTHING, "avx512vnni"),
        ((*avx2, *avx512, "avx_vnni"), "avx512"),
        ((*avx2, *avx512[:-1], "avx512_vnni", "avx_vnni"), "avxvnni"),
        ((*avx2, *avx512[:-1]), "avx2"),
        (("avx2", "fma"), "plain"),
        (("asimd", "asimddp"), "neondot"),
        (("asimd",), "neon"),
        ((), "plain"),
    ):
        processor_with(monkeypatch, *features)
        assert processor.choose_table(None).name == best
        assert processor.choose_table("plain").name == "plain"


@pytest.mark.parametrize("isa", [table.name for table in TABLES.values() if table.requires])
def test_a_forced_instruction_set_that_is_missing_is_refused_before_anything_is_compiled(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any one of its features missing: unavailable with a reason, and `prepare` refuses without the compiler."""
    monkeypatch.setattr(compiler, "runtime", lambda: pytest.fail("the compiler was asked for"))
    for missing in TABLES[isa].requires:
        processor_with(monkeypatch, *(EVERYTHING - {missing}))
        backend = CppyyBackend(isa)
        state = backend.availability()
        assert not state.usable and f"lacks {missing}, which" in state.reason and "plain" in state.remedy
        with pytest.raises(UnavailableError, match="this processor lacks"):
            backend.prepare(some_matrix())


@pytest.mark.parametrize("isa", TABLES)
def test_every_instruction_set_of_this_processor_can_be_forced(isa: str) -> None:
    """It is then in use: its prelude is compiled."""
    backend = CppyyBackend(isa, threads=1)
    if not backend.availability().usable:
        pytest.skip(f"this processor lacks {isa}")
    details = backend.capabilities().details
    assert details is not None and details["instruction set"] == isa
    with backend:
        matrix, x = some_matrix(columns=9), np.ones(64, np.float32)
        np.testing.assert_allclose(backend.prepare(matrix).qgemv(x), qgemv(x, matrix), rtol=1e-4, atol=1e-4)
    assert isa in compiler.runtime().tables


def test_the_environment_chooses_and_its_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.ISA_VARIABLE, "plain")
    monkeypatch.setenv(processor.THREADS_VARIABLE, "3")
    details = CppyyBackend().capabilities().details
    assert details is not None and (details["instruction set"], details["threads"]) == ("plain", "3")
    for variable, value in ((processor.ISA_VARIABLE, "sse9"), (processor.THREADS_VARIABLE, "none")):
        monkeypatch.setenv(variable, value)
        backend = find("cppyy")
        assert not backend.availability().usable
        with pytest.raises(UnavailableError, match=f"{variable} is '{value}'"):
            load("cppyy")
        with pytest.raises(UnavailableError):
            backend.prepare(some_matrix())
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("threads", ("0", "-1", "1e3", "٣", "99999", " 2"))
def test_a_wrong_number_of_threads_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv(processor.THREADS_VARIABLE, threads)
    with pytest.raises(UnavailableError, match=processor.THREADS_VARIABLE):
        processor.choose_threads(None)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match="isa is 'sse'; allowed: avx512vnni, avx512, avxvnni, avx2, neondot, neon or plain"
    ):
        CppyyBackend("sse")
    with pytest.raises(ArgumentError, match="threads"):
        CppyyBackend(threads=0)


# What it needs.


def test_missing_headers_are_reported_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No c++ command and no headers in the usual places; and a c++ command that finds none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "USUAL_HEADERS", str(tmp_path / "*"))
    toolchain.has_headers.cache_clear()
    state = CppyyBackend().availability()
    assert not state.usable and "headers" in state.reason and "g++" in state.remedy
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho ' /nowhere' >&2\n")
    fake.chmod(0o755)
    toolchain.has_headers.cache_clear()
    assert not CppyyBackend().availability().usable
    (tmp_path / "new").touch()
    fake.write_text(f"#!/bin/sh\necho ' {tmp_path}' >&2\n")
    toolchain.has_headers.cache_clear()
    assert CppyyBackend().availability().usable
    toolchain.has_headers.cache_clear()


def test_a_missing_package_is_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_spec", lambda module: None)
    state = CppyyBackend().availability()
    assert not state.usable and "cppyy is not installed" in state.reason and "lowbit[cppyy]" in state.remedy


def test_asking_does_not_import_the_compiler() -> None:
    """Importing the package, availability and capabilities do not import cppyy; preparing does."""
    result = ran("""
        backend = CppyyBackend()
        backend.availability(), backend.capabilities()
        print("cppyy" in sys.modules)
        backend.prepare(matrix)
        print("cppyy" in sys.modules)
        """)
    assert result.stdout == "False\nTrue\n", result.stderr


def test_the_compiler_takes_no_signal_from_the_process() -> None:
    """A crash after cppyy was imported ends by its signal, and handlers of SIGCHLD and others stay as they were."""
    result = ran("""
        def caught():
            return next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
        before = caught()
        CppyyBackend().prepare(matrix)
        print(caught() == before, flush=True)
        import ctypes
        ctypes.string_at(8)
        """)
    assert result.stdout == "True\n"
    assert result.returncode == -signal.SIGSEGV


def test_what_other_threads_set_while_it_starts_stays() -> None:
    """A handler that the main thread installs when ROOT's are there, and a variable; those of cppyy are taken back."""
    result = ran("""
        from lowbit_cppyy.runtime import compiler
        ready, done, start = threading.Event(), threading.Event(), compiler.run_in_empty_folder
        def watched(*arguments):
            found = start(*arguments)
            ready.set()
            done.wait()
            return found
        compiler.run_in_empty_folder = watched
        before, seen = set(os.environ), []
        thread = threading.Thread(target=lambda: CppyyBackend().prepare(matrix))
        thread.start()
        ready.wait()
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        os.environ["SET_MEANWHILE"] = "1"
        done.set()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        print(seen == [signal.SIGTERM], set(os.environ) - before)
        """)
    assert (result.stdout, result.stderr) == ("True {'SET_MEANWHILE'}\n", "")


# What it declares.


def test_declared_roundings_mean_something_at_every_size() -> None:
    """γ of the declaration is far below a tenth, even for one group of 11008 and for groups of 1."""
    arithmetic = Arithmetic("factored", "float32", roundings)
    for rows, group_size in ((4096, 128), (11008, 11008), (11008, 1), (8, 8)):
        assert checked_gamma(arithmetic, rows, group_size) < 2e-3
    assert roundings(4096, 128) == 129 + 2 * 32
    assert integer_roundings(4096, 128) == 7 + 2 * 32


# Its threads.


def test_several_threads_may_call_at_once() -> None:
    """Eight threads, each with its own vector and its own expected result, many times over."""
    with CppyyBackend(threads=3) as backend:
        prepared = backend.prepare(some_matrix(rows=256, columns=2000))
        vectors = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
        expected = [prepared.qgemv(x) for x in vectors]
        wrong: list[int] = []

        def call(number: int) -> None:
            out = np.empty(2000, np.float32)
            for _ in range(100):
                if prepared.qgemv(vectors[number], out).tobytes() != expected[number].tobytes():
                    wrong.append(number)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_ends_the_threads_and_later_calls_fail_in_words() -> None:
    result = ran("""
        def tasks():
            return len(os.listdir("/proc/self/task"))
        def becomes(count):  # the system lists a thread for some milliseconds after it has ended
            import time
            return any(tasks() == count or time.sleep(0.01) for _ in range(3000))
        with CppyyBackend(threads=1) as backend:
            backend.prepare(matrix).qgemv(x)  # whatever the compiler starts has been started
        import time
        time.sleep(0.5)
        before = tasks()
        for _ in range(20):
            with CppyyBackend(threads=4) as backend:
                prepared = backend.prepare(matrix)
                prepared.qgemv(x)
                assert becomes(before + 3)
        print(becomes(before))
        backend.close()
        for call in (lambda: prepared.qgemv(x), lambda: backend.prepare(matrix)):
            try:
                call()
            except Exception as error:
                print(error)
        lost = CppyyBackend(threads=4).prepare(matrix)
        del lost
        print(becomes(before))
        """)
    closed = "backend cppyy is unavailable: it was closed; load it again\n"
    assert result.stdout == "True\n" + 2 * closed + "True\n", result.stderr


def test_a_forked_child_gets_an_error_and_not_a_hang() -> None:
    """A backend that the child loads works, the parent's still works, and both end cleanly."""
    result = ran("""
        import warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of forking with threads; that is what this is about
        backend = CppyyBackend(threads=2)
        prepared = backend.prepare(matrix)
        prepared.qgemv(x)
        child = os.fork()
        if child == 0:
            try:
                prepared.qgemv(x)
            except Exception as error:
                print(error)
            backend.close()
            print(CppyyBackend(threads=2).prepare(matrix).qgemv(x)[0], flush=True)
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(prepared.qgemv(x)[0])
        """)
    lines = result.stdout.splitlines()
    assert "do not exist in a forked process" in lines[0] and lines[1:] == ["4096.0", "4096.0"], result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize("caller", ("none", "daemon"))
def test_the_interpreter_ends_cleanly_with_a_backend_still_open(caller: str) -> None:
    """Nothing is closed; or daemon threads are still inside calls."""
    result = ran(
        """
        prepared = CppyyBackend(threads=3).prepare(matrix)
        print(prepared.qgemv(x)[0])
        def call():
            try:
                while True:
                    prepared.qgemv(x)
            except Exception:
                pass
        if sys.argv[1] == "daemon":
            for _ in range(2):
                threading.Thread(target=call, daemon=True).start()
            time.sleep(0.05)
        """,
        caller,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "4096.0\n", "")


# Its memory.


def test_nothing_beyond_x_and_out_is_touched() -> None:
    """All arrays end where an inaccessible page begins, then begin where one ends: in all four products, with every
    instruction set, each with another width of codes."""
    result = ran("""
        import ctypes, mmap
        from lowbit.quantization.bfp import Blocks, cast
        from lowbit.linear.integer import ACTIVATIONS
        from lowbit_cppyy.codegen.isa import TABLES
        PAGE = mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        keep = []
        def guarded(values, side):
            size = values.nbytes
            pages = -(-size // PAGE)
            memory = mmap.mmap(-1, (pages + 2) * PAGE)
            array = np.frombuffer(memory, np.uint8)
            keep.append(memory)
            for guard in (0, (pages + 1) * PAGE):
                assert libc.mprotect(ctypes.c_void_p(array.ctypes.data + guard), ctypes.c_size_t(PAGE), 0) == 0
            start = PAGE if side == "left" else (pages + 1) * PAGE - size
            there = array[start : start + size].view(values.dtype).reshape(values.shape)
            there[:] = values
            return there
        shapes = [(4, 40, 33, 7), (3, 32, 1, 32), (2, 48, 64, 16), (8, 36, 31, 1)]
        for number, isa in enumerate(TABLES):
            backend = CppyyBackend(isa, threads=2)
            if not backend.availability().usable:
                continue
            bits, rows, columns, group_size = shapes[number % 4]
            values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
            prepared = backend.prepare(quantize(values, bits=bits, group_size=group_size))
            for side in ("left", "right"):
                for count in (1, 3, 6):
                    x = np.random.default_rng(1).standard_normal((count, rows)).astype(np.float32)
                    blocks = cast(x, ACTIVATIONS)
                    there, out = guarded(x, side), guarded(np.empty((count, columns), np.float32), side)
                    there.flags.writeable = False
                    parts = guarded(blocks.mantissas, side), guarded(blocks.exponents, side)
                    assert (prepared.qgemv(there[0], out[0]) == prepared.qgemv(x[0])).all()
                    assert (prepared.qgemm(there, out) == prepared.qgemm(x)).all()
                    assert (prepared.qgemm_cast(there, out) == prepared.qgemm_cast(x)).all()
                    assert (prepared.qgemm_bfp(Blocks(*parts, ACTIVATIONS), out) == prepared.qgemm_bfp(blocks)).all()
        print("untouched")
        """)
    assert (result.returncode, result.stdout) == (0, "untouched\n"), result.stderr
