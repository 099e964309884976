"""The jobs of the repository: which wheels of cppyy pip is given (``noxfile.py``).

nox is not among what these tests need, so a stand-in takes its place: sessions are given, and commands are noted.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
import tomllib
import types
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from paths import ROOT

WHEEL = "cpycppyy-1.13.0-py3-none-any.whl"


class SessionError(Exception):
    """What `nox.Session.error` raises here."""


class Session:
    """A session that builds one wheel and notes what it runs."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, ...]] = []
        cache = Path(os.environ["LOWBIT_CACHE"])
        self.virtualenv = types.SimpleNamespace(location=str(cache.with_name("environment")))
        Path(self.virtualenv.location).mkdir(exist_ok=True)

    def run_install(self, *words: str) -> None:
        self.ran.append(words)
        folder = Path(words[words.index("--wheel-dir") + 1])
        with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
            wheel.writestr(
                zipfile.ZipInfo("cpycppyy-1.13.0.dist-info/METADATA"), "Metadata-Version: 2.1\nName: CPyCppyy\n"
            )

    def log(self, text: str) -> None:
        """Nobody reads it."""

    def error(self, text: str) -> None:
        raise SessionError(text)


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with the stand-in for nox, and an empty cache."""
    nox: Any = types.ModuleType("nox")
    nox.session = lambda function=None, **_: function or (lambda inner: inner)
    nox.options, nox.Session = types.SimpleNamespace(), Session
    nox.project = MagicMock(load_toml=lambda name: tomllib.loads((ROOT / name).read_text("utf-8")))
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "need_compiler", lambda session: None)
    return module


def given(noxfile: Any, session: Session) -> list[tuple[str, str, bool]]:
    """What pip is given: the names of packages and of files, and whether the file is there."""
    with noxfile.cppyy_wheels(session) as wheels:
        named = [wheel.split(" @ file://") for wheel in wheels]
        return [(name, Path(file).name, zipfile.is_zipfile(file)) for name, file in named]


BUILT = [("CPyCppyy", WHEEL, True)]
"""The name is the package's own: pip installs headers in a folder of that name, where cppyy looks for them."""


def test_wheels_are_built_once_and_named(noxfile: Any) -> None:
    """pip gets files and no folder to choose from; it starts without the current folder among its places."""
    session = Session()
    assert [given(noxfile, session) for _ in range(2)] == [BUILT] * 2
    ((command),) = session.ran
    assert command[:5] == ("python", "-P", "-m", "pip", "wheel")


def archive(cache: Path) -> Path:
    """The one archive in the cache."""
    (found,) = (cache / "wheelhouse").glob("*.zip")
    return found


def test_damaged_wheels_are_built_again(noxfile: Any, tmp_path: Path) -> None:
    """An archive that does not match its digest; a newer wheel beside it is not looked at."""
    session = Session()
    given(noxfile, session)
    kept = archive(tmp_path / "cache")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    (kept.parent / "cppyy-99-py3-none-any.whl").write_bytes(b"planted")
    assert [given(noxfile, session) for _ in range(2)] == [BUILT] * 2
    assert len(session.ran) == 2


def test_planted_wheels_are_refused(noxfile: Any, tmp_path: Path) -> None:
    """A folder that others can write to is not used, whatever the digests in it say."""
    session = Session()
    given(noxfile, session)
    kept = archive(tmp_path / "cache")
    with zipfile.ZipFile(kept, "w") as planted:
        planted.writestr("cppyy-3.5.0-py3-none-any.whl", b"planted")
    content = kept.read_bytes()
    kept.with_name(f"{kept.name}.sha256").write_text(f"{len(content)} {hashlib.sha256(content).hexdigest()}")
    kept.parent.chmod(0o777)
    with pytest.raises(SessionError, match=r"cppyy cannot be kept: .*other users can write to .*chmod go-w"):
        given(noxfile, session)
    assert len(session.ran) == 1


def test_wheels_lie_where_nobody_else_writes(noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they are built nor while pip is given them: a temporary folder may be open to others."""
    session = Session()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    with noxfile.cppyy_wheels(session) as wheels:
        ((*_, built, _),) = session.ran
        assert (tmp_path / "cache/wheelhouse").resolve() in Path(built).parents
        assert all(wheel.partition(" @ file://")[2].startswith(session.virtualenv.location) for wheel in wheels)
    assert list(Path(session.virtualenv.location).iterdir()) == []


def test_a_build_that_fails_leaves_nothing(noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one starts anew."""
    session = Session()
    with monkeypatch.context() as broken:
        broken.setattr(session, "run_install", MagicMock(side_effect=SessionError("pip failed")))
        with pytest.raises(SessionError, match="pip failed"):
            given(noxfile, session)
    assert list((tmp_path / "cache/wheelhouse").iterdir()) == []
    assert given(noxfile, session) == BUILT
