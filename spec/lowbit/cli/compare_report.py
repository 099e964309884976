"""The answer of ``lowbit compare`` for people: a table of 80 columns, a page that needs no network, and a plot.

All are made from the JSON answer, so that they agree with it.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from lowbit.cli.demo_report import document, table, write_files
from lowbit.text import one_line, shortened

WIDTH, LABEL, NUMBER, A_LINE = 80, 26, 12, 4
PAGE, PLOT = "comparison.html", "comparison.png"
ALONE = "One window gives no standard errors: use a longer text or a smaller --window."
BEYOND = ">1.8e+308"
SAID_BEYOND = "A perplexity beyond float64 is e to the power of its nats a token."
OTHER_SHAPE = "The models differ in width or in their number of layers, so their layers are not compared."
BY_LAYER = "Relative error of the residual stream after each layer"
PLOT_TEXT = "Left: relative error of the residual stream after each layer. Right: nats a token that B loses, by window."


def told(answer: dict[str, Any]) -> Iterator[str]:
    """The lines of the table."""
    for letter, model in zip("AB", answer["models"], strict=True):
        yield shortened(f"{letter}  {one_line(model['model'])}", WIDTH)
    yield ""
    yield f"{'':{LABEL}}{'A':>{NUMBER}}{'B':>{NUMBER}}    B against A"
    for label, a, b, difference in rows(answer):
        yield f"{label:{LABEL}}{a:>{NUMBER}}{b:>{NUMBER}}    {difference}".rstrip()
    yield ""
    yield shortened(one_line(counted(answer)), WIDTH)
    if answer["difference"]["standard_error"] is None:
        yield ALONE
    if is_beyond(answer):
        yield SAID_BEYOND
    yield ""
    if (layers := answer["layers"]) is None:
        yield OTHER_SHAPE
        return
    yield f"{BY_LAYER}:"
    for first in range(0, len(layers), A_LINE):
        part = enumerate(layers[first : first + A_LINE], first)
        yield "  ".join(f"{number:6} {error:10.3e}" for number, error in part)


def rows(answer: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows of the table: a label, A, B, and the comparison with its standard error."""
    for label, name in (("perplexity", "perplexity"), ("nats a token", "nll")):
        a, b = (_cell(answer[name][model]["mean"]) for model in "ab")
        yield label, a, b, with_error(answer["difference"], "+.5f") if name == "nll" else ""
        a, b = (_error(answer[name][model], ".4f") for model in "ab")
        yield "  standard error", a, b, ""
    yield "KL divergence, nats", "", "", with_error(answer["kl_divergence"], ".5f")
    percent = {
        name: None if number is None else 100 * number for name, number in answer["same_likeliest_token"].items()
    }
    yield "same likeliest token, %", "", "", with_error(percent, ".2f")


def with_error(estimate: dict[str, Any], form: str) -> str:
    """An estimate and its standard error.

    >>> with_error({"mean": 0.25, "standard_error": 0.5}, "+.2f")
    '+0.25 ± 0.50'
    """
    said = _cell(estimate["mean"], form)
    return said if estimate["standard_error"] is None else f"{said} ± {_error(estimate, form.lstrip('+'))}"


def _error(estimate: dict[str, Any], form: str) -> str:
    return "-" if estimate["standard_error"] is None else _cell(estimate["standard_error"], form)


def _cell(number: float | None, form: str = ".4f") -> str:
    """A number for a column, in scientific notation if it would be too long; None stands for one beyond float64."""
    if number is None:
        return BEYOND
    said = f"{number:{form}}"
    sign, _, _ = form.partition(".")
    return said if len(said) < NUMBER else f"{number:{sign}.4e}"


def is_beyond(answer: dict[str, Any]) -> bool:
    """Whether a perplexity is beyond float64."""
    return any(answer["perplexity"][model]["mean"] is None for model in "ab")


def counted(answer: dict[str, Any]) -> str:
    """The number of scored tokens, in words."""
    windows = len(answer["windows"])
    many = f"{windows} window{'s' * (windows > 1)} of {answer['window']}"
    return f"{answer['scored']} of the first {answer['tokens']} tokens of {answer['text']} scored, {many}"


def write_report(answer: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write the page, and the plot if matplotlib is installed; returns their paths by kind."""
    return write_files(answer, folder / PAGE, page, folder / PLOT, draw)


def page(answer: dict[str, Any], *, plot: bool) -> str:
    """The HTML page."""
    a, b = (escape(one_line(model["model"])) for model in answer["models"])
    cells = [[escape(cell) for cell in row] for row in rows(answer)]
    parts = [table(["", f"A: {a}", f"B: {b}", "B against A"], cells, texts=1), f"<p>{escape(counted(answer))}</p>"]
    if answer["difference"]["standard_error"] is None:
        parts.append(f"<p>{ALONE}</p>")
    if is_beyond(answer):
        parts.append(f"<p>{SAID_BEYOND}</p>")
    if answer["layers"] is None:
        parts.append(f"<p>{OTHER_SHAPE}</p>")
    else:
        of_layers = [[str(number), f"{error:.3e}"] for number, error in enumerate(answer["layers"])]
        parts += [f"<h2>{BY_LAYER}</h2>", table(["layer", "error"], of_layers, texts=0)]
    if plot:
        parts.append(f'<p><img src="{PLOT}" alt="{escape(PLOT_TEXT)}"></p>')
    return document(f"lowbit compare: {a} and {b}", parts)


def draw(answer: dict[str, Any], path: Path) -> None:
    """Draw errors by layer and losses by window into a PNG file; matplotlib must be installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=120)
    by_layer, by_window = figure.subplots(1, 2)
    layers = answer["layers"] or []
    by_layer.plot(range(len(layers)), layers, "o-")
    if any(layers):
        by_layer.set_yscale("log")
    by_layer.set(xlabel="layer", ylabel="relative error", title="Residual stream" if layers else "Not comparable")
    lost = [(each["nll"]["b"] - each["nll"]["a"]) / each["scored"] for each in answer["windows"]]
    by_window.bar(range(len(lost)), lost)
    by_window.axhline(answer["difference"]["mean"], color="black", linewidth=1)
    by_window.set(xlabel="window", ylabel="nats a token", title="What B loses to A")
    figure.suptitle(one_line(" and ".join(model["model"] for model in answer["models"])))
    figure.savefig(path, format="png")
