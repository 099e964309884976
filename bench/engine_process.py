"""Engines in processes of their own, which are asked one after the other."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from engines import OTHERS, Continued, Engine, Setting, own
from peers.base import AbsentError

from lowbit.system.storage import cache_folder

WORKER = Path(__file__).with_name("engine_worker.py")
QUANTISER = WORKER.with_name("engine_llama.py")


class Process:
    """An engine that runs; leaving it as a context manager ends its process.

    Attributes:
        name: of the engine.
        version: of its distribution.
        batches: whether it continues several sequences at once.
        peak: the most memory that it had in use so far, in MB.
        model_bytes: of its file.
        failure: why it takes no further part; empty while it does.

    Raises:
        AbsentError: it cannot run.
    """

    def __init__(self, engine: Engine, setting: Setting, isa: str | None) -> None:
        self.name, self.peak, self.model_bytes, self.failure = engine.name, 0.0, setting.file.stat().st_size, ""
        self._opened = ExitStack()
        self._said = self._opened.enter_context(TemporaryFile())  # noqa: SIM115  # the stack closes it
        given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(setting).items()}
        words = [sys.executable, str(WORKER), engine.name, isa or "", json.dumps(given)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        try:
            told = self._answer()
            if "absent" in told:
                raise AbsentError(told["absent"])
        except AbsentError:
            self._end()
            raise
        self.version, self.batches = str(told["version"]), bool(told["batches"])

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def continued(self, prompt: list[int], count: int) -> Continued:
        """As `engines.Generator.continued`."""
        told = self._asked({"prompt": prompt, "count": count})
        self.peak = told.pop("peak_megabytes")
        return Continued(**told)

    def rounds(self, prompts: list[list[int]], count: int) -> float:
        """As `engines.Stepwise.rounds`."""
        return float(self._asked({"prompts": prompts, "rounds": count})["seconds"])

    def nats(self, window: list[int]) -> float:
        """As `engines.Stepwise.nats`."""
        return float(self._asked({"window": window})["nats"])

    def _asked(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            told = [each for each in lines if "ASSERT" in each or "Error" in each] or lines or [""]
            self.failure = f"its process ended with status {status}: {told[-1][:200]}"
            raise AbsentError(self.failure)
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        with suppress(BrokenPipeError):  # it may have ended already
            self._process.communicate()
        self._opened.close()


def stored_as(file: Path, name: str) -> Path:
    """The file in another type, made in the cache once.

    Raises:
        AbsentError: llama.cpp's quantiser is not there, or fails.
    """
    said = f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}"
    out = cache_folder() / f"{file.stem}.{hashlib.sha256(said.encode()).hexdigest()[:8]}.{name}.gguf"
    if not out.exists():
        words = [sys.executable, str(QUANTISER), str(file), str(out), name]
        done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["?"])[-1][:200]
            raise AbsentError(f"the file in {name} was not made: {why}")
    return out


def started(engine: Engine, setting: Setting, isa: str = "") -> Process:
    """The process of an engine.

    Raises:
        AbsentError: it cannot run here.
    """
    file = setting.file if engine.stored is None else stored_as(setting.file, engine.stored)
    return Process(engine, replace(setting, file=file), isa or None)


@contextmanager
def running(
    setting: Setting, isas: Sequence[str], only: Sequence[str] = ()
) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """The engines that can run here, and why others cannot.

    Args:
        setting: of the run.
        isas: instruction sets of lowbit; empty for the best.
        only: words of which the name of an engine must have one; empty for all engines.
    """
    found, absent = list[Process](), dict[str, str]()
    wanted = [(engine, isa) for isa in isas or [""] for engine in own(isa or None)]
    wanted += [(engine, "") for engine in OTHERS]
    with ExitStack() as opened:
        for engine, isa in wanted:
            if only and not any(word in engine.name for word in only):
                continue
            try:
                found.append(opened.enter_context(started(engine, setting, isa)))
            except AbsentError as failure:
                absent[engine.name] = str(failure)
        yield found, absent
