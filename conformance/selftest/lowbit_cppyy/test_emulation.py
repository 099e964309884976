"""The backend on an emulated ARM processor: the bits of this processor, and what is said where a tool is missing."""

import hashlib
import subprocess
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from kernel_runs import HERE, some_matrix
from paths import SUPPORT
from step_runs import answers, compiled, model, operations
from stored_runs import CASES, some_activations, some_cast, some_stored

from lowbit.arrays import Array
from lowbit.errors import UnavailableError
from lowbit.quantization.packing import BITS
from lowbit.runtime.linears import Contract
from lowbit.system.interpreters import python_command, python_environment
from lowbit.tensor_formats.stored import RESULTS
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import AVX2, AVXVNNI, NEONDOT
from lowbit_cppyy.emulation import guest

needs_emulation = pytest.mark.skipif(guest.missing() is not None, reason=f"{guest.missing()} is not installed")
ALIKE = {"Neon": AVX2, "NeonDot": AVXVNNI}
"""Tables of this processor with as many lanes and registers, so that the programs are the same."""

IN_A_CHILD = """
import sys
import test_emulation
from lowbit_cppyy import emulation
with getattr(emulation, sys.argv[1])() as backend:
    print(*getattr(test_emulation, sys.argv[2])(backend), sep="\\n")
"""


def results(backend: CppyyBackend) -> Iterator[str]:
    """A digest of each result: matrices of every format, in each type, one row and five; and operations on rows."""
    for turn, case in enumerate(CASES):
        prepared, result = backend.prepare_stored(some_stored(case.split()[0])), RESULTS[turn % 3]
        count = (1, 5)[turn % 2]
        x = some_activations(count, 256, result)
        if case.endswith("cast"):
            y = prepared.gemm_cast(some_cast(count, 256), "float16")
        else:
            y = prepared.gemv(x[0], result) if count == 1 else prepared.gemm(x, result)
        yield f"{case} {digest(y)}"
    x = some_activations(9, 224)
    for bits in BITS:
        matrix = backend.prepare(some_matrix(bits, 224, 77, 32))
        for own in (matrix.qgemv(x[0]), matrix.qgemm(x[:3]), matrix.qgemm(x), matrix.qgemm_cast(x)):
            yield f"{bits} bits {digest(own)}"
    yield f"softmax {digest(backend.run('attention.softmax', x))}"
    yield f"SwiGLU {digest(backend.run('blocks.swiglu', x, x[::-1].copy()))}"
    keys, values = np.random.default_rng(1).normal(size=(2, 3, 70, 40)).astype(np.float32)
    queries = x[:4].reshape(-1)[: 2 * 6 * 40].reshape(2, 6, 40).copy()
    yield f"attention {digest(backend.run('attention.attend', queries, keys, values))}"
    yield f"clamped {digest(backend.run('blocks.clamped_swiglu', x, x[::-1].copy(), 1.5))}"
    yield f"soft cap {digest(backend.run('blocks.soft_cap', x, 1.5))}"
    shape = 9, 0.5, 2.0, x[0, :6].copy()
    yield f"shaped attention {digest(backend.run('attention.attend_shaped', queries, keys, values, *shape))}"


STEPS: tuple[tuple[str, Contract], ...] = ("odd", "float32"), ("mixed", "integer"), ("sparse", "float32")


def steps(backend: CppyyBackend) -> Iterator[str]:
    """A digest of each answer of a compiled step."""
    for name, contract in STEPS:
        for y in answers(compiled(backend, operations(backend, model(name), contract))):
            yield f"{name} {digest(y)}"


def operations_of_steps(backend: CppyyBackend) -> Iterator[str]:
    """The same of the operations one by one."""
    for name, contract in STEPS:
        for y in answers(operations(backend, model(name), contract)):
            yield f"{name} {digest(y)}"


@cache
def emulated(name: str, results: str) -> list[str]:
    """What a function of this module gives with an emulated backend, in a process of its own, because the backend takes
    the place of the compiler there."""
    environment = python_environment() | {"PYTHONPATH": f"{SUPPORT}:{SUPPORT.parent / 'lowbit_cppyy'}"}
    command = python_command("-c", IN_A_CHILD, name, results)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def digest(y: Array) -> str:
    """Of the bits of a result."""
    return hashlib.sha256(y.tobytes()).hexdigest()[:16]


@pytest.mark.whole
@pytest.mark.toolchain
@needs_emulation
@pytest.mark.parametrize("name", ALIKE)
def test_results_have_the_bits_of_this_processor(name: str) -> None:
    """Matrices of every format, and operations on rows."""
    if ALIKE[name] not in HERE:
        pytest.skip(f"this processor has no {ALIKE[name].name}")
    with CppyyBackend(isa=ALIKE[name].name, threads=1) as backend:
        assert emulated(name, "results") == list(results(backend))


@pytest.mark.whole
@pytest.mark.toolchain
@needs_emulation
def test_steps_have_the_bits_of_their_operations() -> None:
    """Compiled by the cross compiler, on two threads."""
    assert emulated("NeonDot", "steps") == emulated("NeonDot", "operations_of_steps")


@pytest.mark.whole
@pytest.mark.toolchain
@needs_emulation
def test_steps_have_the_bits_of_this_processor() -> None:
    """Those that cppyy compiles, on one thread."""
    if AVXVNNI not in HERE:
        pytest.skip(f"this processor has no {AVXVNNI.name}")
    with CppyyBackend(isa=AVXVNNI.name, threads=1) as backend:
        assert emulated("NeonDot", "steps") == list(steps(backend))


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled, and without a guess."""
    monkeypatch.setattr(guest, "COMPILER", None)
    with pytest.raises(UnavailableError, match=r"aarch64-linux-gnu-g\+\+ is not installed; install g\+\+-aarch64"):
        guest.compiled("", NEONDOT)
