"""Ctrl-C while a device works: taken where everything is in order, and a second one at once."""

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.system.interpreters import python_command
from lowbit.system.interrupts import deferred
from lowbit.system.storage import CACHE_VARIABLE
from lowbit_cuda.port import DevicePort
from lowbit_gpusim.backend import NumpyOnSim
from lowbit_gpusim.sim import memory

TRAINED = ROOT / "bench/mixtral/model"


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Python's own, as in a process of its own, and as it was afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_a_check() -> None:
    """It is raised there, and once; what is reported to a progress is reported first."""
    reported: list[tuple[int, int]] = []
    with deferred() as interrupts:
        interrupts.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.checked(lambda *work: reported.append(work))(1, 2)
        interrupts.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert reported == [(1, 2)]


def test_a_second_one_does_not_wait() -> None:
    """As where a device never answers."""
    with deferred() as interrupts:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        interrupts.waiting = False


def test_one_that_nobody_was_told_of_is_not_lost() -> None:
    """It is raised when the block ends, but never in place of an error."""
    with pytest.raises(KeyboardInterrupt), deferred():
        press()
    with pytest.raises(ValueError), deferred():
        press()
        raise ValueError


def test_where_somebody_else_sees_to_them() -> None:
    """Another handler is left alone, and so is everything on other threads."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred() as interrupts:
        press()
        interrupts.check()
    signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]

    def elsewhere() -> None:
        with deferred():
            seen.append(0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert seen == [signal.SIGINT, 0]


@pytest.mark.parametrize("place", [20, 300, 700, 1500, 3300])
def test_an_interrupt_in_the_midst_of_a_call(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is loaded, a prompt read, tokens made: status 130, what was begun is ended, all is given back.

    It comes when the device has noted some of the bytes that an operation touches, and not the rest.
    """
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    devices, count, add, opened = list[DevicePort](), 0, memory.Ranges.add, NumpyOnSim.open_port

    def pressed(ranges: memory.Ranges, begin: int, end: int) -> None:
        nonlocal count
        count += 1
        if count == place:
            press()
        add(ranges, begin, end)

    def open_port(backend: NumpyOnSim, budget: int | None) -> DevicePort:
        devices.append(opened(backend, budget))
        return devices[-1]

    monkeypatch.setattr(memory.Ranges, "add", pressed)
    monkeypatch.setattr(NumpyOnSim, "open_port", open_port)
    arguments = ["--model", str(TRAINED), "--prompt", "Al", "--tokens", "9", "--device-memory", "4MiB"]
    result = CliRunner().invoke(app, ["generate", *arguments, "--backend", "lowbit_gpusim.backend:NumpyOnSim"])
    assert result.exit_code == 130, result.exception
    assert count > place
    assert [device.used for device in devices] == [0]


WHILE_IMPORTING = """
import signal, sys
class Finder:
    def find_spec(name, *rest):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
import lowbit.__main__
sys.argv = ["lowbit", "profiles"]
lowbit.__main__.main()
"""


@pytest.mark.parametrize("module", ["typer", "lowbit.cli.commands", "lowbit.cli.profiles", "numpy", "rich.table"])
def test_while_modules_are_imported(module: str) -> None:
    """An interrupt is one line as well, before there is a command and while a command is imported."""
    script = WHILE_IMPORTING.format(module=module)
    done = subprocess.run(python_command("-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lowbit: interrupted\n")


@pytest.mark.parametrize("place", ["atexit.register(press)", "press()"])
def test_after_the_command_has_ended(place: str) -> None:
    """While functions of `atexit` run, and in the last moment of the command."""
    script = f"""
import atexit, signal, sys, types
def press(*_): signal.raise_signal(signal.SIGINT)
def run():
    print("done")
    {place}
    raise SystemExit(0)
import lowbit
sys.modules["lowbit.cli"] = types.SimpleNamespace(main=run)
import lowbit.__main__ as m
m.main()
"""
    done = subprocess.run(python_command("-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "lowbit: interrupted\n")


AT_THE_END = """
import atexit, os, signal, sys, threading, time
import lowbit.__main__
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
if {place!r} == "atexit":
    import lowbit.cli
    run = lowbit.cli.main
    def main():
        atexit.register(press)
        run()
    lowbit.cli.main = main
else:
    def later():
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(600)
    threading.Thread(target=later).start()
sys.argv = ["lowbit", *{arguments!r}]
lowbit.__main__.main()
"""


@pytest.mark.parametrize("place", ["atexit", "thread"])
@pytest.mark.parametrize("arguments", [["profiles", "--json"], ["logits"]], ids=["done", "failed"])
def test_while_python_ends(place: str, arguments: list[str]) -> None:
    """While it runs what others registered for its end, or waits for threads: at once, and the answer is out."""
    script = AT_THE_END.format(place=place, arguments=arguments)
    done = subprocess.run(python_command("-c", script), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "lowbit: interrupted"
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert not done.stdout or json.loads(done.stdout)
    assert bool(done.stdout) == (arguments[0] == "profiles")


LAST = """
import os, signal, sys
import lowbit.__main__
class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)
sys.kept = Last()
sys.argv = ["lowbit", "profiles", "--json"]
lowbit.__main__.main()
"""


def test_after_python_has_dropped_its_handlers() -> None:
    """The command is done and its answer is out, so it ends as it would have."""
    done = subprocess.run(python_command("-c", LAST), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)
