"""``lowbit uptrain``: continue training a model, and write it as a directory of floats.

The JSON answer is one object.

=========================== ===========================================================================================
field                       holds
=========================== ===========================================================================================
``source``, ``directory``   what was read, and what was written
``texts``                   the names of the files
``course``                  ``steps``, ``rate``, ``tokens``, ``length``, ``seed`` and ``dtype``
``loss``                    in nats a token, the mean of the ``first`` and of the ``last`` 20 steps
``bytes``                   of all tensors
``resumed``                 the number of steps that an interrupted run had done
=========================== ===========================================================================================
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.options import JsonOption
from lowbit.cli.progress import changing_bar, note
from lowbit.cli.quantize import OutOption, SourceArgument, interrupts_told
from lowbit.contract.checks import spoken
from lowbit.errors import ArgumentError
from lowbit.formats.fetch import read_text
from lowbit.text import one_line
from lowbit.uptraining import DTYPES, Course
from lowbit.uptraining import uptrain as trained


def uptrain(
    source: SourceArgument,
    out: OutOption,
    text: Annotated[
        list[Path], typer.Option("--text", help="A text in UTF-8 to train on. May be given several times.")
    ],
    steps: Annotated[int, typer.Option("--steps", help="The number of training steps.")],
    rate: Annotated[
        float,
        typer.Option(
            "--rate", help="The learning rate; choose about a tenth of the highest rate of the original training."
        ),
    ] = Course.rate,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens per step.")] = Course.tokens,
    length: Annotated[int, typer.Option("--length", help="Tokens in a window of the text.")] = Course.length,
    seed: Annotated[int, typer.Option("--seed", help="The seed for drawing places in the text.")] = Course.seed,
    dtype: Annotated[
        str, typer.Option("--dtype", help=f"What the new weights are rounded to: {spoken(DTYPES)}.")
    ] = Course.dtype,
    as_json: JsonOption = False,
) -> None:
    """Continue training a model, as pooled heads require; after an interrupt the same command resumes. Needs torch."""
    try:
        course = Course(steps, rate, tokens, length, seed, dtype)
    except ArgumentError as error:
        raise ArgumentError(f"--{error.argument}", error.given, error.allowed) from error
    texts = [read_text(path) for path in text]
    with interrupts_told(out), changing_bar() as report:
        told = trained(source, out, texts, course, report)
    answer: dict[str, Any] = {"source": source.name, "directory": str(out), "texts": [path.name for path in text]}
    answer |= {"course": vars(course), **told}
    if as_json:
        print(json.dumps(answer))
        return
    loss = told["loss"]
    print(one_line(f"{out}: {steps} steps; loss {loss['first']:.3f} to {loss['last']:.3f} nats a token"))
    if told["resumed"]:
        note(f"{told['resumed']} steps were done by an interrupted run")
