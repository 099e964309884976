"""The backend's own kernels, thread by thread: every kernel and variant against its meaning, in any order of threads.

Each launch is small and has what is hard about its kernel (`cuda_cases`). The mistakes that this finds are planted in
test_shim_mutations.py; test_shim.py shows them one by one.
"""

from dataclasses import replace

import pytest
from cuda_cases import Case, cases
from cuda_tools import needs_compiler
from sanitized import ADDRESS, THREAD, Sanitized
from shim_cases import RIGHT, checked

from lowbit_cuda.kernels.table import MAKERS
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import Options
from lowbit_gpusim.shim.runner import ShimKernels, Watched, kernel_sources, watched_kernels
from lowbit_gpusim.sim.device import SimDevice

pytestmark = needs_compiler

SEEDS = (0, 1)


@pytest.fixture(scope="module")
def watched() -> Watched:
    return watched_kernels()


def of(name: str) -> list[Case]:
    """The cases of a kernel, in all its variants."""
    return [case for case in cases() if case.kernel.name == name or case.kernel.name.startswith(f"{name}_")]


def test_the_table_has_the_kernels_of_the_sources() -> None:
    """No kernel without a source, none without a place in the table, and each with a case."""
    sources = {name: path.name for path in kernel_sources() for name in build.kernel_names(path)}
    assert {case.kernel.name: case.kernel.source for case in cases()} == sources
    assert sum(len(of(name)) for name in MAKERS) == len(cases())


@pytest.mark.parametrize("name", MAKERS)
def test_a_kernel_computes_what_it_means(watched: Watched, name: str) -> None:
    """Every case of every variant: nothing is found wrong with it, its numbers are those of the meaning, and they have
    the same bits whatever the order of blocks and threads."""
    for case in of(name):
        launches = [case.launch(Options(seed, strict=seed == 1)) for seed in SEEDS]
        for launch in launches:
            watched.run(launch)
            assert not case.wrong(launch), f"{case}: {case.wrong(launch)}"
        first, *others = (b"".join(array.tobytes() for array in case.written(launch).values()) for launch in launches)
        assert all(other == first for other in others), str(case)


@pytest.mark.parametrize("name", MAKERS)
def test_a_simulated_device_runs_it(name: str) -> None:
    """`SimDevice` launches the kernel's own C++ from spans of its memory: what the port says of it is enough."""
    case, arrays = of(name)[0], of(name)[0].launch().arrays
    with SimDevice(kernels=ShimKernels(seed=2)) as device:
        stream = device.stream("s")
        hosts = {part: device.pin(array.nbytes, part) for part, array in arrays.items()}
        spans = {part: device.allocate(array.nbytes, part) for part, array in arrays.items()}
        for part, array in arrays.items():
            device.write(hosts[part].span(), array)
            device.copy(spans[part].span(), hosts[part].span(), stream)
        device.launch(case.kernel, {**{p: memory.span() for p, memory in spans.items()}, **case.numbers}, stream)
        for part, host in hosts.items():
            device.copy(host.span(), spans[part].span(), stream)
        device.finish()
        after = {part: device.read(hosts[part].span(), array.dtype, array.shape) for part, array in arrays.items()}
        for memory in (*hosts.values(), *spans.values()):
            device.free(memory)
    wrong = case.wrong(replace(case.launch(), arrays=after))
    assert not wrong, f"{case}: {wrong}"


@pytest.mark.parametrize("name", MAKERS)
def test_a_kernel_keeps_to_its_memory(memory: Sanitized, name: str) -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own, with the same numbers."""
    every = of(name)
    launches = [case.launch() for case in every]
    memory.run(*launches)
    for case, launch in zip(every, launches, strict=True):
        assert not case.wrong(launch), f"{case}: {case.wrong(launch)}"


@pytest.fixture(scope="module")
def memory() -> Sanitized:
    return Sanitized(ADDRESS)


TINY = {
    "gemm_b4_f16_t1-several": "linear_b4_f16.cuh",
    "expert_in_b4_f16_t8-several": "linear_b4_f16.cuh",
    "rms_norm-1x8": "between.cuh",
    "append_bfp12-1x2x32at0": "attention.cuh",
    "attend_f16_f16-1x2x1x256x8x0at0": "attention.cuh",
}
"""Few blocks: each of their 256 threads is one of the system."""


@pytest.fixture(scope="module")
def threads() -> Sanitized:
    return checked(Sanitized(THREAD, [RIGHT, *(build.KERNELS / name for name in sorted(set(TINY.values())))]))


@pytest.mark.parametrize("name", TINY)
def test_a_kernel_has_no_races(threads: Sanitized, name: str) -> None:
    """Under ThreadSanitizer, which knows nothing of the watch."""
    case = next(case for case in cases() if str(case) == name)
    launch = case.launch()
    threads.run(launch)
    assert not case.wrong(launch), case.wrong(launch)
