"""The directive ``.. benchmarks::``: what the last comparison with other projects came to, as docs/data holds it.

The page opens with a chart (docs/figures/peers.py). What this shows is folded: one line for each problem, and its
table below the line.
"""

import json
from pathlib import Path
from typing import Any

from accuracy import CLASSES
from docutils import nodes
from peers_report import count_threads, headline
from sphinx.util.docutils import SphinxDirective
from token_parts_report import reading_ms, title

from lowbit_docs.tables import Cell, folded, table

HEADS = ["contestant", "ms", "share", "GB/s", "error", "class", "of float32"]
WIDTHS = [34, 12, 10, 10, 12, 12, 10]


class Benchmarks(SphinxDirective):
    """The pictures and tables of ``peers``, ``stored``, ``decode``, ``models``, ``growth``, ``token_parts`` or
    ``quality``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        relative, file = self.env.relfn2path(f"/data/{kind}.json")
        self.env.note_dependency(relative)
        if not Path(file).is_file():
            wanted = {"stored": "peers --problem stored", "token_parts": "decode", "models": "decode --model FILE"}.get(
                kind, kind
            )
            return [nodes.paragraph(text=f"No measurement is kept: run nox -s bench -- --{wanted} --keep.")]
        report = json.loads(Path(file).read_text("utf-8"))
        shown = [about(report), *folded("Versions and builds of the projects", projects(report))]
        others = {
            "decode": self.decode,
            "models": self.models,
            "growth": self.growth,
            "token_parts": self.token_parts,
            "quality": self.quality,
        }
        return shown + others.get(kind, self.peers)(report)

    def peers(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The problems, those on most threads first, then the goals of lowbit itself."""
        found = self.peers_pictures(report)
        for problem in sorted(report["problems"], key=lambda problem: -problem["threads"]):
            found += contest(problem)
        met = sum(goal["met"] for goal in report["goals"])
        return found + folded(f"Goals of lowbit: {met} of {len(report['goals'])} met", goals(report["goals"]))

    def peers_pictures(self, report: dict[str, Any]) -> list[nodes.Node]:
        """Speed against error, and speed against the read limit, with what they show in words."""
        shown = headline(report)
        if not shown:
            return []
        matrix = f"a {shown[0]['rows']} × {shown[0]['columns']} matrix of 4 bits on {count_threads(shown[0])}"
        fastest = "; ".join(f"at batch {problem['batch']} {winners(problem)}" for problem in shown)
        error = (
            "Time against error, each point a kernel. Left and low is better: exact and fast. Dotted lines divide the "
            f"accuracy classes. {matrix.capitalize()}."
        )
        read = (
            "Operations a second against operations for each byte of weights. No kernel can lie above the solid line, "
            "which is the read limit, and none of a class above the dashed line of its arithmetic."
        )
        batches = ", ".join(str(problem["batch"]) for problem in shown)
        points = f"One column of points for each batch of {batches}, for {matrix}: the larger the batch, the farther"
        return [
            self.picture("peers-error.svg", error, f"{len(shown)} panels of time against error. Fastest: {fastest}."),
            self.picture("peers-roofline.svg", read, f"{points} the kernels are from the read limit."),
        ]

    def decode(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture and one table."""
        heads = ["threads", "generator", "tokens/s", "interval", "first token", "read limit"]
        rows: list[list[Cell]] = []
        for run in report["runs"]:
            for generator in run["generators"]:
                speed, low, high = generator["tokens_per_second"]
                least = generator["read_gbps"] * 1e9 / run["model_bytes"]
                first = f"{1e3 * generator['first_seconds'][0]:.0f} ms"
                spread = f"{low:.1f} to {high:.1f}"
                rows.append([str(run["threads"]), generator["name"], f"{speed:.1f}", spread, first, f"{least:.0f}"])
        caption = "Tokens a second of the whole model, as in Figure 4 of the paper."
        speeds = ", ".join(f"{row[1]} {row[2]}" for row in rows)
        said = f"Bars of tokens a second after the first token and while reading the prompt. After the first: {speeds}."
        return [self.picture("decode.svg", caption, said), table(heads, rows, [10, 24, 16, 20, 16, 14])]

    def models(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture, and a row for each model, number of threads, prompt and engine."""
        heads = ["model", "threads", "prompt", "generator", "tokens/s", "interval", "prompt, tokens/s", "read limit"]
        rows: list[list[Cell]] = []
        for run in report["runs"]:
            for generator in run["generators"]:
                speed, low, high = generator["tokens_per_second"]
                least = generator["read_gbps"] * 1e9 / generator.get("model_bytes", run["model_bytes"])
                first = [run["model"].removesuffix(".gguf"), str(run["threads"]), str(run["prompt_tokens"])]
                numbers = [f"{speed:.1f}", f"{low:.1f} to {high:.1f}"]
                prompt = run["prompt_tokens"] / generator["first_seconds"][0]
                rows.append([*first, generator["name"], *numbers, f"{prompt:.0f}", f"{least:.0f}"])
        caption = "Tokens a second of other models, after the first token and while reading the prompt."
        speeds = "; ".join(f"{row[0]}, {row[1]} thread(s), {row[3]}: {row[4]}" for row in rows)
        said = f"Bars of tokens a second. After the first token: {speeds}."
        return [self.picture("models.svg", caption, said), table(heads, rows, [20, 8, 8, 22, 10, 16, 12, 10])]

    def growth(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture, a table of the starts of the command, and all points folded."""
        starts: list[list[Cell]] = []
        points: list[list[Cell]] = []
        for run in report["runs"]:
            threads = str(run["threads"])
            for start in run["commands"]:
                first, low, high = start["first_token_seconds"]
                spread, memory = f"{low:.2f} to {high:.2f} s", f"{start['peak_megabytes']} MB"
                starts.append([threads, start["contract"], f"{first:.2f} s", spread, memory])
            for point in run["points"]:
                size = f"context {point['context']}" if "context" in point else f"batch {point['batch']}"
                prompt = f"{point['prompt_per_second'][0]:.0f}" if "context" in point else ""
                rate = f"{point['tokens_per_second'][0]:.1f}"
                points.append([threads, point["engine"], size, prompt, rate, f"{point['read_gbps']:.1f}"])
        caption = "Tokens a second along the length of a prompt, the context before a token, and the size of a batch."
        said = "Three panels of lines, one for each engine, dashed on two threads; the table below has their points."
        heads = ["threads", "contract", "first token after the command", "interval", "peak memory"]
        return [
            self.picture("growth.svg", caption, said),
            table(heads, starts, [12, 20, 28, 24, 16]),
            *folded(
                f"All {len(points)} points",
                table(
                    ["threads", "engine", "size", "prompt tokens/s", "tokens/s", "GB/s"],
                    points,
                    [10, 34, 18, 14, 14, 10],
                ),
            ),
        ]

    def token_parts(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture, and a table of the parts for each run, folded."""
        found: list[nodes.Node] = []
        for run in report["runs"]:
            rows: list[list[Cell]] = [
                [
                    part["part"],
                    str(part["blocks"]),
                    f"{part['ms']:.3f}",
                    f"{part['wait_ms']:.3f}",
                    f"{part['bytes'] / 1e6:.2f}" if part["bytes"] else "",
                    f"{part['bytes'] / part['ms'] / 1e6:.1f}" if part["bytes"] else "",
                ]
                for part in run["parts"]
            ]
            rows.append(["outside the step", "", f"{run['outside_ms']:.3f}", "", "", ""])
            head = f"{title(run)}: {run['ms']:.2f} ms, where plain reading gave {run['read_gbps']:.1f} GB/s"
            heads = ["part", "blocks", "ms", "wait, ms", "MB", "GB/s"]
            found += folded(head, table(heads, rows, [40, 10, 12, 12, 12, 12]))
        said = "; ".join(f"{title(run)}: {run['ms']:.2f} ms, {reading_ms(run):.2f} to read" for run in report["runs"])
        caption = "Milliseconds of a token after 128 others, and the time in which its bytes can be read."
        return [self.picture("token_parts.svg", caption, f"A bar for each run. {said}."), *found]

    def quality(self, report: dict[str, Any]) -> list[nodes.Node]:
        """The picture, and all points folded, the fastest first."""
        heads = ["threads", "engine", "perplexity", "tokens/s", "interval", "over the file"]
        rows: list[list[Cell]] = []
        found = [row for row in report["runs"] if "absent" not in row]
        for row in sorted(found, key=lambda row: (row["settings"]["threads"], -row["tokens_per_second"][0])):
            speed, low, high = row["tokens_per_second"]
            numbers = [f"{row['perplexity']:.2f}", f"{speed:.1f}", f"{low:.1f} to {high:.1f}"]
            settings = row["settings"]
            rows.append([str(settings["threads"]), settings["engine"], *numbers, f"{row['over_file'][0]:.2f}"])
        caption = (
            "Perplexity against the speed of generation, over that of lowbit on the file as it is, in pairs; right and "
            "low is better. A line joins the sizes of groups of one width, or llama.cpp's types of files."
        )
        said = f"{len(rows)} points on lines: one for each contract and width, one for llama.cpp. The table has them."
        shown = table(heads, rows, [10, 40, 14, 12, 18, 14])
        return [self.picture("quality.svg", caption, said), *folded(f"All {len(rows)} points", shown)]

    def picture(self, name: str, caption: str, said: str) -> nodes.Node:
        """A picture of docs/data above its caption; `said` is its alternative text."""
        figure = nodes.figure("", nodes.image(uri=f"/data/{name}", alt=said, classes=["turns"]))
        figure += nodes.caption("", caption)
        return figure


def winners(problem: dict[str, Any]) -> str:
    """The project of the fastest kernel of each class.

    >>> rows = [("a", "8 bits", 2.0), ("b", "8 bits", 1.0), ("b", "float32", 3.0)]
    >>> contestants = [{"project": name, "accuracy": kind, "ms": [ms]} for name, kind, ms in rows]
    >>> winners({"contestants": contestants})
    'float32 b, 8 bits b'
    """
    rows = sorted(problem["contestants"], key=lambda row: row["ms"][0])
    first = {kind: next((row["project"] for row in rows if row["accuracy"] == kind), None) for kind in CLASSES}
    return ", ".join(f"{kind} {project}" for kind, project in first.items() if project)


def about(report: dict[str, Any]) -> nodes.Node:
    """When and on what."""
    machine = report["machine"]
    caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
    return nodes.paragraph(
        text=f"{report['started'][:10]}, {machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores, "
        f"{caches}, {machine['memory_gib']} GiB; {machine['system']}, {machine['python']}, {machine['compiler']}; "
        f"huge pages {machine['huge_pages'] or 'unknown'}."
    )


def projects(report: dict[str, Any]) -> nodes.Node:
    """Versions and builds; who is absent stands here too, with the reason."""
    rows: list[list[Cell]] = []
    for project in report["projects"]:
        versions = ", ".join(f"{name} {version}" for name, version in project["versions"].items())
        said = "; ".join(f"{name}: {value}" for name, value in project.get("details", {}).items())
        rows.append([project["name"], versions, f"absent: {project['absent']}" if "absent" in project else said])
    return table(["project", "versions", "build"], rows, [16, 28, 56])


def goals(judged: list[dict[str, Any]]) -> nodes.Node:
    """Every goal at its place."""
    rows: list[list[Cell]] = [
        [
            goal["goal"],
            goal["where"],
            goal["by"],
            f"{goal['value']:.2f}",
            goal["wanted"],
            "met" if goal["met"] else "missed",
        ]
        for goal in judged
    ]
    return table(["goal", "where", "by", "value", "wanted", ""], rows, [32, 26, 20, 8, 8, 8])


def contest(problem: dict[str, Any]) -> list[nodes.Node]:
    """The table of one problem, the fastest first, and who is absent from it."""
    threads = f"{problem['threads']} thread{'s' if problem['threads'] > 1 else ''}"
    head = f"{problem['contest']}, batch {problem['batch']}, {threads}"
    quiet = (
        f"{problem['free_rounds']} of {problem['rounds']} rounds with free cores; spin {problem['spin_before']:.2f} "
        f"before and {problem['spin_after']:.2f} after"
    )
    if "arithmetic" in problem:
        quiet += f", {problem['arithmetic']:.2f} of its best between"
    rows: list[list[Cell]] = []
    for row in sorted(problem["contestants"], key=lambda row: row["ms"][0]):
        numbers = [f"{row['ms'][0]:.4g}", f"{row['share'][0]:.2f}", f"{row['gbps']:.1f}", f"{row['error']['rms']:.1e}"]
        name: Cell = [nodes.literal("", row["id"])]
        rows.append([name, *numbers, row["accuracy"], f"{row['original']['rms']:.2g}"])
    found: list[nodes.Node] = [nodes.paragraph(text=f"{quiet}."), table(HEADS, rows, WIDTHS)]
    if problem["absent"]:
        said = "; ".join(f"{each['id']}: {each['reason']}" for each in problem["absent"])
        found.append(nodes.paragraph(text=f"Absent: {said}."))
    return folded(head, *found)
