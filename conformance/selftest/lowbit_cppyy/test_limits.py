"""The number of threads of the cppyy backend: affinity, quotas, OMP_NUM_THREADS, LOWBIT_NUM_THREADS."""

import os
from pathlib import Path

import pytest

from lowbit.errors import UnavailableError
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.quota import processor_quota

VERSION_2 = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = (
    "30 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "32 30 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 30 0:31 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture(autouse=True)
def eight_free_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight processors without limits, whatever machine runs the test."""
    monkeypatch.delenv(processor.THREADS_VARIABLE, raising=False)
    monkeypatch.delenv(processor.OPENMP_VARIABLE, raising=False)
    monkeypatch.setattr(processor, "usable_processors", lambda: 8)
    monkeypatch.setattr(processor, "processor_quota", lambda: None)


def system(root: Path, mounts: str, membership: str, **contents: str) -> Path:
    """A root folder with files of the kernel; their names are given with ``__`` for ``/``."""
    process = root / "proc/self"
    process.mkdir(parents=True)
    (process / "mountinfo").write_text(mounts)
    (process / "cgroup").write_text(membership)
    for name, content in contents.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs", "cpu.cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return root


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors, quota and OpenMP's variable limit the number and never raise it; an argument overrides them."""
    assert processor.choose_threads(None) == 8
    monkeypatch.setattr(processor, "processor_quota", lambda: 5)
    assert processor.choose_threads(None) == 5
    monkeypatch.setenv(processor.OPENMP_VARIABLE, "3")
    assert processor.choose_threads(None) == 3
    monkeypatch.setenv(processor.OPENMP_VARIABLE, "64")
    assert processor.choose_threads(None) == 5
    assert processor.choose_threads(7) == 7


def test_the_variable_of_our_own_is_obeyed_beyond_all_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.OPENMP_VARIABLE, "3")
    monkeypatch.setenv(processor.THREADS_VARIABLE, "12")
    assert processor.choose_threads(None) == 12


@pytest.mark.parametrize(
    ("value", "threads"), (("2", 2), ("4,2", 4), (" 3 ", 3), ("2 , 9,1", 2), ("007", 7), ("999999999", 8))
)
def test_the_first_number_of_openmps_list_is_the_limit(
    monkeypatch: pytest.MonkeyPatch, value: str, threads: int
) -> None:
    monkeypatch.setenv(processor.OPENMP_VARIABLE, value)
    assert processor.choose_threads(None) == threads


@pytest.mark.parametrize(
    "value", ("", " ", "0", "-2", "two", "2x", "4,", ",2", "4,0", "1.5", "٣", "9" * 10, "9" * 9999)
)
def test_a_malformed_list_of_openmp_is_ignored_as_a_whole(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """As GNU's OpenMP does; a number of more digits than Python converts causes no exception."""
    monkeypatch.setenv(processor.OPENMP_VARIABLE, value)
    assert processor.choose_threads(None) == 8


def test_a_number_of_five_thousand_digits_is_refused_in_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.THREADS_VARIABLE, "1" * 5000)
    with pytest.raises(UnavailableError, match=processor.THREADS_VARIABLE) as caught:
        processor.choose_threads(None)
    assert len(str(caught.value)) < 200


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux tells a process its processors")
def test_one_processor_means_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real affinity of this thread, set to one processor and back."""
    monkeypatch.undo()
    monkeypatch.delenv(processor.THREADS_VARIABLE, raising=False)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert processor.choose_threads(None) == 1
    finally:
        os.sched_setaffinity(0, before)


# Quotas, from files as the kernel writes them.


@pytest.mark.parametrize(
    ("content", "processors"),
    (
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("300000 50000\n", 6),
    ),
)
def test_a_quota_of_version_2_is_rounded_up(tmp_path: Path, content: str, processors: int | None) -> None:
    root = system(tmp_path, VERSION_2.format(top="/"), "0::/box\n", box__cpu_max=content)
    assert processor_quota(root) == processors


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    """The limit may be on any group around the process's own; a group beside it does not count."""
    limits = {"a__cpu_max": "400000 100000", "a__b__cpu_max": "max 100000", "a__c__cpu_max": "100000 100000"}
    root = system(tmp_path, VERSION_2.format(top="/"), "0::/a/b\n", **limits)
    assert processor_quota(root) == 4


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    """The process's path is the host's, the mount begins at the container's group: the files lie at the mount."""
    root = system(tmp_path, VERSION_2.format(top="/docker/1f"), "0::/docker/1f\n", cpu_max="300000 100000")
    assert processor_quota(root) == 3


def test_a_quota_of_version_1_is_found(tmp_path: Path) -> None:
    """In the hierarchy that has ``cpu``, with the other hierarchies beside it; −1 means no limit."""
    membership = "9:memory:/elsewhere\n4:cpu,cpuacct:/box\n0::/\n"
    limits = {
        "cpu,cpuacct__cfs_quota_us": "-1\n",
        "cpu,cpuacct__cfs_period_us": "100000\n",
        "cpu,cpuacct__box__cfs_quota_us": "250000\n",
        "cpu,cpuacct__box__cfs_period_us": "100000\n",
    }
    assert processor_quota(system(tmp_path, VERSION_1.format(top="/"), membership, **limits)) == 3


@pytest.mark.parametrize("content", ("", "100000\n", "many few\n", "1 2 3\n", "100000 0\n", "-5 100000\n", "\0\xff"))
def test_a_quota_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    root = system(tmp_path, VERSION_2.format(top="/") + "odd\n - \n", "0::/\nodd\n", cpu_max=content)
    assert processor_quota(root) is None


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert processor_quota(tmp_path) is None
