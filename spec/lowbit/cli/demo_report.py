"""The files that ``lowbit demo`` writes: a page that needs no network, and a plot; and how any command writes such.

Both are made from the demo's JSON answer, so that they agree with it. Texts of models and backends are escaped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowbit.cli.demo_certification import CASES, COLUMNS, rows_of, verdict_lines
from lowbit.errors import ArgumentError
from lowbit.system.storage import write_whole
from lowbit.text import cleaned, one_line

PAGE, PLOT = "report.html", "plot.png"
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse }
th, td { padding: .25rem .75rem; text-align: left; border-bottom: 1px solid #8886 }
td:first-child, .number { white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto; background: white }
"""
REQUANTISED = "The weights of the file are quantised already; re-quantising rounds them again."
PLOT_TEXT = "Left: tokens per second of each backend and quantisation. Right: perplexity against megabytes of weights."


def conformance_page(backend: str) -> str:
    """The file name of the conformance report on a backend.

    >>> conformance_page("onnxruntime-minimum")
    'conformance-onnxruntime-minimum.html'
    """
    return f"conformance-{''.join(sign if sign.isalnum() or sign in '-_' else '_' for sign in backend)}.html"


def made_folder(folder: Path) -> Path:
    """The folder for the files, created if it does not exist.

    Raises:
        ArgumentError: it cannot be created, or is not a folder.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be created in one that exists ({error.strerror})"
        raise ArgumentError("--out", folder, allowed) from error
    return folder.resolve()


def can_draw() -> bool:
    """Whether matplotlib is installed, which only the plot needs."""
    return find_spec("matplotlib") is not None


# **The plot.**


def draw(answer: dict[str, Any], path: Path) -> None:
    """Draw speed and perplexity into a PNG file; matplotlib must be installed (`can_draw`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=120)
    speed, loss = figure.subplots(1, 2)
    draw_speeds(speed, answer["generation"])
    draw_perplexities(loss, answer["perplexity"])
    figure.suptitle(one_line(answer["model"]))
    figure.savefig(path, format="png")


def draw_speeds(axes: Any, generation: dict[str, list[dict[str, Any]]]) -> None:
    """A group of bars for each quantisation, a bar for each backend."""
    names = list(dict.fromkeys(each["backend"] for said in generation.values() for each in said))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        rows = [
            (group + place * width, each["tokens_per_second"])
            for group, said in enumerate(generation.values())
            for each in said
            if each["backend"] == name
        ]
        bars = axes.bar([at for at, _ in rows], [speed for _, speed in rows], width, label=one_line(name))
        axes.bar_label(bars, fmt="%.1f", padding=2)
    middle = 0.4 - width / 2
    axes.set_xticks(
        [group + middle for group in range(len(generation))],
        [name.replace(": ", ":\n") for name in generation],
        fontsize="small",
    )
    axes.set_ylabel("tokens per second")
    axes.set_title("Speed of the certified backends")
    axes.margins(y=0.3)  # room for the legend above the bars
    axes.legend(loc="upper center", ncols=3)


def draw_perplexities(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A point for each width; perplexity on a logarithmic scale."""
    axes.plot([row["bytes"] / 1e6 for row in rows[1:]], [row["perplexity"] for row in rows[1:]], "o-")
    axes.plot([rows[0]["bytes"] / 1e6], [rows[0]["perplexity"]], "s")
    for row in rows:
        as_stored = row is rows[0]  # often close to the point with the most bits, so its label is below
        axes.annotate(
            f"{row['weights'].partition(',')[0].removeprefix('re-quantised: ')}: {rounded(row['perplexity'])}",
            (row["bytes"] / 1e6, row["perplexity"]),
            textcoords="offset points",
            xytext=(0, -8) if as_stored else (6, 6),
            horizontalalignment="center" if as_stored else "left",
            verticalalignment="top" if as_stored else "bottom",
        )
    axes.set_yscale("log")
    axes.margins(x=0.35, y=0.2)  # room for the labels
    axes.set_xlabel("MB of weights in the layers")
    axes.set_ylabel("perplexity")
    axes.set_title("What fewer bits cost")


def rounded(perplexity: float) -> str:
    """A perplexity for a label: one decimal, or none if it is large.

    >>> rounded(30.63), rounded(590229.52)
    ('30.6', '590,230')
    """
    return f"{perplexity:,.0f}" if perplexity >= 1000 else f"{perplexity:.1f}"


# **The page.**


def page(answer: dict[str, Any], *, plot: bool) -> str:
    """The HTML page: verdicts, texts, perplexities, the plot, and links to the conformance reports."""
    title = f"lowbit demo: {escape(one_line(answer['model']))}"
    picture = f'<p><img src="{PLOT}" alt="{escape(PLOT_TEXT)}"></p>' if plot else ""
    return document(title, [*conformance_part(answer), *generation_part(answer), *perplexity_part(answer), picture])


def document(title: str, parts: Iterable[str]) -> str:
    """An HTML page with a title. The title and the parts are HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">{head}<style>{STYLE}</style>\n<h1>{title}</h1>\n{body}\n</html>\n'


def conformance_part(answer: dict[str, Any]) -> Iterator[str]:
    """The verdict on each backend, operation by operation."""
    yield f"<h2>Conformance</h2>\n<p>{escape(CASES)}</p>"
    yield f"<ul>{''.join(f'<li>{escape(one_line(line))}</li>' for line in verdict_lines(answer))}</ul>"
    rows = []
    for verdict in answer["conformance"]:
        name = escape(one_line(verdict["backend"]))
        link = f'<a href="{conformance_page(verdict["backend"])}">{name}: {escape(verdict["verdict"])}</a>'
        rows += [[link, *map(escape, row)] for row in rows_of(verdict)]
    yield table(["report", *COLUMNS], rows, texts=2)


def generation_part(answer: dict[str, Any]) -> Iterator[str]:
    """What each backend generated, for each quantisation."""
    yield "<h2>Generation</h2>"
    columns = ["backend", "compared with the first backend and with the specification", "tokens/s", "MB read per token"]
    for variant, said in answer["generation"].items():
        yield f"<h3>{escape(variant)}</h3>"
        if said:
            text = escape(cleaned(said[0]["text"]))
            yield f"<p>{escape(cleaned(answer['prompt']))}<strong>{text}</strong></p>"
        rows = [
            [
                escape(one_line(each["backend"])),
                escape(one_line(each["agreement"])),
                f"{each['tokens_per_second']:.1f}",
                f"{each['read_bytes'] / 1e6:.1f}",
            ]
            for each in said
        ]
        yield table(columns, rows, texts=2)


def perplexity_part(answer: dict[str, Any]) -> Iterator[str]:
    """The perplexity of each width."""
    yield "<h2>Perplexity</h2>"
    rows = [
        [escape(row["weights"]), f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.2f}"]
        for row in answer["perplexity"]
    ]
    yield table(["weights", "MB", "perplexity"], rows, texts=1)
    yield f"<p>{REQUANTISED}</p>"


def table(columns: Sequence[str], rows: Iterable[list[str]], *, texts: int) -> str:
    """A table; the first `texts` columns hold text, the others numbers. Cells are HTML."""
    kind = ["" if at < texts else ' class="number"' for at in range(len(columns))]
    head = "".join(f'<th scope="col"{of}>{column}</th>' for of, column in zip(kind, columns, strict=True))
    cells = ("".join(f"<td{of}>{cell}</td>" for of, cell in zip(kind, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    return f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>\n{body}</table></div>'


def write_report(answer: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write the page, and the plot if matplotlib is installed; returns their paths by kind."""
    return write_files(answer, folder / PAGE, page, folder / PLOT, draw)


def write_files(
    answer: dict[str, Any], report: Path, page: Callable[..., str], plot: Path, draw: Callable[..., None]
) -> dict[str, str]:
    """Write a page to `report`, and a plot to `plot` if matplotlib is installed; returns their paths by these names."""
    files = {"report": str(report)}
    if can_draw():
        draw(answer, plot)
        files["plot"] = str(plot)
    write_whole(report, page(answer, plot="plot" in files).encode())
    return files
