"""A wheel of the lowbit that is running, so that a new package installs where lowbit is not published.

The wheel is assembled from the installed files and their metadata. It needs no build tool and no network, and the same
files give the same wheel.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from lowbit.errors import UnavailableError

BEGINNING = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can hold
KEPT = ("METADATA", "entry_points.txt")
WHEEL = "Wheel-Version: 1.0\nGenerator: lowbit new-backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel_of_lowbit() -> tuple[str, bytes]:
    """The name and the content of a wheel of the installed lowbit.

    Raises:
        UnavailableError: lowbit runs from a folder and is not installed.
    """
    installed = found()
    information = f"lowbit-{installed.version}.dist-info"
    contents = dict(sources()) | dict(metadata(installed, information))
    record = "".join(f"{path},sha256={digest(content)},{len(content)}\n" for path, content in contents.items())
    contents[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in contents.items():
            entry = zipfile.ZipInfo(path, BEGINNING)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return f"lowbit-{installed.version}-py3-none-any.whl", stream.getvalue()


def found() -> Distribution:
    """The installed distribution."""
    try:
        return distribution("lowbit")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError("a wheel of lowbit", "lowbit is not installed", "install it with pip") from error


def sources() -> Iterator[tuple[str, bytes]]:
    """Every file of lowbit's packages, sorted by path.

    They are looked up by name: an editable installation has them in several folders and lists none of them.
    """
    places = {name: importlib.util.find_spec(name) for name in PACKAGES}
    packages = {name: Path(str(place.origin)).parent for name, place in places.items() if place is not None}
    for name, folder in sorted(packages.items()):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


PACKAGES = (
    "lowbit",
    "lowbit_adapters",
    "lowbit_conformance",
    "lowbit_cppyy",
    "lowbit_cuda",
    "lowbit_foreign",
    "lowbit_numpy",
    "lowbit_torch",
)
"""The packages of the distribution."""


def metadata(installed: Distribution, information: str) -> Iterator[tuple[str, bytes]]:
    """The metadata of a wheel: pip's record of the installed lowbit, without what is specific to that installation."""
    for name in KEPT:
        yield f"{information}/{name}", (installed.read_text(name) or "").encode()
    yield f"{information}/WHEEL", WHEEL.encode()
    yield f"{information}/licenses/LICENSE", (installed.read_text("licenses/LICENSE") or "").encode()


def digest(content: bytes) -> str:
    """The SHA-256 of a file in the form of RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
