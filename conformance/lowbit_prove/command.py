"""``lowbit prove``: prove theorems about kernels, formats, casts and steps, or refute them with numbers.

Exit status: 0 all were proved, 1 one was refuted or is undecided, 2 a wrong argument or no solver.
"""

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.contract.checks import check_integer
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.threads import usable_processors
from lowbit.text import one_line

if TYPE_CHECKING:
    from lowbit_prove.deciding import Decided

MOST_SHOWN = 12
"""Numbers of a refutation that are printed; ``--json`` has all."""


def prove(
    names: Annotated[
        list[str] | None, typer.Argument(help="Kernels, formats, theorems or kinds of theorems; by default all.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the theorems and prove none.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Believe no certificate of an earlier run.")] = False,
    sample: Annotated[int, typer.Option(help="Prove one in this number of the theorems named.")] = 1,
    run: Annotated[
        Path | None, typer.Option(help="Run the kernel of this name on the numbers of a refutation, in a JSON file.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="The most processes at a time; by default one for each processor.")
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
        raise typer.Exit(demonstrate(names or [], run, as_json=as_json))
    choice = Choice(tuple(names or ()), sample)
    if list_only:
        listed = [{"theorem": each.id, "statement": each.statement} for each in choice.theorems]
        print(json.dumps({"theorems": listed}) if as_json else "\n".join(each["theorem"] for each in listed))
        return
    started, found = time.monotonic(), decided(choice, fresh=fresh, jobs=jobs)
    failed = [each for each in found if each.document["outcome"] != "proof"]
    if as_json:
        documents = [each.document for each in found]
        print(json.dumps({"solver": certificates.solver(), "proved": len(found) - len(failed), "theorems": documents}))
    else:
        for each in failed if len(found) > MOST_SHOWN else found:
            print("\n".join(told(each)))
        counted = f"{len(found) - len(failed)} of {len(found)} theorems proved"
        old = sum(each.certified for each in found)
        print(
            f"{counted} in {time.monotonic() - started:.1f} s, {old} of them by certificates; {certificates.solver()}"
        )
    raise typer.Exit(1 if failed else 0)


def demonstrate(names: list[str], path: Path, *, as_json: bool) -> int:
    """Run a kernel's program on numbers and print what it gives; 1 if that is wrong."""
    from lowbit_cppyy.names import kernel_of
    from lowbit_prove import products

    if len(names) != 1:
        raise ArgumentError("names", len(names), "one kernel, with --run")
    kernel, content = kernel_of(names[0].removeprefix("products/")), read_plain(path)
    wrong = products.ran(kernel, content)
    if as_json:
        print(json.dumps({"kernel": kernel.name, "wrong": wrong}))
    elif wrong is None:
        print(f"{kernel.name}: right on these numbers")
    else:
        print(f"{kernel.name}: element {wrong['place']} of y is {wrong['given']:g}, and should be {wrong['wanted']:g}")
    return 0 if wrong is None else 1


def read_plain(path: Path) -> dict[str, Any]:
    """The numbers of a file: an object of JSON with integers."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArgumentError("--run", f"{path}: {one_line(str(error))}", "a file with an object of JSON") from error
    numbers = content.get("numbers", content) if isinstance(content, dict) else None
    if not isinstance(numbers, dict) or not all(type(each) in (int, float) for each in numbers.values()):
        raise ArgumentError("--run", str(path), "a file with an object of names and numbers")
    return numbers


def told(each: "Decided") -> Iterator[str]:
    """A theorem and its outcome in words."""
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
