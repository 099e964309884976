"""``lowbit pool``: a model with fewer key-value heads, as a directory of floats.

The JSON answer is one object.

=========================== ===========================================================================================
field                       holds
=========================== ===========================================================================================
``source``, ``directory``   what was read, and what was written
``method``                  ``mean``, ``first`` or ``random``
``seed``                    of random heads; ``null`` for other methods
``kv_heads``                key-value heads ``before`` and ``after``
``cache_bytes_per_token``   of keys and values of one token in float16, ``before`` and ``after``
``context``                 the longest sequence that the model was made for
``bytes``                   of all tensors
``resumed``                 the number of blocks that an interrupted run had finished
=========================== ===========================================================================================
"""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from lowbit.backend.whole_model import spoken_bytes
from lowbit.cli.options import GPTQOption, JsonOption
from lowbit.cli.progress import changing_bar
from lowbit.cli.quantize import OutOption, SourceArgument, interrupts_told, opened_source, resumed_told
from lowbit.contract.checks import check_choice, spoken
from lowbit.rewriting.changing import write_floats
from lowbit.rewriting.journal import check_destination
from lowbit.rewriting.pooling import METHODS, Pooling, cache_bytes, pooled
from lowbit.text import one_line


def pool(
    source: SourceArgument,
    out: OutOption,
    kv_heads: Annotated[
        int, typer.Option("--kv-heads", help="Key-value heads of the new model: a divisor of those of the source.")
    ],
    method: Annotated[
        str, typer.Option("--method", help=f"What replaces the heads of a group: {spoken(METHODS)}.")
    ] = METHODS[0],
    seed: Annotated[int, typer.Option("--seed", help="With random: the seed of the new heads.")] = 0,
    gptq_version: GPTQOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pool the key-value heads of a model, as the GQA paper does; after an interrupt the same command resumes."""
    request = Pooling(kv_heads, check_choice("--method", method, METHODS), seed)
    check_destination(out)
    opened = opened_source(source, gptq_version)
    model = pooled(opened, request)
    with interrupts_told(out), changing_bar() as report:
        told = write_floats(model, out, {"command": "pool", **asdict(request)}, report)
    before, after = opened.config, model.config
    answer = {
        "source": opened.name,
        "directory": str(out),
        "method": method,
        "seed": seed if method == "random" else None,
        "kv_heads": {"before": before.kv_heads, "after": after.kv_heads},
        "cache_bytes_per_token": {"before": cache_bytes(before), "after": cache_bytes(after)},
        "context": after.context,
        **told,
    }
    _print(answer, as_json)


def _print(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    heads, sizes, context = answer["kv_heads"], answer["cache_bytes_per_token"], answer["context"]
    whole = {when: spoken_bytes(size * context) for when, size in sizes.items()}
    print(
        one_line(
            f"{answer['directory']}: {spoken_bytes(answer['bytes'])}; {heads['after']} key-value heads, the "
            f"{answer['method']} of groups of {heads['before'] // heads['after']}; cache in float16: {sizes['before']} "
            f"to {sizes['after']} bytes a token, {whole['before']} to {whole['after']} for {context} tokens"
        )
    )
    resumed_told(answer["resumed"])
