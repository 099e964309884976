"""What lies in the current folder is not run by any command that starts other processes.

In the folder lies a module for each name that Python or an installed package has, each of which notes that it ran.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from building import EXAMPLES, compiler
from cuda_tools import needs, no_nvrtc
from paths import ROOT, SUPPORT

from lowbit.formats import fetch as data
from lowbit_cuda.cuda.compiler import CompileError, compile_source
from lowbit_gpusim.shim import build
from lowbit_gpusim.shim.build import WATCHED

REPOSITORY = ROOT
SETTINGS = {
    "pytest.ini": "[pytest]\naddopts = -p planted_plugin\n",
    "tox.ini": "[pytest]\naddopts = -p planted_plugin\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p planted_plugin\n[easy_install]\nfind_links = .\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p planted_plugin'\n",
    ".coveragerc": "[run]\nplugins = planted_plugin\n",
    "pip.conf": "[global]\nfind-links = .\n",
    "matplotlibrc": "backend: module://planted_plugin\n",
}


class Planted:
    """The folder, and what ran in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._marker = folder / "here", folder / "marker"
        self.folder.mkdir()
        packages = set(importlib.metadata.packages_distributions())
        names = set(sys.stdlib_module_names) | packages
        names |= {"sitecustomize", "usercustomize", "conftest", "planted_plugin", "lowbit_conformance", "lowbit_numpy"}
        names |= {"lowbit_cppyy", "lowbit_cuda", "lowbit_adapters", "lowbit_foreign"}
        for name in filter(str.isidentifier, names):
            note = f"open({str(self._marker)!r}, 'a').write({name!r} + chr(10))\nraise ImportError('planted')\n"
            (self.folder / f"{name}.py").write_text(note)
        for name, text in SETTINGS.items():
            (self.folder / name).write_text(text)

    def runs(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command there; nothing of the folder may run in it or in what it starts."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | variables
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert not self._marker.exists(), self._marker.read_text()
        return done

    def calls(self, script: str, **variables: str) -> str:
        """Run a script in a Python that does not itself look there, and answer with what it prints."""
        done = self.runs(sys.executable, "-P", "-c", script, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """A folder that has just been planted."""
    return Planted(tmp_path)


LOWBIT = str(Path(sys.executable).parent / "lowbit")
QUICK = ("--op", "packing.unpack", "--quick")


COMMANDS = {
    "--help": 0,
    "backends --json": 0,
    "profiles": 0,
    "kernel list": 0,
    "kernel show --bits 2 --isa plain": 0,
    "tune --bits 9": 2,
    "vectors export out --op packing.unpack --seeds 0": 0,
    "new-backend mine": 0,
    "new-weights out --layers 0": 2,
    "generate --prompt x --model absent": 2,
    "logits --prompt x --model absent --backend cppyy": 2,
    "perplexity --text absent --model absent --backend lowbit_numpy:NumpyBackend": 2,
    "compare absent absent --text absent": 2,
    "demo --model absent --text absent": 2,
}


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_runs_anything_of_it(planted: Planted, words: str) -> None:
    """Each of them gets as far as it does elsewhere."""
    done = planted.runs(LOWBIT, *words.split())
    assert done.returncode == COMMANDS[words], done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_runs_nothing_of_it(planted: Planted) -> None:
    """``python -m lowbit`` leaves the folder once it has control; what Python itself imports before is Python's."""
    own = subprocess.check_output([sys.executable, "-P", "-c", "import runpy, sys; print(*sys.modules)"], text=True)
    for name in [*own.split(), "lowbit"]:  # Python looks for lowbit itself in the current folder first
        (planted.folder / f"{name}.py").unlink(missing_ok=True)
    assert (planted.folder / "signal.py").exists() and (planted.folder / "numpy.py").exists()
    metadata = planted.folder / "planted-1.0.dist-info"
    metadata.mkdir()
    (metadata / "entry_points.txt").write_text("[lowbit.backends]\nplanted = planted_plugin:Backend\n")
    done = planted.runs(sys.executable, "-m", "lowbit", "backends", "numpy", "--json")
    assert done.returncode == 0, done.stderr
    assert '"numpy": {"usable": true' in done.stdout
    done = planted.runs(sys.executable, "-m", "lowbit", "backends", "planted")
    assert done.returncode == 2 and "backend is 'planted'; allowed: " in done.stderr


def test_python_m_keeps_what_the_user_has_named(planted: Planted, tmp_path: Path) -> None:
    """A folder on PYTHONPATH is there on purpose, also where it is the current one and Python has not added it."""
    own = tmp_path / "own"
    own.mkdir()
    starter = REPOSITORY / "conformance/lowbit_conformance/starter/backend.py"
    (own / "starter_backend.py").write_text(starter.read_text("utf-8"))
    (own / "mine-1.0.dist-info").mkdir()
    (own / "mine-1.0.dist-info/entry_points.txt").write_text("[lowbit.backends]\nmine = starter_backend:MyBackend\n")
    for flags in ([], ["-P"]):
        for place in (str(own), "."):
            environment = os.environ | {"PYTHONPATH": place}
            command = [sys.executable, *flags, "-m", "lowbit", "backends", "mine", "--json"]
            said = subprocess.check_output(command, cwd=own, env=environment, text=True)
            assert '"mine": {"usable": true' in said


@pytest.mark.parametrize("name", ["numpy", "lowbit_numpy:NumpyBackend"])
def test_conformance_runs_nothing_of_it(planted: Planted, name: str) -> None:
    """Command, judge and host; neither pytest's settings nor a conftest.py count."""
    done = planted.runs(LOWBIT, "conformance", name, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_foreign_program_is_run_and_nothing_else(planted: Planted) -> None:
    """``--command`` with a Python program, in a folder of its own beside a module that it imports."""
    program = (EXAMPLES / "command/mine.py").read_text("utf-8")
    own = planted.folder.parent / "own"
    own.mkdir()
    (own / "mine.py").write_text(f"import beside\n{program}")
    (own / "beside.py").write_text("")
    done = planted.runs(LOWBIT, "conformance", "--command", f"'{sys.executable}' '{own / 'mine.py'}'", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_backend_in_the_current_folder_is_found_and_nothing_else(planted: Planted) -> None:
    """``module:Class`` of the user's own, which imports numpy: the installed one, not the one that lies beside it."""
    starter = REPOSITORY / "conformance/lowbit_conformance/starter/backend.py"
    (planted.folder / "own_kernels.py").write_text("import own_helper\n" + starter.read_text("utf-8"))
    (planted.folder / "own_helper.py").write_text("")
    done = planted.runs(LOWBIT, "conformance", "own_kernels:MyBackend", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_current_folder_is_no_place_of_imports_without_need(planted: Planted) -> None:
    """Naming an installed backend as module:Class leaves the path alone; one that lies there extends it at the end."""
    show = "import os, sys; from lowbit.backend import find; find({0!r}); print(sys.path.index(os.getcwd()) if "
    show += "os.getcwd() in sys.path else None, len(sys.path) - 1)"
    assert planted.calls(show.format("lowbit_numpy:NumpyBackend")).split()[0] == "None"
    starter = REPOSITORY / "conformance/lowbit_conformance/starter/backend.py"
    (planted.folder / "own_kernels.py").write_text(starter.read_text("utf-8"))
    place, last = planted.calls(show.format("own_kernels:MyBackend")).split()
    assert place == last


def test_fetching_runs_nothing_of_it(planted: Planted) -> None:
    """pip is started, and fails for want of an index; a pip.py lying there is not taken for it."""
    cache = str(planted.folder.parent / "cache")
    name = next(iter(data.TABLE))
    script = f"from lowbit.formats.fetch import fetch\ntry:\n    fetch({name!r})\nexcept Exception as error:\n"
    said = planted.calls(script + "    print(error)", LOWBIT_CACHE=cache, PIP_NO_INDEX="1")
    assert "pip could not download" in said and "No matching distribution" in said


CHILDREN = {
    "demo": "from lowbit.cli.demo_certification import suite; suite('nobody')",
    "soak": "from kills.portions import entry_of; print(entry_of('nobody', 0, 1))",
}


@pytest.mark.parametrize("part", CHILDREN)
def test_parts_that_start_the_suite_run_nothing_of_it(planted: Planted, part: str) -> None:
    """Their children are lowbit's own, here with a backend that does not exist."""
    script = f"try:\n    {CHILDREN[part]}\nexcept Exception as error:\n    print(error)"
    assert planted.calls(script, PYTHONPATH=str(SUPPORT))


def test_no_child_is_started_without_the_flag() -> None:
    """Of all that starts Python in this repository, -c and -m come after -P or -I, or from `python_command`."""
    shipped = ("lowbit_conformance", "lowbit_bench", "lowbit_prove")
    folders = ("spec", "backends", "bench", "docs/_ext", *(f"conformance/{name}" for name in shipped))
    folders = (*folders, "conformance/selftest/support/kills")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    bare = re.compile(r"""(?:executable|"python"),\s*["']-[cm]["']""")
    files += [REPOSITORY / "noxfile.py"]
    assert [f"{path}: {match[0]}" for path in files for match in bare.finditer(path.read_text("utf-8"))] == []
    script = (REPOSITORY / "bench/gpu/run.sh").read_text("utf-8")
    assert re.findall(r'^\s*"\$python" (-\w)', script, re.M) == ["-P"] * 3


# **Compilers look there too.**


def test_kernels_are_compiled_from_their_own_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ reads from standard input, whose folder is the current one: a launch.h lying there is not included."""
    compiler("g++")
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    shim, kernels = Path(build.HERE), Path(build.KERNELS)
    for path in (*shim.glob("*.h"), *kernels.glob("*.cuh"), *kernels.glob("*.h")):
        (here / path.name).write_text("#error planted\n")
    source = tmp_path / "one.cuh"
    source.write_text('#include "device.cuh"\nextern "C" void nothing(int* x) { x[0] = 1; }\n')
    monkeypatch.chdir(here)
    assert build.build([source], WATCHED).is_file()


@needs(no_nvrtc())
def test_nvrtc_takes_no_header_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's header that is missing stays missing, whatever lies in the current folder."""
    kernels, here = tmp_path / "kernels", tmp_path / "here"
    kernels.mkdir()
    here.mkdir()
    (kernels / "one.cuh").write_text('#include "planted.cuh"\nextern "C" __global__ void one(int* x) { x[0] = y; }\n')
    (here / "planted.cuh").write_text("constexpr int y = 1;\n")
    monkeypatch.chdir(here)
    with pytest.raises(CompileError, match=r"planted\.cuh"):
        compile_source("one.cuh", "sm_90", folder=kernels, keep=False)
