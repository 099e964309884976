"""Bugs planted in the backend's kernels, one at a time: every barrier left out, every shuffle from another lane.

A bug that no launch of `cuda_cases` shows would mean that the barrier is not needed, or that the cases are too few. The
runtime plants them, at the line where the source has the call; one test plants one in the text, to show that this is
the same.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_cases import Case, cases
from cuda_tools import needs_compiler

from lowbit_cuda.kernels.table import MAKERS
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.launching import KernelError, Mutation, Options
from lowbit_gpusim.shim.runner import Watched, watched_kernels

pytestmark = needs_compiler

MEETING = re.compile(r"\b(__syncthreads\w*|__syncwarp|__shfl\w*|__ballot_sync|__any_sync|__all_sync)\(")
REDUNDANT: dict[tuple[str, str], str] = {}
"""Meetings of a kernel that may be left out, and why they are there nonetheless."""


@pytest.fixture(scope="module")
def watched() -> Watched:
    return watched_kernels()


def found(watched: Watched, case: Case, mutation: Mutation) -> bool:
    """Whether a case shows the bug: the runtime finds something, or a number is wrong."""
    for seed in range(2):
        launch = case.launch(Options(seed, mutation=mutation))
        try:
            watched.run(launch)
        except KernelError:
            return True
        if case.wrong(launch):
            return True
    return False


def survivors(watched: Watched, every: list[Case]) -> tuple[set[str], set[str]]:
    """The meetings in these cases of one kernel, and those of them that can be left out without anybody noticing."""
    watched.meetings()
    where: dict[tuple[str, str, int], list[Case]] = {}
    for case in every:
        watched.run(case.launch())
        for meeting in watched.meetings():
            where.setdefault(meeting, []).append(case)
    met, alive = set[str](), set[str]()
    for (name, file, line), there in where.items():
        met.add(f"{file}:{line}")
        if not any(found(watched, case, Mutation(file, line)) for case in there):
            alive.add(f"{name} at {file}:{line}")
    return met, alive


def kernels() -> dict[str, list[Case]]:
    """The cases of each kernel; of products those with float16 scales, since only loads are others with float32."""
    every: dict[str, list[Case]] = {}
    for case in cases():
        if not re.match(r"(gemm|expert_in)_b\d_f32", case.kernel.name):
            every.setdefault(case.kernel.name, []).append(case)
    return every


@pytest.mark.parametrize("name", MAKERS)
def test_every_planted_bug_is_found(watched: Watched, name: str) -> None:
    """Of each kernel: each barrier and each shuffle that it reaches."""
    for kernel, every in kernels().items():
        if kernel == name or kernel.startswith(f"{name}_"):
            _, alive = survivors(watched, every)
            assert {place for place in alive if (kernel, place) not in REDUNDANT} == set(), kernel


def test_every_meeting_in_the_sources_is_reached(watched: Watched) -> None:
    """So none was left out of the test above."""
    written = {
        f"{path.name}:{number}"
        for path in build.KERNELS.glob("*.cuh")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MEETING.search(line.split("//")[0])
    }
    watched.meetings()
    for every in kernels().values():
        for case in every:
            watched.run(case.launch())
    assert {f"{file}:{line}" for _, file, line in watched.meetings()} == written


def test_planted_in_the_text_it_is_the_same(watched: Watched, tmp_path: Path) -> None:
    """A barrier taken out of the source: what is found is word for word what is found where the runtime skips it."""
    case = next(case for case in cases() if case.kernel.name == "rms_norm" and "300" in case.what)
    watched.meetings()
    watched.run(case.launch())
    _, file, line = next(meeting for meeting in watched.meetings() if meeting[0] == "__syncthreads")
    for path in build.KERNELS.glob("*.cuh"):
        lines = path.read_text().splitlines()
        if path.name == file:
            assert "__syncthreads();" in lines[line - 1]
            lines[line - 1] = lines[line - 1].replace("__syncthreads();", ";")
        (tmp_path / path.name).write_text("\n".join(lines) + "\n")
    changed = Watched([tmp_path / case.kernel.source])
    said = []
    for program, options in ((changed, Options(3)), (watched, Options(3, mutation=Mutation(file, line)))):
        launch = replace(case.launch(), options=options)
        with pytest.raises(KernelError) as caught:
            program.run(launch)
        said.append(str(caught.value))
    assert said[0] == said[1]
