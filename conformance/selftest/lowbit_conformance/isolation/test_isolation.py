"""The host process and the memory it shares: where arrays lie, what a fault is called, and that nothing gets out."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hosting import PATIENCE, has_ended, verdict_on
from misbehaving import (
    AnswersInTheJudgesPlace,
    BlindsTheWatch,
    BlindsTheWatchOfSignals,
    BlindsTheWatchOfTheFolder,
    BlindsTheWatchOfTheMask,
    ClaimsANumber,
    ClosesStandardOutput,
    ClosesTheChannel,
    Forges,
    ForgesItsDetails,
    ForgesItsLimits,
    ForgesItsOverread,
    ForgesItsRefusal,
    ForgesMuchMemory,
    LeavesADaemon,
    Mine,
    ReadsAnEarlierCall,
    ReadsFarPast,
    ReadsNull,
    ReadsPastTheEnd,
    RedirectsStandardOutput,
    RenamesItself,
    SaysWhatItSees,
    SpawnsAPool,
    UsesThePadding,
    WritesNothing,
    WritesPastOut,
    WritesX,
)
from paths import SUPPORT

from lowbit.errors import ArgumentError
from lowbit_conformance.isolation import faults
from lowbit_conformance.isolation import methods as isolation
from lowbit_conformance.isolation.arena import ARGUMENTS, CONTROL, PAGE, RESULTS, Arena, Placement, Side
from lowbit_conformance.isolation.calls import Call
from lowbit_conformance.isolation.process import BOOT, HostEndedError, HostProcess, neutral_environment
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError, HostRefusedError

HERE = SUPPORT


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena()) as memory:
        yield memory


# Where arrays lie.


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("alignment", [0, 16, 64])
@pytest.mark.parametrize("overread", [0, 32])
@pytest.mark.parametrize("size", [1, 7, 1024, 1025, 5000])
def test_an_array_lies_against_its_page(arena: Arena, side: Side, alignment: int, overread: int, size: int) -> None:
    """On the right nothing but the declared alignment and over-read lies between the end and the page that faults."""
    array = np.arange(size, dtype=np.float32)
    segment = arena.place("x", array, Placement(side, 0xFF, alignment, overread), False)
    assert arena.bytes[segment.start : segment.end].tobytes() == array.tobytes()
    assert segment.start % max(alignment, 4) == 0
    assert segment.first % PAGE == segment.last % PAGE == 0
    if side == "left":
        assert segment.start == segment.first
    else:
        assert overread <= segment.last - segment.end < overread + max(alignment, 4)
    assert not arena.spoilt(segment)


def test_arrays_are_apart_and_their_pages_are_used_again(arena: Arena) -> None:
    """Two arrays never share or touch pages; what is given back is taken again."""
    how = Placement("right", 0)
    first, second = (arena.place(name, np.ones(3000), how, False) for name in "ab")
    assert second.first - first.last >= PAGE
    arena.free([first])
    again = arena.place("c", np.ones(10), how, False)
    assert again.first == first.first


@pytest.mark.parametrize("at", [-1, 0])
def test_a_byte_beside_an_array_is_seen(arena: Arena, at: int) -> None:
    """A changed byte of the padding, before or after, is an OOB_WRITE; one of an input is an INPUT_MUTATED."""
    segment = arena.place("x", np.ones(5, np.uint8), Placement("right", 0xFF, 16), False)
    arena.bytes[(segment.end if at == 0 else segment.start - 1)] ^= 1
    assert arena.spoilt(segment).startswith("OOB_WRITE: bytes were written")
    other = arena.place("y", np.ones(5, np.uint8), Placement("left", 0xFF), False)
    arena.bytes[other.start] ^= 1
    assert arena.spoilt(other) == "INPUT_MUTATED: y was changed"


def test_a_host_cannot_point_outside(arena: Arena) -> None:
    """A reply that places an array outside the memory is refused."""
    for at in (-1, arena.bytes.size - 3, "0", None, 2**70):
        with pytest.raises(ValueError, match="outside"):
            arena.read(np.dtype("<f4"), (1,), {"at": at})


needs_handler = pytest.mark.skipif(not faults.handler(), reason="needs a C compiler to say where a fault was")


@needs_handler
@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (ReadsPastTheEnd, "UNDECLARED_OVERREAD: a read 0 bytes past the end of x"),
        (ReadsFarPast, "OOB_READ: a read 1000 bytes past the end of x"),
        (ReadsAnEarlierCall, "OOB_READ: a read of element 0 of x after the call that it was given to"),
        (WritesX, "INPUT_MUTATED: a write to element 0 of x"),
        (WritesPastOut, "OOB_WRITE: a write 0 bytes past the end of out"),
        (ReadsNull, "CRASHED(SIGSEGV): a read of address 0x0, which is no argument"),
    ],
)
def test_a_fault_is_called_by_its_name(kind: type[Mine], verdict: str) -> None:
    """The address that could not be touched says what was done, and to which array."""
    assert verdict_on(kind).startswith(verdict)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (Mine, "passed"),
        (RenamesItself, "passed"),
        (WritesNothing, "STALE_OUTPUT: 5 of 5 elements of out were never written"),
        (UsesThePadding, "OOB_READ: the result changes with the bytes around the arguments"),
        (SaysWhatItSees, "RAISED: RuntimeError: signs []"),
        (ClosesStandardOutput, "STATE_CHANGED: standard output"),
        (RedirectsStandardOutput, "STATE_CHANGED: standard output"),
    ],
)
def test_what_is_seen_without_a_fault(kind: type[Mine], verdict: str) -> None:
    """Poison, padding and the comparison of both sides; and a backend sees nothing of the suite."""
    assert verdict_on(kind).startswith(verdict)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (BlindsTheWatch, "WROTE_TO_STDOUT: 'hello"),
        (BlindsTheWatchOfSignals, "STATE_CHANGED: signals blocked"),
        (BlindsTheWatchOfTheFolder, "STATE_CHANGED: the folder: /, before "),
        (BlindsTheWatchOfTheMask, "STATE_CHANGED: the file mode mask: 0077, before "),
    ],
)
def test_the_judge_sees_for_itself(kind: type[Mine], verdict: str) -> None:
    """A backend that silences the watch in its own process is seen from outside."""
    assert verdict_on(kind).startswith(verdict)


def test_the_first_thread_of_a_process_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a library that starts no threads when it is loaded, as BLAS on a machine of one core."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    codes = np.arange(32, dtype=np.uint8).reshape(32, 1) % 16
    with closing(Remote("name", "numpy", PATIENCE)) as remote:
        remote.load()
        remote.together([Call("run", "packing.pack", (codes, 4))] * 2, 2)


@pytest.mark.parametrize("method", isolation.methods())
def test_no_daemon_outlives_its_host(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has left the host's session ends with the host, even where the host ends by itself."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("HELD_OPEN", str(tmp_path / "pipe"))
    monkeypatch.setenv(isolation.VARIABLE, method)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert verdict_on(LeavesADaemon).startswith(("CRASHED: the process ended with status 0", "not loaded: NOT_ISO"))
    assert os.read(reader, 1) == b""  # BlockingIOError while it is held open
    os.close(reader)


DIES = """import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] != "capabilities":
        os.abort()
    said = {"name": "dies", "operations": {"packing.unpack": {}}}
    print(json.dumps({"id": request["id"], "result": said}), flush=True)"""


def test_a_program_that_dies_has_crashed_and_not_forked(tmp_path: Path) -> None:
    """The adapter of programs may have one; its death, and its start for the next call, are no child of a call."""
    (tmp_path / "dies.py").write_text(DIES)
    with closing(Remote("command", f"{sys.executable} {tmp_path / 'dies.py'}", PATIENCE)) as remote:
        remote.load()
        for _ in range(2):
            with pytest.raises(BrokenPromiseError, match=r"^CRASHED: .* has ended by signal 6"):
                remote.run("packing.unpack", np.zeros((1, 1), np.uint32), 4)


def test_a_closed_channel_is_said_in_words() -> None:
    """Not in those of an exception of the host."""
    words = "the channel to the process that judges was closed or replaced: Bad file descriptor"
    assert verdict_on(ClosesTheChannel) == f"CRASHED: the process ended with status 4: {words}"


def test_what_says_nonsense_of_its_profiles_fails_to_load() -> None:
    """What a backend claims is no part of the suite's own arguments."""
    assert verdict_on(ClaimsANumber).startswith("not loaded: DECLARATION_REFUSED: profiles in capabilities() is 5")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ForgesItsLimits, "a limit of packing.unpack is 'colour'; allowed: "),
        (ForgesItsOverread, "overread is -3; allowed: "),
        (ForgesItsDetails, "details in capabilities() is an object of type tuple; allowed: "),
    ],
)
def test_a_declaration_is_checked_out_of_reach_too(kind: type[Forges], words: str) -> None:
    """A backend that replaces the checks of the host is refused all the same, in the same words."""
    assert verdict_on(kind).startswith(f"not loaded: DECLARATION_REFUSED: {words}")


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's words on why it cannot run forge no line of what the command says."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    remote = Remote("name", f"misbehaving:{ForgesItsRefusal.__name__}", PATIENCE)
    with closing(remote.arena), pytest.raises(HostRefusedError, match=r"^no device mine: passed$"):
        remote.load()


def test_a_reply_names_no_more_memory_than_there_is(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """One array that is named many times, or that lies among the arguments, takes no memory of the judge."""
    read, at = arena.reading(), {"at": CONTROL + ARGUMENTS}
    assert read(np.dtype("|u1"), (5,), at).shape == (5,)
    with pytest.raises(ValueError, match="bytes of results"):
        read(np.dtype("|u1"), (RESULTS - 4,), at)
    with pytest.raises(ValueError, match="outside the memory of results"):
        arena.reading()(np.dtype("|u1"), (5,), {"at": CONTROL})
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with closing(Remote("name", f"misbehaving:{ForgesMuchMemory.__name__}", PATIENCE)) as remote, closing(remote.arena):
        remote.load()
        with pytest.raises(BrokenPromiseError, match=r"^WRONG: .* bytes of results$"):
            remote.run("packing.unpack", np.zeros((1, 1), np.uint32), 4)


def test_processes_of_python_itself_are_no_breach() -> None:
    """A backend may prepare with `multiprocessing`, whose processes start and whose helpers stay."""
    assert verdict_on(SpawnsAPool) == "passed"


def test_a_reply_out_of_turn_is_a_crash() -> None:
    """A backend that writes to the judge's channel does not get its words taken for results."""
    assert verdict_on(AnswersInTheJudgesPlace, 2.0).startswith(
        ("CRASHED: the process broke the protocol", "RAISED", "HUNG")
    )


def test_another_backend_is_refused_in_the_hosts_words() -> None:
    """A name that nobody offers is refused by the host; the judge imports nothing to find out."""
    before = set(sys.modules)
    remote = Remote("name", "abacus", PATIENCE)
    with closing(remote.arena), pytest.raises(HostRefusedError, match="backend is 'abacus'; allowed: "):
        remote.load()
    assert not [name for name in set(sys.modules) - before if name.startswith(("lowbit_numpy", "lowbit_cppyy"))]


def test_the_judge_imports_no_backend() -> None:
    """After a run of the suite on numpy its package was never imported in the process that judges."""
    code = (
        "import sys, pytest; pytest.main(['-p', 'lowbit_conformance.suite.plugin', '--pyargs', 'lowbit_conformance', "
        "'-c', '/dev/null', '-p', 'no:cacheprovider', '--import-mode=importlib', '-q', '--backend', 'numpy', "
        "'--op', 'packing.pack/C1', '--seeds', '0']); print([m for m in sys.modules if m.startswith('lowbit_numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


def test_arguments_are_refused_across_the_border() -> None:
    """An ArgumentError of the host is one here, with the same words."""
    remote = Remote("name", "numpy", PATIENCE)
    try:
        with pytest.raises(ArgumentError, match="bits is 5; allowed: "):
            remote.run("packing.unpack", np.zeros((1, 1), np.uint32), 5)
    finally:
        remote.close()
        remote.arena.close()


def test_a_host_ends_with_its_judge() -> None:
    """When the judge is killed no host is left behind."""
    code = (
        "from lowbit_conformance.isolation.remote import Remote; import time; "
        "r = Remote('name', 'numpy', 60.0); r.load(); "
        "print(r._host._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as judge:
        assert judge.stdout is not None
        host = int(judge.stdout.readline())
        judge.send_signal(signal.SIGKILL)
        judge.wait()
    assert has_ended(host), "the host lives on"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os._exit(7)", "CRASHED: the process ended with status 7"),
        ("import os, time; os.write(0, b'x' * 8); time.sleep(600)", "CRASHED: the process broke the protocol"),
        (
            "import os, time; os.write(0, b'\\x02' + bytes(7) + b'[]'); time.sleep(600)",
            "CRASHED: the process broke",
        ),
        ("import os, time; os.write(0, bytes(6) + b'\\xff\\xff'); time.sleep(600)", "CRASHED: the process broke"),
    ],
)
def test_a_broken_channel_ends_in_words(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    """A host that ends, talks nonsense, or announces a reply larger than the world is an error, never a hang."""
    monkeypatch.setattr("lowbit_conformance.isolation.process.BOOT", program)
    with pytest.raises(HostEndedError, match=words.replace("(", r"\(")):
        HostProcess(arena)


def test_a_process_that_dies_after_its_answer_has_crashed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread faults when the answer is out: the handlers that go first are not called a change of handlers."""
    host = HostProcess(arena)
    host.remember()
    os.kill(host._process.pid, signal.SIGSEGV)
    monkeypatch.setattr(host, "_state_now", lambda: {"others": ""})
    with pytest.raises(HostEndedError, match=r"CRASHED\(SIGSEGV\)"):
        host.seen()


def test_the_environment_says_nothing_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest sets is not handed on; what the user set is, and by what a backend is set."""
    mine = ("MINE", "LOWBIT_CPPYY_ISA", "LOWBIT_NUM_THREADS", "LOWBIT_CACHE")
    for name in (*mine, "LOWBIT_TESTING"):
        monkeypatch.setenv(name, "1")
    environment = neutral_environment()
    assert all(environment[name] == "1" for name in mine) and "LOWBIT_TESTING" not in environment
    assert not [name for name in environment if name.startswith("PYTEST")]
    assert "conformance" not in BOOT
