"""Work on a Ray cluster of three machines: quantising, evaluating and soaking, with a machine or the driver lost.

The machines are those of `ray.cluster_utils`, processes of this one. ``nox -s cluster`` installs Ray and runs this.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import rewriting
import tiny_checkpoint
import tiny_gguf
from paths import SUPPORT
from rewriting import contents

from lowbit.errors import ArgumentError, UnavailableError
from lowbit.rewriting.journal import SUFFIX
from lowbit.runtime import Options, open_model
from lowbit.runtime.evaluating import Models, Piece, Scoring
from lowbit.system.interpreters import python_command
from lowbit.system.on_ray import OnRay

pytest.importorskip("ray", reason="ray is not installed: `nox -s cluster` installs it and runs these tests")

LAYERS, GROUP = 12, ["--group-size", 32]
LONG = 900
"""Seconds after which what must happen is taken not to happen."""
DRIVERS: list["subprocess.Popen[bytes]"] = []
"""The processes that a test has begun."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster whose first machine gives no processors; the others have one each."""
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *_path()])}
    found = Cluster()
    join(found, 0)
    yield found
    found.shutdown()


@pytest.fixture(autouse=True)
def three_machines(cluster: Any) -> Iterator[None]:
    """Three that give processors at the beginning of each test, whatever became of the test before."""
    while len(cluster.worker_nodes) < 3:
        join(cluster, 1)
    yield
    while DRIVERS:
        DRIVERS[-1].kill()  # of a test that failed; it would keep the machines busy
        DRIVERS.pop().wait()


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


@dataclass(frozen=True)
class Job:
    """Work on a cluster.

    Attributes:
        words: of the command line; the job's place comes behind ``OUT``, and the cluster's address at the end.
        result: what is in a place when the work is done, but for dates and times.
        kept: how many parts are finished in a place.
        parts: of the whole.
        tasks: of each part.
    """

    words: tuple[object, ...]
    result: Callable[[Path], Any]
    kept: Callable[[Path], int]
    parts: int
    tasks: int = 1

    def program(self, place: Path, *options: object, before: str = "") -> list[str]:
        """The command of a process that does it in a place."""
        words = [str(place / "out") if word == OUT else str(word) for word in (*self.words, *options)]
        return python_command("-c", PROGRAM.format(support=str(SUPPORT), before=before, words=words))

    def begun(self, place: Path, *options: object, before: str = "") -> "subprocess.Popen[bytes]":
        """A process that does it, whose answer becomes a file of the place."""
        with (place / "answer").open("wb") as answer:
            DRIVERS.append(subprocess.Popen(self.program(place, *options, before=before), stdout=answer))
        return DRIVERS[-1]


OUT = object()
PROGRAM = """
import sys
sys.path[:0] = [{support!r}]
{before}
sys.argv = {words!r}
if sys.argv[0] == "soak":
    import typer
    from kills import soak
    typer.run(soak.main)
else:
    from lowbit.cli import main
    main()
"""
SLOWLY = "from pathlib import Path; import slow_tasks; slow_tasks.slow_down(Path({!r}))"


def answer_in(place: Path) -> dict[str, Any]:
    """The JSON that a process printed, without times."""
    found = json.loads((place / "answer").read_bytes())
    return {name: each for name, each in found.items() if name != "seconds"}


def written_in(place: Path) -> dict[str, bytes]:
    """The files of a model."""
    return contents(place / "out")


def blocks_in(place: Path) -> int:
    """The blocks that are finished of a model that is not."""
    return len(list(place.glob(f".*{SUFFIX}/model-*.safetensors")))


def windows_in(place: Path) -> int:
    """The windows whose results are kept in a place."""
    file = place / "out"
    return len(json.loads(file.read_bytes())["parts"]) - 1 if file.exists() else 0


def portions_in(place: Path) -> dict[str, Any]:
    """The portions of a soak, without seconds."""
    file = place / "out"
    portions = json.loads(file.read_bytes())["backends"].get(NARROW, {}) if file.exists() else {}
    return {first: {**entry, "seconds": 0} for first, entry in portions.items()}


def soaked_in(place: Path) -> str:
    """All that a soak keeps and prints, in its order, without dates and seconds."""
    content = json.loads((place / "out").read_bytes()) | {"date": "", "backends": portions_in(place)}
    return json.dumps(content) + (place / "answer").read_text()


NARROW = "odd_backends:Narrow"
SEEDS = 100


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Of each kind one, on models of many blocks and a text of many windows."""
    place = tmp_path_factory.mktemp("sources")
    config = tiny_checkpoint.DENSE | {"num_hidden_layers": LAYERS}
    dense = tiny_checkpoint.write(place / "dense", tiny_checkpoint.published(config))
    models = [tiny_gguf.write(place / f"{seed}.gguf", tiny_gguf.published(seed)) for seed in (0, 1)]
    (text := place / "text").write_text(rewriting.TEXT)
    read = ("--text", text, "--tokens", 240, "--window", 20, "--backend", "numpy", "--keep", OUT, "--json")
    words = ("lowbit", "quantize", dense, "-o", OUT, *GROUP)
    seen = ("--method", "gptq", "--calibration", text, "--window", 32)
    return {
        "quantize": Job(words, written_in, blocks_in, LAYERS),
        "gptq": Job((*words, *seen), written_in, blocks_in, LAYERS, tasks=4),
        "perplexity": Job(("lowbit", "perplexity", "--model", models[0], *read), answer_in, windows_in, 12),
        "compare": Job(("lowbit", "compare", *models, *read), answer_in, windows_in, 12),
        "soak": Job(
            ("soak", "--out", OUT, "--seeds", SEEDS, "--backend", NARROW),
            soaked_in,
            lambda place: len(portions_in(place)),
            SEEDS // 20,
        ),
    }


KINDS = ("quantize", "gptq", "perplexity", "compare", "soak")


@pytest.fixture(scope="module")
def expected(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What one process makes of a job, which is done once."""

    @cache
    def found(kind: str) -> Any:
        place = tmp_path_factory.mktemp(kind)
        job = jobs[kind]
        if "--keep" in job.words:  # results are kept of other processes alone
            words = [word for word in job.words if word not in ("--keep", OUT)]
            job = replace(job, words=tuple(words))
        assert job.begun(place).wait(LONG) == 0
        return job.result(place)

    return found


def until(look: Callable[[], Any]) -> Any:
    """What `look` finds, as soon as it is true."""
    end = time.monotonic() + LONG
    while not (found := look()):
        assert time.monotonic() < end, f"nothing after {LONG} s"
        time.sleep(0.02)
    return found


def begun_slowly(cluster: Any, job: Job, place: Path) -> "subprocess.Popen[bytes]":
    """A driver that has kept two parts, while three more have begun and wait."""
    (gate := place / "gate").mkdir()
    driver = job.begun(place, "--cluster", cluster.address, before=SLOWLY.format(str(gate)))
    until(lambda: driver.poll() is not None or (job.kept(place) >= 2 and len(list(gate.glob("waiting-*"))) >= 3))
    assert driver.poll() is None
    return driver


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_that_of_one_process(
    kind: str, cluster: Any, jobs: dict[str, Job], expected: Callable[[str], Any], tmp_path: Path
) -> None:
    """Every byte of it, or every number of the answer."""
    assert jobs[kind].begun(tmp_path, "--cluster", cluster.address).wait(LONG) == 0
    assert jobs[kind].result(tmp_path) == expected(kind)
    assert "quantize" in jobs[kind].words or jobs[kind].kept(tmp_path) == jobs[kind].parts


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_is_lost_in_the_middle(
    kind: str, cluster: Any, jobs: dict[str, Job], expected: Callable[[str], Any], tmp_path: Path
) -> None:
    """Its tasks are done again, on the others."""
    driver, gate = begun_slowly(cluster, jobs[kind], tmp_path), tmp_path / "gate"
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    (gate / "open").touch()
    assert driver.wait(LONG) == 0
    assert jobs[kind].result(tmp_path) == expected(kind)
    began = [each.name.split("-")[1] for each in gate.glob("waiting-*")]
    assert len(began) > len(set(began))  # some part was begun twice


@pytest.mark.parametrize("kind", KINDS)
def test_the_driver_is_killed(
    kind: str, cluster: Any, jobs: dict[str, Job], expected: Callable[[str], Any], tmp_path: Path
) -> None:
    """The same command takes up what it had kept, and begins the tasks that are left."""
    job, driver = jobs[kind], begun_slowly(cluster, jobs[kind], tmp_path)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = job.kept(tmp_path)
    assert 2 <= kept < job.parts
    (again := tmp_path / "again").mkdir()
    (again / "open").touch()
    resumed = job.begun(tmp_path, "--cluster", cluster.address, before=SLOWLY.format(str(again)))
    assert resumed.wait(LONG) == 0
    assert job.result(tmp_path) == expected(kind)
    begun = {each.name.split("-")[1] for each in again.glob("waiting-*")}
    assert len(begun) == (job.parts - kept - 2) * job.tasks  # the first two of those that are left do not wait


def test_a_machine_without_the_model(cluster: Any, tmp_path: Path) -> None:
    """The message names the path and the machine, and what to do."""
    model = tiny_gguf.write(tmp_path / "model.gguf", tiny_gguf.published(0))
    models = Models((tmp_path / "elsewhere.gguf",), (open_model(model).config,), "numpy", Options())
    with pytest.raises(
        UnavailableError, match=r"elsewhere\.gguf.* nothing is there on machine .* put it under the same"
    ):
        list(OnRay(cluster.address).run(Scoring(models), [Piece(0, (3, 4))]))


def test_a_machine_without_a_module(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of the soak: the message names it."""
    (tmp_path / "only_here.py").write_text("def work(item, threads):\n    return item\n")
    monkeypatch.syspath_prepend(tmp_path)
    work = import_module("only_here").work
    with pytest.raises(UnavailableError, match=r"could not begin the work: .*No module named 'only_here'; install"):
        list(OnRay(cluster.address).run(work, [0]))


def test_products_have_the_threads_of_this_process(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Ray's number, so that sums are the same to the bit; backends have those of their task."""
    from task_work import variables

    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    (found,) = dict(OnRay(cluster.address).run(variables, [0])).values()
    assert found["OPENBLAS_NUM_THREADS"] == "7" and found["OMP_NUM_THREADS"] == "1"


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
