"""The trained model as the specification's decoder reads it: float16 weights, taken as float32."""

from pathlib import Path

from lowbit.model.weights import LlamaWeights
from lowbit.runtime import open_model

MODEL = Path(__file__).parent / "model"


def load_model(folder: Path = MODEL) -> LlamaWeights:
    """The whole model of a checkpoint directory."""
    return open_model(folder).weights
