"""The backend's own kernels, thread by thread: every kernel and variant against its meaning, in any order of threads.

Each launch is small and has what is hard about its kernel (`cuda_cases`). A test compiles one source. The mistakes that
this finds are planted in test_shim_mutations.py; test_shim.py shows them one by one.
"""

from dataclasses import replace
from functools import cache

import pytest
from cuda_cases import Case, cases
from cuda_tools import needs_compiler
from sanitized import ADDRESS, THREAD, Sanitized
from shim_cases import RIGHT, checked

from lowbit_cuda.kernels.table import MAKERS
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import Options
from lowbit_gpusim.shim.runner import ShimKernels, Watched, kernel_sources
from lowbit_gpusim.sim.device import SimDevice

pytestmark = needs_compiler

SEEDS = (0, 1)


SOURCES = (
    *("attention.cuh", "between.cuh", "dense.cuh"),
    *(f"linear_b{bits}_{reals}.cuh" for bits in (2, 3, 4, 8) for reals in ("f16", "f32")),
)
every_source = pytest.mark.parametrize("source", SOURCES)


@cache
def watched(source: str) -> Watched:
    return Watched([build.KERNELS / source])


@cache
def of(source: str) -> list[Case]:
    """The cases of the kernels of a source, in all their variants."""
    return [case for case in cases() if case.kernel.source == source]


def test_the_table_has_the_kernels_of_the_sources() -> None:
    """No kernel without a source, none without a place in the table, and each with a case."""
    sources = {name: path.name for path in kernel_sources() for name in build.kernel_names(path)}
    assert {case.kernel.name: case.kernel.source for case in cases()} == sources
    assert set(sources.values()) == set(SOURCES)
    assert all(any(name == each or name.startswith(f"{each}_") for each in MAKERS) for name in sources)


@every_source
def test_a_kernel_computes_what_it_means(source: str) -> None:
    """Every case of every variant: nothing is found wrong with it, its numbers are those of the meaning, and they have
    the same bits whatever the order of blocks and threads."""
    for case in of(source):
        launches = [case.launch(Options(seed, strict=seed == 1)) for seed in SEEDS]
        for launch in launches:
            watched(source).run(launch)
            assert not case.wrong(launch), f"{case}: {case.wrong(launch)}"
        first, *others = (b"".join(array.tobytes() for array in case.written(launch).values()) for launch in launches)
        assert all(other == first for other in others), str(case)


@every_source
def test_a_simulated_device_runs_it(source: str) -> None:
    """`SimDevice` launches the kernel's own C++ from spans of its memory: what the port says of it is enough."""
    case, arrays = of(source)[0], of(source)[0].launch().arrays
    with SimDevice(kernels=ShimKernels(seed=2, watched=watched(source))) as device:
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


@every_source
def test_a_kernel_keeps_to_its_memory(source: str) -> None:
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own, with the same numbers."""
    every = of(source)
    launches = [case.launch() for case in every]
    Sanitized(ADDRESS, [build.KERNELS / source]).run(*launches)
    for case, launch in zip(every, launches, strict=True):
        assert not case.wrong(launch), f"{case}: {case.wrong(launch)}"


TINY = {
    "gemm_b4_f16_t1-several": "linear_b4_f16.cuh",
    "expert_in_b4_f16_t8-several": "linear_b4_f16.cuh",
    "rms_norm-1x8": "between.cuh",
    "append_bfp12-1x2x32at0": "attention.cuh",
    "attend_f16_f16-1x2x1x256x8x0at0": "attention.cuh",
}
"""Few blocks: each of their 256 threads is one of the system."""


@pytest.mark.parametrize("name", TINY)
def test_a_kernel_has_no_races(name: str) -> None:
    """Under ThreadSanitizer, which knows nothing of the watch."""
    case = next(case for case in cases() if str(case) == name)
    launch = case.launch()
    checked(Sanitized(THREAD, [RIGHT, build.KERNELS / TINY[name]])).run(launch)
    assert not case.wrong(launch), case.wrong(launch)
