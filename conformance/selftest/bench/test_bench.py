"""The benchmarks' own instruments: the readers read every byte, and the spin runs on every thread."""

from pathlib import Path

import limits
import pytest
import verdicts


def test_the_readers_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading sums every word (it raises if it does not), also where the rotation begins again."""
    monkeypatch.setattr(limits, "ROTATION", 2**24)
    monkeypatch.setattr(limits, "TRIAL", 2**20)
    reader = limits.MemoryReader(2)
    assert reader.fastest in {way.name for way in reader.ways}
    assert len(reader.ways) == len({(way.reader, way.chunk) for way in reader.ways}) > 1
    assert all(reader.seconds(nbytes) > 0 for nbytes in (2**23, 2**23 + 8, 2**20 + 24))
    reader.try_again(2**20)
    assert reader.fastest == reader.ways[0].name
    assert reader.freedom() > 0


def test_the_sources_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a package, compiled ones too, and the file of a module that is no package."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "single_backend.py").touch()
    (tmp_path / "whole_backend/__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "kernels.so", "kernels.cu", "__pycache__/x.pyc"):
        (tmp_path / "whole_backend" / name).touch()
    assert verdicts.sources("single_backend") == [tmp_path / "single_backend.py"]
    found = [path.name for path in verdicts.sources("whole_backend")]
    assert found == ["__init__.py", "kernels.cu", "kernels.so"]
    assert verdicts.sources("no_such_backend") == []


def test_verdicts_are_asked_for_once_and_again_when_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict is kept in a file by name, instruction set and sources, and each of them decides."""
    questions: list[tuple[str, str]] = []

    def answer(name: str, isa: str) -> str:
        questions.append((name, isa))
        return f"passed {len(questions)}"

    monkeypatch.setattr(verdicts, "asked", answer)
    file = tmp_path / "results/verdicts.json"
    assert [verdicts.Verdicts(file).of("numpy") for _ in range(2)] == ["passed 1", "passed 1"]
    assert verdicts.Verdicts(file).of("numpy", "avx2") == "passed 2"
    before = verdicts.state_of("numpy")
    monkeypatch.setattr(verdicts, "sources", lambda package: [file])
    assert verdicts.state_of("numpy") != before
    assert verdicts.Verdicts(file).of("numpy") == "passed 3"
    assert questions == [("numpy", ""), ("numpy", "avx2"), ("numpy", "")]


def test_a_broken_file_of_verdicts_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file is not believed and not fatal."""
    monkeypatch.setattr(verdicts, "asked", lambda name, isa: "unproven (failed)")
    file = tmp_path / "verdicts.json"
    file.write_text('{"numpy')
    assert verdicts.Verdicts(file).of("numpy") == "unproven (failed)"
