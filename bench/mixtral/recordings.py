"""Recorded routings: which experts a real model asked for, and which would have been guessed, token by token.

`routings.npz` holds small integers only, so that it can be read by anything that reads numpy's arrays:

=================== ==================== =======================================================================
array               shape                what
=================== ==================== =======================================================================
``header``          ()                   JSON: what the weights were (their sums), what was read, how
``tokens``          P × T                the bytes that were read, P passages of T
``chosen``          P × L × T × 2        the experts that each layer ran, best first
``guess_a``         P × L−a × T × 4      at l: the likeliest experts of layer l + a, guessed at layer l, best first
``renormed_a``      P × L−a × T × 4      the same, the input re-normalised with the norm of layer l + a first
=================== ==================== =======================================================================

with a = 1, 2 and 10 layers ahead (errata M5). A guess is the later layer's gate on this layer's gate input.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lowbit.offload import Request
from lowbit.storage import written

HERE = Path(__file__).parent
FILE = HERE / "routings.npz"
AHEAD = (1, 2, 10)
GUESSED = 4

Small = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Recordings:
    """The arrays of the file; `guesses` and `renormed` by the number of layers ahead."""

    header: dict[str, Any]
    tokens: Small
    chosen: Small
    guesses: dict[int, Small]
    renormed: dict[int, Small]

    @property
    def layers(self) -> int:
        """L."""
        return int(self.chosen.shape[1])

    def of_layer(self, layer: int) -> list[list[tuple[int, ...]]]:
        """For each passage the experts that one layer needed, pass after pass: what `lowbit.replay` reads."""
        return [[tuple(pair) for pair in passage[layer].tolist()] for passage in self.chosen]

    def requests(self, passage: int, count: int, *, renormed: bool = False) -> list[Request]:
        """What an engine would have been asked for in one passage, with `count` guesses for each next layer."""
        return requests(self.chosen[passage], (self.renormed if renormed else self.guesses)[1][passage], count)

    def save(self, path: Path) -> None:
        """Write the file under a temporary name, then rename it."""
        named: dict[str, Any] = {f"guess_{ahead}": array for ahead, array in self.guesses.items()}
        named |= {f"renormed_{ahead}": array for ahead, array in self.renormed.items()}
        header = np.array(json.dumps(self.header, ensure_ascii=False))
        with written(path) as stream:
            np.savez_compressed(stream, header=header, tokens=self.tokens, chosen=self.chosen, **named)

    @classmethod
    def load(cls, path: Path = FILE) -> Self:
        """Read the file; nothing in it is ever executed."""
        with np.load(path, allow_pickle=False) as arrays:
            guesses, renormed = ({a: arrays[f"{name}_{a}"] for a in AHEAD} for name in ("guess", "renormed"))
            return cls(json.loads(str(arrays["header"])), arrays["tokens"], arrays["chosen"], guesses, renormed)


def requests(chosen: npt.NDArray[Any], guesses: npt.NDArray[Any], count: int) -> list[Request]:
    """The requests of T passes: `chosen` is layers × T × 2, `guesses` (layers − 1) × T × at least `count`."""
    last = len(chosen) - 1
    return [
        Request(
            layer,
            tuple(chosen[layer, token].tolist()),
            tuple(guesses[layer, token, :count].tolist()) if layer < last else (),
        )
        for token in range(chosen.shape[1])
        for layer in range(len(chosen))
    ]
