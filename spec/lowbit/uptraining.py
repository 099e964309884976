"""Continuing the training of a model: the entry to `lowbit_torch.uptraining`, which needs torch.

The specification imports neither torch nor a backend: it finds the trainer by an entry point.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from typing import Any

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError, UnavailableError
from lowbit.system.entries import entries, loaded, single

UPTRAIN = "lowbit.uptrain"
"""The group of the entry point by which a package offers training: a function of model, out, texts, course, report."""
DTYPES = ("float32", "bfloat16", "float16")
WHAT = "training"


@dataclass(frozen=True)
class Course:
    """How a model is trained on.

    Attributes:
        steps: of training.
        rate: the learning rate, constant; a tenth of the highest rate of the original training is a good choice.
        tokens: of a step, at least `length`; rounded down to whole windows.
        length: tokens of a window.
        seed: of the places in the text.
        dtype: what the trained weights are rounded to, one of `DTYPES`.

    Raises:
        ArgumentError: a number outside its range.
    """

    steps: int
    rate: float = 1e-4
    tokens: int = 4096
    length: int = 256
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, least=1)
        if not (isinstance(self.rate, int | float) and 0 < self.rate < math.inf):
            raise ArgumentError("rate", self.rate, "a finite number above 0")
        check_integer("length", self.length, least=1)
        check_integer("tokens", self.tokens, least=self.length)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        check_choice("dtype", self.dtype, DTYPES)


def uptrain(
    model: str | PathLike[str],
    out: str | PathLike[str],
    texts: str | Sequence[str],
    course: Course,
    report: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Continue training a model, as pooled heads require, and write it as a checkpoint directory of floats.

    An interrupted training leaves a file beside the directory, and the same call resumes from it. ::

        lowbit.uptrain("pooled", "trained", Path("corpus.txt").read_text(), Course(steps=2000, rate=2e-4))

    Args:
        model: a GGUF file or a checkpoint directory, quantised or not.
        out: the directory; a free name, or an empty directory.
        texts: what it is trained on, one or several, each longer than a window.
        course: how it is trained.
        report: called with what is done, how much of it, and how much there is in all.

    Returns:
        ``bytes`` of the tensors; ``steps``; ``resumed``, how many of them an interrupted call had done; ``loss``, the
        mean of the ``first`` and of the ``last`` 20 steps in nats a token.

    Raises:
        ArgumentError: no such model; one that cannot be trained, such as one with experts; a destination that is taken;
            a text shorter than a window; weights that the dtype does not hold.
        FormatError: a damaged model.
        UnavailableError: torch is not installed; too little disk space.
    """
    found = entries(UPTRAIN)
    if not found or find_spec("torch") is None:
        raise UnavailableError(WHAT, "torch is not installed", "pip install 'lowbit[torch]'")
    train: Any = loaded(single(found, WHAT), WHAT)
    given = (texts,) if isinstance(texts, str) else tuple(texts)
    told: dict[str, Any] = train(model, out, given, course, report or (lambda what, done, total: None))
    return told
