"""The engine's events on the device and on the simulation, token by token, with one trained model on both.

The model is the repository's small Mixtral (`mixtral.model`), its experts of 2 bits and its attention of 4, so its
routing is real. It generates from a prompt, once on each device, with experts mirrored and swapped. What must be equal
is what the engine decided: every event, in order; and each trace must be the one that `lowbit.moe.offload` gives for
what was asked for. The simulation computes in numpy, whose exponentials round otherwise than a GPU's: so how far the
logits are apart is said too, and should another expert be chosen for that reason, from where on.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from mixtral.loading import load_model

from gpu.parts import Answer, Setting
from lowbit.arrays import F32
from lowbit.backend.whole_model import DeviceSettings
from lowbit.model.matrices import to_float
from lowbit.model.weights import LlamaWeights
from lowbit.moe.offload import Event, Memory, Request, trace
from lowbit.quantization.affine import quantize
from lowbit_cuda.engine.storage import device_bytes
from lowbit_cuda.model.decoder import Decoder
from lowbit_cuda.port import DevicePort, charge
from lowbit_gpusim.sim.device import SimDevice

TOKENS = 32
SLOTS, LAYERS, EXPERTS = 3, 16, 8
PROMPT = b"The experts that do not fit are brought when they are needed."
ROOM = 1 << 26


@dataclass
class Told:
    """What one run came to."""

    tokens: list[int] = field(default_factory=list)
    logits: list[F32] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    specified: bool = False
    peak: int = 0
    budget: int = 0


def run(setting: Setting) -> Answer:
    """Both modes."""
    weights, results, bad = model(), {}, []
    for mode in ("mirror", "swap"):
        budget = budget_for(weights, mode)
        here = generated(SimDevice(budget=budget), weights, mode)
        there = generated(opened(setting, budget), weights, mode)
        results[mode] = compared(here, there)
        bad += [mode] if results[mode]["wrong"] else []
    words = "; ".join(f"{mode}: {result['events']} events, {result['said']}" for mode, result in results.items())
    verdict: Literal["failed", "simulated", "passed"] = "simulated" if setting.simulate else "passed"
    return Answer("failed" if bad else verdict, words, results)


def opened(setting: Setting, budget: int) -> DevicePort:
    """The device with this budget; simulated, one that runs things as late as it may."""
    if setting.simulate:
        return SimDevice("rtx3080-mobile", budget=budget, schedule="late")
    from lowbit_cuda.cuda.device import CudaDevice

    return CudaDevice(budget)


def model() -> LlamaWeights:
    """Experts of 2 bits, all else of 4."""

    def change(name: str, matrix: Any) -> Any:
        bits = 2 if "expert" in name else 4
        return quantize(to_float(matrix), bits=bits, group_size=32, scale_dtype="float16")

    return load_model().changed(change)


def settings(budget: int, mode: Memory) -> DeviceSettings:
    """With guesses always, so that nothing depends on the time things take."""
    return DeviceSettings(memory=budget, mode=mode, prefetch="on")


def budget_for(weights: LlamaWeights, mode: Memory) -> int:
    """The bytes with which `SLOTS` of the experts fit: those with all of them, less the others."""
    with SimDevice(budget=ROOM) as device, Decoder(device, weights, settings(ROOM, mode)) as decoder:
        engine = decoder.engine
        assert engine is not None
        assert engine.arrangement.slots == EXPERTS
        fewer = replace(engine.arrangement, slots=SLOTS)
        whole, part = (charge(device_bytes(one, engine.expert_bytes)) for one in (engine.arrangement, fewer))
        return device.peak - whole + part


def generated(device: DevicePort, weights: LlamaWeights, mode: Memory) -> Told:
    """The likeliest tokens after the prompt, and what the engine did for them."""
    told = Told()
    with device, Decoder(device, weights, settings(device.budget, mode), record=True) as decoder:
        engine = decoder.engine
        assert engine is not None
        state, given = decoder.new_state(), list(PROMPT)
        for _ in range(TOKENS):
            told.logits.append(decoder.logits(decoder.hidden(given, state)[-1:])[0])
            told.tokens.append(int(np.argmax(told.logits[-1])))
            given = told.tokens[-1:]
        told.events, told.requests = list(decoder.events), list(engine.requests)
        told.specified = told.events == list(trace(engine.arrangement, told.requests))
        told.peak, told.budget = device.peak, device.budget
    return told


def compared(here: Told, there: Told) -> dict[str, Any]:
    """What is equal, and where not, from where on."""
    parted = first_difference(here.requests, there.requests)
    events = first_difference(here.events, there.events)
    logits = max(float(np.abs(a - b).max()) for a, b in zip(here.logits, there.logits, strict=True))
    within = all(told.peak <= told.budget for told in (here, there))
    routed = parted is None and here.tokens == there.tokens
    wrong = not (here.specified and there.specified and within) or (parted is None and events is not None)
    said = "equal" if events is None else f"different from {events} on"
    if not routed and not wrong:
        said += f", since request {parted} was another: logits were apart by {logits:.3g}"
    return {
        "wrong": wrong,
        "said": said,
        "events": len(there.events),
        "requests_equal": parted is None,
        "tokens_equal": here.tokens == there.tokens,
        "logits_apart": logits,
        "as_specified": {"simulation": here.specified, "device": there.specified},
        "peak_within_budget": within,
        "peak_bytes": there.peak,
        "budget_bytes": there.budget,
    }


def first_difference(one: list[Any], other: list[Any]) -> int | None:
    """The number of the first that differs, None if none does."""
    pairs = enumerate(zip(one, other, strict=False))
    found = next((number for number, (a, b) in pairs if a != b), None)
    return min(len(one), len(other)) if found is None and len(one) != len(other) else found
