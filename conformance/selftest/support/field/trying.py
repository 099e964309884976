"""Kernels of this folder under the suite, as they are and with a mistake each.

As a program it tries all mistakes and prints what came of each; arguments name some: ``python -m field.trying awq``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from field.judging import Judgement, judge
from field.mistakes import HELD_OUT, KERNELS, MISTAKES, Mistake
from lowbit.backend.function import Claim

HERE = Path(__file__).parent
SOURCES = ("numpy_kernels.py", "cpp_kernels.py", "kernels.cpp")
COMPILER = ("g++", "-O1", "-shared", "-fPIC")


def changed(mistake: Mistake) -> str:
    """The source with the mistake: in the kernel's own function if the text is there, else wherever it is.

    Raises:
        ValueError: the text is not there.
    """
    source = (HERE / mistake.file).read_text()
    begin = source.find(f"def {mistake.kernel}(") if mistake.file.endswith(".py") else source.find(f"{mistake.kernel}(")
    own = source.find(mistake.old, begin)
    place = own if own >= 0 else source.find(mistake.old)
    if place < 0:
        raise ValueError(f"{mistake.what}: {mistake.old!r} is not in {mistake.file}")
    return source[:place] + mistake.new + source[place + len(mistake.old) :]


@contextmanager
def kernels(mistake: Mistake | None = None) -> Iterator[None]:
    """The kernels as modules that the host finds, one of them with a mistake, compiled where they have to be."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            shutil.copy(HERE / source, folder)
        if mistake is not None:
            (folder / mistake.file).write_text(changed(mistake))
        if mistake is None or mistake.file == "kernels.cpp":
            compiled = [*COMPILER, "-o", str(folder / "kernels.so"), str(folder / "kernels.cpp")]
            subprocess.run(compiled, check=True, timeout=120)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [name, before]))
        try:
            yield
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def module_of(mistake: Mistake) -> str:
    return "cpp_kernels" if mistake.file == "kernels.cpp" else mistake.file.removesuffix(".py")


def tried(mistake: Mistake) -> Judgement:
    """What the suite says of a kernel with a mistake."""
    operation, limits = KERNELS[mistake.kernel]
    with kernels(mistake):
        return judge(f"{module_of(mistake)}:{mistake.kernel}", Claim(operation, limits))


def outcome(mistake: Mistake, found: Judgement) -> str:
    """``survived``, ``killed``, ``named`` or ``misnamed``."""
    if not found.failures:
        return "survived"
    if not found.names:
        return "killed"
    return "named" if set(found.names) & set(mistake.names) else "misnamed"


def main(wanted: list[str]) -> None:
    """Print a line for each mistake, and what came of both lists."""
    for title, listed in (("mistakes", MISTAKES), ("held out", HELD_OUT)):
        results = []
        for mistake in listed:
            if wanted and not {mistake.kernel, mistake.file, title} & set(wanted):
                continue
            found = tried(mistake)
            results.append(outcome(mistake, found))
            counts = f"{len(found.failures)} of {found.executed} cases"
            print(f"{results[-1]:9}{mistake.file} {mistake.kernel}: {mistake.what} ({counts}) {dict(found.names)}")
        print(title, {word: results.count(word) for word in ("named", "killed", "misnamed", "survived")})


if __name__ == "__main__":
    main(sys.argv[1:])
