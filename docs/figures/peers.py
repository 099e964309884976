"""Bars of time relative to the fastest kernel, for three matrix shapes and three accuracy classes, on one thread.

Data: ``docs/data/peers.json``. lowbit is the fastest in float32 and in 8 bits at all three shapes, the small one
included, and has no kernel whose error puts it into the class of 16 bits. llama.cpp, ONNX Runtime and OpenVINO take 1.4
to 3.6 times as long as the fastest of their classes, numpy 6 times, and PyTorch in float32 44 to 51 times.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

SHAPES = ("4096x11008", "4096x4096", "576x1536")
CLASSES = ("float32", "16 bits", "8 bits")
SHOWN = 10  # longer bars end here, and their number says how long they are

report = json.loads(Path("../data/peers.json").read_text("utf-8"))  # the folder of a figure is its own
problems = {
    f"{each['rows']}x{each['columns']}": each
    for each in report["problems"]
    if each["family"] == "4 bits" and each["batch"] == 1 and each["threads"] == 1
}


def fastest(problem: dict, accuracy: str) -> dict[str, float]:
    """The least time of each project in one class, relative to the least of all."""
    times = {}
    for row in problem["contestants"]:
        if row["accuracy"] == accuracy:
            times[row["project"]] = min(row["ms"][0], times.get(row["project"], row["ms"][0]))
    return {project: time / min(times.values()) for project, time in times.items()}


found = {(shape, accuracy): fastest(problems[shape], accuracy) for shape in SHAPES for accuracy in CLASSES}
rows = []  # from top to bottom: a class and a project
for accuracy in CLASSES:
    first = found[SHAPES[0], accuracy]
    rows += [(accuracy, project) for project in sorted(first, key=first.__getitem__)]
places = {row: index + CLASSES.index(row[0]) * 0.9 for index, row in enumerate(rows)}

figure, axes = plt.subplots(1, len(SHAPES), figsize=(8, 4.6), sharey=True, layout="constrained")
for axis, shape in zip(axes, SHAPES, strict=True):
    for (accuracy, project), y in places.items():
        ratio = found[shape, accuracy].get(project)
        if ratio is None:
            continue
        axis.barh(y, min(ratio, SHOWN), color="#c44e52" if project == "lowbit" else "#8da0b8")
        inside = ratio > SHOWN * 0.8
        axis.text(
            min(ratio, SHOWN) + (-0.2 if inside else 0.2),
            y,
            f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}",
            va="center",
            ha="right" if inside else "left",
            fontsize=9,
        )
    axis.set(title=shape.replace("x", " × "), xlim=(0, SHOWN))
    axis.set_xticks([0, 1, 5, 10], ["0", "1", "5", "10"])
    axis.axvline(1, color="0.6", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
for accuracy in CLASSES:
    top = min(y for row, y in places.items() if row[0] == accuracy)
    place = {"transform": axes[0].get_yaxis_transform(), "ha": "right", "va": "center"}
    axes[0].text(-0.03, top - 0.8, accuracy, fontsize=9.5, fontweight="bold", **place)
axes[0].set_yticks(list(places.values()), [project for _, project in places])
axes[0].invert_yaxis()
axes[0].margins(y=0.06)
figure.supxlabel("time relative to the fastest of the class: shorter is faster", fontsize=10)
