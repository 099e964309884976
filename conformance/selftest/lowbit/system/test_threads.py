"""Work side by side: the results of one after the other, at the same time, and no work after a failure."""

import threading

import pytest

from lowbit.system.threads import BLAS, OPENMP, side_by_side, usable_processors, worker_environment


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_results_are_in_order(threads: int) -> None:
    """Whichever ends first."""
    done = threading.Event()

    def work(item: int) -> int:
        if threads > 1:  # the first waits for the last of the first round
            done.set() if item == threads - 1 else done.wait(60)
        return item * item

    assert side_by_side(work, range(20), threads) == [item * item for item in range(20)]
    assert side_by_side(work, [], threads) == []


def test_as_many_at_a_time_as_were_asked_for() -> None:
    """Three meet at a barrier for three, and never is there a fourth; one thread is the caller's own."""
    barrier, lock, running, most = threading.Barrier(3, timeout=60), threading.Lock(), 0, 0

    def work(item: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    side_by_side(work, range(9), 3)
    assert most == 3
    assert side_by_side(lambda item: threading.current_thread(), [1], 1) == [threading.current_thread()]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_ends_the_work(error: type[BaseException], threads: int) -> None:
    """The error of the earliest item that failed comes out, what ran has ended, and not everything was begun."""
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item in (3, 5):
            raise error(item)
        if item > 5 and threads > 1:
            threading.Event().wait(0.005)

    with pytest.raises(error, match="3"):
        side_by_side(work, range(5_000), threads)
    count = len(begun)
    assert count < 5_000  # all of them take seconds
    threading.Event().wait(0.02)
    assert len(begun) == count


def test_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the process may use, not those that there are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert usable_processors() == 2
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_processors() == 1


GIVEN = [
    ({}, str(usable_processors())),
    ({"OMP_NUM_THREADS": "3"}, "3"),
    ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "2"}, "2"),
]


@pytest.mark.parametrize(("given", "products"), GIVEN)
def test_a_worker_multiplies_on_as_many_threads_as_its_caller(
    given: dict[str, str], products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because float32 sums depend on it; its backends get their part of the processors."""
    for name in (*BLAS, OPENMP):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = worker_environment(5)
    assert found == {"OPENBLAS_NUM_THREADS": products, "MKL_NUM_THREADS": products, "OMP_NUM_THREADS": "5"}
