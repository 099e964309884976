"""Fixtures of the benchmarks: backends with their verdict, and the memory read limit."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from limits import MemoryReader
from verdicts import Verdicts

from lowbit import backend as registry
from lowbit.backend import Backend
from lowbit.errors import UnavailableError


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default="", help="names with commas between; all that can run here by default")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        wanted = metafunc.config.option.backends
        metafunc.parametrize(
            "backend", wanted.split(",") if wanted else registry.names(), indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend that can run here; one that cannot is listed as skipped, with its reason."""
    try:
        found = registry.load(request.param)
    except UnavailableError as error:
        pytest.skip(str(error))
    with found:
        yield found


@pytest.fixture(scope="session")
def conformance() -> Verdicts:
    return Verdicts()


@pytest.fixture(scope="session")
def reader() -> MemoryReader:
    """The memory read limit of all the processors that this process may use."""
    return MemoryReader(len(os.sched_getaffinity(0)))


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Whether the cores were free, and which reader is the limit.

    The machine's description has no place for them: runs whose descriptions differ are not compared.
    """
    reader = MemoryReader(len(os.sched_getaffinity(0)))
    output_json["lowbit"] = {
        "threads": reader.threads,
        "spin_speedup": round(reader.freedom(), 2),
        "reader": reader.fastest,
    }
