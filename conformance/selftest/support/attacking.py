"""Backends that attack the processes around them, in a module of their own, so that it imports no test framework.

What they try is a list of functions; each returns if it succeeded and raises `OSError` if the system refused.
"""

import ctypes
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from misbehaving import Mine

LIBC: Any = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
PIDFD_GETFD, KCMP, IOPRIO_SET = 438, 312, 251  # the last two are the numbers on x86-64


def called(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def look_at_a_descriptor(victim: int) -> None:
    os.readlink(f"/proc/{victim}/fd/0")


def open_a_descriptor(victim: int) -> None:
    os.close(os.open(f"/proc/{victim}/fd/0", os.O_RDONLY | os.O_NONBLOCK))


def open_memory(victim: int) -> None:
    os.close(os.open(f"/proc/{victim}/mem", os.O_RDWR))


def open_memory_of_a_thread(victim: int) -> None:
    os.close(os.open(f"/proc/{victim}/task/{victim}/mem", os.O_RDWR))


def read_environment(victim: int) -> None:
    with open(f"/proc/{victim}/environ", "rb") as file:
        file.read()


def send_a_signal(victim: int) -> None:
    os.kill(victim, 0)


def send_a_signal_to_a_thread(victim: int) -> None:
    called(LIBC.tgkill(victim, victim, 0))


def send_a_signal_by_descriptor(victim: int) -> None:
    folder = os.open(f"/proc/{victim}", os.O_RDONLY)
    try:
        signal.pidfd_send_signal(folder, 0)
    finally:
        os.close(folder)


def take_a_descriptor(victim: int) -> None:
    process = os.pidfd_open(victim)
    try:
        called(LIBC.syscall(PIDFD_GETFD, process, 0, 0))
    finally:
        os.close(process)


def write_memory(victim: int) -> None:
    """The address is none, so that the system says EFAULT where it lets this process in."""

    class Range(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    here = ctypes.create_string_buffer(8)
    own, theirs = Range(ctypes.addressof(here), 8), Range(8, 8)
    written = LIBC.process_vm_writev(victim, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
    if written < 0 and ctypes.get_errno() != 14:
        raise OSError(ctypes.get_errno(), "refused")


def trace(victim: int) -> None:
    called(LIBC.ptrace(PTRACE_SEIZE, victim, 0, 0))
    LIBC.ptrace(PTRACE_DETACH, victim, 0, 0)


def compare(victim: int) -> None:
    called(LIBC.syscall(KCMP, os.getpid(), victim, 2, 0, 0))


def limit(victim: int) -> None:
    resource.prlimit(victim, resource.RLIMIT_CPU, resource.prlimit(victim, resource.RLIMIT_CPU))


def limit_by_a_thread(victim: int) -> None:
    limit(max(map(int, os.listdir(f"/proc/{victim}/task"))))


def set_priority(victim: int) -> None:
    os.setpriority(os.PRIO_PROCESS, victim, os.getpriority(os.PRIO_PROCESS, victim))


def set_priority_of_the_user(victim: int) -> None:
    """All processes of the user, of which the victim is one; that of this process comes first."""
    os.kill(victim, 0)
    os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0))


def set_processors(victim: int) -> None:
    os.sched_setaffinity(victim, os.sched_getaffinity(victim))


def set_scheduling(victim: int) -> None:
    os.sched_setscheduler(victim, os.sched_getscheduler(victim), os.sched_getparam(victim))


def set_io_priority(victim: int) -> None:
    called(LIBC.syscall(IOPRIO_SET, 1, victim, 0))


def choose_for_want_of_memory(victim: int) -> None:
    with open(f"/proc/{victim}/oom_score_adj", "r+") as file:
        value = file.read()
        file.seek(0)
        file.write(value)


def forget_references(victim: int) -> None:
    with open(f"/proc/{victim}/clear_refs", "w") as file:
        file.write("1")


def move_to_a_group(victim: int) -> None:
    """A control group of its own, which can be frozen."""
    hierarchy = next((path for path in HIERARCHIES if os.path.exists(f"{path}/cgroup.procs")), "/sys/fs/cgroup")
    with open(f"/proc/{victim}/cgroup") as file:
        before = next(line.rstrip().split(":", 2)[2] for line in file if line.split(":")[1] in ("freezer", ""))
    group = f"{hierarchy}/attack-{victim}"
    os.makedirs(group, exist_ok=True)
    try:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write(str(victim))
        with open(f"{hierarchy}{before}/cgroup.procs", "w") as file:
            file.write(str(victim))
    finally:
        with suppress(OSError):
            os.rmdir(group)


HIERARCHIES = ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup")


ATTACKS: tuple[Callable[[int], None], ...] = (
    look_at_a_descriptor,
    open_a_descriptor,
    open_memory,
    open_memory_of_a_thread,
    read_environment,
    send_a_signal,
    send_a_signal_to_a_thread,
    send_a_signal_by_descriptor,
    take_a_descriptor,
    write_memory,
    trace,
    compare,
    limit,
    limit_by_a_thread,
)
# A filter of calls knows the processes above it, and no other. Files in ``/proc`` are closed to all but root, and to
# root by its domain.
PRIORITIES = (set_priority, set_priority_of_the_user, set_processors, set_scheduling, set_io_priority)
FILES = (choose_for_want_of_memory, forget_references, move_to_a_group)


def successes(victims: list[int], attacks: Sequence[Callable[[int], None]] = ATTACKS) -> list[str]:
    """The attacks that succeed against one of these processes."""
    found = []
    for attack in attacks:
        for victim in victims:
            with suppress(OSError):
                attack(victim)
                found.append(attack.__name__)
                break
    return found


def above() -> Iterator[int]:
    """The processes above this one, and all others that ``/proc`` shows, without this one and those below it."""
    mine = {os.getpid()}
    parents = dict[int, int]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    for process, parent in sorted(parents.items()):
        if parent in mine:
            mine.add(process)
    process = parents.get(os.getpid(), 0)
    while process > 1:
        yield process
        process = parents.get(process, 0)


class Attacks(Mine):
    """Fails with the attacks that succeeded."""

    found: list[str] | None = None

    def act(self, x: Any, out: Any) -> None:
        if self.found is None:  # a process that is traced already cannot be traced again
            self.found = successes(list(above())[:3], (*ATTACKS, *PRIORITIES, *FILES))
        raise RuntimeError(f"succeeded: {self.found}")


class WritesEvents(Mine):
    """Answers wrongly, and writes verdicts of its own to every pipe of the process above."""

    lines: bytes = b'{"event": "verdict", "id": "packing.pack/C1/forged", "outcome": "passed"}\n{"event": "finished"}\n'

    def act(self, x: Any, out: Any) -> None:
        out[:] = 0
        with suppress(OSError):
            for name in os.listdir(f"/proc/{os.getppid()}/fd"):
                self.write(f"/proc/{os.getppid()}/fd/{name}")

    def write(self, path: str) -> None:
        with suppress(OSError):
            if stat.S_ISFIFO(os.stat(path).st_mode):
                descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, self.lines)
                os.close(descriptor)


class WritesNoText(WritesEvents):
    """What it writes is neither JSON nor text, and has no end."""

    lines = b"\xff\xfe not json \x1b[2J\n[[[[[[\n\n17"


class StartsAChain(Mine):
    """Starts a process that starts the next in a session of its own and ends, for a minute; all hold a pipe open.

    The judge's deadline comes earlier.
    """

    doublings = 0

    def act(self, x: Any, out: Any) -> None:
        held = os.open(os.environ["HELD_OPEN"], os.O_WRONLY)
        until = time.monotonic() + 60
        if os.fork() == 0:
            for _ in range(self.doublings):
                os.fork()
            while time.monotonic() < until:
                if os.fork():
                    os._exit(0)
                os.setsid()
            os._exit(0)
        os.close(held)
        time.sleep(60)


class StartsAForest(StartsAChain):
    """64 chains."""

    doublings = 6


class WritesToTheTerminal(Mine):
    """Fails with the terminals that it finds; a line there would look like one of the command."""

    def act(self, x: Any, out: Any) -> None:
        raise RuntimeError(f"terminals {[name for name in os.listdir('/dev/pts') if name.isdecimal()]}")


class LeavesSharedMemory(Mine):
    """Leaves a file of shared memory of each kind."""

    def act(self, x: Any, out: Any) -> None:
        from multiprocessing import resource_tracker, shared_memory

        memory = shared_memory.SharedMemory(os.environ["SHARED_MEMORY"], create=True, size=4096)
        resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]  # multiprocessing has no other way
        out[:] = LIBC.shmget(int(os.environ["SHARED_KEY"]), 4096, 0o1600)
        os._exit(1)


class KillsTheJudge(Mine):
    number = signal.SIGKILL

    def act(self, x: Any, out: Any) -> None:
        out[:] = 0
        with suppress(OSError):
            os.kill(os.getppid(), self.number)


class StopsTheJudge(KillsTheJudge):
    number = signal.SIGSTOP


class ReplacesATest(Mine):
    """Replaces the file of a test module while the suite could still import it, and its own program too."""

    def __init__(self) -> None:
        super().__init__()
        folder = os.environ["SUITE_FOLDER"]
        with open(os.path.join(folder, "test_linear.py"), "a") as file:
            file.write("\nMARKS.clear()\n")


class ShortensTheMemory(Mine):
    """Makes the shared memory shorter, under the arrays that the judge is about to read."""

    def act(self, x: Any, out: Any) -> None:
        out[:] = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if "memfd:arrays" in os.readlink(f"/proc/self/fd/{name}"):
                    os.ftruncate(int(name), 0)
                    raise RuntimeError("the shared memory was made shorter")


class RunsPrograms(Mine):
    """Does all that a domain must not stand in the way of: threads, programs, signals between its own processes."""

    def _prepare(self, matrix: Any) -> Any:
        import subprocess
        import sys
        import tempfile
        import threading

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        os.kill(child.pid, signal.SIGTERM)
        if child.wait(10) != -signal.SIGTERM:
            raise RuntimeError("the child did not obey")
        os.listdir(f"/proc/{os.getpid()}/fd")
        with open("/proc/self/comm", "w") as file, tempfile.TemporaryDirectory() as folder:  # its own files
            file.write("mine")
            os.makedirs(f"{folder}/one/two")
            open(f"{folder}/file", "w").close()
            os.rename(f"{folder}/file", f"{folder}/one/two/file")
        threads = [threading.Thread(target=os.getpid) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        subprocess.run(["/bin/sh", "-c", "sleep 60 & kill $!; wait; exit 0"], check=True, timeout=20)
        return super()._prepare(matrix)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no outcomes": lambda reply: reply.pop("outcomes", None),
    "none of them": lambda reply: reply["outcomes"].clear(),
    "one of them": lambda reply: reply["outcomes"].pop(),
    "text": lambda reply: reply.update(outcomes="ab"),
    "a number": lambda reply: reply.update(outcomes=17),
    "empty ones": lambda reply: reply.update(outcomes=[{}, {}]),
    "no such argument": lambda reply: reply.update(outcomes=[{"argument": 99}] * 2),
    "no breaches": lambda reply: reply.pop("breaches", None),
    "odd breaches": lambda reply: reply.update(breaches=[17]),
    "a strange error": lambda reply: reply.update(outcomes=[{"raised": 1}] * 2),
    "an odd failure": lambda reply: reply.update(failed=[]),
    "an unknown error": lambda reply: reply.update(outcomes=[{"known": "Exception", "arguments": []}] * 2),
}


class ChangesReplies(Mine):
    """Sends the judge a changed reply to each product; which one follows from the environment."""

    def act(self, x: Any, out: Any) -> None:
        import sys

        host: Any = sys.modules["__main__"]
        send, change = host.send, CHANGES[os.environ["CHANGE"]]

        def changed(channel: Any, message: dict[str, Any]) -> None:
            change(message)
            send(channel, message)

        host.send = changed
        out[:] = 0
