"""The same kernels under sanitizers, in processes of their own: what the watch does not look for, and a second opinion.

Under AddressSanitizer and UndefinedBehaviorSanitizer threads are fibers as ever. Under ThreadSanitizer each is a thread
of the system, and the runtime tells it what barriers put in order, and nothing else.
"""

import numpy as np
import pytest
from cuda_tools import needs_compiler
from sanitized import ADDRESS, THREAD, Sanitized
from shim_cases import RIGHT, RIGHT_NAMES, WRONG, checked, right, wrong

from lowbit_gpusim.shim.launching import KernelError, Mutation, Options

pytestmark = needs_compiler

MEMORY = {
    "beyond": "AddressSanitizer: heap-buffer-overflow",
    "below": "AddressSanitizer: heap-buffer-overflow|AddressSanitizer: use-after-poison",
    "beyond_shared": "AddressSanitizer: heap-buffer-overflow",
    "far": "AddressSanitizer: SEGV",
    "not_aligned": "runtime error: .* misaligned address",
    "undefined": "runtime error: shift exponent",
}
RACES = (
    *("missing_barrier", "missing_second_barrier", "two_write", "missing_warp_barrier", "shuffle_is_no_barrier"),
    *("warp_barrier_between_warps", "threads_write", "reads_neighbour"),
)
MEETINGS = {"left_early": "barrier", "circle": "deadlock", "two_barriers": "barrier", "mask_without_me": "mask"}


@pytest.fixture(scope="module")
def memory() -> Sanitized:
    return Sanitized(ADDRESS, [RIGHT, WRONG])


@pytest.fixture(scope="module")
def threads() -> Sanitized:
    return checked(Sanitized(THREAD, [RIGHT, WRONG]))


def test_right_kernels_keep_to_their_memory(memory: Sanitized) -> None:
    """Many launches in one process: nothing outside, nothing undefined, and the right numbers."""
    runs = [right(name, Options(seed)) for name in RIGHT_NAMES for seed in range(3)]
    memory.run(*(launch for launch, _ in runs))
    for launch, expected in runs:
        assert list(launch.arrays.values())[-1].tobytes() == expected.tobytes(), launch.kernel.name


@pytest.mark.parametrize("name", MEMORY)
def test_the_sanitizer_notices(memory: Sanitized, name: str) -> None:
    """One byte outside on either side, of an array or of shared memory; a shift too far; and no array has changed."""
    launch = wrong(name, Options())
    with pytest.raises(KernelError, match=f"kernel {name}: sanitizer: ({MEMORY[name]}).*wrong.cuh") as caught:
        memory.run(launch)
    assert "\n" not in str(caught.value)
    assert (launch.arrays["out"] == 5).all()


@pytest.mark.parametrize("name", MEETINGS)
def test_meetings_are_judged_as_ever(memory: Sanitized, threads: Sanitized, name: str) -> None:
    """Barriers that cannot be are errors with fibers and with threads of the system, and nothing hangs."""
    for process in (memory, threads):
        with pytest.raises(KernelError, match=f"kernel {name}: {MEETINGS[name]}: block"):
            process.run(wrong(name, Options()))


def test_right_kernels_have_no_races(threads: Sanitized) -> None:
    """A thread of the system for each thread: no complaint, and the right numbers."""
    runs = [right(name, Options()) for name in RIGHT_NAMES]
    threads.run(*(launch for launch, _ in runs))
    for launch, expected in runs:
        assert list(launch.arrays.values())[-1].tobytes() == expected.tobytes(), launch.kernel.name


@pytest.mark.parametrize("name", RACES)
def test_races_are_noticed(threads: Sanitized, name: str) -> None:
    """By another tool than the watch, on the same kernels."""
    with pytest.raises(KernelError, match=f"kernel {name}: sanitizer: ThreadSanitizer: data race"):
        threads.run(wrong(name, Options()))


def test_a_barrier_left_out_is_noticed(threads: Sanitized) -> None:
    """The right kernel with its barrier skipped: so the barriers of the tests above do put things in order."""
    launch, _ = right("block_sum", Options())
    line = 1 + [text.strip() for text in RIGHT.read_text().splitlines()].index("__syncthreads();")
    mutated = type(launch)(launch.kernel, launch.arrays, launch.numbers, Options(mutation=Mutation(RIGHT.name, line)))
    with pytest.raises(KernelError, match="data race"):
        threads.run(mutated)
    assert not np.any(launch.arrays["out"])
