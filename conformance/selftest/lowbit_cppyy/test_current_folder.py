"""The cppyy backend runs no file of the current folder, whatever its name.

The names are those that strace shows ROOT, cling, the dynamic linker and the shell looking for.
"""

import os
import platform
import subprocess
import sys
import textwrap
from importlib.resources import files
from pathlib import Path

import pytest
from building import build, compiler

from lowbit_cppyy.runtime.empty_folder import NoFolderOfOwnError, run_in_empty_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a current folder for each thread exists on Linux only")

refusable = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="a system call without number")

LIBRARIES = ("libRIOLegacy", "libCling", "libCoreLegacy", "libThreadLegacy", "libcppyy_backend", "cling4root")
OF_THE_SHELL = ("libselinux.so.1", "libpcre2-8.so.0", "libacl.so.1", "libcap.so.2")  # of the program ls
MOST_INPUTS = 300

USE = """
    import os, sys, threading, time
    from contextlib import suppress
    from pathlib import Path
    import numpy as np
    from lowbit.quantization.affine import quantize
    from lowbit_cppyy import CppyyBackend

    def all_here():
        # Whether every thread stands where the process does; one that has ended may be listed a moment longer.
        for _ in range(6000):
            with suppress(FileNotFoundError):
                if {os.readlink(task / "cwd") for task in Path("/proc/self/task").iterdir()} == {os.getcwd()}:
                    return True
            time.sleep(0.01)
        return False

    def use():
        backend = CppyyBackend(threads=2)
        matrix = backend.prepare(quantize(np.ones((64, 128), np.float32), bits=4, group_size=32))
        answers = [*matrix.qgemv(np.ones(64, np.float32)), *matrix.qgemm(np.ones((6, 64), np.float32)).ravel()]
        answers += [*backend.run("blocks.swiglu", np.zeros((1, 64), np.float32), np.ones((1, 64), np.float32)).ravel()]
        assert set(answers) == {64.0, 0.0}, answers
        print(all_here(), backend.close())
"""
REFUSED = """
    import ctypes, struct
    from lowbit.errors import UnavailableError

    def refuse_unshare():
        number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
        load, jump, answer = 0x20, 0x15, 0x06
        steps = [(load, 0, 0, 0), (jump, 0, 1, number), (answer, 0, 0, 0x00050001), (answer, 0, 0, 0x7FFF0000)]
        program = b"".join(struct.pack("HBBI", *step) for step in steps)
        text = ctypes.create_string_buffer(program, len(program))
        described = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(text))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, described, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, a filter
        assert libc.unshare(0x200) == -1

    refuse_unshare()
"""


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A folder full of files with names that cppyy looks for, and the file that each of them writes to if it is run."""
    folder, marker = tmp_path / "here", tmp_path / "marker"
    folder.mkdir()
    source = tmp_path / "planted.c"
    source.write_text(
        f"""#include <fcntl.h>
        #include <unistd.h>
        __attribute__((constructor)) static void run(void) {{
          int file = open("{marker}", O_WRONLY | O_CREAT | O_APPEND, 0600);
          if (file >= 0 && write(file, "ran\\n", 4)) close(file);
        }}"""
    )
    library = tmp_path / "planted.so"
    build([compiler("cc", "gcc"), "-shared", "-fPIC", str(source), "-o", str(library)])
    for name in LIBRARIES:
        for target in (folder / name, folder / f"{name}.so"):
            target.hardlink_to(library)
        (folder / f"{name}.rootmap").write_text("[ planted.so ]\nnamespace lowbit\nclass std\nheader string\n")
    (folder / "DOESNOTEXIST").mkdir()
    for name in OF_THE_SHELL:
        (folder / "DOESNOTEXIST" / name).hardlink_to(library)
    (folder / "planted.so").hardlink_to(library)
    (folder / ".rootmap").write_text("[ planted.so ]\nnamespace lowbit\nnamespace std\nclass TObject\n")
    settings = [f"{kind}.*.Root.DynamicPath: {folder}" for kind in ("Unix", "*")]
    settings += [f"Rint.{what}: {folder}/rootlogon.C" for what in ("Load", "Logon", "Logoff")]
    settings += ["Root.Stacktrace.Script: " + str(folder / "script"), "+Plugin.TVirtualStreamerInfo: * T planted X()"]
    (folder / ".rootrc").write_text("\n".join([*settings, ""]))
    for name in ("rootlogon.C", ".rootlogon.C", "rootalias.C", "rootlogoff.C"):
        (folder / name).write_text("#error planted\n")
    return folder, marker


def plant_headers(folder: Path) -> None:
    """Every name of a header of cppyy or of the C++ library, as a header that cannot be compiled."""
    headers = Path(str(files("cppyy_backend"))) / "include"
    names = {path.name for path in headers.iterdir()} | {
        "string",
        "vector",
        "cstdint",
        "decode.h",
        "bridge.h",
        "linear.h",
    }
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_text("#error planted\n")


def plant_inputs(folder: Path) -> None:
    """The names that the compiler gives to its inputs, as links to a header of the backend."""
    for number in range(MOST_INPUTS):
        (folder / f"input_line_{number}").symlink_to(Path(str(files("lowbit_cppyy"))) / "cpp/decode.h")


def ran(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new Python process with this current folder."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(USE) + textwrap.dedent(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("where", ["main", "another"])
def test_nothing_in_the_current_folder_is_run(planted: tuple[Path, Path], where: str) -> None:
    """Libraries, settings, maps, headers and inputs: none has an effect, and no thread changes its folder."""
    folder, marker = planted
    plant_headers(folder)
    plant_inputs(folder)
    thread = "thread = threading.Thread(target=use)\nthread.start()\nthread.join()\nuse()\n"
    done = ran(folder, "use()" if where == "main" else thread)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.splitlines()) == {"True None"}
    assert not marker.exists()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="the number of the system call is not known"
)
def test_where_unshare_is_refused_the_process_stands_elsewhere_while_it_is_alone(planted: tuple[Path, Path]) -> None:
    """As in a container: nothing is run either, and the folder of the process is unchanged."""
    folder, marker = planted
    plant_headers(folder)
    done = ran(folder, textwrap.dedent(REFUSED) + "use()")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True None\n")
    assert not marker.exists()


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="the number of the system call is not known"
)
def test_where_unshare_is_refused_other_threads_are_not_misled(planted: tuple[Path, Path]) -> None:
    """Beside another thread it is unavailable, with a reason; once it has been loaded, other threads do not matter."""
    folder, marker = planted
    beside = """
        done = threading.Event()
        other = threading.Thread(target=done.wait)
        other.start()
        try:
            use()
        except UnavailableError as error:
            print(error)
        done.set()
        other.join()
        CppyyBackend().warm_up("linear.qgemv")
        done = threading.Event()
        other = threading.Thread(target=done.wait)
        other.start()
        use()
        done.set()
        """
    done = ran(folder, textwrap.dedent(REFUSED) + textwrap.dedent(beside))
    refusal, answer = done.stdout.splitlines()
    assert "other threads run" in refusal and "load the backend before" in refusal
    assert (done.returncode, done.stderr, answer) == (0, "", "True None")
    assert not marker.exists()


def test_a_temporary_folder_is_left_by_nobody(planted: tuple[Path, Path], tmp_path: Path) -> None:
    """The empty folders are removed after use, and an error says if none can be made."""
    room = tmp_path / "room"
    room.mkdir()
    script = f"import tempfile\ntempfile.tempdir = {str(room)!r}\nuse()\n"
    assert ran(planted[0], script).stdout == "True None\n"
    assert list(room.iterdir()) == []
    script = f"import tempfile\ntempfile.tempdir = {str(room / 'none')!r}\nuse()\n"
    assert "TMPDIR" in ran(planted[0], script).stderr.splitlines()[-1]


def test_what_the_work_raises_or_returns_comes_back() -> None:
    """Results and exceptions pass through; the current folder of the work is empty and accessible to its owner only."""
    before = os.getcwd()

    def fail() -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        run_in_empty_folder("the test", fail)
    listed, mode, place = run_in_empty_folder("the test", lambda: (os.listdir(), os.stat(".").st_mode, os.getcwd()))
    assert (listed, mode & 0o777, os.getcwd()) == ([], 0o700, before)
    assert place != before and not os.path.exists(place)
    assert issubclass(NoFolderOfOwnError, Exception)


def test_an_interrupt_does_not_leave_the_work_half_done() -> None:
    """Ctrl-C during the work is raised when the work has ended."""
    script = """
        import signal, time
        from lowbit_cppyy.runtime.empty_folder import run_in_empty_folder
        ended = []
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started without it

        def work():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            ended.append(True)

        try:
            run_in_empty_folder("the test", work)
        except KeyboardInterrupt:
            print(ended)
        """
    assert ran(Path.cwd(), script).stdout == "[True]\n"
