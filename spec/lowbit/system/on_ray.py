"""Tasks on the machines of a Ray cluster.

Every machine needs the same version of lowbit, and the files that a task reads under the same path. Results come to
this process through Ray's object store. A task requests enough processors to leave none idle: one, or more if there are
fewer tasks than processors, but no more than the smallest machine has.

Ray itself repeats a task whose worker or machine is lost, and recomputes a result that is lost before it arrives.

Source: the documentation of Ray, on tasks and their fault tolerance.
"""

import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

from lowbit.errors import LowbitError, UnavailableError
from lowbit.system.tasks import MOST_LOSSES, Executor, Item, Result, Results, Work, lost_too_often, queue_of
from lowbit.system.threads import worker_environment

SECONDS_TO_ANSWER = 20
AHEAD = 2
"""Submitted tasks per task that can run at once, so that a free machine finds work waiting."""


class OnRay(Executor):
    """Tasks on a cluster.

    Args:
        address: of the cluster, as ``ray.init`` takes it: HOST:PORT, or ``auto`` for that of this machine.

    Raises:
        UnavailableError: ray is not installed.
    """

    def __init__(self, address: str) -> None:
        self._address, self._ray = address, _imported()

    def run(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        with redirect_stdout(sys.stderr):  # Ray prints about lost machines; standard output is for answers
            try:
                self._connect()
                yield from self._done(work, items)
            finally:
                self._ray.shutdown()

    def _done(self, work: Work[Item, Result], items: Sequence[Item]) -> Results[Item, Result]:
        """The results of a cluster that this process has joined."""
        ray, running, waiting = self._ray, dict[Any, Item](), queue_of(items)
        try:
            threads, slots = self._divided(len(waiting))
            variables = {"env_vars": worker_environment(threads)}
            call = ray.remote(num_cpus=threads, max_retries=MOST_LOSSES - 1, runtime_env=variables)(_called)
            sent, own = ray.put(work), version("lowbit")
            while waiting or running:
                while waiting and len(running) < AHEAD * slots:
                    item = waiting.popleft()
                    running[call.remote(sent, item, threads, own)] = item
                for reference in ray.wait(list(running))[0]:
                    item = running.pop(reference)
                    yield item, self._result(reference, item)
                    del reference  # or the store keeps the result
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _connect(self) -> None:
        """Join the cluster.

        Raises:
            UnavailableError: there is none.
        """
        try:
            host, _, port = self._address.removeprefix("ray://").rpartition(":")
            if host and port.isdecimal():  # Ray itself retries for minutes
                socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
            self._ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = f"there is no cluster at {self._address}: {error}"
            remedy = "start one with ray start --head, or name another address"
            raise UnavailableError("the cluster", reason, remedy) from error

    def _divided(self, tasks: int) -> tuple[int, int]:
        """The processors per task, and the number of tasks that can run at once."""
        counts = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        counts = [count for count in counts if count]
        if not counts:
            raise UnavailableError("the cluster", "no machine of it has a processor to give", "add one")
        threads = max(1, min(*counts, sum(counts) // max(1, tasks)))
        return threads, sum(count // threads for count in counts)

    def _result(self, reference: Any, item: object) -> Any:
        errors = self._ray.exceptions
        try:
            result, error = self._ray.get(reference)
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
        ) as lost:
            raise lost_too_often("a machine", item) from lost
        except errors.RaySystemError as failed:  # for example, a required package is missing
            reason = f"a machine of it could not begin the work: {str(failed).strip().splitlines()[-1]}"
            remedy = "install the same packages there, and start Ray with the same PYTHONPATH"
            raise UnavailableError("the cluster", reason, remedy) from failed
        if error is not None:
            raise error
        return result


def _called(work: Work[Item, Result], item: Item, threads: int, asked: str) -> tuple[Result | None, LowbitError | None]:
    """Runs on a machine of the cluster; returns the result or lowbit's error."""
    try:
        if (own := version("lowbit")) != asked:
            reason = f"a machine of it has lowbit {own}, and this one has {asked}"
            raise UnavailableError("the cluster", reason, f"install lowbit {asked} on every machine")
        return work(item, threads), None
    except LowbitError as error:
        return None, error


def _imported() -> Any:
    """The package ray.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UnavailableError("the cluster", "the package ray is not installed", "pip install lowbit[ray]") from error
    return ray
