"""Backends that do one forbidden thing each, in a module of their own, so that it imports no test framework."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from lowbit.backend import Backend, Capabilities, Declaration, PreparedLinear
from lowbit.contract.rounding import Arithmetic


class Mine(Backend):
    """Declares products of 8 bits; a subclass says what they do instead."""

    name = "mine"

    def capabilities(self) -> Capabilities:
        declared = Declaration({"bits": (8,)}, Arithmetic("dequantised"))
        return Capabilities({"linear.qgemv": declared, "packing.unpack": Declaration()})

    def _prepare(self, matrix: Any) -> PreparedLinear:
        return Product(self, matrix)

    def act(self, x: Any, out: Any) -> None:
        out[:] = x.sum()


class RenamesItself(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.CDLL(None).prctl(15, b"\xff\xfe", 0, 0, 0)  # PR_SET_NAME: no text in UTF-8
        super().act(x, out)


class Product(PreparedLinear):
    def __init__(self, owner: Mine, matrix: Any) -> None:
        super().__init__(owner.name, matrix.rows, matrix.columns, matrix.nbytes)
        self.owner = owner

    def _qgemv(self, x: Any, out: Any) -> None:
        self.owner.act(x, out)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class ReadsPastTheEnd(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.string_at(address(x), x.nbytes + 4)


class ReadsFarPast(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.string_at(address(x) + x.nbytes + 1000, 4)


class ReadsAnEarlierCall(Mine):
    seen: int = 0

    def act(self, x: Any, out: Any) -> None:
        if self.seen:
            ctypes.string_at(self.seen, 4)
        self.seen, out[:] = address(x), 0
        self.kept = x


class WritesX(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.memset(address(x), 0, 4)


class WritesPastOut(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.memset(address(out), 0, out.nbytes + 4)


class ReadsNull(Mine):
    def act(self, x: Any, out: Any) -> None:
        ctypes.string_at(0)


class BlindsTheWatch(Mine):
    """Takes away what looks after the process from inside it, and then does as it likes."""

    def act(self, x: Any, out: Any) -> None:
        host: Any = sys.modules["__main__"]
        host.Watch.breaches = lambda self, preparing: []
        self.misbehave()
        out[:] = 0

    def misbehave(self) -> None:
        os.write(1, b"hello")


class BlindsTheWatchOfSignals(BlindsTheWatch):
    def misbehave(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class BlindsTheWatchOfTheFolder(BlindsTheWatch):
    def misbehave(self) -> None:
        os.chdir("/")


class BlindsTheWatchOfTheMask(BlindsTheWatch):
    def misbehave(self) -> None:
        os.umask(0o077)


class ClaimsANumber(Mine):
    def capabilities(self) -> Capabilities:
        nonsense: Any = 5
        return Capabilities({"packing.unpack": Declaration()}, profiles=nonsense)


class ClosesStandardOutput(Mine):
    def act(self, x: Any, out: Any) -> None:
        os.close(1)
        out[:] = 0


class ClosesTheChannel(Mine):
    """Closes the socket to the judge."""

    def act(self, x: Any, out: Any) -> None:
        os.closerange(3, 300)
        out[:] = 0


class RedirectsStandardOutput(Mine):
    def act(self, x: Any, out: Any) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        out[:] = 0


class LeavesADaemon(Mine):
    """Starts a process that leaves its session and holds a pipe open, and ends itself."""

    def act(self, x: Any, out: Any) -> None:
        os.open(os.environ["HELD_OPEN"], os.O_WRONLY)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(100)
        os._exit(0)


class WritesNothing(Mine):
    def act(self, x: Any, out: Any) -> None:
        pass


class UsesThePadding(Mine):
    def capabilities(self) -> Capabilities:
        return Capabilities(super().capabilities().operations, overread=64)

    def act(self, x: Any, out: Any) -> None:
        out[:] = ctypes.string_at(address(x) + x.nbytes, 1)[0]


class AnswersInTheJudgesPlace(Mine):
    def act(self, x: Any, out: Any) -> None:
        for descriptor in range(3, 200):
            with suppress(OSError):
                os.write(descriptor, b"\x02\0\0\0\0\0\0\0{}")
        time.sleep(5)


class SaysWhatItSees(Mine):
    """Fails with what it can see of the suite."""

    def act(self, x: Any, out: Any) -> None:
        import traceback

        signs = [name for name in sys.modules if name.startswith(("lowbit_conformance", "pytest", "_pytest"))]
        signs += [name for name in os.environ if "PYTEST" in name]
        signs += [part for part in sys.argv if "conformance" in part]
        signs += [frame.filename for frame in traceback.extract_stack() if "conformance/lowbit" in frame.filename]
        raise RuntimeError(f"signs {sorted(signs)}")


class SpawnsAPool(Mine):
    """Well-behaved: prepares with processes of `multiprocessing`, and shares memory, for which Python keeps helpers."""

    def _prepare(self, matrix: Any) -> PreparedLinear:
        from multiprocessing import get_context
        from multiprocessing.shared_memory import SharedMemory

        process = get_context("spawn").Process(target=os.getpid)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"exit code {process.exitcode}")
        shared = SharedMemory(create=True, size=4096)
        shared.close()
        shared.unlink()
        return super()._prepare(matrix)

    def act(self, x: Any, out: Any) -> None:
        out[:] = 0


class Forges(Mine):
    """Writes its replies itself: `edit` has the last word on each of them, past all checks of the host."""

    def __init__(self) -> None:
        host: Any = sys.modules["__main__"]
        send = host.send
        host.send = lambda channel, message: send(channel, self.edit(message))

    def edit(self, message: Any) -> Any:
        return message


class ForgesItsLimits(Forges):
    def edit(self, message: Any) -> Any:
        if "capabilities" in message:
            message["capabilities"]["operations"]["packing.unpack"]["limits"] = {"colour": ["red"]}
        return message


class ForgesItsOverread(Forges):
    def edit(self, message: Any) -> Any:
        if "capabilities" in message:
            message["capabilities"]["overread"] = -3
        return message


class ForgesItsDetails(Forges):
    def edit(self, message: Any) -> Any:
        if "capabilities" in message:
            message["capabilities"]["details"] = [1, 2]
        return message


class ForgesItsRefusal(Forges):
    def edit(self, message: Any) -> Any:
        if "capabilities" in message:
            return {"refused": "no device\nmine: passed", "token": message["token"]}
        return message


class ForgesMuchMemory(Forges):
    """Answers with one array of a gigabyte many times, of pages that nobody has written."""

    def edit(self, message: Any) -> Any:
        if "outcomes" in message:
            array = {"array": "|u1", "shape": [1 << 29], "at": (3 << 30) + (1 << 20)}
            message["outcomes"] = [{"result": [array] * 100}] * len(message["outcomes"])
        return message


class NeverSaysWhatItCan(Mine):
    def capabilities(self) -> Capabilities:
        time.sleep(600)
        return super().capabilities()


class TakesASecond(Mine):
    def act(self, x: Any, out: Any) -> None:
        time.sleep(1.0)
        super().act(x, out)


class WaitsInACall(Mine):
    """Says in a named pipe that a call has begun, and does not end it."""

    def act(self, x: Any, out: Any) -> None:
        with open(os.environ["HAS_BEGUN"], "wb") as pipe:
            pipe.write(b"x")
        time.sleep(600)
