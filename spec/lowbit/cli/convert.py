"""``lowbit convert``: write a model in another layout where that loses nothing.

The JSON answer is one object.

===================== =================================================================================================
field                 holds
===================== =================================================================================================
``source``            the name of the file or directory that was read
``path``              what was written
``format``            its layout
``bytes``             of all tensors
``resumed``           the number of blocks that an interrupted run had finished
``matrices``          of each matrix that is codes its ``bits`` and the ``digest`` of its float32 numbers
===================== =================================================================================================
"""

import json
from typing import Annotated

import typer

from lowbit.backend.whole_model import spoken_bytes
from lowbit.cli.options import GPTQOption, JsonOption
from lowbit.cli.progress import changing_bar
from lowbit.cli.quantize import OutOption, SourceArgument, interrupts_told, opened_source, resumed_told
from lowbit.contract.checks import spoken
from lowbit.rewriting.converting import convert as carried_out
from lowbit.rewriting.journal import check_destination
from lowbit.rewriting.layouts import FLOATS, LAYOUTS, layout_of
from lowbit.text import one_line


def convert(
    source: SourceArgument,
    out: OutOption,
    layout: Annotated[str, typer.Option("--format", help=f"The layout to write: {spoken([*LAYOUTS, FLOATS.name])}.")],
    gptq_version: GPTQOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model in another layout where that loses nothing; after an interrupt the same command resumes."""
    chosen = layout_of(layout, of_codes=False)
    check_destination(out, is_file=chosen.is_file)
    opened = opened_source(source, gptq_version)
    with interrupts_told(out), changing_bar() as report:
        told = carried_out(opened, out, chosen, report)
    if as_json:
        print(json.dumps({"source": opened.name, "path": str(out), "format": chosen.name, **told}))
        return
    count = len(told["matrices"])
    print(
        one_line(
            f"{out}: {spoken_bytes(told['bytes'])} in layout {chosen.name}; {count} matrices of codes; every number is "
            f"that of {opened.name}"
        )
    )
    resumed_told(told["resumed"])
