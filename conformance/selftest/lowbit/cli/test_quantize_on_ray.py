"""``lowbit quantize --cluster``: three machines, of which one is lost, and a driver that is killed.

The machines are those of `ray.cluster_utils`, processes of this one. ``nox -s cluster`` installs Ray and runs this.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rewriting
import tiny_checkpoint
from paths import SUPPORT
from rewriting import contents

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.rewriting.journal import SUFFIX
from lowbit.system.interpreters import python_command
from lowbit.system.on_ray import OnRay

pytest.importorskip("ray", reason="ray is not installed: `nox -s cluster` installs it and runs these tests")

answer = partial(rewriting.answer, "quantize")
LAYERS, GROUP = 12, ["--group-size", 32]
LONG = 300
"""Seconds after which what must happen is taken not to happen."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose first machine gives no processors; the others have one each."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *_path()])}
    found = Cluster()
    for processors in (0, 1, 1, 1):
        join(found, processors)
    yield found
    found.shutdown()


def join(cluster: Any, processors: int) -> None:
    """Add a machine, in as many attempts as it takes: Ray gives each one 30 s, and this machine may be busy."""
    end = time.monotonic() + LONG
    while True:
        try:
            cluster.add_node(num_cpus=processors)
            break
        except Exception as error:
            if "timed out during startup" not in str(error) or time.monotonic() > end:
                raise
    cluster.wait_for_nodes(LONG)


def _path() -> list[str]:
    """Where this process was told to find modules; the machines find them there too."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of many small blocks."""
    config = tiny_checkpoint.DENSE | {"num_hidden_layers": LAYERS}
    return tiny_checkpoint.write(tmp_path_factory.mktemp("source") / "dense", tiny_checkpoint.published(config))


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    path = tmp_path_factory.mktemp("expected") / "new"
    answer(source, "-o", path, *GROUP)
    return contents(path)


def test_the_bytes_are_those_of_one_process(
    cluster: Any, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Of every file."""
    answer(source, "-o", tmp_path / "new", *GROUP, "--cluster", cluster.address)
    assert contents(tmp_path / "new") == expected


def until(look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it is true."""
    end = time.monotonic() + LONG
    while not (found := look()):
        assert time.monotonic() < end, f"nothing after {LONG} s"
        time.sleep(0.02)
    return found


PROGRAM = """
import sys
sys.path[:0] = [{support!r}]
from pathlib import Path
from lowbit.cli import main
from lowbit.rewriting import apart
from slow_tasks import Slow
apart.Task = Slow.of(Path({gate!r}))
sys.argv = {words!r}
main()
"""


def begun(cluster: Any, source: Path, destination: Path, slowly: Path) -> "subprocess.Popen[bytes]":
    """A driver whose tasks wait, from the third block on, until there is the file ``open`` in the folder `slowly`."""
    words = ["lowbit", "quantize", source, "-o", destination, *GROUP, "--cluster", cluster.address]
    program = PROGRAM.format(support=str(SUPPORT), gate=str(slowly), words=list(map(str, words)))
    return subprocess.Popen(python_command("-c", program))


def parts(folder: Path) -> list[Path]:
    return list(folder.glob(f".*{SUFFIX}/model-*.safetensors"))


def test_a_machine_is_lost_in_the_middle(
    cluster: Any, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """Its tasks are done again, on the others and on one that joins."""
    gate, out = tmp_path / "gate", tmp_path / "out"
    gate.mkdir()
    out.mkdir()
    driver = begun(cluster, source, out / "new", gate)
    until(lambda: len(parts(out)) >= 2 and len(list(gate.glob("waiting-*"))) >= 3)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    (gate / "open").touch()
    assert driver.wait(LONG) == 0
    assert contents(out / "new") == expected
    began = [each.name.split("-")[1] for each in gate.glob("waiting-*")]
    assert len(began) > len(set(began))  # some block was begun twice
    join(cluster, 1)


def test_the_driver_is_killed(cluster: Any, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """The same command takes up what it had kept."""
    gate, out = tmp_path / "gate", tmp_path / "out"
    gate.mkdir()
    out.mkdir()
    driver = begun(cluster, source, out / "new", gate)
    until(lambda: len(parts(out)) >= 2 and len(list(gate.glob("waiting-*"))) >= 3)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not (out / "new").exists()
    told = answer(source, "-o", out / "new", *GROUP, "--cluster", cluster.address)
    assert contents(out / "new") == expected
    assert 2 <= told["resumed"] < LAYERS


def test_errors_of_the_work_come_back(cluster: Any) -> None:
    """With their fields, and no further task is begun."""
    from task_work import refuse_three

    with pytest.raises(ArgumentError, match="item is 3; allowed: another one") as caught:
        list(OnRay(cluster.address).run(refuse_three, range(10)))
    assert caught.value.given == 3


def test_a_bounded_number_is_under_way(cluster: Any, tmp_path: Path) -> None:
    """Three machines with two tasks for each, whatever the caller does not take."""
    from task_work import Noting

    results = OnRay(cluster.address).run(Noting(tmp_path), range(100))
    next(results)
    time.sleep(2)  # for tasks that should not be there to begin
    assert len(list(tmp_path.iterdir())) <= 6
    results.close()


def test_no_cluster() -> None:
    """The address is in the message."""
    with pytest.raises(UnavailableError, match=r"there is no cluster at 127\.0\.0\.1:1: .*refused"):
        list(OnRay("127.0.0.1:1").run(len, [()]))  # type: ignore[arg-type]  # it is never called
