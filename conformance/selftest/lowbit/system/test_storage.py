"""Where lowbit keeps files, how it writes them, and which of them it runs (`lowbit.system.storage`)."""

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system import storage
from lowbit_conformance.report.files import check_writable

ROOT = os.geteuid() == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("LOWBIT_CACHE", str(folder))
    return folder


@pytest.fixture(params=[0o022, 0o002, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Files are made as for users with each of these umasks."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


# **Where.**


def test_the_cache_is_the_users_or_the_named_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOWBIT_CACHE goes before the user's cache folder; a relative name is seen from the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOWBIT_CACHE", raising=False)
    assert storage.cache_folder() == tmp_path / "lowbit"
    monkeypatch.setenv("LOWBIT_CACHE", "")
    assert storage.cache_folder() == tmp_path / "lowbit"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWBIT_CACHE", "mine")
    assert storage.cache_folder() == tmp_path / "mine"


def test_a_user_without_a_home_keeps_nothing_in_the_current_folder() -> None:
    """HOME is unset and the user has no entry: the home folder would be one called ~ in the current folder."""
    script = """
import os, pwd
def absent(number):
    raise KeyError(number)
pwd.getpwuid = absent
from lowbit.system.storage import cache_folder
print(cache_folder())
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "LOWBIT_CACHE")}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "/nonexistent/lowbit\n"


def test_folders_are_made_for_their_owner_alone(cache: Path, umask: int) -> None:
    """Each that is missing has mode 0700, whatever the umask; one that exists keeps its mode."""
    storage.make_folder(cache / "part")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache / "part", cache, cache.parent)]
    assert modes == [0o700] * 3
    storage.make_folder(cache)
    cache.parent.chmod(0o755)
    storage.make_folder(cache / "other")
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o755


def test_a_file_in_the_place_of_the_cache_is_said(cache: Path) -> None:
    """Not a traceback, but the place and what to do."""
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(UnavailableError, match=r"cache.*: Not a directory; name a folder .* in LOWBIT_CACHE"):
        storage.code_folder("shim")
    with pytest.raises(NotADirectoryError):
        storage.make_folder(cache)


# **Writing.**


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failure in the middle leaves the old file, and nothing else."""
    target = tmp_path / "report.json"
    storage.write_whole(target, b"first")
    with pytest.raises(ZeroDivisionError), storage.written(target) as stream:
        stream.write(b"second")
        raise ZeroDivisionError
    assert target.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["report.json"]


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    """Neither under the name itself nor under a name that could be guessed; the target stays as it was."""
    victim, target = tmp_path / "victim", tmp_path / "report.json"
    victim.write_text("precious")
    for name in ("report.json", "report.json.partial", ".report.json.partial", f".report.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
    storage.write_whole(target, b"report")
    assert (target.read_bytes(), target.is_symlink(), victim.read_text()) == (b"report", False, "precious")


def test_reports_do_not_overwrite_what_a_planted_link_names(tmp_path: Path) -> None:
    """``lowbit conformance --report`` and its like, where another user may write to the folder too."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    options = ("--report", "--junit", "--html")
    for option in options:
        for name in ("", ".partial", ".part", ".tmp"):
            (tmp_path / f"{option[2:]}{name}").symlink_to(victim)
            (tmp_path / f".{option[2:]}{name}").symlink_to(victim)
    command = [sys.executable, "-P", "-m", "lowbit", "conformance", "numpy", "--op", "packing.unpack", "--quick"]
    command += [word for option in options for word in (option, str(tmp_path / option[2:]))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "precious"
    for option in options:
        target = tmp_path / option[2:]
        assert "packing.unpack" in target.read_text() and not target.is_symlink()


def test_a_long_name_of_wide_letters_can_be_written(tmp_path: Path) -> None:
    """The temporary name stays within the 255 bytes of a name."""
    target = tmp_path / ("€" * 80)
    storage.write_whole(target, b"x")
    assert target.read_bytes() == b"x"


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    """Root could replace /dev/null by a file; so both the check before the work and the writing refuse."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), Path("/dev/stdout"), Path("/dev/new")):
        with pytest.raises(ArgumentError, match="a plain file"):
            check_writable("--report", path)
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(OSError, match="not a plain file"):
            storage.write_whole(path, b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


# **Which folders hold code.**


def test_the_folder_of_code_is_new_and_private(cache: Path, umask: int) -> None:
    """It and those above it that were missing have mode 0700."""
    folder = storage.code_folder("shim")
    assert folder == (cache / "shim").resolve()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert storage.code_folder("shim") == folder


def test_a_readable_folder_is_taken(cache: Path) -> None:
    """Others may read what is kept (mode 0755)."""
    (cache / "shim").mkdir(parents=True)
    for path in (cache, cache / "shim"):
        path.chmod(0o755)
    assert storage.code_folder("shim").is_dir()


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o2775, 0o1777, 0o757])
@pytest.mark.parametrize("which", ["folder", "cache"])
def test_a_folder_that_others_write_to_is_refused_with_the_command(cache: Path, mode: int, which: str) -> None:
    """The sentence names the folder, its mode, and chmod; a sticky bit does not help the folder itself."""
    (cache / "shim").mkdir(parents=True, mode=0o700)
    place = cache if which == "cache" else cache / "shim"
    place.chmod(mode)
    if which == "cache" and mode & stat.S_ISVTX:
        assert storage.code_folder("shim")
        return
    with pytest.raises(UnavailableError) as caught:
        storage.code_folder("shim")
    assert f"other users can write to {place} (mode {mode:o})" in str(caught.value)
    assert f"`chmod go-w {shlex.quote(str(place))}`" in caught.value.remedy and "LOWBIT_CACHE" in caught.value.remedy


def test_a_link_is_resolved_before_it_is_checked(cache: Path, tmp_path: Path) -> None:
    """What counts is the target, and the target is what is used from then on."""
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    cache.mkdir(parents=True)
    (cache / "shim").symlink_to(target)
    assert storage.code_folder("shim") == target.resolve()
    target.chmod(0o777)
    with pytest.raises(UnavailableError, match="other users can write"):
        storage.code_folder("shim")
    (cache / "none").symlink_to(tmp_path / "nothing")
    with pytest.raises(UnavailableError):
        storage.code_folder("none")


@pytest.mark.skipif(not ROOT, reason="only root can give a file to another user")
@pytest.mark.parametrize("which", ["folder", "cache"])
def test_a_folder_of_another_user_is_refused(cache: Path, which: str) -> None:
    """Root does not run what a user could have written."""
    (cache / "shim").mkdir(parents=True, mode=0o700)
    place = cache if which == "cache" else cache / "shim"
    os.chown(place, 12345, -1)
    with pytest.raises(UnavailableError, match=f"{place} belongs to user 12345"):
        storage.code_folder("shim")


# **What is kept in them.**


class Maker:
    """Makes a file and counts how often."""

    def __init__(self, content: str = "code") -> None:
        self.content, self.times = content, 0

    def __call__(self, path: Path) -> None:
        self.times += 1
        path.write_text(self.content)


def test_a_file_is_made_once(cache: Path, umask: int) -> None:
    """Whatever the umask, it is taken the second time; only its owner can write to it."""
    folder, make = storage.code_folder("shim"), Maker()
    for _ in range(3):
        path = storage.kept_code(folder, "a.so", make)
    assert (make.times, path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (1, "code", 0o700)
    assert sorted(os.listdir(folder)) == ["a.so", "a.so.sha256"]


def damage(path: Path) -> None:
    path.write_text("c0de")


def cut(path: Path) -> None:
    path.write_text("")


def forget(path: Path) -> None:
    path.unlink()


def forget_digest(path: Path) -> None:
    path.with_name("a.so.sha256").unlink()


def empty_digest(path: Path) -> None:
    path.with_name("a.so.sha256").write_text("")


def link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def hard_link(path: Path) -> None:
    path.with_name("other").hardlink_to(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def pipe_for_digest(path: Path) -> None:
    record = path.with_name("a.so.sha256")
    record.unlink()
    os.mkfifo(record)


def open_to_others(path: Path) -> None:
    path.chmod(0o720)


def open_digest(path: Path) -> None:
    path.with_name("a.so.sha256").chmod(0o602)


HARMS = [damage, cut, forget, forget_digest, empty_digest, link, hard_link, pipe, pipe_for_digest]


@pytest.mark.parametrize("how", [*HARMS, open_to_others, open_digest])
def test_what_does_not_match_is_made_again_once(cache: Path, how: Callable[[Path], None]) -> None:
    """A damaged file, one without its digest, and anything that is not a plain file of its own; and then no more."""
    folder, make = storage.code_folder("shim"), Maker()
    how(storage.kept_code(folder, "a.so", make))
    for _ in range(2):
        path = storage.kept_code(folder, "a.so", make)
        assert (make.times, path.read_text(), path.is_symlink()) == (2, "code", False)


@pytest.mark.skipif(not ROOT, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["a.so", "a.so.sha256"])
def test_a_file_of_another_user_is_not_run(cache: Path, name: str) -> None:
    """Even where it matches: it was placed while the folder was open to others."""
    folder, make = storage.code_folder("shim"), Maker()
    os.chown(storage.kept_code(folder, "a.so", make).with_name(name), 12345, -1)
    storage.kept_code(folder, "a.so", make)
    assert (make.times, (folder / name).stat().st_uid) == (2, 0)


def test_only_a_plain_file_of_ones_own_is_read(tmp_path: Path, umask: int) -> None:
    """Whatever the umask, what was written with `OWN_MODE` is read; a larger file and what others can change is not."""
    path, victim = tmp_path / "record", tmp_path / "victim"
    storage.write_whole(path, b"sound", storage.OWN_MODE)
    assert storage.read_own(path, 5) == b"sound"
    with pytest.raises(OSError, match="File too large"):
        storage.read_own(path, 4)
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PermissionError):
            storage.read_own(path, 5)
    path.replace(victim)
    victim.chmod(0o600)
    for plant in (path.symlink_to, path.hardlink_to):
        plant(victim)
        with pytest.raises(OSError, match=r"symbolic links|not permitted"):
            storage.read_own(path, 5)
        path.unlink()
    os.mkfifo(path)
    for other in (path, tmp_path, Path("/dev/null"), tmp_path / "none"):
        with pytest.raises(OSError, match=r"not permitted|No such file"):
            storage.read_own(other, 5)


@pytest.mark.parametrize("name", ["a.so", "a.so.sha256"])
def test_a_folder_under_the_name_is_an_error_and_not_run(cache: Path, name: str) -> None:
    """It cannot be replaced; the caller is told before anything is made."""
    folder, make = storage.code_folder("shim"), Maker()
    (folder / name).mkdir()
    with pytest.raises(IsADirectoryError):
        storage.kept_code(folder, "a.so", make)
    assert (os.listdir(folder), make.times) == ([name], 0)


def test_a_file_of_another_size_is_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of a terabyte would be read for an hour before its digest was known to be wrong."""
    folder, make = storage.code_folder("shim"), Maker()
    with storage.kept_code(folder, "a.so", make).open("wb") as stream:
        stream.truncate(1 << 40)
    monkeypatch.setattr(storage.hashlib, "file_digest", lambda *_: pytest.fail("it was read"))  # type: ignore[attr-defined]  # through its import
    assert (storage.kept_code(folder, "a.so", make).read_text(), make.times) == ("code", 2)


def test_a_maker_that_fails_leaves_nothing(cache: Path) -> None:
    """Its exception passes, and what it had written is gone, folders included."""
    folder = storage.code_folder("shim")

    def fail(path: Path) -> None:
        path.with_name("more").mkdir()
        path.write_text("half")
        raise KeyError("compiler")

    with pytest.raises(KeyError, match="compiler"):
        storage.kept_code(folder, "a.so", fail)
    assert os.listdir(folder) == []


def test_two_makers_at_once_leave_no_lasting_mismatch(cache: Path) -> None:
    """The file of one with the digest of the other, as after an interrupt between the two, is made again once."""
    folder, inner, outer = storage.code_folder("shim"), Maker("inner"), Maker("outer")

    def make(path: Path) -> None:
        outer(path)
        if outer.times == 1:
            storage.kept_code(folder, "a.so", inner)  # another process is done first

    assert storage.kept_code(folder, "a.so", make).read_text() == "outer"
    assert storage.kept_code(folder, "a.so", make).read_text() == "outer"
    assert (inner.times, outer.times) == (1, 1)
    (folder / "a.so").write_text("inner")
    for _ in range(2):
        assert storage.kept_code(folder, "a.so", make).read_text() == "outer"
    assert (inner.times, outer.times) == (1, 2)


def test_a_killed_maker_is_cleaned_up(cache: Path) -> None:
    """Its workplace is removed when something is next made; a temporary file, which has no lock, after a day."""
    folder = storage.code_folder("shim")
    script = f"""
import os, signal
from pathlib import Path
from lowbit.system.storage import kept_code
kept_code(Path({str(folder)!r}), "a.so", lambda path: os.kill(os.getpid(), signal.SIGKILL))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (workplace,) = folder.iterdir()
    new, old = folder / ".new.0123.part", folder / ".old.0123.part"
    for temporary in (new, old):
        temporary.touch()
    os.utime(old, times=(time.time() - 2 * 24 * 3600,) * 2)
    storage.kept_code(folder, "b.so", Maker())
    assert [each.exists() for each in (workplace, new, old)] == [False, True, False]
