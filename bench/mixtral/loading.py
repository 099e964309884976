"""The trained model as the specification's decoder reads it: float16 weights, taken as float32."""

from pathlib import Path

from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.model.weights import LlamaWeights, in_memory

MODEL = Path(__file__).parent / "model"


def load_model(folder: Path = MODEL) -> LlamaWeights:
    """The whole model of a checkpoint directory."""
    return in_memory(open_checkpoint(folder))
