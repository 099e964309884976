"""A pytest plugin: the processor seconds of every test function, its child processes included.

``pytest -p cost --cost FILE conformance/selftest`` writes a line for each test function with the seconds of all its
cases, the dearest first. Processor seconds differ little between a busy machine and a quiet one, unlike wall time, so
`conftest.py` takes from such a file which tests are slow. A fixture counts for the first test that uses it.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest


def spent() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Cost:
    """Adds up what test functions cost."""

    def __init__(self, file: Path) -> None:
        self._file, self._seconds = file, dict[str, float]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = spent()
        try:
            return (yield)
        finally:
            name = f"{item.nodeid.partition('::')[0]}::{getattr(item, 'originalname', item.name)}"
            self._seconds[name] = self._seconds.get(name, 0.0) + spent() - before

    def pytest_sessionfinish(self) -> None:
        lines = [
            f"{seconds:8.2f} {name}\n" for name, seconds in sorted(self._seconds.items(), key=lambda each: -each[1])
        ]
        self._file.write_text("".join(lines), "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", type=Path, help="write the processor seconds of every test function to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.cost is not None:
        config.pluginmanager.register(Cost(config.option.cost))
