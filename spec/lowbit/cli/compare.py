"""``lowbit compare``: two models on a text.

The JSON answer is one object. An *estimate* is an object with ``mean`` and ``standard_error``, which is ``null`` where
there is one window only. What is beyond float64, as a perplexity may be, is ``null`` as well.

============================ ==========================================================================================
field                        holds
============================ ==========================================================================================
``models``                   how A and B were run, each as `lowbit perplexity` says it
``text``, ``window``         the name of the text, and the tokens of a window
``tokens``, ``scored``       tokens of the text that were used, and positions that were scored
``perplexity``, ``nll``      estimates of A and B, by ``a`` and ``b``; the second is in nats a token
``difference``               estimate of the nats a token that B loses to A, in pairs
``kl_divergence``            estimate of the divergence of B from A, in nats a token
``same_likeliest_token``     estimate of the fraction of positions at which both prefer the same token
``layers``                   relative error of the residual stream after each block; ``null`` where they differ in shape
``windows``                  of each window ``scored``, ``nll``, ``kl_divergence`` and ``same_likeliest_token``, as sums
``files``                    the page and the plot, where ``--out`` asks for them
============================ ==========================================================================================
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.backend import registry
from lowbit.cli.compare_report import told, write_report
from lowbit.cli.demo_report import made_folder
from lowbit.cli.executors import ClusterOption, KeepOption, ProcessesOption, executor_of
from lowbit.cli.options import BackendOption, JsonOption, called, file_of, opened
from lowbit.cli.progress import changing_bar, note
from lowbit.contract.checks import check_integer
from lowbit.formats.fetch import DEFAULT_TEXT, TABLE, read_text
from lowbit.model.comparison import Estimate, Window
from lowbit.runtime.comparing import BY_FORMULAS, Compared, compare_models
from lowbit.runtime.evaluating import Evaluation, Models
from lowbit.text import json_number

KIND = "a GGUF file or a checkpoint directory"


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"The reference model: {KIND}.")],
    b: Annotated[Path, typer.Argument(metavar="B", help=f"The model to compare with it: {KIND}.")],
    text: Annotated[
        Path | None,
        typer.Option("--text", help=f"A text file in UTF-8. By default {TABLE[DEFAULT_TEXT].file} is fetched."),
    ] = None,
    window: Annotated[int, typer.Option("--window", help="The number of tokens in a window.")] = 512,
    tokens: Annotated[int, typer.Option("--tokens", help="How many tokens of the text are used.")] = 2048,
    backend: BackendOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for a page, and for a plot where matplotlib is installed.")
    ] = None,
    processes: ProcessesOption = None,
    cluster: ClusterOption = None,
    keep: KeepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two models on a text: perplexity, divergence, agreement, and the error after each layer."""
    check_integer("--window", window, least=1)
    check_integer("--tokens", tokens, least=1)
    executor = executor_of(processes, cluster, keep)
    with registry.load(backend) as engine:
        path = file_of(text, DEFAULT_TEXT)
        words = read_text(path)
        models = opened(a), opened(b)
        folder = None if out is None else made_folder(out)
        there = Models((a.absolute(), b.absolute()), tuple(each.config for each in models), engine.name, BY_FORMULAS)
        elsewhere = None if executor is None else Evaluation(executor, there, keep).compare
        options: dict[str, Any] = {"most_tokens": tokens, "window": window, "elsewhere": elsewhere}
        with changing_bar() as report, called("window", "--window"):
            found = compare_models(models, engine, words, **options, report=report)
    answer = described(found, path.name, window)
    if folder is not None:
        answer["files"] = write_report(answer, folder)
    if as_json:
        print(json.dumps(answer))
        return
    print("\n".join(told(answer)))
    for account in found.accounts:
        note(account.sentence)


def described(found: Compared, text: str, window: int) -> dict[str, Any]:
    """The JSON answer, without files."""
    numbers = found.comparison
    both = {"perplexity": numbers.perplexities, "nll": numbers.losses}
    return {
        "models": [dict(account.fields) for account in found.accounts],
        "text": text,
        "window": window,
        "tokens": found.tokens,
        "scored": numbers.count,
        **{name: dict(zip("ab", map(_estimated, pair), strict=True)) for name, pair in both.items()},
        "difference": _estimated(numbers.difference),
        "kl_divergence": _estimated(numbers.divergence),
        "same_likeliest_token": _estimated(numbers.agreement),
        "layers": None if numbers.layers is None else list(numbers.layers),
        "windows": [_summed(each) for each in numbers.windows],
    }


def _estimated(number: Estimate) -> dict[str, float | None]:
    return {"mean": json_number(number.mean), "standard_error": json_number(number.error)}


def _summed(window: Window) -> dict[str, Any]:
    return {
        "scored": window.count,
        "nll": dict(zip("ab", window.losses, strict=True)),
        "kl_divergence": window.divergence,
        "same_likeliest_token": window.agreed,
    }
