"""Rows of two panels, one row a search: predicted cycles against measured time, and measured speeds of candidates.

The points on the left rise roughly in proportion, with some kernels slower than predicted. The bars on the right are
sorted by speed, and the names of the chosen kernel and of the default are marked. Data: ``docs/data/tuning.json``.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from lowbit_cppyy.tuning.figure import draw

searches = json.loads(Path("../data/tuning.json").read_text("utf-8"))["searches"]  # the folder of a figure is its own
figure, axes = plt.subplots(len(searches), 2, figsize=(8.4, 3.6 * len(searches)), squeeze=False, layout="constrained")
for search, (scatter, bars) in zip(searches, axes, strict=True):
    in_panels = [trial for trial in search["trials"] if not trial["block"]]  # the text has the block of equation 5
    draw({**search, "trials": in_panels}, scatter, bars)
