"""Record the routing of the trained model: what its layers ask for when it reads text that it was not trained on.

    cd bench
    python -m mixtral.record      # a minute; writes mixtral/routings.npz

The specification's own decoder reads passages of the model's context, byte by byte as in generation, with the weights
as float32. Each sparse layer shows what its gate was given; what would have been guessed for later layers is computed
from that (`lowbit.model.replay.guess`), with and without their norm.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from training.models import MODELS
from training.texts import split

from lowbit.arrays import F32, F64
from lowbit.model.decoder import Decoder
from lowbit.model.replay import Norm, guess
from lowbit.model.weights import LlamaWeights, SparseWeights
from lowbit.moe.routing import Ids
from mixtral.loading import MODEL, load_model
from mixtral.recordings import AHEAD, FILE, GUESSED, Recordings, Small

PASSAGES = 3
"""Of each text, beginning at equal distances in its last tenth, which was not trained on."""


class Recorder:
    """A decoder whose sparse layers are listened to.

    Attributes:
        inputs: of each layer what its gate was given, a row for each token so far.
        chosen: of each layer the experts of each token so far.
    """

    def __init__(self, model: LlamaWeights) -> None:
        self.model, self.decoder = model, Decoder(model, observe=self._observe)
        self.inputs: list[list[F64]] = [[] for _ in model.layers]
        self.chosen: list[list[Ids]] = [[] for _ in model.layers]

    def read(self, tokens: Sequence[int]) -> None:
        """Read a passage from nothing, one token at a time."""
        state = self.decoder.new_state(len(tokens))
        for token in tokens:
            self.decoder.hidden([token], state)

    def gate_inputs(self, layer: int) -> F32:
        """What the gate was given, float32 as it sees it: T × hidden."""
        return np.concatenate(self.inputs[layer]).astype(np.float32)

    def experts(self) -> Small:
        """Layers × T × 2."""
        return np.stack([np.concatenate(rows) for rows in self.chosen]).astype(np.uint8)

    def guesses(self, ahead: int, renormed: bool) -> Small:
        """(Layers − ahead) × T × `GUESSED`, what each layer guesses for the one `ahead` of it."""
        result = []
        for layer, later in enumerate(self.model.layers[ahead:]):
            part = later.feed_forward
            assert isinstance(part, SparseWeights)
            assert later.feed_forward_norm is not None
            norm = Norm(later.feed_forward_norm.astype(np.float64), self.model.config.rms_epsilon)
            result.append(guess(self.gate_inputs(layer), part.router, GUESSED, norm if renormed else None))
        return np.stack(result).astype(np.uint8)

    def _observe(self, layer: int, x: F64, experts: Ids) -> None:
        self.inputs[layer].append(x.copy())
        self.chosen[layer].append(experts.copy())


def passages(length: int, model: str = "mixtral") -> list[tuple[str, int, Small]]:
    """Text, offset in its kept tenth, and bytes of each passage; of the texts of a model of `training.models`."""
    found = []
    for name in MODELS[model].texts:
        kept = split(name)[1]
        step = (kept.size - length) // (PASSAGES - 1)
        found += [(name, place * step, kept[place * step : place * step + length]) for place in range(PASSAGES)]
    return found


def record(model: LlamaWeights, read: Sequence[tuple[str, int, Small]], header: dict[str, Any]) -> Recordings:
    """Read every passage and keep what was asked for and guessed."""
    chosen: list[Small] = []
    guesses: dict[int, list[Small]] = {ahead: [] for ahead in AHEAD}
    renormed: dict[int, list[Small]] = {ahead: [] for ahead in AHEAD}
    for name, offset, tokens in read:
        recorder = Recorder(model)
        recorder.read(tokens.tolist())
        chosen.append(recorder.experts())
        for ahead in AHEAD:
            guesses[ahead].append(recorder.guesses(ahead, renormed=False))
            renormed[ahead].append(recorder.guesses(ahead, renormed=True))
        print(f"{name} from {offset}: {tokens.size} tokens", flush=True)
    return Recordings(
        header | {"passages": [{"text": name, "offset": offset} for name, offset, _ in read]},
        np.stack([tokens for _, _, tokens in read]),
        np.stack(chosen),
        {ahead: np.stack(rows) for ahead, rows in guesses.items()},
        {ahead: np.stack(rows) for ahead, rows in renormed.items()},
    )


def weight_sums(folder: Path) -> dict[str, str]:
    """The sum of each shard, by which a recording and its weights belong together."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def main() -> None:
    """Record and write."""
    model = load_model()
    header = {
        "about": "experts that the trained model in `model` asked for and guessed, reading text kept from training",
        "weights": weight_sums(MODEL),
        "offsets": "bytes from the beginning of the last tenth of each text",
        "precision": "float16 weights read as float32; the specification's decoder, token by token",
        "arrays": "see mixtral/recordings.py",
    }
    recordings = record(model, passages(model.config.context), header)
    recordings.save(FILE)
    print(f"{recordings.tokens.size} tokens, {FILE.stat().st_size} bytes: {FILE}")


if __name__ == "__main__":
    main()
