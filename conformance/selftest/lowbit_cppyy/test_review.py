"""The cppyy backend in unusual surroundings: forks, Ctrl-C, other users' folders, other modes of arithmetic."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lowbit.arrays import Array
from lowbit.quantization.affine import quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.tuning.choices import default_recipe

LAYOUT = PanelLayout(4, 64, 100, 32, "float32", "minimum", panel=64)


def ran(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new Python process, where nothing has been compiled yet."""
    common = """
        import os, sys, threading, time
        import numpy as np
        from lowbit.quantization.affine import quantize
        from lowbit_cppyy import CppyyBackend
        from lowbit_cppyy.runtime import compiler
        from lowbit_cppyy.tuning import outcomes
        matrix = quantize(np.ones((64, 100), np.float32), bits=4, group_size=32)
        x = np.ones((2, 64), np.float32)
        """
    source = textwrap.dedent(common) + textwrap.dedent(script)
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


# **Outcomes of searches.**


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, without the folder for outcomes."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.delenv(outcomes.VARIABLE, raising=False)
    outcomes.forget()
    yield tmp_path
    outcomes.forget()


def write(panel: int) -> outcomes.Key:
    table = TABLES["plain"]
    key = outcomes.Key.of("vector", LAYOUT, table)
    recipe = replace(default_recipe("vector", LAYOUT, table), panel=panel, registers=1)
    outcomes.write(key, recipe, {})
    return key


@pytest.mark.usefixtures("kept")
def test_a_first_search_changes_nothing_in_a_process_that_found_no_outcomes_before() -> None:
    """The absence of the folder is remembered like every outcome that was read: results keep their bits."""
    assert outcomes.tuned("vector", LAYOUT, TABLES["plain"]) is None
    write(panel=64)
    assert outcomes.tuned("vector", LAYOUT, TABLES["plain"]) is None


@pytest.mark.usefixtures("kept")
def test_an_outcome_whose_panel_suits_no_other_purpose_is_ignored() -> None:
    """With a panel of 16, the kernels for several rows would not fit the layout, and fail at their first call."""
    with pytest.warns(outcomes.OutcomeWarning, match="panel is 16; allowed: 64 or 128"):
        assert outcomes.read(write(panel=16)) is None


@pytest.mark.usefixtures("kept")
def test_a_cache_folder_that_cannot_be_looked_into_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a service that keeps HOME and drops root; here the system refuses the name, also to root."""
    monkeypatch.setenv("LOWBIT_CACHE", "/" + 300 * "x")
    assert outcomes.tuned("vector", LAYOUT, TABLES["plain"]) is None
    assert outcomes.described(TABLES["plain"]) == "default"


# **Ctrl-C.**


def test_a_kernel_can_be_asked_for_again_after_it_was_interrupted() -> None:
    """Whenever Ctrl-C arrives: here right after each of the first calls of the compiler."""
    result = ran("""
        define, interrupted = compiler.Runtime.define, set()
        def interrupting(self, source):
            define(self, source)
            if source not in interrupted:
                interrupted.add(source)
                raise KeyboardInterrupt
        compiler.Runtime.define = interrupting
        backend = CppyyBackend("plain", threads=1)
        for attempt in range(20):
            try:
                print(backend.prepare(matrix).qgemm(x)[0, 0], len(interrupted))
                break
            except KeyboardInterrupt:
                pass
        """)
    assert (result.stdout, result.stderr) == ("64.0 4\n", "")


# **Forks.**


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_does_not_wait_for_what_another_thread_was_working_out() -> None:
    """As it would on Python 3.11 with the property of `functools`, which has one lock for all objects of a class."""
    result = ran("""
        import signal
        from lowbit_cppyy.caching import cached_property
        go_on, results = threading.Event(), []
        def slowly():
            if threading.current_thread() is not threading.main_thread():
                reached.set()
                go_on.wait()
        class One:
            @cached_property
            def answer(self):
                slowly()
                return 42
        class Slow(CppyyBackend):
            def capabilities(self):
                slowly()
                return super().capabilities()
        for ask in (lambda: One().answer, lambda: 7 * bool(Slow("plain", threads=1)._claimed)):
            reached = threading.Event()
            worker = threading.Thread(target=ask)
            worker.start()
            reached.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a child that waits is ended
                os._exit(ask())
            results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            go_on.set()
            worker.join()
            go_on.clear()
        print(results)
        """)
    assert (result.stdout, result.stderr) == ("[42, 7]\n", "")


def test_a_property_is_worked_out_once() -> None:
    """It is stored in the object, and keeps its documentation."""
    asked: list[object] = []

    class One:
        @cached_property
        def answer(self) -> list[int]:
            """The answer."""
            asked.append(self)
            return [42]

    first, second = One(), One()
    assert first.answer is first.answer and first.answer is not second.answer
    assert asked == [first, second] and One.answer.__doc__ == "The answer."


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_layers_of_torch_work_in_a_child_that_is_forked_while_another_thread_prepares_one() -> None:
    """As data loaders fork; the child prepares its own matrix with its own backend."""
    pytest.importorskip("torch")
    result = ran("""
        import signal, torch
        from lowbit import torch_op
        from lowbit_torch import QuantLinear
        layers = [QuantLinear.from_matrix(matrix, backend="reference") for _ in range(2)]
        x = torch.ones(64)
        layers[0](x)
        engine, reached, go_on = torch_op.engine("reference"), threading.Event(), threading.Event()
        def slowly(matrix, prepare=engine.backend.prepare):
            reached.set()
            go_on.wait()
            return prepare(matrix)
        engine.backend.prepare = slowly
        worker = threading.Thread(target=layers[1], args=(x,))
        worker.start()
        reached.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits is ended
            os._exit(int(layers[0](x)[0] + layers[1](x)[0]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        go_on.set()
        worker.join()
        """)
    assert (result.stdout, result.stderr) == ("128\n", "")


# **Arithmetic.**

MODES: dict[str, dict[str, tuple[int, int]]] = {
    "x86_64": {"rounding upward": (28, 0x4000), "without subnormal numbers": (28, 0x8040)},
    "aarch64": {"rounding upward": (0, 0x400000), "without subnormal numbers": (0, 1 << 24)},
}
"""Where glibc keeps a mode in ``fenv_t``: the byte at which a word of 32 bits begins, and its bits there."""


# C has no function that sets the second mode, so it is written into the structure, which differs between systems.
@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in MODES, reason="its fenv_t is not known")
@pytest.mark.parametrize("mode", ("rounding upward", "without subnormal numbers"))
def test_results_do_not_depend_on_the_mode_of_arithmetic_of_the_caller(mode: str) -> None:
    """A mode set in the calling thread: a worker does not have it, and either may compute a panel."""
    at, bits = MODES[platform.machine()][mode]
    c = ctypes.CDLL("libm.so.6")
    before = (ctypes.c_uint32 * 16)()
    assert c.fegetenv(before) == 0
    changed = (ctypes.c_uint32 * 16)(*before)
    changed[at // 4] |= bits
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 256)).astype(np.float32)
    matrix = quantize(random.standard_normal((256, 9000)).astype(np.float32), bits=4, group_size=64)
    with CppyyBackend(threads=2) as backend:
        prepared = backend.prepare(matrix)
        calls: dict[str, Callable[[], Array]] = {
            "qgemv": lambda: prepared.qgemv(x[0]),
            "qgemm": lambda: prepared.qgemm(x),
            "qgemm_cast": lambda: prepared.qgemm_cast(x),
            "softmax": lambda: backend.run("attention.softmax", x),
        }
        expected = {name: call().tobytes() for name, call in calls.items()}
        c.fesetenv(changed)
        try:
            given = {name: call().tobytes() for name, call in calls.items()}
            after = (ctypes.c_uint32 * 16)()
            c.fegetenv(after)
        finally:
            c.fesetenv(before)
    assert after[at // 4] & bits == bits
    assert [name for name in calls if given[name] != expected[name]] == []


# **Instruction sets.**


def test_a_processor_is_asked_for_no_instructions_that_no_word_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with AVX-512 and VNNI but without the byte permutations of VBMI, of which there are many, get both."""
    lacking = {"avx512vbmi", "avx_vnni"}
    monkeypatch.delenv(processor.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(processor, "has", lambda feature: feature not in lacking)
    assert processor.choose_table(None).name == "avx512vnni"
    bodies = " ".join(TABLES["avx512vnni"].words.values())
    assert not re.search(r"permutex\w*_epi8|multishift", bodies)  # what VBMI permutes and shifts
