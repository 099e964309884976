"""Whole steps under sanitizers: nothing is read or written outside an array, nothing is undefined, and no thread races.

The same text that cppyy compiles is compiled by g++ or clang++ and runs in a process of its own, where each array has
memory of exactly its size. The results must have the bits of cppyy's.
"""

from pathlib import Path

import numpy as np
import pytest
import sanitized_programs
from kernel_runs import HERE
from sanitized_guest import THREADS, SanitizedGuest, sanitized
from step_runs import (
    ANY,
    EDGES,
    EMBEDDINGS,
    answers,
    compiled,
    edge,
    edge_answers,
    embedded_in,
    logits,
    model,
    operations,
)

from lowbit.arrays import F32
from lowbit.errors import UnavailableError
from lowbit.model.generation import generate
from lowbit.runtime.linears import Contract
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.emulation.backend import EmulatedRuntime
from lowbit_cppyy.runtime.compiler import using
from lowbit_cppyy.step import parts
from lowbit_cppyy.step.source import StepSource

COMPILERS = sanitized_programs.sanitizing()
pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(not COMPILERS, reason="neither g++ nor clang++ is installed"),
]
STEPS: tuple[tuple[str, Contract], ...] = (
    ("sparse", "float32"),
    ("qwen2", "integer"),
    ("mixed", "integer"),
    ("odd", "float32"),
    ("sparse mixed", "integer"),
)
SLOWEST = TABLES["plain"]  # of which every processor has the instructions


@pytest.fixture
def races() -> None:
    """Skip the test where ThreadSanitizer does not run."""
    program = sanitized_programs.compiled("int main() {}", COMPILERS[0], sanitizers=THREADS)
    if b"unexpected memory mapping" in sanitized_programs.answer(program, b"").stderr:
        pytest.skip("this kernel's address space layout is not one that ThreadSanitizer can use")


def expected(name: str, contract: Contract, table: InstructionSet) -> list[F32]:
    """The answers of this process, computed by one thread."""
    with CppyyBackend(isa=table.name, threads=1) as backend:
        return answers(compiled(backend, operations(backend, model(name), contract)))


@pytest.mark.whole
@pytest.mark.parametrize("threads", (3, 1))
@pytest.mark.parametrize("each", STEPS, ids="-".join)
def test_addresses_and_what_is_undefined(each: tuple[str, Contract], threads: int) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer, on the best instruction set of this processor."""
    name, contract = each
    with sanitized(HERE[0], threads, COMPILERS[0]) as backend:
        found = answers(compiled(backend, operations(backend, model(name), contract)))
    for one, other in zip(found, expected(name, contract, HERE[0]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", EDGES)
def test_addresses_at_the_ends_of_sizes(name: str) -> None:
    """Sizes of one, and sizes that fill no vector and no panel."""
    with CppyyBackend(isa=SLOWEST.name, threads=1) as backend:
        expected = edge_answers(compiled(backend, operations(backend, edge(name))))
    with sanitized(SLOWEST, 3, COMPILERS[0]) as backend:
        found = edge_answers(compiled(backend, operations(backend, edge(name))))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_addresses_of_rows_of_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three ends where its array ends."""
    monkeypatch.setattr("lowbit_cppyy.step.decoder.TURN", 10**12)
    models = [embedded_in(name, 3) for name in EMBEDDINGS]

    def found(backend: CppyyBackend) -> list[F32]:
        decoders = [compiled(backend, operations(backend, each)) for each in models]
        steps = [list(generate(own, [0], 20, sampling=ANY)) for own in decoders]
        assert all({0, 1, 2} == {step.token for step in each[:-1]} for each in steps)
        return [step.logits for each in steps for step in each]

    with CppyyBackend(isa=SLOWEST.name, threads=1) as backend:
        expected = found(backend)
    with sanitized(SLOWEST, 1, COMPILERS[0]) as backend:
        for one, other in zip(found(backend), expected, strict=True):
            np.testing.assert_array_equal(one, other)


class Greedy(StepSource):
    """A step that writes one number behind the memory of a thread's normed row."""

    @property
    def source(self) -> str:
        first, call, rest = super().source.partition("const float* const normed")
        assert call
        return f"{first}team.row[{self.step.config.hidden}] = 0.0f;\n{call}{rest}"


def test_a_thread_that_leaves_its_memory_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All the memory of a call is one allocation; fences lie between its parts."""
    monkeypatch.setattr(parts, "StepSource", Greedy)
    with (
        pytest.raises(UnavailableError, match="the emulated process ended"),
        sanitized(SLOWEST, 1, COMPILERS[0]) as backend,
    ):
        logits(compiled(backend, operations(backend, edge("narrow"))), 1, 1)
    assert "AddressSanitizer: use-after-poison" in capfd.readouterr().err


@pytest.mark.usefixtures("races")
@pytest.mark.parametrize("each", STEPS, ids="-".join)
def test_threads(each: tuple[str, Contract]) -> None:
    """ThreadSanitizer, with two threads and with three."""
    name, contract = each
    for threads in (2, 3):
        with sanitized(SLOWEST, threads, COMPILERS[0], THREADS) as backend:
            found = answers(compiled(backend, operations(backend, model(name), contract)))
        for one, other in zip(found, expected(name, contract, SLOWEST), strict=True):
            np.testing.assert_array_equal(one, other)


WAIT, WAITS = "team.wait();", 6


class Hasty(StepSource):
    """A step that leaves out one of the waits in its text: the one whose number the environment has."""

    @property
    def source(self) -> str:
        first, *others = super().source.split(WAIT)
        assert len(others) == WAITS
        left_out = 'std::atoi(std::getenv("LOWBIT_LEFT_OUT"))'
        return first + "".join(f"if ({left_out} != {n}) {WAIT}{text}" for n, text in enumerate(others))


@pytest.mark.usefixtures("races")
@pytest.mark.parametrize("left_out", range(WAITS))
def test_every_missing_wait_is_found(
    left_out: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A step without one of its waits has a race, and the sanitizer reports it. So the tests above can fail."""
    monkeypatch.setattr(parts, "StepSource", Hasty)
    monkeypatch.setenv("LOWBIT_LEFT_OUT", str(left_out))
    with (
        pytest.raises(UnavailableError, match="the emulated process ended"),
        sanitized(SLOWEST, 3, COMPILERS[0], THREADS) as backend,
    ):
        logits(backend.compiled(operations(backend, model("odd"))), 1, 3)
    assert "WARNING: ThreadSanitizer: data race" in capfd.readouterr().err


NO_ALLOCATION = r"""
#include <cstdlib>
#include <cstring>
#include <new>
#include <pthread.h>

void* operator new(std::size_t size) {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::strcmp(name, "lowbit") == 0) std::abort();
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""


class Frugal(SanitizedGuest):
    """A process that ends where a thread of a pool allocates memory."""

    def compiled(self, source: str, *options: str) -> Path:
        return super().compiled(source + NO_ALLOCATION if "int main()" in source else source, *options)


def test_threads_allocate_nothing() -> None:
    """An allocation that fails in one of them would leave the others waiting, and end the process."""
    runtime = EmulatedRuntime(Frugal(SLOWEST, COMPILERS[0], ()))
    with using(runtime), CppyyBackend(isa=SLOWEST.name, threads=3) as backend:
        assert all(
            np.isfinite(each).all() for each in edge_answers(compiled(backend, operations(backend, edge("routed"))))
        )
