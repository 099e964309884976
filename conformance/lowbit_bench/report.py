"""The output of a comparison: a table, JSON, a picture and a page.

The picture has two parts: the time of each backend relative to the fastest, shape by shape; and its bytes a second
beside those of plain reading, the roofline of products with one vector. With three sizes or more there is a second one,
of bytes a second by size.
"""

import base64
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowbit.system.storage import write_whole
from lowbit.text import one_line

Answer = Mapping[str, Any]


def show(answer: Answer, console: Console) -> None:
    """A table for each problem."""
    machine = answer["machine"]
    console.print(f"{machine['cpu']}, {answer['threads']} threads, {answer['rounds']} rounds", highlight=False)
    for each in answer["problems"]:
        console.print(f"\n[bold]{each['id']}[/], {each['free']} of {each['rounds']} rounds free", highlight=False)
        console.print(table_of(each, answer["verdicts"]))
    for missing in answer["absent"]:
        where = f" at {missing['problem']}" if missing["problem"] else ""
        text = one_line(f"not measured: {missing['name']}{where}: {missing['reason']}")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


COLUMNS = ("backend", "ms", "95 % from", "to", "× fastest", "GB/s", "of reading", "conformance")


def rows_of(problem: Answer, verdicts: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The cells of `COLUMNS` for each backend at one problem, the fastest first."""
    rows = sorted(problem["rows"], key=lambda row: row["seconds"][0])
    for row in rows:
        milliseconds = (f"{1e3 * each:.3f}" for each in row["seconds"])
        relative = f"{row['seconds'][0] / rows[0]['seconds'][0]:.2f}"
        speed, share = f"{row['bytes_per_second'] / 1e9:.1f}", f"{row['share'][0]:.2f}"
        yield row["backend"], *milliseconds, relative, speed, share, verdicts.get(row["backend"], "not asked")


def table_of(problem: Answer, verdicts: Mapping[str, str]) -> Table:
    """The backends at one problem."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[-1]) else "right")
    for cells in rows_of(problem, verdicts):
        table.add_row(*cells)
    return table


def png_of(figure: Any) -> bytes:
    """A figure of matplotlib as PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()


def figure_of(answer: Answer) -> bytes:
    """The picture as PNG."""
    from matplotlib.figure import Figure

    problems = answer["problems"]
    names = list(dict.fromkeys(row["backend"] for each in problems for row in each["rows"]))
    figure = Figure(figsize=(9, 1.6 + 0.9 * len(problems)), layout="constrained")
    left, right = figure.subplots(1, 2)
    height, slowest = 0.8 / max(len(names), 1), 1.0
    for place, each in enumerate(problems):
        fastest = min(row["seconds"][0] for row in each["rows"])
        for row in each["rows"]:
            number = names.index(row["backend"])
            at, colour = place + (number - (len(names) - 1) / 2) * height, f"C{number}"
            left.barh(at, row["seconds"][0] / fastest, height, color=colour)
            right.barh(at, row["bytes_per_second"] / 1e9, height, color=colour)
        reading = max(row["bytes"] / row["read_seconds"] for row in each["rows"]) / 1e9
        right.plot([reading, reading], [place - 0.45, place + 0.45], color="black")
        slowest = max(slowest, max(row["seconds"][0] for row in each["rows"]) / fastest)
    if slowest > 10:
        left.set_xscale("log")
    for axes, title in ((left, "time, × the fastest"), (right, "GB/s of weights; line: plain reading")):
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(problems)), [label(each["id"]) for each in problems], fontsize=7)
        axes.invert_yaxis()
    right.set_yticklabels([])
    handles = [left.barh([0], [0], color=f"C{number}") for number in range(len(names))]
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8)
    return png_of(figure)


def sweep_of(answer: Answer) -> bytes:
    """Bytes a second by the size of the matrix, a line for each backend, as PNG; empty for fewer than three sizes."""
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, float, float]]] = {}
    for each in answer["problems"]:
        for row in each["rows"]:
            reading = row["bytes"] / row["read_seconds"] / 1e9
            lines.setdefault(row["backend"], []).append((row["bytes"], row["bytes_per_second"] / 1e9, reading))
    if len({size for points in lines.values() for size, _, _ in points}) < 3:
        return b""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        sizes, speeds, _ = zip(*sorted(points), strict=True)
        axes.plot([size / 1e6 for size in sizes], speeds, marker="o", label=name)
    every = sorted({(size, reading) for points in lines.values() for size, _, reading in points})
    axes.plot([size / 1e6 for size, _ in every], [reading for _, reading in every], "k--", label="plain reading")
    axes.set(xscale="log", yscale="log", xlabel="MB of the matrix", ylabel="GB/s")
    axes.legend(fontsize=8)
    return png_of(figure)


def label(name: str) -> str:
    """An id in two lines."""
    words = name.split()
    half = (len(words) + 1) // 2
    return " ".join(words[:half]) + "\n" + " ".join(words[half:])


def page_of(answer: Answer, pictures: Sequence[tuple[bytes, str]]) -> str:
    """One HTML page with the tables and the pictures, each with its alternative text."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>lowbit bench</title>"]
    parts.append("<style>body{font:15px sans-serif;margin:2em;max-width:60em}td,th{padding:.2em .8em;text-align:right}")
    parts.append("td:first-child,th:first-child,td:last-child{text-align:left}img{max-width:100%}</style>")
    machine = answer["machine"]
    parts.append(f"<h1>lowbit bench</h1><p>{html.escape(machine['cpu'])}, {answer['threads']} threads, ")
    parts.append(f"{answer['rounds']} rounds, {html.escape(answer['started'])}</p>")
    for picture, text in pictures:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<img alt="{text}" src="data:image/png;base64,{encoded}">')
    for each in answer["problems"]:
        parts.append(f"<h2>{html.escape(each['id'])}</h2><table><tr><th>{'<th>'.join(COLUMNS)}")
        parts += ["<tr><td>" + "<td>".join(map(html.escape, row)) for row in rows_of(each, answer["verdicts"])]
        parts.append("</table>")
    for missing in answer["absent"]:
        parts.append(f"<p>not measured: {html.escape(missing['name'])}: {html.escape(missing['reason'])}</p>")
    return "\n".join(parts)


def write(answer: Answer, folder: Path) -> Sequence[Path]:
    """Write ``bench.json``, and where matplotlib is installed pictures and ``bench.html``; what was written."""
    files = {"bench.json": json.dumps(answer, indent=1).encode()}
    if answer["problems"] and find_spec("matplotlib"):
        bars = figure_of(answer)
        pictures = [(bars, "Time of each backend relative to the fastest, and bytes a second beside plain reading.")]
        files["bench.png"] = bars
        if sweep := sweep_of(answer):
            pictures.append((sweep, "Bytes a second by the size of the matrix, a line for each backend."))
            files["sweep.png"] = sweep
        files["bench.html"] = page_of(answer, pictures).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_whole(folder / name, content)
    return [folder / name for name in files]
