"""The settings of the tests themselves: what `conftest.py` and pyproject.toml promise for every test."""

import re

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
