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

from field.held_out import MORE_KERNELS, SECOND
from field.held_out_eighth import EIGHTH_KERNELS
from field.held_out_eighth_blocks import EIGHTH_BLOCKS
from field.held_out_eighth_words import EIGHTH_WORDS
from field.held_out_eleventh import ELEVENTH_KERNELS, ELEVENTH_WORDS
from field.held_out_eleventh_blocks import ELEVENTH_BLOCKS
from field.held_out_fifth import FIFTH
from field.held_out_last import FOURTH
from field.held_out_later import THIRD
from field.held_out_ninth import NINTH_KERNELS
from field.held_out_ninth_blocks import NINTH_BLOCKS
from field.held_out_ninth_words import NINTH_WORDS
from field.held_out_seventh import SEVENTH, SEVENTH_KERNELS
from field.held_out_sixth import SIXTH
from field.held_out_tenth import TENTH_KERNELS
from field.held_out_tenth_blocks import TENTH_BLOCKS
from field.held_out_tenth_words import TENTH_WORDS
from field.held_out_twelfth import TWELFTH_KERNELS, TWELFTH_WORDS
from field.held_out_twelfth_blocks import TWELFTH_BLOCKS
from field.held_out_twelfth_bytes import TWELFTH_FP8
from field.judging import Judgement, judge
from field.mended import MENDED, MENDED_KERNELS
from field.mistakes import HELD_OUT, KERNELS, MISTAKES, Mistake
from lowbit.backend.function import Claim, Library

HERE = Path(__file__).parent
SOURCES = (
    *("numpy_kernels.py", "more_numpy.py", "torch_kernels.py", "triton_kernels.py", "numba_kernels.py"),
    *("cast_kernels.py", "step_kernels.py", "vector_kernels.py"),
    *("cpp_kernels.py", "kernels.cpp", "more_cpp.py", "more.cpp", "rust_kernels.py", "kernels.rs"),
    *("tiles_cpp.py", "tiles.cpp", "words_rs.py", "words.rs", "torch_blocks.py"),
    *("strips_cpp.py", "strips.cpp", "split_kernels.py", "torch_groups.py"),
    *("magic_kernels.py", "planes_kernels.py", "torch_tiles.py"),
    *("lanes_cpp.py", "lanes.cpp", "panels_cpp.py", "panels.cpp"),
)
COMPILERS = {
    "kernels.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "kernels.so"),
    "more.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "more.so"),
    "kernels.rs": ("rustc", "-O", "--crate-type", "cdylib", "-o", "kernels_rs.so"),
    "tiles.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "tiles.so"),
    "strips.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "strips.so"),
    "words.rs": ("rustc", "-O", "--crate-type", "cdylib", "-o", "words.so"),
    "lanes.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "lanes.so"),
    "panels.cpp": ("g++", "-O1", "-shared", "-fPIC", "-o", "panels.so"),
}
MODULES = {
    **{"kernels.cpp": "cpp_kernels", "more.cpp": "more_cpp", "tiles.cpp": "tiles_cpp"},
    **{"kernels.rs": "rust_kernels", "words.rs": "words_rs", "strips.cpp": "strips_cpp"},
    **{"lanes.cpp": "lanes_cpp", "panels.cpp": "panels_cpp"},
}
LIBRARIES: dict[str, Library] = {
    **{"torch_kernels.py": "torch", "torch_blocks.py": "torch", "triton_kernels.py": "torch"},
    **{"torch_groups.py": "torch", "torch_tiles.py": "torch"},
}

LISTS = {
    **{"mistakes": MISTAKES, "first": HELD_OUT, "second": SECOND, "third": THIRD, "fourth": FOURTH},
    **{"fifth": FIFTH, "sixth": SIXTH, "seventh": SEVENTH, "eighth": EIGHTH_WORDS + EIGHTH_BLOCKS},
    **{"ninth": NINTH_WORDS + NINTH_BLOCKS, "tenth": TENTH_WORDS + TENTH_BLOCKS},
    **{"eleventh": ELEVENTH_WORDS + ELEVENTH_BLOCKS, "twelfth": TWELFTH_WORDS + TWELFTH_BLOCKS + TWELFTH_FP8},
    "mended": MENDED,
}
"""All lists by name; all but the first and the last were held out."""


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
def kernels(mistake: Mistake | None = None, compiled: tuple[str, ...] = ("kernels.cpp",)) -> Iterator[None]:
    """The kernels as modules that the host finds, one of them with a mistake; it or some others are compiled."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "TRITON_INTERPRET")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            shutil.copy(HERE / source, folder)
        if mistake is not None:
            (folder / mistake.file).write_text(changed(mistake))
        for source in compiled if mistake is None else set(COMPILERS) & {mistake.file}:
            subprocess.run([*COMPILERS[source], source], check=True, timeout=120, cwd=folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [name, before["PYTHONPATH"]]))
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            yield
        finally:
            for variable, value in before.items():
                os.environ.pop(variable)
                if value is not None:
                    os.environ[variable] = value


def module_of(mistake: Mistake) -> str:
    return MODULES.get(mistake.file, mistake.file.removesuffix(".py"))


def claim_of(file: str, kernel: str) -> Claim:
    """What a kernel is certified for."""
    known = MORE_KERNELS | SEVENTH_KERNELS | EIGHTH_KERNELS | NINTH_KERNELS | TENTH_KERNELS | ELEVENTH_KERNELS
    known |= TWELFTH_KERNELS | MENDED_KERNELS
    operation, limits = known.get((file, kernel)) or KERNELS[kernel]
    return Claim(operation, limits, arrays=LIBRARIES.get(file, "numpy"))


def tried(mistake: Mistake) -> Judgement:
    """What the suite says of a kernel with a mistake."""
    with kernels(mistake):
        return judge(f"{module_of(mistake)}:{mistake.kernel}", claim_of(mistake.file, mistake.kernel))


def outcome(mistake: Mistake, found: Judgement) -> str:
    """``survived``, ``killed``, ``named`` or ``misnamed``."""
    if not found.failures:
        return "survived"
    if not found.names:
        return "killed"
    return "named" if set(found.names) & set(mistake.names) else "misnamed"


def main(wanted: list[str]) -> None:
    """Print a line for each mistake, and what came of both lists."""
    for title, listed in LISTS.items():
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
