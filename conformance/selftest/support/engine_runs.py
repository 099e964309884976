"""What the tests of the offload engine share: runs that it is asked for, drawn by hypothesis or like a program's."""

from typing import Any

import hypothesis.strategies as st
import numpy as np

from lowbit.moe.offload import Arrangement, Request
from lowbit_conformance.suite.walks import Walk

ARRANGEMENTS = st.builds(
    lambda layers, experts, slots, buffers, memory: Arrangement(layers, experts, min(slots, experts), buffers, memory),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["mirror", "swap"]),
)


@st.composite
def runs(draw: Any) -> tuple[Arrangement, list[Request]]:
    """An arrangement and requests for it: any experts, any guesses, passes that end early, layers that need none."""
    arrangement, requests = draw(ARRANGEMENTS), list[Request]()
    experts = st.integers(0, arrangement.experts - 1)
    for _ in range(draw(st.integers(1, 12))):
        last = requests[-1].layer if requests else -1
        layer = 0 if last + 1 == arrangement.layers or draw(st.integers(0, 5)) == 0 else last + 1
        needed = draw(st.lists(experts, unique=True))
        guesses = draw(st.lists(experts, max_size=5)) if layer < arrangement.layers - 1 else []
        requests.append(Request(layer, tuple(needed), tuple(guesses)))
    return arrangement, requests


def walk(arrangement: Arrangement, seed: int, steps: int) -> list[Request]:
    """What a program asks for: experts that come again, guesses of which some are right, prompts, abandoned passes."""
    steps_of = Walk(arrangement, 2, 3, np.random.default_rng(seed))
    return [steps_of.next() for _ in range(steps)]
