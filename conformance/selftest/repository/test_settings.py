"""The settings of the tests themselves: what `conftest.py` and pyproject.toml promise for every test."""

import re

import pytest
from hypothesis import HealthCheck, settings
from paths import ROOT

TESTS = ROOT / "conformance/selftest"
TIMED = re.compile(r"\b(?:deadline=(?:[\d.]+|timedelta)|derandomize=|database=)")


def test_no_time_limits_a_property_test() -> None:
    """Neither an example nor the drawing of it, and every run has the same examples."""
    assert settings.default is not None
    assert settings.default.deadline is None
    assert settings.default.derandomize
    assert settings.default.database is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_no_test_has_settings_of_its_own_for_what_the_profile_settles() -> None:
    """A test may ask for another number of examples; what the profile says holds for all of them."""
    decorated = re.compile(r"\bsettings\((?P<arguments>[^()]*(?:\([^()]*\)[^()]*)*)\)")
    given = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in TESTS.rglob("*.py")
        if path.name not in ("conftest.py", "test_settings.py")
        for found in decorated.finditer(path.read_text("utf-8"))
        if TIMED.search(found["arguments"])
    ]
    assert given == []


def test_every_test_that_is_listed_as_slow_exists() -> None:
    """A list of costs that names what has gone would mark nothing."""
    lines = (TESTS / "slow.txt").read_text("utf-8").splitlines()
    listed = [line.split()[1].split("::") for line in lines if not line.startswith("#")]
    sources = {path: (TESTS / path).read_text("utf-8") for path, _ in listed if (TESTS / path).is_file()}
    gone = [name for path, name in listed if not re.search(rf"def {name}\b", sources.get(path, ""))]
    assert listed and gone == []


def test_slow_tests_are_left_out_on_request(request: pytest.FixtureRequest) -> None:
    """The list and the marks mean the same: every test of this run that is listed is marked."""
    listed = (TESTS / "slow.txt").read_text("utf-8")
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(TESTS):
            named = f" {item.path.relative_to(TESTS).as_posix()}::{item.originalname}\n" in listed
            assert named == (item.get_closest_marker("slow") is not None), item.nodeid
