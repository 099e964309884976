"""A backend cannot reach the process that judges it, and what it writes into the events of a run fails the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import attacking
import pytest
from hosting import failures_of, verdict_on
from misbehaving import Mine
from paths import SUPPORT

from lowbit_conformance.cli.conformance import Run
from lowbit_conformance.isolation import confinement
from lowbit_conformance.isolation import methods as isolation
from lowbit_conformance.isolation.arena import Arena
from lowbit_conformance.isolation.events import Event, EventPipe, EventReader, signed
from lowbit_conformance.isolation.process import HostEndedError, HostProcess
from lowbit_conformance.suite.tally import Tally, Verdict

HERE = SUPPORT
NOBODY = 65534
USERS = [os.getuid()] + ([NOBODY] if os.getuid() == 0 else [])
METHODS = ["landlock", "namespaces"]
KEY = bytes(32)


# **What a host can reach.**


def in_child(work: Callable[[], str]) -> str:
    """What a function says that runs in a child process, or its exception."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = work()
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def become(user: int) -> None:
    """Be this user, with files of its own in ``/proc`` again, as after it has started a program."""
    if user != os.getuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        attacking.LIBC.prctl(4, 1, 0, 0, 0)


@pytest.fixture(params=USERS, ids=lambda user: "root" if user == 0 else "user")
def victim(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A user, and a process of that user which waits."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        become(request.param)
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    yield request.param, process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def attack(method: str, user: int, process: int) -> str:
    """The attacks that succeed after this method has separated the attacker; a word where it cannot be had."""
    become(user)
    if confinement.confine([method]) != method:
        return "unavailable"
    return json.dumps(attacking.successes([process]))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_reaches_a_process_outside(method: str, victim: tuple[int, int]) -> None:
    """As root and as an ordinary user, by every way that there is; without a method they succeed."""
    assert set(json.loads(in_child(lambda: attack("none", *victim)))) >= {
        "open_memory",
        "send_a_signal",
        "trace",
        "limit",
    }
    said = in_child(lambda: attack(method, *victim))
    if said == "unavailable":
        assert method not in available(victim[0]), "a method that works here was not used"
    else:
        assert json.loads(said) == []


def available(user: int) -> set[str]:
    """The methods that this system has for a user, asked of the system in another way."""
    found = set[str]()
    if attacking.LIBC.syscall(444, None, 0, 1) >= 6:
        found.add("landlock")

    def make() -> str:
        become(user)
        return str(attacking.LIBC.unshare(confinement.NEW_USER | confinement.NEW_PROCESSES))

    return found | ({"namespaces"} if in_child(make) == "0" else set())


@pytest.mark.parametrize("method", METHODS)
def test_a_backend_reaches_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from a call of a backend, against the judge and the process above it."""
    monkeypatch.setenv(isolation.VARIABLE, "none")
    said = verdict_on(attacking.Attacks)
    for each in ("open_a_descriptor", "limit", "set_priority", "set_processors", "choose_for_want_of_memory"):
        assert each in said
    if method in available(os.getuid()):
        monkeypatch.setenv(isolation.VARIABLE, method)
        # In a run the judge's files are closed to all but root; the process of this test is not. To root a domain
        # closes them. Not every user can write to all of them.
        reached = [each.__name__ for each in attacking.FILES if each.__name__ in said]
        open_files = reached if method == "landlock" and os.getuid() else []
        assert verdict_on(attacking.Attacks).startswith(f"RAISED: RuntimeError: succeeded: {open_files}")


CHAINS = [  # every other one in each run of the tests: both methods and both kinds are among them
    ("landlock", attacking.StartsAChain),
    ("landlock", attacking.StartsAForest),
    ("namespaces", attacking.StartsAForest),
    ("namespaces", attacking.StartsAChain),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain[0]}-{chain[1].__name__}")
def test_chains_of_processes_end_with_their_host(
    chain: tuple[str, type[Mine]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However fast they start each other: nobody holds the pipe open any more when there is a verdict."""
    method, kind = chain
    if method not in available(os.getuid()):
        return
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("HELD_OPEN", str(pipe))
    monkeypatch.setenv(isolation.VARIABLE, method)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert verdict_on(kind, 2.0).startswith("HUNG")
        assert os.read(reader, 1) == b""  # BlockingIOError while it is held open
    finally:
        os.close(reader)


def test_terminals_and_shared_memory_of_the_user_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """In namespaces: what is left there goes with them."""
    if "namespaces" not in available(os.getuid()):
        return
    monkeypatch.setenv(isolation.VARIABLE, "namespaces")
    name, key = f"left-{os.getpid()}", 0x6C0B0000 + os.getpid()
    monkeypatch.setenv("SHARED_MEMORY", name)
    monkeypatch.setenv("SHARED_KEY", str(key))
    assert verdict_on(attacking.LeavesSharedMemory).startswith("CRASHED: the process ended with status 1")
    assert not Path("/dev/shm", name).exists()
    assert attacking.LIBC.shmget(key, 4096, 0o600) == -1
    ours, theirs = os.openpty()  # so that there is one
    assert verdict_on(attacking.WritesToTheTerminal).startswith("RAISED: RuntimeError: terminals []")
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("method", [*METHODS, "none"])
def test_what_a_backend_needs_works(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, programs, signals to its own children, its own files in ``/proc``."""
    if method in {*available(os.getuid()), "none"}:
        monkeypatch.setenv(isolation.VARIABLE, method)
        assert verdict_on(attacking.RunsPrograms) == "passed"


def test_the_next_host_is_separated_as_the_first() -> None:
    """A backend that makes a method fail does not get a weaker one: there is no other host then."""
    with closing(Arena()) as arena, pytest.raises(HostEndedError, match=r"NOT_ISOLATED: .* by nothing-known"):
        HostProcess(arena, ["nothing-known"])


def test_a_backend_does_not_learn_how_it_is_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that chooses a method is the judge's."""
    monkeypatch.setenv(isolation.VARIABLE, "none")
    from lowbit_conformance.isolation.process import neutral_environment

    assert isolation.VARIABLE not in neutral_environment()


def test_the_shared_memory_keeps_its_size() -> None:
    """A host that made it shorter would end the judge by a signal."""
    assert verdict_on(attacking.ShortensTheMemory) == "passed"


# **Runs.**


@pytest.mark.parametrize("kind", [attacking.WritesEvents, attacking.WritesNoText])
def test_lines_of_a_backend_fail_the_run(kind: type[Mine]) -> None:
    """Where nothing separates it, a backend reaches the pipe as root; what it writes there is a sentence."""
    if os.getuid() == 0:  # the judge's files are closed to another process of the same ordinary user
        assert any(failure["verdict"] == "FORGED" for failure in failures_of(kind, "none"))
    assert {failure["verdict"] for failure in failures_of(kind, "")} == {"WRONG"}


def test_a_judge_that_is_killed_fails_the_run() -> None:
    """Its death is the verdict on the case that was running; the others are undecided."""
    failures = failures_of(attacking.KillsTheJudge, "none")
    assert [failure["verdict"] for failure in failures] == ["CRASHED(SIGKILL)"]
    assert {failure["verdict"] for failure in failures_of(attacking.KillsTheJudge, "")} == {"WRONG"}


def test_files_that_change_during_a_run_fail_it(tmp_path: Path) -> None:
    """A test module that a backend replaces has been imported before, and the change is seen at the end."""
    import lowbit_conformance

    copy = tmp_path / "lowbit_conformance"
    shutil.copytree(Path(lowbit_conformance.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    run = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; from lowbit.__main__ import main; main()"
    words = ["conformance", "attacking:ReplacesATest", "--json", "--quick", "--op", "packing.unpack/C1"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{HERE}", "SUITE_FOLDER": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", run, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["counts"]["specified"] > 2  # the tests as they were
    assert [failure["message"][:27] for failure in report["failures"]][-1] == "FORGED: files of lowbit or "


# **Events.**


def lines(*events: dict[str, Any]) -> list[bytes]:
    return [signed(KEY, number, json.dumps(event)) for number, event in enumerate(events)]


def test_events_arrive_as_they_were_sent() -> None:
    """In pieces of any size, with text that is not ASCII and lone surrogates."""
    reader, writer = os.pipe()
    pipe = EventPipe(writer, KEY)
    pipe.send("start", id="ä\ud800")
    pipe.send("finished")
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    events = EventReader(KEY)
    found = [event for at in range(0, len(data), 7) for event in events.feed(data[at : at + 7])]
    assert found == [{"event": "start", "id": "ä\ud800"}, {"event": "finished"}]
    assert not events.forged


THREE = lines({"event": "start", "id": "a"}, {"event": "verdict"}, {"event": "finished"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([THREE[0], b'{"event": "finished"}\n', *THREE[1:]], "did not write"),
        ([THREE[0], b"\xff\0\n", *THREE[1:]], "did not write"),
        ([THREE[0], b"\n", *THREE[1:]], "did not write"),
        ([THREE[0], b"abc ", *THREE[1:]], "did not write"),
        ([THREE[0], THREE[2]], "event 2 where event 1 was due"),
        ([THREE[0], THREE[0], *THREE[1:]], "event 0 where event 1 was due"),
        ([THREE[1], THREE[0], THREE[2]], "event 1 where event 0 was due"),
        ([THREE[0], signed(bytes(31) + b"1", 1, '{"event": "finished"}')], "did not write"),
        ([THREE[0], THREE[1].replace(b"verdict", b"Verdict"), THREE[2]], "did not write"),
    ],
    ids=["json", "bytes", "empty", "joined", "missing", "repeated", "exchanged", "key", "changed"],
)
def test_what_the_judge_did_not_write_is_noticed(data: list[bytes], words: str) -> None:
    """Lines of others, and lines that are missing, repeated, exchanged or changed."""
    events = EventReader(KEY)
    for part in data:
        list(events.feed(part))
    assert words in events.forged


def test_a_line_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never ended is not kept."""
    monkeypatch.setattr("lowbit_conformance.isolation.events.MOST_LINE", 1000)
    events = EventReader(KEY)
    for _ in range(20):
        assert not list(events.feed(b"x" * 400))
    assert "a line of more than 1000 bytes" in events.forged
    assert len(events._rest) <= 1000


# **Every case once.**

CASES = [f"packing.pack/C1/lattice/{number}-s0" for number in range(13)]
PASSED = [vars(Verdict(case, "passed")) for case in CASES]


def ended(verdicts: list[dict[str, Any]], status: int = 0, finished: bool = True) -> list[Verdict]:
    """The failures of a run with these verdicts that ended so."""
    run = Run(Tally("mine"))
    run.take({"event": "expected", "ids": CASES})
    run.take({"event": "loaded", "isolation": "landlock"})
    for verdict in verdicts:
        run.take({"event": "verdict"} | verdict)
    if finished:
        run.take({"event": "finished"})
    found = [Verdict(case, "failed", text) for case, text in run.problems("", "", status, "")]
    whole = replace(run.tally, verdicts=[*run.tally.verdicts, *found])
    assert (whole.verdict == "passed") == (not found)
    return found


def test_a_whole_run_passes() -> None:
    """Each case once, an end by itself."""
    assert not ended(PASSED)


@pytest.mark.parametrize(
    ("verdicts", "status", "finished", "words"),
    [
        (PASSED[:2], 0, True, "UNDECIDED: 11 of 13 cases have no verdict"),
        ([*PASSED, PASSED[0]], 0, True, "FORGED: there were two verdicts on"),
        ([*PASSED[1:], PASSED[1]], 0, True, "FORGED: there were two verdicts on"),
        ([*PASSED, vars(Verdict("packing.pack/C1/x", "passed"))], 0, True, "FORGED: there was a verdict on"),
        (PASSED, -9, True, "CRASHED(SIGKILL)"),
        (PASSED, -40, True, "CRASHED(SIG40)"),
        (PASSED, 3, True, "CRASHED: the process that judges ended with status 3"),
        (PASSED, 1, True, "CRASHED: the process that judges ended with status 1"),
        (PASSED, 0, False, "CRASHED: the process that judges ended with status 0"),
    ],
    ids=["few", "twice", "instead", "unknown", "killed", "real-time", "status 3", "status 1", "unfinished"],
)
def test_any_other_run_fails(verdicts: list[dict[str, Any]], status: int, finished: bool, words: str) -> None:
    """A case without a verdict, with two, one that nobody announced; an end that is not the judge's own."""
    assert any(failure.message.startswith(words) for failure in ended(verdicts, status, finished))


def test_cases_that_are_added_need_verdicts() -> None:
    """Those of sizes that a declaration names come once, before the verdicts, and no case twice."""

    def forged(*events: Event) -> bool:
        run = Run(Tally("mine"))
        for event in ({"event": "expected", "ids": CASES[:2]}, *events):
            run.take(dict(event))
        return bool(run.impossible)

    more, loaded = {"event": "added", "ids": CASES[2:]}, {"event": "loaded", "isolation": "landlock"}
    verdict: Event = {"event": "verdict", **PASSED[5]}
    assert not forged(more, loaded, verdict)
    assert forged(loaded, verdict)
    assert forged(more, more) and forged(loaded, more) and forged({"event": "added", "ids": CASES[:1]})


def test_a_tally_with_undecided_cases_has_not_passed() -> None:
    """Whoever counts; a verdict on the run as a whole decides no case."""
    assert Tally("mine", collected=3, verdicts=[Verdict(case, "passed") for case in CASES[:2]]).verdict == "failed"
    assert Tally("mine", collected=2, verdicts=[Verdict(case, "passed") for case in CASES[:2]]).verdict == "passed"
