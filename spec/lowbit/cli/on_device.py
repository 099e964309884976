"""A model on a backend that runs models whole, and the options that only such a backend takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from lowbit.backend import base as registry
from lowbit.backend.base import Backend
from lowbit.backend.linears import Contract
from lowbit.backend.whole_model import KEYS, PREFETCHES, DeviceSettings, bytes_of
from lowbit.cli.interrupts import Interruptible, deferred
from lowbit.cli.loading import LoadedModel, Ready, on_backend, said_plan, weights_of
from lowbit.cli.progress import progress_bar
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.model.quantization_plan import Plan
from lowbit.moe.offload import MEMORIES

DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help="For a backend that runs models whole, such as cuda: the most of the device's memory that is used, such "
        "as 12GiB. Experts that do not fit are brought when they are needed. Without it "
        "what is free, less what its driver needs.",
    ),
]
BuffersOption = Annotated[
    int | None, typer.Option("--buffers", help=f"On a device: staging buffers for experts; {DeviceSettings.buffers}.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help=f"On a device: {spoken(MEMORIES)}, whether the host keeps a copy of every expert or exchanges them; "
        f"{DeviceSettings.mode}.",
    ),
]
PrefetchOption = Annotated[
    str | None,
    typer.Option(
        "--prefetch",
        help=f"On a device: {spoken(PREFETCHES)}, whether experts are copied ahead on a guess; "
        f"{DeviceSettings.prefetch}, which stops where it does not pay.",
    ),
]
KeysOption = Annotated[
    str | None, typer.Option("--keys", help=f"On a device: keys are kept in {spoken(KEYS)}; {DeviceSettings.keys}.")
]
ColdOption = Annotated[
    str | None,
    typer.Option(
        "--cold-experts",
        help="On a device: a backend that runs experts on the host where that is quicker than to copy them. Its "
        "rounding is another, so the text may depend on what was cached.",
    ),
]


@dataclass(frozen=True)
class DeviceOptions:
    """What was given on the command line, None for what was not."""

    memory: str | None = None
    buffers: int | None = None
    mode: str | None = None
    prefetch: str | None = None
    keys: str | None = None
    cold_experts: str | None = None

    def settings(self, backend: Backend) -> DeviceSettings | None:
        """What they ask of a backend; None where the backend runs no models whole.

        Raises:
            ArgumentError: an option for such a backend, and this is none; or a wrong one.
        """
        names = {"memory": "--device-memory", "mode": "--memory"}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        options = {name: names.get(name, "--" + name.replace("_", "-")) for name in given}
        if not backend.runs_models:
            for name, value in given.items():
                raise ArgumentError(
                    options[name], value, f"a backend that runs models whole, which {backend.name} is not"
                )
            return None
        for name, allowed in (("mode", MEMORIES), ("prefetch", PREFETCHES), ("keys", KEYS)):
            if name in given:
                check_choice(options[name], given[name], allowed)
        if self.buffers is not None:
            check_integer("--buffers", self.buffers, least=1)
        if self.memory is not None:
            given["memory"] = bytes_of(self.memory, "--device-memory")
        if self.cold_experts is not None:
            _check_backend("--cold-experts", self.cold_experts)
        return DeviceSettings(**given)


def _check_backend(option: str, name: str) -> None:
    """Refuse the name of a backend that is not there or cannot run here, before a model is quantised for it."""
    try:
        registry.load(name).close()
    except ArgumentError as error:
        raise ArgumentError(option, error.given, error.allowed) from error


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A model on a device; it says of itself what `Ready` says.

    Attributes:
        model: where the weights come from.
        plan: how they were quantised, or None where they are as stored.
        backend: its name.
        settings: what was asked of it.
        decoder: ready to run.
    """

    model: LoadedModel
    plan: Plan | None
    backend: str
    settings: DeviceSettings
    decoder: Interruptible

    def describe(self) -> dict[str, Any]:
        """What was run, as every JSON answer states it."""
        return {
            "model": self.model.file,
            "backend": self.backend,
            "requantized": None if self.plan is None else asdict(self.plan),
            "settings": asdict(self.settings),
            "device": self.decoder.account().describe(),
        }

    def account(self) -> str:
        """The same in a sentence."""
        how = "as stored" if self.plan is None else f"quantised {said_plan(self.plan)}"
        return f"{self.model.file} {how} on {self.backend}; {self.decoder.account().sentence()}"


@contextmanager
def made_ready(
    model: LoadedModel,
    backend: Backend,
    plan: Plan | None,
    contract: Contract = "float32",
    *,
    steps: bool = False,
    settings: DeviceSettings | None = None,
    context: int | None = None,
) -> Iterator[Ready | OnDevice]:
    """Put a model on a backend: whole where there are settings for it, with room for `context` tokens; and otherwise
    one linear layer at a time.

    Leaving the block gives the device's memory back.

    Raises:
        ArgumentError: a contract or steps, which a backend that runs models whole does not take from outside.
        LowbitError: see `on_backend` and `lowbit.backend.base.Backend.decoder`.
    """
    if settings is None:
        yield on_backend(model, backend, plan, contract, steps=steps)
        return
    if contract != "float32":
        raise ArgumentError("--contract", contract, f"float32: {backend.name} runs models whole")
    if steps:
        raise ArgumentError("--steps", "given", f"leaving it out: {backend.name} runs models whole, steps and all")
    settings, weights = replace(settings, context=context), weights_of(model, plan)
    with deferred() as interrupts:
        with progress_bar(f"loading {model.file}") as progress:
            decoder = backend.decoder(weights, settings, interrupts.checked(progress))
        with decoder:
            yield OnDevice(model, plan, backend.name, settings, Interruptible(decoder, interrupts))
