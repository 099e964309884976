"""``lowbit prove``: prove theorems about kernels, formats, casts and steps, or refute them with numbers.

Exit status: 0 all were proved, 1 one was refuted or is undecided, 2 a wrong argument or no solver.
"""

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.contract.checks import check_integer
from lowbit.errors import UnavailableError
from lowbit.system.threads import usable_processors

if TYPE_CHECKING:
    from lowbit_prove.deciding import Decided

MOST_SHOWN = 12
"""The largest count of numbers of a refutation that are printed; ``--json`` has all."""


def prove(
    names: Annotated[
        list[str] | None, typer.Argument(help="Kernels, formats, theorems or kinds of theorems; by default all.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the theorems and prove none.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Accept no certificate of an earlier run: prove everything again.")
    ] = False,
    sample: Annotated[int, typer.Option(help="Prove only one in this many of the named theorems; 1 proves all.")] = 1,
    run: Annotated[
        Path | None, typer.Option(help="Run refutations again on their numbers, from a file that --json wrote.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="The maximum number of processes; by default one per processor.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Prove what kernels, formats, casts and steps promise, for all values at once, or refute it with numbers."""
    if find_spec("z3") is None:
        raise UnavailableError("lowbit prove", "the package z3-solver is not installed", "pip install 'lowbit[prove]'")
    check_integer("--sample", sample, 1)
    check_integer("--jobs", jobs := usable_processors() if jobs is None else jobs, 1)
    from lowbit_prove import certificates
    from lowbit_prove.deciding import Choice, decided

    if run is not None:
        raise typer.Exit(replay(names or [], run, as_json=as_json))
    choice = Choice(tuple(names or ()), sample)
    if list_only:
        listed = [{"theorem": each.id, "statement": each.statement} for each in choice.theorems]
        print(json.dumps({"theorems": listed}) if as_json else "\n".join(each["theorem"] for each in listed))
        return
    started, found = time.monotonic(), decided(choice, fresh=fresh, jobs=jobs)
    failed = [each for each in found if each.document["outcome"] != "proof"]
    if as_json:
        documents = [each.document for each in found]
        answer = {"solver": certificates.solver(), "proved": len(found) - len(failed), "theorems": documents}
        compared = {"not_compared": not_compared(found), "compared_with_emulators": compared_with_emulators(found)}
        print(json.dumps(answer | compared))
    else:
        if missing := not_compared(found):
            print(f"compared with no processor, nor with an emulator: {', '.join(missing)}")
        for emulator, names in compared_with_emulators(found).items():
            print(f"compared with {emulator} and with no processor: {', '.join(names)}")
        for each in failed if len(found) > MOST_SHOWN else found:
            print("\n".join(told(each)))
        counted = f"{len(found) - len(failed)} of {len(found)} theorems proved"
        old = sum(each.certified for each in found)
        print(
            f"{counted} in {time.monotonic() - started:.1f} s, {old} of them by certificates; {certificates.solver()}"
        )
    raise typer.Exit(1 if failed else 0)


def not_compared(found: list["Decided"]) -> list[str]:
    """The limits of the theorems about instructions on this machine, if any such theorems were decided."""
    from lowbit_prove.processors import unchecked

    return unchecked() if any(each.theorem.kind == "instructions" for each in found) else []


def compared_with_emulators(found: list["Decided"]) -> dict[str, list[str]]:
    """Intrinsics that the theorems compare only with an emulator, by emulator."""
    from lowbit_prove.processors import emulated

    return emulated() if any(each.theorem.kind == "instructions" for each in found) else {}


def replay(names: list[str], path: Path, *, as_json: bool) -> int:
    """Run refutations again and print the results; returns 1 if one of them is wrong."""
    from lowbit_prove.replay import runs

    found = runs(names, path)
    if as_json:
        documents = [each.document for each in found]
        print(json.dumps(documents[0] if len(documents) == 1 else {"runs": documents}))
    else:
        print("\n".join(line for each in found for line in each.told) or f"{path}: no refutation")
    return 1 if any(each.wrong for each in found) else 0


def told(each: "Decided") -> Iterator[str]:
    """A theorem and its outcome as text."""
    document = each.document
    yield f"{each.theorem.id}: {each.theorem.statement}"
    if document["outcome"] == "proof":
        how = "by a certificate" if each.certified else f"in {each.seconds:.2f} s"
        yield f"    proved {how}: {document['steps']} steps, by {document['by']}"
        return
    yield f"    {'REFUTED' if document['outcome'] == 'refutation' else 'undecided'}: {document['reason']}"
    numbers = document.get("numbers", {})
    for name, value in list(numbers.items())[:MOST_SHOWN]:
        yield f"    {name} = {value:#x}" if isinstance(value, int) and name.startswith("w") else f"    {name} = {value}"
    if len(numbers) > MOST_SHOWN:
        yield f"    and {len(numbers) - MOST_SHOWN} more, with --json"
    if document["outcome"] == "refutation":
        yield f"    again on these numbers: lowbit prove {each.theorem.id} --json > FILE; lowbit prove --run FILE"
