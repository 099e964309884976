"""Deadlines: of calls, of long calls, and of loading a backend."""

from argparse import Namespace

import misbehaving
import pytest
from hosting import verdict_on
from paths import SUPPORT

from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.deadlines import DEADLINE, LOADING_DEADLINE
from lowbit_conformance.suite.plugin import under_test


def test_a_backend_that_does_not_load_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of loading ends it, however long a call may take."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    remote = Remote("name", f"misbehaving:{misbehaving.NeverSaysWhatItCan.__name__}", 600.0, loading=2.0)
    with pytest.raises(BrokenPromiseError, match=r"^HUNG: longer than 2 s$"):
        remote.load()
    remote.arena.close()


def test_a_long_request_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a second is late where a request is ordinary, and not where one of its length is long."""
    assert verdict_on(misbehaving.TakesASecond, 0.5) == "HUNG: longer than 0.5 s"
    monkeypatch.setattr("lowbit_conformance.isolation.process.LONG", 1)
    assert verdict_on(misbehaving.TakesASecond, 0.5) == "passed"


@pytest.mark.parametrize(
    ("given", "expected"), [(None, (DEADLINE, LOADING_DEADLINE)), (7.0, (7.0, 7.0)), (500.0, (500.0, 500.0))]
)
@pytest.mark.parametrize("named", [{"backend": "numpy"}, {"backend": "bank:none"}, {"command": "./mine"}])
def test_the_option_governs_loading_too(
    named: dict[str, str], given: float | None, expected: tuple[float, float]
) -> None:
    """Without ``--deadline`` loading has more time than a call."""
    unnamed = dict.fromkeys(("backend", "library", "command", "function"))
    remote = under_test(Namespace(**{**unnamed, "deadline": given} | named))
    assert (remote.deadline, remote.loading) == expected
    remote.arena.close()
