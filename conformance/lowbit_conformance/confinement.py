"""Separating the host from the process that judges it, before any code of a backend is loaded.

`process` sends this text to the host's interpreter, in front of `host`, and it needs nothing but the standard library.
Both processes belong to one user, so that the host could write to the judge's files in ``/proc``, trace it, or send it
signals. Three methods are known, and the report names the one that was used.

``landlock``: a Landlock domain (Linux 6.12 or later). Within it a process can neither trace a process outside, which
includes its ``/proc/PID/fd`` and ``/proc/PID/mem``, nor send it a signal, nor connect to its abstract sockets. Threads,
child processes and programs that the backend starts share the domain and can reach one another.

``namespaces``: a user, PID and mount namespace of its own. The process waits outside for one that runs inside as
process 2, and ends as that ends; ``/proc`` shows the processes inside only.

``none``: neither can be had.

The first two need no capability. A host of root gives up the capabilities that would lead around them, and keeps those
that concern the owner and the mode of files.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

LIBC: Any = ctypes.CDLL(None, use_errno=True)
CREATE_RULESET, RESTRICT_SELF = 444, 446  # system calls, of the same numbers on all architectures that CPython runs on
SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals
LEAST_ABI = 6
NEW_USER, NEW_PROCESSES, NEW_MOUNTS = 0x10000000, 0x20000000, 0x00020000
PRIVATE = 1 << 14 | 1 << 18  # MS_REC | MS_PRIVATE
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVILEGES = 1, 24, 38  # of prctl
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, IPC_LOCK: files, users that compilers run as, pinned memory.
KEPT_CAPABILITIES = (0, 1, 3, 4, 6, 7, 14)
CAPABILITIES_VERSION = 0x20080522
DEATH_OF_SETUP = 120


class Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def confine(methods: Sequence[str]) -> str:
    """Separate this process by the first of these methods that works here, and say which; empty if none does."""
    known = {"landlock": landlock, "namespaces": namespaces}
    return next((method for method in methods if method == "none" or (method in known and known[method]())), "")


def landlock() -> bool:
    """Enter a Landlock domain; this thread is the only one yet, and all later ones inherit it."""
    if sys.platform != "linux" or LIBC.syscall(CREATE_RULESET, None, 0, 1) < LEAST_ABI:
        return False
    rules = Ruleset(0, 0, SCOPES)
    ruleset = LIBC.syscall(CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    drop_capabilities()
    restricted = LIBC.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(restricted)


def namespaces() -> bool:
    """Go on as process 2 of new namespaces; a child tries first, since a step that fails cannot be taken back."""
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
    drop_capabilities()
    second = os.fork()
    if second:
        os.close(0)
        os.write(writer, b"%d" % os.waitpid(second, 0)[1])
        os._exit(0)
    os.close(writer)
    return True


def enter_namespaces() -> bool:
    user, group = os.geteuid(), os.getegid()
    if LIBC.unshare(NEW_USER | NEW_PROCESSES | NEW_MOUNTS):
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
    """Let ``/proc`` show this namespace, in no other."""
    return not (LIBC.mount(b"none", b"/", None, PRIVATE, None) or LIBC.mount(b"proc", b"/proc", b"proc", 0, None))


def wait_outside(first: int, reader: int) -> None:
    """End as the host inside ends."""
    LIBC.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(0)  # the channel to the judge is the host's
    status = os.waitpid(first, 0)[1]
    if told := os.read(reader, 20):  # otherwise the first process itself was killed
        status = int(told)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    LIBC.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the host has left its memory image already
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(DEATH_OF_SETUP)


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


def drop_capabilities() -> None:
    """Keep none but `KEPT_CAPABILITIES` of those that this process has, and let no program regain one."""
    for number in range(64):
        if number not in KEPT_CAPABILITIES:
            LIBC.prctl(CAPBSET_DROP, number, 0, 0, 0)
    header = CapabilityHeader(CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower 32 of each, then the upper
    if LIBC.capget(ctypes.byref(header), sets) == 0:
        kept = sum(1 << number for number in KEPT_CAPABILITIES)
        LIBC.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)(sets[0] & kept, sets[1] & kept, 0, 0, 0, 0))
    LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
