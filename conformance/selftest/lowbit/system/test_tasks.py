"""Tasks on processes: every result once, whichever process is killed; a bounded number ahead; errors as they are."""

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path

import pytest
from paths import SUPPORT
from task_work import Killing, Noting, refuse_three, square, threads_of

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.interpreters import python_command
from lowbit.system.tasks import MOST_LOSSES, Processes
from lowbit.system.threads import usable_processors

LONG = 300
"""Seconds after which what must happen is taken not to happen."""


def test_each_item_has_its_result() -> None:
    """In whatever order; and none at all."""
    found = dict(Processes(2).run(square, range(20)))
    assert found == {item: item * item for item in range(20)}
    assert list(Processes(2).run(square, [])) == []


def test_the_processes_end_with_the_job(tmp_path: Path) -> None:
    """None is left when the last result has been taken, nor when the job has failed."""
    list(Processes(2).run(square, range(3)))
    assert active_children() == []
    with pytest.raises(UnavailableError, match="without a result"):
        list(Processes(1).run(Killing(tmp_path, (1,), 100), [1]))
    assert active_children() == []


def test_threads_are_divided() -> None:
    """Each of the processes may use its part, and at least one."""
    counts = {number: dict(Processes(number).run(threads_of, [0]))[0] for number in (1, 1000)}
    assert counts == {1: usable_processors(), 1000: 1}


def test_a_result_may_make_further_items_possible(tmp_path: Path) -> None:
    """They are appended to the queue, and done again as others are where a process is lost."""
    queue, found = deque([1]), []
    for _, result in Processes(2).run(Killing(tmp_path, (4, 256), 2), queue):
        found.append(result)
        if result < 1000:
            queue.append(result + 1 if result == 1 else result)
    assert found == [1, 4, 16, 256, 65536]
    assert len(list(tmp_path.iterdir())) == 2 and not queue


def test_what_a_killed_process_had_is_done_again(tmp_path: Path) -> None:
    """Two of them in one job."""
    found = list(Processes(2).run(Killing(tmp_path, (2, 7), 2), range(10)))
    assert sorted(found) == [(item, item * item) for item in range(10)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_task_that_always_kills_its_process_ends_the_job(tmp_path: Path) -> None:
    """After what can finish has finished."""
    with pytest.raises(UnavailableError, match=rf"part 1 ended {MOST_LOSSES} times without a result"):
        list(Processes(1).run(Killing(tmp_path, (1,), 100), [1]))
    assert len(list(tmp_path.iterdir())) == MOST_LOSSES


def test_an_error_of_the_work_is_raised() -> None:
    """As it is, with its fields."""
    with pytest.raises(ArgumentError, match="item is 3; allowed: another one") as caught:
        list(Processes(2).run(refuse_three, range(10)))
    assert caught.value.given == 3


def test_no_more_is_begun_than_is_asked_for(tmp_path: Path) -> None:
    """A caller that takes two results of a hundred has not begun many more."""
    with closing(Processes(2).run(Noting(tmp_path), range(100))) as results:
        next(results)
        next(results)
        time.sleep(0.5)  # for tasks that should not be there to begin
        assert len(list(tmp_path.iterdir())) <= 2 + 3


PROGRAM = """
import sys
sys.path[:0] = [{support!r}]
from pathlib import Path
from task_work import Waiting
from lowbit.system.tasks import Processes
if __name__ == "__main__":
    list(Processes(2).run(Waiting(Path({folder!r})), [1, 2]))
"""


def test_processes_end_with_the_one_that_began_them(tmp_path: Path) -> None:
    """It is killed, and so can say nothing to them."""
    folder, program = tmp_path / "noted", tmp_path / "program.py"
    folder.mkdir()
    program.write_text(PROGRAM.format(support=str(SUPPORT), folder=str(folder)))
    parent = subprocess.Popen(python_command(str(program)))
    try:
        pids = wait_for(lambda: [int(each.name) for each in folder.iterdir()], 2)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + LONG
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for(look: Callable[[], list[int]], count: int) -> list[int]:
    """What is found, as soon as it is enough."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        if len(found := look()) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"fewer than {count} after {LONG} s")
