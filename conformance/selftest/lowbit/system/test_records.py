"""Records of finished parts: taken up by the same job, refused for another one, whole after every part."""

from pathlib import Path

import pytest

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.records import Kept, read_record, write_record

CALL = {"command": "count", "tokens": (1, 2)}


def test_the_same_job_takes_up_its_results(tmp_path: Path) -> None:
    """As JSON has them; without a file there is nothing to take up."""
    for number in range(3):
        kept = Kept(tmp_path / "kept", CALL)
        assert kept.results == {str(each): [each, 0.1 * each] for each in range(number)}
        kept.add(str(number), [number, 0.1 * number])
    Kept(None, CALL).add("0", 1)
    assert Kept(None, CALL).results == {}
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_another_job(tmp_path: Path) -> None:
    """The reader says so, and a user's file is refused and stays."""
    write_record(tmp_path / "kept", CALL, {"0": 1})
    before = (tmp_path / "kept").read_bytes()
    other = CALL | {"tokens": (1, 3)}
    assert read_record(tmp_path / "kept", CALL) == {"0": 1} and read_record(tmp_path / "kept", other) is None
    with pytest.raises(ArgumentError, match=r"--keep is .*kept.*, the record of another command; allowed: a free name"):
        Kept(tmp_path / "kept", other)
    assert (tmp_path / "kept").read_bytes() == before


NO_RECORDS = [b"", b"notes", b"[]", b'{"call": {}}', b'{"parts": [], "call": {}}', b'{"parts": {"0": NaN}, "call": {}}']


@pytest.mark.parametrize("content", NO_RECORDS)
def test_what_is_no_record(content: bytes, tmp_path: Path) -> None:
    """It is refused and stays."""
    (file := tmp_path / "kept").write_bytes(content)
    with pytest.raises(ArgumentError, match="which is no record"):
        Kept(file, CALL)
    assert file.read_bytes() == content


def test_what_is_no_file(tmp_path: Path) -> None:
    """A folder, a link to nowhere, a name in no folder."""
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "link", tmp_path / "none" / "kept"):
        with pytest.raises(ArgumentError, match="--keep is"):
            Kept(path, CALL)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The message says what to do; what was kept before is there."""
    (folder := tmp_path / "folder").mkdir()
    kept = Kept(folder / "kept", CALL)
    folder.rename(tmp_path / "gone")
    with pytest.raises(
        UnavailableError, match=r"it cannot be written: .*; free disk space .*run the same command again"
    ):
        kept.add("0", 1)
