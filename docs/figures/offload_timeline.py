"""Four timelines of one token in four layers on a simulated device, with and without guesses, from its log.

Copies to the device take nearly all of the time, and computing takes short moments between them. In two timelines
experts are copied back to the host too. A right guess copies an expert before its layer begins; a wrong one copies an
expert in vain. Virtual time: Mixtral-8x7B with 2-bit experts, routed by ``bench/mixtral/routings.npz``.
"""

import sys
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from lowbit.moe.offload import Arrangement, trace
from lowbit_gpusim.sim.device import SimDevice

sys.path.insert(0, "../../bench")  # the folder of a figure is its own
from mixtral.following import pairs, passes
from mixtral.recordings import FILE, Recordings
from mixtral.replaying import Replay
from mixtral.table2 import sizes

MACHINE, LAYERS, SLOTS, TOKENS, FIRST, SHOWN = "rtx3060", 32, 2, 10, 17, 4
LANES = {"to device": 2, "compute": 1, "to host": 0}
COLORS = {
    "load": "C0",
    "guess that was right": "C1",
    "guess that was wrong": "0.8",
    "expert that was there": "C2",
    "expert that came": "C4",
    "attention, gate": "0.3",
    "scores": "k",
    "expert on its way back": "C5",
}
recordings = Recordings.load(FILE)


def guess_names(events):
    """For each stage, in order, whether its expert was promoted or dropped next."""
    names = []
    for number, event in enumerate(events):
        if event.kind == "load":
            names.append("load")
        elif event.kind == "stage":
            of_it = (e.kind for e in events[number + 1 :] if (e.layer, e.expert) == (event.layer, event.expert))
            names.append("guess that was right" if next(of_it, "drop") == "promote" else "guess that was wrong")
    return names


def named(log, events):
    """The log's records that take time on the device, each with a name of `COLORS`; copies and events are in step."""
    copies = guess_names(events)
    filled = sum(record.stream == "experts to device" and record.kind == "copy" for record in log) - len(copies)
    copies = iter(["filling"] * filled + copies)
    runs = ("expert that was there" if e.kind == "hit" else "expert that came" for e in events)
    runs = iter([name for name, e in zip(runs, events, strict=True) if e.kind in ("hit", "promote") for _ in range(2)])
    for record in log:
        if record.kind == "launch":
            yield record, next(runs) if record.what.startswith("expert") else "attention, gate"
        elif record.kind == "copy" and record.engine == "to host":
            yield record, "scores" if record.stream == "compute" else "expert on its way back"
        elif record.kind == "copy" and record.stream == "experts to device":
            yield record, next(copies)


def picture(axes, memory, guesses):
    """One panel."""
    arrangement = Arrangement(LAYERS, 8, SLOTS, memory=memory)
    with SimDevice(MACHINE, backed=False) as device:
        model = Replay(device, sizes(2), arrangement, prefetch=guesses > 0)
        for position, asked in enumerate(passes(recordings, pairs(recordings)[0], guesses)[:TOKENS]):
            model.token(position, asked, [request.needed for request in asked])
        device.finish()
        log, events = device.log, trace(arrangement, model.engine.requests)
    begins = [record.begin for record in log if record.what == "attention"][(TOKENS - 1) * LAYERS :]
    begin = begins[FIRST]
    shown = begin - 5e-4, begins[FIRST + SHOWN] + 5e-4
    for record, name in named(log, events):
        if record.end < shown[0] or record.begin > shown[1]:
            continue
        left, right = 1e3 * (record.begin - begin), 1e3 * (record.end - begin)
        axes.barh(LANES[record.engine], right - left, 0.7, left, color=COLORS[name], edgecolor="white", linewidth=0.3)
    for layer, (start, end) in enumerate(pairwise(begins[FIRST : FIRST + SHOWN + 1]), FIRST):
        axes.axvline(1e3 * (start - begin), color="k", linewidth=0.6, linestyle=":")
        axes.text(1e3 * ((start + end) / 2 - begin), 2.5, f"layer {layer}", ha="center", fontsize=8)
    axes.axvline(1e3 * (begins[FIRST + SHOWN] - begin), color="k", linewidth=0.6, linestyle=":")
    axes.set_yticks(list(LANES.values()), LANES)
    axes.set_ylim(-0.5, 2.8)
    axes.set_title(f"{memory}, {'one guess' if guesses else 'no guesses'}", fontsize=9, loc="left")
    return 1e3 * (begins[FIRST + SHOWN] - begin)


figure, panels = plt.subplots(4, 1, figsize=(9, 7.2), sharex=True)
ends = [
    picture(axes, memory, guesses)
    for axes, (memory, guesses) in zip(panels, [("mirror", 0), ("mirror", 1), ("swap", 0), ("swap", 1)], strict=True)
]
panels[-1].set_xlim(-0.5, max(ends) + 0.5)
panels[-1].set_xlabel("ms of virtual time")
patches = [Patch(color=color, label=name) for name, color in COLORS.items()]
figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
print(ends)
