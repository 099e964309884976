"""Kernels under sanitizers: AddressSanitizer and UndefinedBehaviorSanitizer with fibers, and ThreadSanitizer with an
operating-system thread for each thread of a block.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from lowbit.arrays import Array
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.build import CORE, Flavor
from lowbit_gpusim.shim.launching import POISON, WRITE, KernelError, Launch, Mutation, access_code, slot
from lowbit_gpusim.shim.runner import bytes_of, kernel_sources

TIMEOUT = 60  # seconds for launches under a sanitizer
# Without addresses and process numbers, so that messages are reproducible.
_COMPLAINT = re.compile(r"((?:Address|Thread)Sanitizer: [\w -]+?(?= on | \(pid|:|$)|runtime error: .*)", re.M)
_PLACE = re.compile(r"(\w+\.cuh):(\d+)")

DRIVER, SYSTEM = (str(Path(__file__).parent / "shim_programs" / name) for name in ("driver.cpp", "system.cpp"))
SANITIZED = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fsanitize-sections=lowbit_shared"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # checks are called: compiled in half the time
)
ADDRESS = Flavor(
    "address",
    ("-O0", *SANITIZED),
    ("-O1", *SANITIZED),
    ("-fsanitize=address,undefined",),
    (*CORE, "fibers.cpp", DRIVER),
)
THREAD = Flavor(
    "thread",
    ("-O1", "-fsanitize=thread"),
    ("-O1",),
    ("-fsanitize=thread", "-pthread"),
    (*CORE, SYSTEM, DRIVER),
)


class Sanitized:
    """Kernels under a sanitizer, in a separate process for each call of `run`.

    Args:
        flavor: `ADDRESS` or `THREAD`.
        sources: as for `Watched`.

    Raises:
        UnavailableError: there is no g++ with this sanitizer, or it refuses a source.
    """

    def __init__(self, flavor: Flavor, sources: Sequence[Path] | None = None) -> None:
        self._program = build.build(kernel_sources() if sources is None else sources, flavor)

    def run(self, *launches: Launch) -> None:
        """Run launches one after another, which write to their arrays.

        Raises:
            KernelError: of the kind ``sanitizer`` what the sanitizer says, or what the runtime does; no array has
                changed then.
        """
        try:
            done = subprocess.run(
                [*self._prefix, str(self._program)],
                input=b"".join(_serialized(launch) for launch in launches),
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
                env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"},
            )
        except subprocess.TimeoutExpired:
            name = ", ".join(dict.fromkeys(launch.kernel.name for launch in launches))
            raise KernelError(name, "endless", f"the process has not ended after {TIMEOUT} seconds") from None
        answers = _answers(done.stdout)
        results: list[tuple[Array, bytes]] = []
        for launch in launches:
            message = next(answers, None)
            if message is None:
                raise KernelError(launch.kernel.name, *_complaint(done.stderr.decode(errors="replace")))
            if message:
                kind, _, rest = message.decode().partition("\n")
                raise KernelError(launch.kernel.name, kind, rest)
            for parameter in launch.kernel.parameters:
                if parameter.access in ("write", "update"):
                    results.append((launch.arrays[parameter.name], next(answers)))
        if done.returncode:
            raise KernelError(launches[-1].kernel.name, *_complaint(done.stderr.decode(errors="replace")))
        for array, result in results:
            bytes_of(array)[:] = np.frombuffer(result, np.uint8)

    @cached_property
    def _prefix(self) -> list[str]:
        # ThreadSanitizer needs limited randomisation of the address space.
        setarch = shutil.which("setarch")
        return [setarch, "-R"] if setarch else []


def _serialized(launch: Launch) -> bytes:
    """A launch in the format that driver.cpp reads."""
    kernel, options = launch.kernel, launch.options
    mutation = options.mutation or Mutation("", 0)
    sizes = (*kernel.grid(launch.numbers), kernel.block, kernel.shared(launch.numbers))
    numbers = (*sizes, options.seed, int(options.strict), mutation.line, len(kernel.parameters))
    parts = [np.array(numbers, np.int64).tobytes(), _text(kernel.name.encode()), _text(mutation.file.encode())]
    for parameter in kernel.parameters:
        if parameter.access is None:
            parts += [np.int64(0).tobytes(), slot(parameter, launch.numbers[parameter.name])]
            continue
        given = bytes_of(launch.arrays[parameter.name])
        poison = access_code(parameter) == WRITE
        parts += [np.int64(1).tobytes(), _text(parameter.name.encode())]
        parts.append(np.array([access_code(parameter), parameter.multiple], np.int64).tobytes())
        parts.append(_text(bytes([POISON]) * given.nbytes if poison else given.tobytes()))
    return b"".join(parts)


def _text(content: bytes) -> bytes:
    return np.int64(len(content)).tobytes() + content


def _answers(output: bytes) -> Iterator[bytes]:
    """The complete parts of an answer."""
    while len(output) >= 8:
        size = int.from_bytes(output[:8], "little")
        if len(output) < 8 + size:
            return
        yield output[8 : 8 + size]
        output = output[8 + size :]


def _complaint(said: str) -> tuple[str, str]:
    """The kind and message of the error of a process that did not finish."""
    found = _COMPLAINT.search(said)
    if found:
        places = dict.fromkeys(f"{name}:{line}" for name, line in _PLACE.findall(said))
        return "sanitizer", f"{re.sub('0x[0-9a-f]+ ', '', found[1])}; at {', '.join(list(places)[:4])}"
    lines = said.strip().splitlines()
    if len(lines) == 2:
        return lines[0], lines[1]  # an error of the runtime, with operating-system threads
    return "sanitizer", " ".join(lines) or "the process died without a word"
