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

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lowbit.system.storage import write_whole
from lowbit.text import one_line

Answer = Mapping[str, Any]
FILES = ("bench.json", "bench.png", "sweep.png", "bench.html")
"""The files that `write` may write."""
LEAST_NAME = 12
"""Least width of a name, in characters."""
DISTURBED = 1.2
"""No kernel reads memory so much faster than the reader, if both have the same memory to themselves."""
SURE = 6
"""Least number of rounds for an interval that holds the true median with 95 %; see `lowbit_bench.intervals`."""


def show(answer: Answer, console: Console) -> None:
    """Print a table for each problem, and the rest of the report."""
    for text in texts_of(answer, console.width):
        console.print(text, highlight=False, soft_wrap=True)


def texts_of(answer: Answer, width: int) -> Iterator[Text]:
    """The lines of the report; lines of a table exceed the width only if numbers need it."""
    rounds = counted(answer["rounds"], "round")
    yield Text(f"{answer['machine']['cpu']}, {counted(answer['threads'], 'thread')}, {rounds}")
    for each in answer["problems"]:
        yield Text(f"\n{each['id']}", style="bold").append(f", {free_of(each)}", style="not bold")
        yield from table_of(each, answer["verdicts"], answer["repeat"], width)
        if not all(row["checked"] for row in each["rows"]):
            yield Text("the results were not compared with the specification, which has no judge at this size")
    yield from (Text(line) for line in rest_of(answer))


def counted(count: int, what: str) -> str:
    """A number of things, in words.

    >>> counted(1, "round"), counted(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def free_of(problem: Answer) -> str:
    """How many rounds were free."""
    return f"{problem['free']} of {counted(problem['rounds'], 'round')} free"


def rest_of(answer: Answer) -> Iterator[str]:
    """Shares that cannot be right, the backends that were not measured, and how to repeat the tests of those that did
    not pass."""
    for each in answer["problems"]:
        if any(row["share"][0] > DISTURBED for row in each["rows"]):
            yield f"{each['id']}: a share above {DISTURBED}; reading was disturbed, or caches hold a part of the matrix"
    for missing in answer["absent"]:
        what = " at ".join(filter(None, (missing["name"], missing["problem"])))
        yield one_line(f"not measured: {what}: {missing['reason']}")
    for name, line in answer["repeat"].items():
        yield one_line(f"did not pass: {name}; to see why: {line}")


NUMBERS = ("× fastest", "GB/s", "of reading")


def headings_of(problem: Answer) -> tuple[str, ...]:
    """The headings of a table. Fewer than six rounds give no interval that holds the median with 95 %."""
    fewest = min(len(row["runs"]) for row in problem["rows"])
    ends = ("95 % from", "to") if fewest >= SURE else ("least", "greatest")
    return "backend", "ms", *ends, *NUMBERS, "conformance"


def rows_of(problem: Answer, verdicts: Mapping[str, str], repeat: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The cells of a table: the fastest first, and last the backends that did not pass, which are not compared."""
    fastest = fastest_of(problem, repeat)
    for row in sorted(problem["rows"], key=lambda row: (row["backend"] in repeat, row["seconds"][0])):
        milliseconds = (f"{1e3 * each:.3f}" for each in row["seconds"])
        relative = "-" if row["backend"] in repeat else f"{row['seconds'][0] / fastest:.2f}"
        speed, share = digits(row["bytes_per_second"] / 1e9, 1), digits(row["share"][0], 2)
        yield row["backend"], *milliseconds, relative, speed, share, verdicts.get(row["backend"], "not asked")


def digits(number: float, decimals: int) -> str:
    """A number with a fixed number of decimals; a number too small for them has two significant digits.

    >>> digits(12.34, 1), digits(0.345, 2), digits(0.0123, 1)
    ('12.3', '0.34', '0.012')
    """
    return f"{number:.{decimals}f}" if number >= 10**-decimals else f"{number:.2g}"


def fastest_of(problem: Answer, repeat: Mapping[str, str]) -> float:
    """Seconds of the fastest backend that did not fail; of the fastest one if all did."""
    return float(min((row["backend"] in repeat, row["seconds"][0]) for row in problem["rows"])[1])


def table_of(problem: Answer, verdicts: Mapping[str, str], repeat: Mapping[str, str], width: int) -> Iterator[Text]:
    """The lines of a table. Numbers are never cut; names are shortened where they do not fit."""
    cells = [headings_of(problem), *rows_of(problem, verdicts, repeat)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    names = shortened([one_line(name) for name in columns[0]], max(LEAST_NAME, width - sum(widths[1:]) - 7))
    widths[0] = max(map(cell_len, names))
    for number, (name, row) in enumerate(zip(names, cells, strict=True)):
        inner = " ".join(
            " " * (size - cell_len(cell)) + cell for cell, size in zip(row[1:-1], widths[1:-1], strict=True)
        )
        padding = " " * (widths[0] - cell_len(name))
        yield Text(f"{name}{padding} {inner} {row[-1]}", style="" if number else "bold")


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names shortened to this width at their beginnings, or unchanged if some would become equal.

    >>> shortened(["./run --fast", "./run --exact"], 8), shortened(["one/libk.so", "two/libk.so"], 8)
    (['… --fast', '…--exact'], ['one/libk.so', 'two/libk.so'])
    """
    short = [name if cell_len(name) <= width else f"…{name[len(name) - width + 1 :]}" for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


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
    failed = answer["repeat"]
    figure = Figure(figsize=(9, 1.6 + 0.9 * len(problems)), layout="constrained")
    left, right = figure.subplots(1, 2)
    height, slowest = 0.8 / max(len(names), 1), 1.0
    for place, each in enumerate(problems):
        fastest = fastest_of(each, failed)
        for row in each["rows"]:
            number = names.index(row["backend"])
            at, style = place + (number - (len(names) - 1) / 2) * height, style_of(number, row["backend"] in failed)
            left.barh(at, row["seconds"][0] / fastest, height, **style)
            right.barh(at, row["bytes_per_second"] / 1e9, height, **style)
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
    handles = [left.barh([0], [0], **style_of(number, name in failed)) for number, name in enumerate(names)]
    labels = [literal(f"{name} (did not pass)" if name in failed else name) for name in names]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return png_of(figure)


def style_of(number: int, failed: bool) -> dict[str, Any]:
    """The style of a backend's bars: hollow and hatched if it did not pass."""
    if failed:
        return {"facecolor": "none", "edgecolor": f"C{number}", "hatch": "////"}
    return {"color": f"C{number}"}


def literal(name: str) -> str:
    """A name, escaped for a picture, in which dollars would begin a formula."""
    return one_line(name).replace("$", r"\$")


def sweep_of(answer: Answer) -> bytes:
    """Bytes per second by the size of the matrix, a line for each backend, as PNG; empty for fewer than three sizes."""
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
        failed = name in answer["repeat"]
        label = literal(f"{name} (did not pass)" if failed else name)
        axes.plot([size / 1e6 for size in sizes], speeds, "x:" if failed else "o-", label=label)
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
    parts.append(f"<h1>lowbit bench</h1><p>{html.escape(machine['cpu'])}, {counted(answer['threads'], 'thread')}, ")
    parts.append(f"{counted(answer['rounds'], 'round')}, {html.escape(answer['started'])}</p>")
    for picture, text in pictures:
        encoded = base64.b64encode(picture).decode()
        parts.append(f'<img alt="{text}" src="data:image/png;base64,{encoded}">')
    for each in answer["problems"]:
        parts.append(f"<h2>{html.escape(each['id'])}</h2><table><tr><th>{'<th>'.join(headings_of(each))}")
        rows = rows_of(each, answer["verdicts"], answer["repeat"])
        parts += ["<tr><td>" + "<td>".join(map(html.escape, row)) for row in rows]
        parts.append("</table>")
    parts += [f"<p>{html.escape(line)}</p>" for line in rest_of(answer)]
    return "\n".join(parts)


def write(answer: Answer, folder: Path) -> Sequence[Path]:
    """Write ``bench.json`` and, if matplotlib is installed, pictures and ``bench.html``; returns the files."""
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
