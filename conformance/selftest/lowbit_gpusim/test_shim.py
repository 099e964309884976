"""Kernels run thread by thread: right ones give the right numbers in any order, and every mistake is found and named.

The kernels are those of `shim_kernels`; test_shim_kernels.py runs those of the backend.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_tools import needs_compiler
from shim_cases import BLOCK, RIGHT, RIGHT_NAMES, WRONG, kernel, numbers, reads, right, writes, wrong

from lowbit.arrays import Array
from lowbit.errors import ArgumentError, UnavailableError
from lowbit_cuda.port import DeviceError, Parameter
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import KernelError, Launch, Mutation, Options
from lowbit_gpusim.shim.runner import ShimKernels, Watched
from lowbit_gpusim.sim.device import SimDevice

pytestmark = needs_compiler

EARLY = (
    "race: .*thread .* of shared memory .* which thread .*; no barrier that both wait at is between$"
    "|uninitialized: .*thread .* reads byte .* of shared memory at .*, which nobody has written yet$"
)
"""Where a barrier is missing: the reader was late, or it was early."""

FOUND = {
    "missing_barrier": EARLY,
    "missing_second_barrier": "race: .*thread .* byte 0 of shared memory at .*wrong.cuh:.*, which thread",
    "two_write": "race: .*thread .* writes byte .* of shared memory at .*, which thread .* writes at",
    "missing_warp_barrier": EARLY,
    "shuffle_is_no_barrier": EARLY,
    "barrier_of_half_a_warp": EARLY,
    "warp_barrier_between_warps": EARLY,
    "third_reader": "race: .*thread (0 writes|2 reads) byte 0 of shared .*, which thread (0 writes|2 reads)",
    "divergent_barrier": "barrier: .*thread .* waits in __syncthreads at wrong.cuh.* which has left the kernel",
    "two_barriers": r"barrier: .* waits in __syncthreads at wrong.cuh:\d+, but thread .* in __syncthreads at wrong.cuh",
    "left_early": "barrier: .* waits in __syncthreads at wrong.cuh.* for thread 63, which has left the kernel",
    "barrier_against_shuffle": "barrier: .*thread (63 waits in __syncthreads|.* but thread 63 in __syncthreads)",
    "mask_without_me": "mask: .* is in __shfl_xor_sync at wrong.cuh:.* with lanes 0x0000ffff, and is not one of them",
    "lane_outside_mask": r"mask: .* with lanes 0x0000ffff and reads lane \d+, which does not take part",
    "lanes_left": "barrier: .* waits in __shfl_xor_sync at .* for thread .*, which has left the kernel",
    "different_masks": "barrier: .* waits in __shfl_xor_sync .* with lanes .*, but thread .* with lanes",
    "circle": "deadlock: .*no thread can go on: thread 0 waits in __syncwarp at .* with lanes 0x00000003; thread 1",
    "nobody_wrote": "uninitialized: .*thread 63 reads byte 0 of shared memory at .*, which nobody has written yet",
    "nobody_wrote_variable": "uninitialized: .*thread 63 reads byte .* of shared variables at .*, which nobody has",
    "last_block_wrote": r"uninitialized: block \(1, 0, 0\): .* of shared memory",
    "beyond": r"bounds: .*thread 63 reads 4 bytes at wrong.cuh:\d+, from byte 256 of x, which has 256",
    "below": "bounds: .*thread 0 writes 4 bytes at .*, from byte -256 of out, which has 256",
    "beyond_shared": "bounds: .*thread 63 writes 4 bytes at .*, from byte 256 of shared memory, which has 256",
    "far": "bounds: .* reads 4 bytes at .*, far from all that it was given",
    "not_aligned": "alignment: .*thread 63 touches 16 bytes at once at .*, from byte 52 of x",
    "writes_input": "access: .* writes byte .* of x at .*, which is only read",
    "reads_output": "uninitialized: .* reads byte .* of out at .*, which nobody has written yet",
    "leaves_output": "unwritten: all of out is to be written, and nobody has written byte 252 of its 256",
    "blocks_write": r"race: .* of out at .*, which thread .* of block \(., 0, 0\) writes at .*; between blocks",
    "threads_write": "race: .*thread (0|63) writes byte 0 of out at .*, which thread (0|63) writes at",
    "reads_neighbour": "race|uninitialized: .* of out",
    "waits_by_reading": "endless: .*thread .* still runs at .*wrong.cuh|race: .* of shared variables",
    "stack_of_another": r"bounds: .*thread \d+ reads 4 bytes at .*, on the stack of thread 0",
}
"""What is found in each wrong kernel."""


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    yield Watched([RIGHT, WRONG])


@pytest.mark.parametrize("name", RIGHT_NAMES)
def test_right_kernels_pass(watched: Watched, name: str) -> None:
    """In any order of threads, changed at meetings or at accesses too, the numbers are the same, and right."""
    for seed in range(20):
        launch, expected = right(name, Options(seed, strict=seed % 2 == 1))
        watched.run(launch)
        assert list(launch.arrays.values())[-1].tobytes() == expected.tobytes(), seed


@pytest.mark.parametrize("name", FOUND)
def test_each_mistake_is_found(watched: Watched, name: str) -> None:
    """In whatever order the threads run, with kernel, place and threads named; and no array has changed."""
    for seed in range(6):
        launch = wrong(name, Options(seed, strict=seed % 2 == 1))
        with pytest.raises(KernelError) as caught:
            watched.run(launch)
        assert re.match(f"kernel {name}: ({FOUND[name]})", str(caught.value)), (seed, str(caught.value))
        assert str(caught.value).count("\n") == 0
        assert caught.value.kind == str(caught.value).split(": ")[1]
        assert launch.arrays["x"].tobytes() == numbers(BLOCK).tobytes()
        assert (launch.arrays["out"] == 5).all()


def test_every_wrong_kernel_has_its_place() -> None:
    """All of wrong.cuh is tested, here or under a sanitizer."""
    assert set(re.findall(r"^WRONG\((\w+)\)", WRONG.read_text(), re.M)) == {*FOUND, "undefined"}


def test_after_a_mistake_the_runtime_is_as_before(watched: Watched) -> None:
    """Kernels that fail half-way, between others that are right."""
    for name in ("left_early", "circle", "far", "nobody_wrote"):
        with pytest.raises(KernelError):
            watched.run(wrong(name, Options()))
        launch, expected = right("block_sum", Options())
        watched.run(launch)
        assert launch.arrays["out"].tobytes() == expected.tobytes()


def test_a_seed_decides_the_order(watched: Watched) -> None:
    """The same seed finds the same, word for word; among several seeds more than one pair of threads is seen."""

    def said(seed: int) -> str:
        with pytest.raises(KernelError) as caught:
            watched.run(wrong("missing_barrier", Options(seed)))
        return str(caught.value)

    assert said(3) == said(3)
    assert len({said(seed) for seed in range(8)}) > 1


def test_lines_are_those_of_the_kernel(watched: Watched) -> None:
    """Both accesses of a race are named by the line in the kernel that makes them."""
    lines = WRONG.read_text().splitlines()
    start = lines.index("WRONG(missing_second_barrier) {")
    said = set[tuple[int, ...]]()
    for seed in range(8):
        with pytest.raises(KernelError) as caught:
            watched.run(wrong("missing_second_barrier", Options(seed)))
        said.add(tuple(int(line) for line in re.findall(r"wrong\.cuh:(\d+)", str(caught.value))))
    write, read = start + 5, start + 7
    assert said <= {(write, read), (read, write)}


def test_a_planted_bug_is_found(watched: Watched) -> None:
    """A barrier left out is seen; a shuffle from another lane changes numbers. The source is as it was."""
    launch, expected = right("block_sum", Options())
    watched.meetings()
    watched.run(launch)
    met = watched.meetings()
    assert [name for name, _, _ in met] == ["__shfl_xor_sync", "__syncthreads"]
    (_, file, shuffle), (_, _, barrier) = met
    with pytest.raises(KernelError, match=r"race|uninitialized"):
        watched.run(replace(launch, options=Options(mutation=Mutation(file, barrier))))
    watched.run(replace(launch, options=Options(mutation=Mutation(file, shuffle))))
    assert launch.arrays["out"].tobytes() != expected.tobytes()


def test_without_assembly_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor is another, fibers change by way of the C library."""
    portable = replace(build.WATCHED, runtime=(*build.WATCHED.runtime, "-DLOWBIT_SHIM_UCONTEXT"))
    monkeypatch.setattr(build, "WATCHED", portable)
    watched = Watched([RIGHT, WRONG])
    for name in RIGHT_NAMES:
        launch, expected = right(name, Options(7, strict=True))
        watched.run(launch)
        assert list(launch.arrays.values())[-1].tobytes() == expected.tobytes()
    for name in ("circle", "missing_barrier", "left_early"):
        with pytest.raises(KernelError):
            watched.run(wrong(name, Options()))


def test_a_simulated_device_runs_the_kernels_themselves(watched: Watched) -> None:
    """`SimDevice` with the shim in place of numpy: the same numbers, and a mistake is a `DeviceError`."""
    launch, expected = right("block_sum", Options())
    with SimDevice(kernels=ShimKernels(seed=4, watched=watched)) as device:
        stream = device.stream("s")
        host, x, out = device.pin(1200, "host"), device.allocate(1200, "x"), device.allocate(12, "out")
        device.write(host.span(), launch.arrays["x"])
        device.copy(x.span(), host.span(), stream)
        device.launch(launch.kernel, {"x": x.span(), "out": out.span(), "n": 100}, stream)
        device.copy(host.span(0, 12), out.span(), stream)
        device.finish()
        assert device.read(host.span(0, 12), np.float32, (3,)).tobytes() == expected.tobytes()
        with pytest.raises(DeviceError, match="left_early"):
            device.launch(wrong("left_early", Options()).kernel, {"x": x.span(), "out": x.span(512), "n": 64}, stream)
            device.finish()
        device.free(host)
        device.free(x)
        device.free(out)


def test_the_table_must_say_what_the_source_says(watched: Watched) -> None:
    """Another number of arguments, another type, an input that the source may write: refused before it runs."""
    launch, _ = right("reverse", Options())
    tables = {
        "it has 3 arguments, and the table 2": (reads(BLOCK),),
        "x is 'const 4f\\*;?', and in the table float32, update": (
            Parameter("x", "float32", "update", lambda _: BLOCK),
            writes(BLOCK),
        ),
        "out is '4f\\*', and in the table float64, write": (
            reads(BLOCK),
            Parameter("out", "float64", "write", lambda _: BLOCK),
        ),
    }
    for said, spans in tables.items():
        given = {p.name: np.zeros(BLOCK, p.kind) for p in spans}
        with pytest.raises(KernelError, match=f"kernel reverse: table: {said}"):
            watched.run(Launch(kernel("reverse", *spans), given, {"n": BLOCK}))
    unknown = Launch(kernel("nothing", reads(BLOCK)), {"x": launch.arrays["x"]}, {"n": 1})
    with pytest.raises(KernelError, match="kernel nothing: table: no source has a kernel of this name"):
        watched.run(unknown)


def test_arguments_are_checked_before_a_launch() -> None:
    """Each mistake in what is given, in one line that names it."""
    described = kernel("reverse", reads(BLOCK), writes(BLOCK))
    x, out = numbers(BLOCK), np.zeros(BLOCK, np.float32)
    frozen = out.copy()
    frozen.flags.writeable = False
    mistakes: dict[str, tuple[dict[str, Array], dict[str, float]]] = {
        "arguments of reverse": ({"x": x}, {"n": 1}),
        "x of reverse is an array of float64": ({"x": x.astype(np.float64), "out": out}, {"n": 1}),
        "x of reverse is 252 bytes; allowed: 256": ({"x": x[1:], "out": out}, {"n": 1}),
        "x of reverse is an array with gaps": ({"x": np.repeat(x, 2)[::2], "out": out}, {"n": 1}),
        "out of reverse is a read-only array": ({"x": x, "out": frozen}, {"n": 1}),
        "n is 2147483648": ({"x": x, "out": out}, {"n": 2**31}),
        "n is 1.5": ({"x": x, "out": out}, {"n": 1.5}),
    }
    for less in ({"block": 0}, {"block": 1025}, {"grid": lambda _: (1, 0, 1)}, {"shared": lambda _: -1}):
        with pytest.raises(ArgumentError, match=r"(threads|blocks|shared memory) of reverse is"):
            Launch(replace(described, **less), {"x": x, "out": out}, {"n": 1})
    for said, (arrays, given) in mistakes.items():
        with pytest.raises(ArgumentError, match=said):
            Launch(described, arrays, given)


def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    """With the compiler's first error, in one line; a warning is an error too."""
    source = tmp_path / "broken.cuh"
    source.write_text(
        '#include "device.cuh"\nKERNEL(1, 1) broken(float* out) {\n  int32_t unused = 1;\n  out[0] = 0;\n}\n'
    )
    with pytest.raises(UnavailableError, match=r"broken\.cuh:3.*unused") as caught:
        Watched([source])
    assert "\n" not in str(caught.value)


def test_what_the_watch_would_not_see_is_refused(tmp_path: Path) -> None:
    """Atomics, whose order no seed decides, and copies by the C library."""
    for body, said in {
        "__atomic_fetch_add(out, 1, __ATOMIC_RELAXED);": "undefined reference to `__tsan_atomic32_fetch_add'",
        "memcpy(out, out + 1, 4);": 'attempt to use poisoned "memcpy"',
    }.items():
        source = tmp_path / "unseen.cuh"
        source.write_text(f'#include "device.cuh"\nKERNEL(1, 1) unseen(int32_t* out) {{\n  {body}\n}}\n')
        with pytest.raises(UnavailableError, match=re.escape(said)):
            Watched([source])


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnavailableError, match=r"g\+\+ was not found.*install a C\+\+ compiler"):
        Watched([RIGHT])
