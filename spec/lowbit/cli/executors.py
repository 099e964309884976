"""The options of commands whose work is done by other processes or machines, a part at a time."""

from pathlib import Path
from typing import Annotated

import typer

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError
from lowbit.system.on_ray import OnRay
from lowbit.system.tasks import Executor, Processes

ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", help="The number of processes that read windows. By default this process reads them."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", help="Read windows on a Ray cluster: its address, HOST:PORT or auto."),
]
KeepOption = Annotated[
    Path | None,
    typer.Option("--keep", help="Keep the result of each window in this file; the same command resumes from it."),
]


def executor_of(processes: int | None, cluster: str | None, keep: Path | None = None) -> Executor | None:
    """The executor for parts of the work; None for this process.

    Args:
        processes: of ``--processes``.
        cluster: of ``--cluster``.
        keep: of ``--keep``; kept results come from other processes, by default one.

    Raises:
        ArgumentError: both are given, or a number of processes below 1.
        UnavailableError: ray is not installed.
    """
    if cluster is not None:
        if processes is not None:
            sentence = "--processes and --cluster are two places for the work; give one of them"
            raise ArgumentError("--processes", processes, "only without --cluster", sentence)
        return OnRay(cluster)
    if processes is None:
        return None if keep is None else Processes(1)
    check_integer("--processes", processes, least=1)
    return Processes(processes)
