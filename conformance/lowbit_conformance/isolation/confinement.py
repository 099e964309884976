"""Separating the host from the process that judges it, before any code of a backend is loaded.

`process` sends this text to the host's interpreter, in front of `host`, and it needs nothing but the standard library.
Both processes belong to one user, so that the host could write to the judge's files in ``/proc``, trace it, limit its
resources, or send it signals. Three methods are known, and the report names the one that was used.

``namespaces``: a PID, mount and IPC namespace of its own, and a user namespace where this process may not make them
otherwise. The process waits outside for one that runs inside as process 2, and ends as that ends; ``/proc`` shows the
processes inside only, terminals and shared memory are new and empty, and all of it goes when process 1 is killed,
however fast the processes inside start others. Where the system has Landlock, the host is in a domain too, so that it
does not reach process 1.

``landlock``: a Landlock domain (Linux 6.12 or later). Within it a process can neither trace a process outside, which
includes its ``/proc/PID/fd`` and ``/proc/PID/mem``, nor send it a signal, nor connect to its abstract sockets. Threads,
child processes and programs that the backend starts share the domain and can reach one another. A domain says nothing
of resource limits and priorities, so that a filter of system calls refuses to change those of processes outside. Nor
does it cover the files of ``/proc`` that root may write to, such as ``oom_score_adj``; the domain of a host of root
therefore opens no file of ``/proc`` for writing but the host's own, and none of ``/sys``, where groups of processes are
frozen. The process waits in a domain around that of the host, from which it can kill all of them at once.

``none``: neither can be had.

Neither needs a capability. A host of root gives up the capabilities that would lead around them, and keeps those that
concern the owner and the mode of files.
"""

import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

LIBC: Any = ctypes.CDLL(None, use_errno=True)
# System calls that have the same numbers on all architectures of CPython.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals
# To files, and from one folder to another, which a domain of files denies unless allowed.
WRITE, REFER = 1 << 1, 1 << 13
PATH_BENEATH = 1
LEAST_ABI = 6
NEW_USER, NEW_PROCESSES, NEW_MOUNTS, NEW_IPC = 0x10000000, 0x20000000, 0x00020000, 0x08000000
PRIVATE = 1 << 14 | 1 << 18  # MS_REC | MS_PRIVATE
PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, NO_NEW_PRIVILEGES = 1, 4, 22, 24, 38  # of prctl
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, IPC_LOCK: files, users that compilers run as, pinned memory.
KEPT_CAPABILITIES = (0, 1, 3, 4, 6, 7, 14)
CAPABILITIES_VERSION = 0x20080522
DEATH_OF_SETUP = 120
KEEPERS = (signal.SIGTERM, signal.SIGCHLD)
# Of each architecture its number in filters, and the system calls prlimit64, setpriority, ioprio_set, and then
# sched_setaffinity, sched_setparam, sched_setscheduler, sched_setattr.
CALLS = {
    "x86_64": (0xC000003E, 302, 141, 251, (203, 142, 144, 314)),
    "aarch64": (0xC00000B7, 261, 140, 30, (122, 118, 119, 274)),
}
FOREIGN_CALLS = 0x40000000  # and above: those of x32
LOAD, EQUAL, AT_LEAST, SKIP, GIVE = 0x20, 0x15, 0x35, 0x05, 0x06  # of BPF
ALLOWED, REFUSED, UNKNOWN = 0x7FFF0000, 0x00050001, 0x00050026  # answers: run it, EPERM, ENOSYS
NUMBER, ARCHITECTURE, ARGUMENTS_AT = 0, 4, 16  # where a filter finds them
MOST_THREADS = 250  # of processes outside, so that the filter is not longer than the system allows


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def confine(methods: Sequence[str]) -> str:
    """Isolate this process by the first of these methods that works here, and return its name; empty if none does."""
    known = {"landlock": landlock, "namespaces": namespaces}
    return next((method for method in methods if method == "none" or (method in known and known[method]())), "")


def landlock() -> bool:
    """Continue as a child in a nested Landlock domain; this is still the only thread."""
    if not has_domains():
        return False
    drop_capabilities()
    if not enter_domain(files_of_root() & REFER):
        return False
    signal.pthread_sigmask(signal.SIG_BLOCK, KEEPERS)
    host = os.fork()
    if host:
        keep(host)
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEEPERS)
    if not enter_domain(files_of_root()):
        os._exit(DEATH_OF_SETUP)
    filter_calls(threads_above())
    return True


def has_domains() -> bool:
    return sys.platform == "linux" and bool(LIBC.syscall(CREATE_RULESET, None, 0, 1) >= LEAST_ABI)


class Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))


def enter_domain(files: int = 0) -> bool:
    """Enter a Landlock domain within the present one; all later threads and processes inherit it.

    With WRITE in `files`, no file in ``/sys`` can be opened for writing, and in ``/proc`` only those of this process.
    REFER is denied by every enclosing domain with file rights, unless it is allowed there too.
    """
    rules = Ruleset(files, 0, SCOPES)
    ruleset = LIBC.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    for name in os.listdir("/") if files else ():
        if name != "sys" or not files & WRITE:
            allow(ruleset, "/proc/self" if name == "proc" else f"/{name}", files)
    restricted = LIBC.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)


def files_of_root() -> int:
    """The file rights that a domain handles: only for root, because an ordinary user cannot open such files anyway."""
    return WRITE | REFER if os.geteuid() == 0 else 0


def allow(ruleset: int, path: str, files: int) -> None:
    """Allow everything beneath a path; one that cannot be opened is inaccessible anyway."""
    if sys.platform == "linux":
        with suppress(OSError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = files if os.path.isdir(path) else files & WRITE
            LIBC.syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(Beneath(access, place)), 0)
            os.close(place)


def keep(host: int) -> None:
    """Wait for the host or for SIGTERM, then kill everything in this domain, and exit as the host did.

    One system call kills all, so that no process can start another meanwhile.
    """
    LIBC.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.close(0)  # the channel to the judge is the host's
    ended, status = 0, 0
    while not ended and signal.sigwait(KEEPERS) != signal.SIGTERM:
        ended, status = os.waitpid(host, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    end_as(status if ended else os.waitpid(host, 0)[1])


def threads_above() -> list[int]:
    """The threads of the ancestors of this process, as far as ``/proc`` shows them."""
    found: list[int] = []
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):
        while process > 1:
            found += map(int, os.listdir(f"/proc/{process}/task"))
            with open(f"/proc/{process}/stat", "rb") as file:
                process = int(file.read().rpartition(b")")[2].split()[1])
    return found


# **A filter of system calls.** An instruction is its code, two jumps and a number.

Instruction = tuple[int, int, int, int]


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(outside: Sequence[int]) -> None:
    """Refuse system calls that change limits and priorities of outside processes, which a domain does not refuse.

    The limits of any process but this one are refused. A thread may get other processors and another priority, as
    libraries do with their own threads, unless it is one of `outside`.
    """
    if platform.machine() not in CALLS or sys.maxsize < 2**32:
        return
    architecture, limits, priority, io_priority, scheduling = CALLS[platform.machine()]
    refuse: Instruction = (GIVE, 0, 0, REFUSED)
    allow: Instruction = (GIVE, 0, 0, ALLOWED)
    strangers = [part for thread in outside[:MOST_THREADS] for part in ((EQUAL, 0, 1, thread), refuse)]
    first, second = (LOAD, 0, 0, ARGUMENTS_AT), (LOAD, 0, 0, ARGUMENTS_AT + 8)
    program: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (GIVE, 0, 0, UNKNOWN)]
    program += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, FOREIGN_CALLS), (GIVE, 0, 0, UNKNOWN)]
    program += on_call(limits, [first, (EQUAL, 1, 0, 0), (EQUAL, 0, 1, os.getpid()), allow, *reading_limits(), refuse])
    for call, of_a_process in ((priority, 0), (io_priority, 1)):  # others are of a group or a user
        program += on_call(call, [first, (EQUAL, 1, 0, of_a_process), refuse, second, *strangers, allow])
    for call in scheduling:
        program += on_call(call, [first, *strangers, allow])
    text = b"".join(struct.pack("=HBBI", *part) for part in [*program, allow])
    LIBC.prctl(SECCOMP, 2, ctypes.byref(Program(len(program) + 1, text)), 0, 0)


def on_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """The instructions for one system call; the last one returns the answer."""
    return [(EQUAL, 1, 0, number), (SKIP, 0, 0, len(body)), *body]


def reading_limits() -> list[Instruction]:
    """Allow a call of prlimit64 that has no address of new limits."""
    low, high = ARGUMENTS_AT + 16, ARGUMENTS_AT + 20
    return [(LOAD, 0, 0, low), (EQUAL, 0, 3, 0), (LOAD, 0, 0, high), (EQUAL, 0, 1, 0), (GIVE, 0, 0, ALLOWED)]


# **Namespaces.**


def namespaces() -> bool:
    """Continue as process 2 of new namespaces; a child tries first, because a failed step cannot be undone."""
    if sys.platform != "linux":
        return False
    trial = os.fork()
    if not trial:
        os._exit(0 if enter_namespaces() and mount_processes_in_child() else 1)
    if os.waitpid(trial, 0)[1] or not enter_namespaces():
        return False
    reader, writer = os.pipe()
    first = os.fork()
    if first:
        os.close(writer)
        wait_outside(first, reader)
    os.close(reader)
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not mount_processes():
        os._exit(DEATH_OF_SETUP)
    mount_anew()
    drop_capabilities()
    second = os.fork()
    if second:
        os.close(0)
        os.write(writer, b"%d" % os.waitpid(second, 0)[1])
        os._exit(0)
    os.close(writer)
    LIBC.prctl(DUMPABLE, 1, 0, 0, 0)  # a new user namespace has hidden this process from the judge
    if has_domains():
        enter_domain(files_of_root())
    return True


def enter_namespaces() -> bool:
    """Enter new namespaces; root needs no user namespace, in which it could not access files of other users."""
    user, group = os.geteuid(), os.getegid()
    kinds = NEW_PROCESSES | NEW_MOUNTS | NEW_IPC
    if LIBC.unshare(kinds) == 0:
        return True
    if LIBC.unshare(NEW_USER | kinds):
        return False
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    try:
        for name, content in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    except OSError:
        return False
    return True


def mount_processes_in_child() -> bool:
    child = os.fork()
    if not child:
        os._exit(0 if mount_processes() else 1)
    return os.waitpid(child, 0)[1] == 0


def mount_processes() -> bool:
    """Let ``/proc`` show only this namespace, without changing others."""
    return not (LIBC.mount(b"none", b"/", None, PRIVATE, None) or LIBC.mount(b"proc", b"/proc", b"proc", 0, None))


def mount_anew() -> None:
    """Mount separate terminals and shared memory, because writes to the user's would remain. Not all systems allow
    this."""
    LIBC.mount(b"devpts", b"/dev/pts", b"devpts", 0, b"newinstance,ptmxmode=0666,mode=0620")
    LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


def wait_outside(first: int, reader: int) -> None:
    """Wait, and exit as the host inside does."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(0)  # the channel to the judge is the host's
    status = os.waitpid(first, 0)[1]
    if told := os.read(reader, 20):  # otherwise the first process itself was killed
        status = int(told)
    end_as(status)


def end_as(status: int) -> None:
    """Exit as a process with this status has ended."""
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)  # the host has left its memory image already
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(DEATH_OF_SETUP)


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


def drop_capabilities() -> None:
    """Drop all capabilities except `KEPT_CAPABILITIES`, and let no program regain one."""
    for number in range(64):
        if number not in KEPT_CAPABILITIES:
            LIBC.prctl(CAPBSET_DROP, number, 0, 0, 0)
    header = CapabilityHeader(CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower 32 of each, then the upper
    if LIBC.capget(ctypes.byref(header), sets) == 0:
        kept = sum(1 << number for number in KEPT_CAPABILITIES)
        LIBC.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)(sets[0] & kept, sets[1] & kept, 0, 0, 0, 0))
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
