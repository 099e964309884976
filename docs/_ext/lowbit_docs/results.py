"""The directive ``.. results::``: tables of the experiments, with the papers' numbers beside ours.

Each is made from a file that ``nox -s experiments`` wrote. Losses are compared window by window with those of the model
as it is, so what stands behind ± is the standard error of a difference in pairs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import exp, expm1, log
from pathlib import Path
from typing import Any

import numpy as np
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from training.models import MODELS

from lowbit.model.comparison import Estimate, estimate
from lowbit_docs.tables import Cell, table

Row = Mapping[str, Any]
Table = tuple[str, list[str], list[list[Cell]], list[int]]
"""Title, heads, rows and widths."""

LLAMA_7B = {
    (128, 4): 5.81, (128, 3): 6.43, (128, 2): 23.58, (64, 4): 5.79, (64, 3): 6.23, (64, 2): 14.15,
    (32, 4): 5.77, (32, 3): 6.11, (32, 2): 10.24, (16, 4): 5.76, (16, 3): 5.99, (16, 2): 8.30,
}  # fmt: skip
LLAMA_7B_FLOAT = 5.68
"""QIGen, table 2: perplexity of LLaMA-7B by group size and bits, and of its floats."""
LLAMA2_7B = {1: (10.0861, 10.0861), 2: (9.9999, 9.6061), 4: (9.83, 9.5196)}
LLAMA2_7B_FLOAT = 9.4881
"""K-sort, table I: perplexity of Llama2-7B, unsorted and sorted, by the blocks of a head; and of its floats."""
MIXTRAL_WIKI2 = {
    (16, 16): 3.59, (16, 4): 3.67, (16, 3): 3.96, (16, 2): 4.52, (4, 16): 3.68, (4, 4): 3.76, (4, 3): 4.05,
    (4, 2): 4.61, (3, 16): 3.99, (3, 4): 4.06, (3, 3): 4.34, (3, 2): 4.90, (2, 16): 4.98, (2, 4): 5.08,
    (2, 3): 5.36, (2, 2): 5.97,
}  # fmt: skip
"""MoE offloading, table 1: perplexity of Mixtral-8x7B on WikiText-2 by the bits of attention and of experts."""


class Results(SphinxDirective):
    """``.. results:: NAME``: the tables of an experiment, and a line on the machines and the dates."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        relative, file = self.env.relfn2path(f"/data/results/{name}.json")
        self.env.note_dependency(relative)
        try:
            told = json.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ExtensionError(f"no {relative}: run nox -s experiments -- {name}") from error
        shown: list[nodes.Node] = []
        for title, heads, rows, widths in TABLES[name](told["rows"]):
            shown += [nodes.paragraph("", "", nodes.strong(text=title)), table(heads, rows, widths)]
        return [*shown, nodes.paragraph(text=f"{measured(told)} {scored(told['rows'])}".strip())]


def measured(told: Mapping[str, Any]) -> str:
    """When the rows were measured, and on what; of several runs, which rows each has.

    >>> run = {"date": "2026-01-02", "machine": {"cpu": "Abacus"}, "versions": {"numpy": "2.0"}}
    >>> rows = [{"run": 0, "settings": {"order": "none"}}, {"run": 1, "settings": {"order": "norm"}}]
    >>> measured({"runs": [run], "rows": rows[:1]})
    'Measured on 2026-01-02, Abacus, numpy 2.0.'
    >>> measured({"runs": [run, run | {"date": "2026-01-03"}], "rows": rows})
    'Measured on 2026-01-02, Abacus, numpy 2.0 (1 row: order none); 2026-01-03, Abacus, numpy 2.0 (1 row: order norm).'
    """
    said = list[str]()
    for number, run in enumerate(told["runs"]):
        versions = ", ".join(f"{each} {version}" for each, version in run["versions"].items())
        here = [row["settings"] for row in told["rows"] if row["run"] == number]
        part = f"{len(here)} {'row' if len(here) == 1 else 'rows'}"
        if alone := distinct([row["settings"] for row in told["rows"] if row["run"] != number], here):
            part += f": {alone}"
        said.append(f"{run['date']}, {run['machine']['cpu']}, {versions}" + (f" ({part})" if told["runs"][1:] else ""))
    return f"Measured on {'; '.join(said)}."


def distinct(others: Sequence[Row], rows: Sequence[Row]) -> str:
    """The settings that all rows of a run have, and no row of another.

    >>> distinct([{"order": "none", "block": 8}], [{"order": "norm", "block": 8}, {"order": "norm", "block": 16}])
    'order norm'
    """
    alike = {pair for pair in rows[0].items() if all(pair in row.items() for row in rows)}
    elsewhere = {pair for row in others for pair in row.items()}
    return ", ".join(f"{name} {value}" for name, value in rows[0].items() if (name, value) in alike - elsewhere)


def scored(rows: Sequence[Row]) -> str:
    """How many tokens the rows scored; nothing of rows that score none."""
    counts = sorted({sum(row["counts"]) for row in rows if "counts" in row})
    if not counts:
        return ""
    return f"Tokens that were scored for each number: {' or '.join(f'{count:,}' for count in counts)}."


def loss(row: Row, baseline: Row) -> Estimate:
    """Nats a token that a row loses to a baseline, in pairs of windows."""
    return estimate([a - b for a, b in zip(row["nats"], baseline["nats"], strict=True)], row["counts"])


def nats(row: Row) -> float:
    """Nats a token."""
    return float(sum(row["nats"]) / sum(row["counts"]))


def increase(row: Row, baseline: Row) -> str:
    """By how many percent the perplexity grew, with its standard error.

    >>> increase({"nats": [1.2, 1.4], "counts": [2, 2]}, {"nats": [1.0, 1.0], "counts": [2, 2]})
    '+16.2 ± 5.8'
    """
    found = loss(row, baseline)
    return f"{100 * expm1(found.mean):+.1f} ± {100 * exp(found.mean) * (found.error or 0.0):.1f}"


def of(rows: Sequence[Row], **settings: object) -> Row:
    """The row with these settings."""
    return next(row for row in rows if settings.items() <= row["settings"].items())


def models(rows: Sequence[Row]) -> list[str]:
    """The models of an experiment, in order."""
    return list(dict.fromkeys(row["settings"]["model"] for row in rows))


# **The experiments.**


def qigen(rows: Sequence[Row]) -> list[Table]:
    """A table for each model and width: groups down, quantisers across; and the error of the layers."""
    found: list[Table] = []
    methods = list(dict.fromkeys(row["settings"]["method"] for row in rows if row["settings"]["group"]))
    for model in models(rows):
        base = of(rows, model=model, method="floats")
        for bits in (4, 3, 2):
            lines: list[list[Cell]] = []
            for group in (0, 128, 64, 32, 16):
                paper = f"{100 * (LLAMA_7B[group, bits] / LLAMA_7B_FLOAT - 1):+.1f}" if group else "–"
                here = {"model": model, "bits": bits, "group": group}
                own = [
                    [row for row in rows if (here | {"method": each}).items() <= row["settings"].items()]
                    for each in methods
                ]
                cells = [f"{increase(some[0], base)} ({some[0]['layer_error']:.1e})" if some else "–" for some in own]
                lines.append([str(group) if group else "column", paper, *cells])
            title = f"{model} ({exp(nats(base)):.3f}), {bits} bits: increase of perplexity in % (error of the layers)"
            found.append((title, ["group", "paper, GPTQ", *methods], lines, [10, 14, *[19] * len(methods)]))
    return found


def encoder(rows: Sequence[Row]) -> list[Table]:
    """A table for each width: groups down, quantisers across; beside each error its ratio to that of the nearest."""
    methods, found = list(dict.fromkeys(row["settings"]["method"] for row in rows)), list[Table]()
    for bits in (4, 3, 2):
        lines: list[list[Cell]] = []
        for group in dict.fromkeys(row["settings"]["group"] for row in rows):
            here = [row for row in rows if {"bits": bits, "group": group}.items() <= row["settings"].items()]
            own = {row["settings"]["method"]: row for row in here}
            cells = [ratio(own[each], own["nearest"]) if each in own else "–" for each in methods]
            lines.append([str(group) if group else "column", *cells])
        title = f"{bits} bits: squared error of a layer (its ratio to rounding to the nearest)"
        found.append((title, ["group", *methods], lines, [12, *[88 // len(methods)] * len(methods)]))
    return found


def logarithms(row: Row, other: Row | None = None) -> Estimate:
    """The mean over matrices of the logarithm of the error, or of its ratio to another's in pairs.

    >>> round(exp(logarithms({"errors": [2.0, 8.0]}, {"errors": [2.0, 2.0]}).mean), 9)
    2.0
    """
    values = [log(each) for each in row["errors"]]
    if other is not None:
        values = [own - log(each) for own, each in zip(values, other["errors"], strict=True)]
    return estimate(values, [1] * len(values))


def ratio(row: Row, nearest: Row) -> str:
    """The geometric mean of the errors of the matrices, and that of their ratios to those of the nearest."""
    error = exp(logarithms(row).mean)
    if row is nearest:
        return f"{error:.1e}"
    found = logarithms(row, nearest)
    return f"{error:.1e} ({exp(found.mean):.2f} ± {exp(found.mean) * (found.error or 0.0):.2f})"


def ksort(rows: Sequence[Row]) -> list[Table]:
    """A table for each model: places and blocks down, orders across."""
    found: list[Table] = []
    for model in models(rows):
        base = of(rows, model=model, part="floats")
        for part in ("keys before RoPE", "keys after RoPE", "values"):
            here = [row for row in rows if row["settings"]["model"] == model and row["settings"]["part"] == part]
            orders = list(dict.fromkeys(row["settings"]["order"] for row in here))
            if not here:
                continue
            lines: list[list[Cell]] = []
            for block in sorted({row["settings"]["block"] for row in here}, reverse=True):
                own = {row["settings"]["order"]: row for row in here if row["settings"]["block"] == block}
                plain = loss(own["unsorted"], base).mean
                cells = {
                    order: increase(row, base) + (f" ({recovered(row, base, plain)})" if order != "unsorted" else "")
                    for order, row in own.items()
                }
                lines.append([str(block), *(cells.get(order, "–") for order in orders)])
            title = f"{model} ({exp(nats(base)):.3f}), {part}: increase of perplexity in % (recovered)"
            found.append((title, ["block", *orders], lines, [10, *[90 // len(orders)] * len(orders)]))
    paper: list[list[Cell]] = []
    for blocks, (unsorted, sorted_) in LLAMA2_7B.items():
        whole, rest = (log(each / LLAMA2_7B_FLOAT) for each in (unsorted, sorted_))
        grown = [f"{100 * expm1(each):+.1f}" for each in (whole, rest)]
        paper.append([f"{128 // blocks}", grown[0], f"{grown[1]} ({100 * (1 - rest / whole):.0f} %)"])
    title = f"The paper: Llama2-7B ({LLAMA2_7B_FLOAT}), head_dim 128"
    return [(title, ["block", "unsorted", "row norm"], paper, [20, 40, 40]), *found]


def recovered(row: Row, baseline: Row, plain: float) -> str:
    """The share of the loss of the unsorted cache that an order gives back."""
    return f"{100 * (1 - loss(row, baseline).mean / plain):.0f} %"


def scores(rows: Sequence[Row]) -> list[Table]:
    """What the channels of the heads hold; and errors of orders and of changes: of attention, and of keys."""
    (channels,) = [row for row in rows if row["settings"]["part"] == "channels"]
    lines: list[list[Cell]] = []
    for name, value in channels.items():
        if isinstance(value, list) and name != "counts":
            low, middle, high = np.percentile(value, [10, 50, 90])
            told = f"in {100 * np.mean(value):.0f} %" if name in SHARES else f"{middle:.2f}, {low:.2f} to {high:.2f}"
            lines.append([NAMES[name], told])
    title = f"{channels['settings']['model']}, channels of key heads before RoPE: median, and 10 to 90 % of the heads"
    found: list[Table] = [(title, ["", "heads"], lines, [70, 30])]
    orders: list[list[Cell]] = []
    for row in rows:
        settings = row["settings"]
        if settings["part"] == "channels":
            continue
        means = [float(np.mean(row[name])) for name in ("errors", "key_errors", "coarse")]
        said = settings["order"] + (f"; {settings['change']}" if settings["change"] else "")
        where = f"{settings['part'].removeprefix('keys ')}, {settings['block']}"
        orders.append([where, said, f"{means[0]:.3f}", f"{means[1]:.4f}", f"{100 * means[2]:.0f} %"])
    columns = ["place, block", "order", "attention", "keys", "queries' energy in the coarsest block"]
    return [*found, (TITLE, columns, orders, [18, 36, 12, 12, 22])]


TITLE = "Divergence of attention's probabilities in nats, and squared error of the keys over their squares"
SHARES = ("the same channel",)
NAMES = {
    "largest by norm": "norm of a row of W_k: the largest over the median",
    "largest held": "what a channel holds: the largest over the median",
    "the same channel": "the channel with the largest norm also holds most",
    "near the largest": "channels that hold more than half of what the largest holds",
    "means": "part of the keys' energy that is the mean of a channel",
    "norm with held": "correlation of norm and what is held (of logarithms)",
    "norm with queries": "correlation of norm and what the queries hold",
    "held with queries": "correlation of what keys and what queries hold",
}
"""What the numbers of the row of channels are."""


def llama_cpp(rows: Sequence[Row]) -> list[Table]:
    """Engines down: the perplexity, and what is apart from lowbit's, on average and in the window where it is most."""
    base, lines = of(rows, engine="lowbit"), list[list[Cell]]()
    for row in rows:
        apart = [(a - b) / n for a, b, n in zip(row["nats"], base["nats"], row["counts"], strict=True)]
        cells = [f"{float(np.mean(apart)):+.6f}", f"{max(map(abs, apart)):.6f}"] if row is not base else ["–", "–"]
        lines.append([row["settings"]["engine"], f"{exp(nats(row)):.4f}", *cells])
    title = f"{models(rows)[0]}, {len(base['nats'])} windows of 512 tokens: nats a token apart from lowbit"
    return [(title, ["engine", "perplexity", "mean", "in one window at most"], lines, [46, 18, 18, 18])]


def heads(rows: Sequence[Row]) -> list[Table]:
    """A table for each model: heads down, ways across."""
    found: list[Table] = []
    for model in models(rows):
        base = of(rows, model=model, kv_heads=8)
        lines: list[list[Cell]] = []
        for groups in (4, 2, 1):
            own = [of(rows, model=model, kv_heads=groups, way=way) for way in ("mean", "first", "random")]
            lines.append([str(groups), str(own[0]["cache_bytes"]), *(f"{exp(nats(row)):.2f}" for row in own)])
        title = f"{model}, perplexity with 8 heads {exp(nats(base)):.3f} ({base['cache_bytes']} bytes a token)"
        found.append((title, ["heads", "bytes a token", "mean", "first", "random"], lines, [12, 22, 22, 22, 22]))
    return found


def groups(rows: Sequence[Row]) -> list[Table]:
    """A table for each length of the cache: key and value heads down."""
    found: list[Table] = []
    for row in rows:
        lines: list[list[Cell]] = []
        for each in row["groups"]:
            low, high = (f"{1e3 * quartile:.3f}" for quartile in each["quartiles"])
            times = [f"{1e3 * each['median']:.3f}", f"{low} to {high}"]
            share = f"{each['median'] / row['groups'][0]['median']:.2f}"
            lines.append([str(each["kv_heads"]), f"{each['cache_bytes'] / 1e6:.1f}", *times, share])
        heads, context = row["groups"][0]["kv_heads"], row["settings"]["context"]
        title = f"Attention of one token over {context} tokens, {heads} query heads"
        columns = ["key and value heads", "MB of cache", "ms", "half of the calls", "of the first row"]
        found.append((title, columns, lines, [22, 18, 18, 24, 18]))
    return found


def ngram(rows: Sequence[Row]) -> list[Table]:
    """Texts down, models and orders across, for each set of texts; the models' own from the files of their training."""
    found: list[Table] = []
    for model in dict.fromkeys(row["settings"]["texts of"] for row in rows):
        here = [row for row in rows if row["settings"]["texts of"] == model]
        trained = validations(here[0]["texts"])
        lines: list[list[Cell]] = []
        for place, text in enumerate(here[0]["texts"]):
            bits = [row["nats"][place] / row["counts"][place] / log(2) for row in here]
            lines.append([text, *(f"{each:.3f}" for each in (*(own[text] for own in trained.values()), *bits))])
        columns = [*trained, *(f"order {row['settings']['order']}" for row in here)]
        widths = [16, *[84 // len(columns)] * len(columns)]
        found.append((f"Bits a byte of texts of {', '.join(trained)}", ["text", *columns], lines, widths))
    return found


def validations(texts: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """Bits a byte of each text, by the name of each kept model that was trained on these texts."""
    kept = [(model, seed) for model in MODELS.values() for seed in model.seeds if [*model.texts] == [*texts]]
    folders = [model.folder(seed) for model, seed in kept]
    told = [json.loads((folder / "training.json").read_text("utf-8")) for folder in folders]
    return {folder.name: each["validation_bits_per_byte"] for folder, each in zip(folders, told, strict=True)}


def uptraining(rows: Sequence[Row]) -> list[Table]:
    """A table for each seed: heads and ways down, parts of the training across, with what is lost to eight heads."""
    found: list[Table] = []
    for base in rows:
        if base["settings"]["kv_heads"] != 8:
            continue
        lines: list[list[Cell]] = []
        for row in same_seed(rows, base):
            settings = row["settings"]
            pairs = zip(row["points"], base["points"], strict=True)
            cells = [f"{exp(nats(point)):.3f} ({increase(point, whole)})" for point, whole in pairs]
            lines.append([str(settings["kv_heads"]), str(settings["way"]), *cells])
        columns = [f"after {100 * point['part']:.0f} %" for point in base["points"]]
        title = f"{base['settings']['model']}, perplexity (increase in % over 8 heads after the same training)"
        found.append((title, ["heads", "made by", *columns], lines, [8, 12, *[20] * len(columns)]))
    return found


def same_seed(rows: Sequence[Row], other: Row) -> list[Row]:
    """The rows of models that were trained from the seed of another's.

    >>> rows = [{"settings": {"model": each}} for each in ("dense-0", "dense-1", "gqa-0")]
    >>> [row["settings"]["model"] for row in same_seed(rows, rows[0])]
    ['dense-0', 'gqa-0']
    """
    seed = other["settings"]["model"].rpartition("-")[2]
    return [row for row in rows if row["settings"]["model"].rpartition("-")[2] == seed]


def mixed(rows: Sequence[Row]) -> list[Table]:
    """A table for each model: attention down, experts across; the paper's in brackets."""
    found: list[Table] = []
    widths = (16, 4, 3, 2)
    for model in models(rows):
        base, lines = of(rows, model=model, attention=16, experts=16), list[list[Cell]]()
        for attention in widths:
            cells: list[Cell] = []
            for experts in widths:
                row = of(rows, model=model, attention=attention, experts=experts)
                paper = 100 * (MIXTRAL_WIKI2[attention, experts] / MIXTRAL_WIKI2[16, 16] - 1)
                cells.append(f"{increase(row, base)} ({paper:+.1f}); {row['bytes'] / 1e6:.2f} MB")
            lines.append([f"{attention} bits", *cells])
        told = f"{model}: increase of perplexity in % from {exp(nats(base)):.3f}"
        title = f"{told} (the paper's on WikiText-2); size of the matrices"
        heads = ["attention", *(f"experts {each} bits" for each in widths)]
        found.append((title, heads, lines, [12, 22, 22, 22, 22]))
    return found


def routing(rows: Sequence[Row]) -> list[Table]:
    """A table of the cache for each model: rules down, slots across; and one of guesses."""
    found: list[Table] = []
    for row in rows:
        model, experts = row["settings"]["model"], len(row["shares"][0])
        lines: list[list[Cell]] = [[name, *(f"{each:.2f}" for each in row["cache"][name])] for name in row["cache"]]
        lines.append(["by chance", *(f"{slots / experts:.2f}" for slots in range(1, experts + 1))])
        heads = ["rule", *(f"k = {slots}" for slots in range(1, experts + 1))]
        title = f"{model}: recall of the cache, {row['tokens']:,} tokens in all layers"
        found.append((title, heads, lines, [20, *[80 // experts] * experts]))
    counts = range(1, len(rows[0]["guesses"]["1"]) + 1)
    lines = [
        [f"{row['settings']['model']}, {ahead} ahead", *(f"{each:.2f}" for each in values)]
        for row in rows
        for ahead, values in row["guesses"].items()
    ]
    heads = ["model and layers", *(f"{count} guessed" for count in counts)]
    return [*found, ("Recall of guesses", heads, lines, [28, *[72 // len(counts)] * len(counts)])]


TABLES: Mapping[str, Callable[[Sequence[Row]], list[Table]]] = {
    "ngram": ngram, "qigen": qigen, "ksort": ksort, "heads": heads, "uptraining": uptraining, "mixed": mixed,
    "routing": routing, "encoder": encoder, "scores": scores, "llama.cpp": llama_cpp, "groups": groups,
}  # fmt: skip
