"""How a model is run: the options, and the backends to which each applies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from lowbit.backend.base import Backend
from lowbit.backend.whole_model import DeviceSettings
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.model.caches import KEYS, Keys
from lowbit.model.quantization_plan import Plan
from lowbit.runtime import elementwise
from lowbit.runtime.linears import CONTRACTS, Contract

StepChoice = Literal["auto", "compiled", "operations", "formulas"]
STEPS: tuple[StepChoice, ...] = get_args(StepChoice)
"""How the step of a decoder runs: as one ``compiled`` call; by the ``operations`` of the backend, one after the other,
where it declares them; by the ``formulas`` of the specification in float64, with products on the backend; or ``auto``:
compiled where the backend can, else by formulas."""


@dataclass(frozen=True)
class Options:
    """How a model is run.

    Attributes:
        plan: quantise its matrices first; None for the weights as stored.
        contract: ``float32``, or ``integer`` to multiply by activations cast to 8-bit mantissas.
        step: how the step of a decoder runs, one of `STEPS`; or the names of elementwise operations
            (`lowbit.runtime.elementwise.OPERATIONS`), which run on the backend while formulas do the rest.
        device: settings of a backend that runs whole models; None for its defaults.
        by_layer: run one layer at a time, even on a backend that runs whole models.
        keys: the number format of keys and values, one of `lowbit.model.caches.KEYS`; None for the format in which
            attention computes. A backend that runs whole models takes it from `device`.
    """

    plan: Plan | None = None
    contract: Contract = "float32"
    step: StepChoice | tuple[str, ...] = "auto"
    device: DeviceSettings | None = None
    by_layer: bool = False
    keys: Keys | None = None

    def runs_whole(self, backend: Backend) -> bool:
        """Whether the backend runs the whole model rather than one layer at a time."""
        return backend.runs_models and not self.by_layer

    def elementwise(self, backend: Backend) -> tuple[str, ...]:
        """The elementwise operations to run on a backend.

        >>> from lowbit.backend.registry import load
        >>> engine = load("numpy")
        >>> Options(step=("attention.attend",)).elementwise(engine), Options().elementwise(engine)
        (('attention.attend',), ())
        """
        if isinstance(self.step, tuple):
            return self.step
        own = self.step in ("compiled", "operations") or (self.step == "auto" and backend.compiles_steps)
        return elementwise.OPERATIONS if own else ()

    def check(self, backend: Backend, spelled: Callable[[str], str] = str) -> None:
        """Refuse options that do not apply to a backend.

        Args:
            backend: the model is to run on it.
            spelled: maps the name of an option to the name that the user knows.

        Raises:
            ArgumentError: one does not apply, or there is no such contract or elementwise operation.
        """
        check_choice(spelled("contract"), self.contract, CONTRACTS)
        if isinstance(self.step, tuple):
            for operation in self.step:
                check_choice(spelled("step"), operation, elementwise.OPERATIONS)
        else:
            check_choice(spelled("step"), self.step, STEPS)
        if self.keys is not None:
            check_choice(spelled("keys"), self.keys, KEYS)
        if not self.runs_whole(backend):
            if self.device is not None:
                raise not_whole(spelled("device"), self.device, backend)
            return
        changed = {
            "contract": self.contract != "float32",
            "step": self.step != "auto",
            "keys": self.keys is not None,
        }
        for name, given in changed.items():
            if given:
                option = spelled(name)
                sentence = f"{option} does not apply to a backend that runs whole models, such as {backend.name}"
                raise ArgumentError(option, getattr(self, name), "a backend that runs one layer at a time", sentence)


def not_whole(option: str, given: object, backend: Backend) -> ArgumentError:
    """The error for an option of whole models on a backend that runs one layer at a time."""
    sentence = f"{option} applies only where a backend runs whole models; {backend.name} runs one layer at a time"
    return ArgumentError(option, given, "a backend that runs whole models", sentence)


AS_STORED = Options()
