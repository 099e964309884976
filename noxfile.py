"""Every job of this repository is one command: ``nox -s NAME``, and each installs what it needs.

=============  ===========================================================================================
demo           fetch a real model, certify the backends on its weights, generate, measure
tests          the specification's own tests and doctests; of long sweeps only a part
pythons        the tests that need no compiler, on every supported version of Python that is found
conformance    the whole suite on every backend, or on one: ``-- --backend numpy [--op linear.qgemv]``
kills          every known defect against the suite, until the suite finds it
prove          prove what is decidable about kernels, formats, casts, steps: ``-- products --sample 10``
soak           a thousand seeds of every backend and the whole kill matrix: hours; resumes where it stopped
arm            the whole suite on the kernels for ARM, emulated; needs g++-aarch64-linux-gnu and qemu-user
atlas          other projects' kernels under the suite: ``-- PROJECT`` installs that one and runs it
functions      certify the docs' functions in torch, Triton, Pallas and numba; installs them: gigabytes
torch          the tests of the layer for PyTorch, which the job `tests` skips; installs torch: gigabytes
interop        read what lowbit writes with transformers, GPTQModel, HQQ and llama.cpp; installs them: gigabytes
cluster        quantise, evaluate and soak on a Ray cluster of three machines, lose one; installs Ray
bench          compare the speed of the backends; ``-- --peers`` with other projects' kernels, ``-- --decode`` with
               other engines on a whole model (``-- --growth``: only along its sizes; ``-- --quality``: perplexity
               against speed, by bits and groups), in the environment of bench-peers
docs           build the documentation into docs/_build/html
site           look at the built documentation in a browser: needs Chromium; ``-- --page NAME`` looks at one page
types, lint    mypy --strict; ruff and import-linter
=============  ===========================================================================================

What runs lowbit runs its *wheel*, so what is tested is what users get. Environments are kept, and nothing is
installed again until pyproject.toml or a source file changes.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from email import message_from_bytes
from functools import partial
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent / "spec"))  # nox's own environment does not hold lowbit
from lowbit.errors import UnavailableError
from lowbit.system.storage import code_folder, kept_code
from lowbit.system.threads import usable_processors

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_missing_interpreters = False  # of `pythons`; the other sessions run on nox's own

HERE = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
SHIPPED = ["spec/lowbit", "backends", *(f"conformance/lowbit_{name}" for name in ("conformance", "bench", "prove"))]
SOURCES = ["spec", "backends", "conformance", "conformance/selftest/support"]
PEERS = {
    "ONNX Runtime": ("onnx", "onnxruntime"),
    "llama.cpp": ("llama-cpp-python",),
    "PyTorch": ("torch",),
    "OpenVINO": ("openvino", "openvino-genai"),
    "ik_llama.cpp": ("ik-llama-cpp-python",),
    "ONNX Runtime GenAI": ("onnxruntime-genai",),
}
ONLY_TEXT = "-DLLAVA_BUILD=OFF"  # llama.cpp without what reads images
WITH_KILLS = {"PYTHONPATH": str(HERE / "conformance/selftest/support")}  # of programs that import `kills`
TYPED = [["spec", "backends", "conformance", "docs/_ext", "noxfile.py"], ["bench"]]  # each has a conftest of its own
PORTABLE = ["backends/lowbit_numpy", "backends/lowbit_cppyy", "backends/lowbit_foreign", *SHIPPED[2:]]


@nox.session
def demo(session: nox.Session) -> None:
    """Fetch a real model, certify the backends on its weights, generate, measure."""
    install(session, extras=["cppyy", "conformance", "demo"])
    with session.chdir(session.invoked_from):  # so that `--model FILE` is read as the user typed it
        session.run("lowbit", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the specification's own tests and doctests; those marked `whole` are left to the job `conformance`.

    NVIDIA's packages are among what is installed: kernels are compiled for GPUs, and the device for GPUs runs over a
    stand-in for the driver, where there is no GPU. Arguments go to pytest: ``nox -s tests -- -k packing``. Paths among
    them replace all tests. The daily loop is ``nox -s tests -- -m "not slow"``.
    """
    rest, marks = [*session.posargs], "not whole"
    named = any("/" in each and Path(each.partition("::")[0]).exists() for each in rest)
    if "-m" in rest[:-1]:  # of two -m pytest takes the last
        place = rest.index("-m")
        marks = f"({rest[place + 1]}) and not whole"
        del rest[place : place + 2]
    install(session, extras=["cppyy", "conformance", "cuda", "prove"], groups=["tests", "docs"])
    session.run(
        "pytest",
        f"--numprocesses={usable_processors() + 1}",  # tests of deadlines and interrupts wait
        "--dist=worksteal",
        *(() if named else ("conformance/selftest", "--pyargs", "lowbit")),
        "-m",
        marks,
        *rest,
        env={
            "LOWBIT_TESTS_COMPLETE": "1",  # what was installed may not be missing: its tests are never skipped
            "PYTHONDONTWRITEBYTECODE": None,  # pytest keeps the test modules that it has rewritten, for the next run
        },
    )


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the tests that need no compiler on every supported version of Python; one that is not found is left out.

    cppyy is not installed: it does not build on every version. Arguments go to pytest.
    """
    install(session, extras=["conformance"], groups=["tests", "docs"])
    chosen = ["-m", "not slow and not toolchain"]
    session.run("pytest", "--numprocesses=auto", *chosen, "conformance/selftest/lowbit", *session.posargs)
    session.run("lowbit", "conformance", "numpy", "--quick")


@nox.session
def conformance(session: nox.Session) -> None:
    """Run the whole suite on every backend of this repository, side by side; or on one: ``-- --backend NAME``.

    With all backends it also runs the other tests that the job `tests` leaves out: they have the marker `whole`.
    Further arguments go to `lowbit conformance`, or to pytest where no backend is named.
    """
    parser = argparse.ArgumentParser(prog="nox -s conformance --", add_help=False)
    parser.add_argument("--backend", help="a name that `lowbit backends` lists")
    options, rest = parser.parse_known_args(session.posargs)
    if options.backend:
        install(session, extras=["cppyy", "conformance"])
        run_outside(session, "lowbit", "conformance", options.backend, *rest)
    else:
        install(session, extras=["cppyy", "conformance", "bench", "cuda", "prove"], groups=["tests", "docs"])
        session.run("pytest", "--numprocesses=auto", "--dist=worksteal", "-m", "whole", "conformance/selftest", *rest)


@nox.session
def kills(session: nox.Session) -> None:
    """Run every known defect against the suite until it is found; a survivor or a false alarm fails.

    Arguments go to the program: ``nox -s kills -- --seeds 5 --sample 3`` tries one defect in three.
    """
    install(session, extras=["conformance"])
    out = str(Path(session.create_tmp()).resolve() / "kill-matrix.json")
    matrix = ["python", "-P", "-m", "kills.matrix", "--first-kill"]
    run_outside(session, *matrix, "--out", out, *session.posargs, env=WITH_KILLS)


@nox.session
def prove(session: nox.Session) -> None:
    """Prove every theorem, or refute it; arguments go to `lowbit prove`: ``nox -s prove -- places --fresh``."""
    install(session, extras=["prove"])
    run_outside(session, "lowbit", "prove", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Run a thousand seeds of each backend and the whole kill matrix, and keep the results in docs/data.

    Both resume where they stopped. Arguments go to the first: ``nox -s soak -- --seeds 200 --backend numpy``, or
    ``--processes 4``.
    """
    install(session, extras=["cppyy", "conformance"])
    data = HERE / "docs/data"
    data.mkdir(exist_ok=True)
    soaked, matrix = str(data / "soak.json"), str(data / "kill-matrix.json")
    long_run, kill_matrix = ["python", "-P", "-m", "kills.soak"], ["python", "-P", "-m", "kills.matrix", "--all"]
    run_outside(session, *long_run, "--out", soaked, *session.posargs, env=WITH_KILLS)
    run_outside(session, *kill_matrix, "--out", matrix, env=WITH_KILLS)


@nox.session
def arm(session: nox.Session) -> None:
    """Run the whole suite on the kernels for ARM, on an emulated processor; arguments go to `lowbit conformance`.

    A cross compiler and QEMU are no packages of Python: ``apt-get install g++-aarch64-linux-gnu qemu-user``.
    """
    install(session, extras=["cppyy", "conformance"])
    for name in ("NeonDot", "Neon"):
        run_outside(session, "lowbit", "conformance", f"lowbit_cppyy.emulation:{name}", *session.posargs)


@nox.session
def atlas(session: nox.Session) -> None:
    """Run the suite on the kernels of other projects, and keep their results in docs/data/atlas.

    The first argument names a project, whose packages are installed beside those that are there already; without one
    all projects run that are installed. ``-- --list`` shows them. Further arguments go to bench/run_atlas.py.
    """
    install(session, extras=["conformance"])
    program = ["python", "bench/run_atlas.py"]
    named = [word for word in session.posargs[:1] if not word.startswith("-")]
    for project in named:
        listed = str(session.run(*program, "--packages", project, silent=True)).split()
        if listed and not marked(session, project, digest(each.encode() for each in listed)):
            session.install(*listed)
            mark(session, project, digest(each.encode() for each in listed))
    session.run(*program, *session.posargs)


@nox.session
def torch(session: nox.Session) -> None:
    """Run the tests of `lowbit_torch`, on every backend that there is.

    torch is gigabytes, so no other job installs it and .ci/run does not run this one: whoever changes `lowbit_torch`
    does. If your package index also has builds of torch for CPUs only, which are much smaller, tell pip so, for example
    by PIP_EXTRA_INDEX_URL; nothing here needs another. Arguments go to pytest.
    """
    install(session, extras=["cppyy", "conformance", "torch"], groups=["torch"])
    names = ["lowbit_torch", "repository/test_without_extras.py"]
    session.run("pytest", *(f"conformance/selftest/{name}" for name in names), *session.posargs)


@nox.session
def functions(session: nox.Session) -> None:
    """Certify the functions of the docs, in PyTorch, in Triton under its interpreter, in Pallas and with numba.

    They are gigabytes, so no other job installs them and .ci/run does not run this one. It takes minutes. Builds of
    torch for CPUs only will do, as for the session torch. Arguments go to pytest.
    """
    install(session, extras=["conformance", "torch"], groups=["functions"])
    session.run("pytest", "conformance/selftest/docs/test_function_examples.py", *session.posargs)


@nox.session
def interop(session: nox.Session) -> None:
    """Load what `lowbit quantize` and `lowbit convert` write in the tools that own the formats, and compare logits.

    They are gigabytes and llama.cpp compiles for minutes, so no other job installs them and .ci/run does not run this
    one. Builds of torch for CPUs only will do, as for the session torch. Arguments go to the program: ``nox -s interop
    -- --model FILE`` reads a model of yours in place of tiny ones with random weights.
    """
    install(session, groups=["interop"])
    support = str(HERE / "conformance/selftest/support")
    run_outside(session, "python", f"{support}/interop.py", *session.posargs)


@nox.session
def cluster(session: nox.Session) -> None:
    """Quantise, evaluate and soak on a Ray cluster of three machines; lose one, kill the driver and resume.

    The machines are processes of this one.

    Ray starts a dozen processes for each cluster and takes minutes, so .ci/run does not run this one. Arguments go to
    pytest.
    """
    install(session, extras=["ray"], groups=["tests"])
    session.run("pytest", "conformance/selftest/lowbit/cli/test_on_ray.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare the speed of the backends, as a table and a picture in bench/results; arguments go to pytest.

    ``-- --benchmark-autosave`` keeps the run, and ``-- --benchmark-compare`` shows the last one beside the new one.
    With ``--peers``, ``--decode``, ``--growth`` or ``--quality`` other projects take part, in the session bench-peers.
    """
    if {"--peers", "--decode", "--growth", "--quality"} & set(session.posargs):
        session.notify("bench-peers", session.posargs)
        return
    install(session, extras=["cppyy", "conformance", "bench"])
    results = HERE / "bench/results"
    results.mkdir(exist_ok=True)
    figures = results / "bench.json"
    kept = [f"--benchmark-json={figures}", f"--benchmark-storage={results / 'runs'}"]
    session.run("pytest", "bench", *kept, "--benchmark-columns=median,iqr,rounds", *session.posargs)
    session.run("python", "bench/report.py", str(figures), str(results / "bench.svg"))


@nox.session
def experiments(session: nox.Session) -> None:
    """Measure the papers' claims for the pages *Results*; finished rows are kept. Arguments go to the program."""
    install(session, extras=["cppyy", "bench", "torch"])
    session.run("python", "-P", "-m", "experiments", *session.posargs, env={"PYTHONPATH": str(HERE / "bench")})


@nox.session(name="bench-peers")
def bench_peers(session: nox.Session) -> None:
    """Compare with the kernels of other projects, in an environment that holds them all; run it as ``bench``.

    A project that cannot be installed is listed as absent with the reason, and the others are measured.
    """
    install(session, extras=["cppyy", "conformance", "bench"])
    absent = json.dumps(install_peers(session))
    programs = {"--decode": ("decode", "growth", "token_parts"), "--growth": ("growth",), "--quality": ("quality",)}
    for program in next((names for word, names in programs.items() if word in session.posargs), ("compare",)):
        session.run("python", f"bench/{program}.py", "--not-installed", absent, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; every warning is an error."""
    install(session, extras=["conformance"], groups=["docs"])  # the notebook finds backends by their entry points
    flags = ["--fail-on-warning", "--keep-going", "--nitpicky"]
    session.run("sphinx-build", *flags, "-b", "html", "docs", "docs/_build/html", *session.posargs)
    session.log(f"open {HERE / 'docs/_build/html/index.html'}")


@nox.session
def site(session: nox.Session) -> None:
    """Look at the pages that ``nox -s docs`` has built in a browser, at three widths, light and dark.

    It needs Chromium (Debian and Ubuntu: ``apt-get install chromium``), or a program like it in LOWBIT_BROWSER. .ci/run
    does not run it. Arguments go to docs/_ext/site_check.py: ``nox -s site -- --page index --screenshots /tmp/shots``.
    """
    pages = HERE / "docs/_build/html"
    if not (pages / "index.html").is_file():
        session.error("docs/_build/html has no pages: run nox -s docs first")
    install(session, groups=["site"], own=False, wheel=False)
    session.run("python", "docs/_ext/site_check.py", str(pages), *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of everything, this file included."""
    install(session, extras=["conformance", "bench"], groups=["types"], wheel=False)
    for together in TYPED:
        session.run("mypy", *together)
    elsewhere = ["spec", *PORTABLE]  # what is installed must not use what only Linux has
    session.run("mypy", "--platform=darwin", "--disable-error-code=unreachable", *elsewhere)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style, the formatting, and which way imports run."""
    install(session, groups=["lint"], own=False, wheel=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    found = [str(HERE / folder) for folder in SOURCES]  # parsed, not imported, so lowbit need not be installed
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": os.pathsep.join(found)})


# What the sessions share: outside packages, lowbit's own wheel, and a folder that is not the repository.


def install(
    session: nox.Session,
    *,
    extras: Sequence[str] = (),
    groups: Sequence[str] = (),
    own: bool = True,
    wheel: bool = True,
) -> None:
    """Install what lowbit depends on (`own`), some extras and groups of pyproject.toml, and lowbit's `wheel`.

    What an environment holds already is not installed again.
    """
    project = PROJECT["project"]
    wanted: list[str] = [*project["dependencies"]] if own else []
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    wanted += nox.project.dependency_groups(PROJECT, *groups)
    if wheel:
        wanted += PROJECT["build-system"]["requires"]
    packages = digest(line.encode() for line in wanted)
    if not marked(session, "packages", packages):
        with ExitStack() as stack:
            built = stack.enter_context(cppyy_wheels(session)) if "cppyy" in extras else []
            session.install(*wanted, *built)
        mark(session, "packages", packages)
    sources = digest(path.read_bytes() for path in shipped())
    if wheel and not marked(session, "wheel", sources):
        with tempfile.TemporaryDirectory(dir=session.virtualenv.location) as folder:
            built = ["hatchling", "build", "-t", "wheel", "-d", folder]
            session.run_install("python", "-P", "-m", *built, silent=True)  # --install-only builds, too
            session.install("--no-deps", "--force-reinstall", *map(str, Path(folder).glob("*.whl")))
        mark(session, "wheel", sources)


def install_peers(session: nox.Session) -> dict[str, str]:
    """Install the extra ``peers`` one project at a time; those that fail, each with what pip said last."""
    extras, failed = PROJECT["project"]["optional-dependencies"], dict[str, str]()
    for project, packages in PEERS.items():
        wanted = [line for line in (*extras["adapters"], *extras["peers"]) if re.split(r"[<>=]", line)[0] in packages]
        if marked(session, project, digest(line.encode() for line in wanted)):
            continue
        run = partial(session.run_install, "python", "-P", "-m", "pip", silent=True, success_codes=range(256))
        options = {"CMAKE_ARGS": f"{ONLY_TEXT} {os.environ.get('CMAKE_ARGS', '')}"}
        answer, check = run("install", *wanted, env=options), str(run("show", *packages))
        if all(f"Name: {name}" in check.replace("_", "-") for name in packages):
            mark(session, project, digest(line.encode() for line in wanted))
            continue
        failed[project] = ([line for line in str(answer).splitlines() if line.strip()] or ["pip failed"])[-1][:300]
        session.warn(f"{project} could not be installed: {failed[project]}")
    return failed


@contextmanager
def cppyy_wheels(session: nox.Session) -> Iterator[list[str]]:
    """The wheels of cppyy and what it needs, as files for pip; built once for this machine.

    They are kept in one archive of the cache, as other compiled code is: where no other user can write, and built again
    where the archive does not match its digest. pip is given each file by its path, so that it installs no other. The
    files lie in the environment that they are installed in: others may be able to replace them in the folder of TMPDIR.
    """
    requirement = next(line for line in PROJECT["project"]["optional-dependencies"]["cppyy"] if "cppyy" in line)
    need_compiler(session)
    key = f"{requirement.replace('==', '-')}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

    def build(archive: Path) -> None:
        session.log("building cppyy, once for this machine: one to three minutes")
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder, zipfile.ZipFile(archive, "w") as kept:
            session.run_install("python", "-P", "-m", "pip", "wheel", "--wheel-dir", folder, requirement)
            for wheel in sorted(Path(folder).glob("*.whl")):
                kept.write(wheel, wheel.name)

    try:
        archive = kept_code(code_folder("wheelhouse"), f"{key}.zip", build)
    except (UnavailableError, OSError) as error:
        session.error(f"cppyy cannot be kept: {error}")
    with tempfile.TemporaryDirectory(dir=session.virtualenv.location) as folder:
        shutil.unpack_archive(archive, folder)
        yield sorted(requirement_for(wheel) for wheel in Path(folder).glob("*.whl"))


def requirement_for(wheel: Path) -> str:
    """A wheel for pip, with the name that its package has: CPyCppyy's headers are installed in a folder of that name.

    pip would take the name from the file, which has it in lower case, and cppyy would not find the headers.
    """
    with zipfile.ZipFile(wheel) as opened:
        metadata = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return f"{message_from_bytes(opened.read(metadata))['Name']} @ {wheel.as_uri()}"


def need_compiler(session: nox.Session) -> None:
    """Say in one sentence what is missing, before a build says it in two hundred lines."""
    if not any(map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]))):
        session.error("no C++ compiler was found: install g++ or clang++, or name yours in the variable CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        session.error("Python.h was not found: install Python's headers (Debian and Ubuntu: python3-dev)")


def run_outside(session: nox.Session, *command: str, env: Mapping[str, str] | None = None) -> None:
    """Run a command where the repository's own folders cannot be imported by accident."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        session.run(*command, env=env)


def shipped() -> Iterator[Path]:
    """Every file that ends up in the wheel, and what decides how it gets there."""
    yield HERE / "pyproject.toml"
    for folder in SHIPPED:
        yield from sorted(path for path in (HERE / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")


def digest(parts: Iterable[bytes]) -> str:
    """One number for a list of byte strings; where one ends and the next begins counts too."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def marked(session: nox.Session, name: str, state: str) -> bool:
    """Whether this environment was left in this state; a new environment carries no marks."""
    file = Path(session.virtualenv.location, f"lowbit-{name}")
    return file.is_file() and file.read_text() == state


def mark(session: nox.Session, name: str, state: str) -> None:
    Path(session.virtualenv.location, f"lowbit-{name}").write_text(state)
