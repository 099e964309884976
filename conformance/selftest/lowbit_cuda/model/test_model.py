"""The decoder on a simulated device: its answers, its memory to the byte, and neither depends on the other."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_models import CONFIG, DENSE, PROMPT, bits_of, model

from lowbit.arrays import F64
from lowbit.attention.attention import KeyValueCache
from lowbit.attention.rope import llama3_scaling, partial_scaling, proportional_scaling
from lowbit.backend import load
from lowbit.backend.whole_model import DeviceSettings
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model.block import FORMULAS
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import AnyDecoder, next_logits
from lowbit.model.decoder import Decoder as ReferenceDecoder
from lowbit.model.generation import Step, first_difference, generate
from lowbit.model.matrices import to_float
from lowbit.model.program import Program
from lowbit.model.replay import guess
from lowbit.model.step import step_of
from lowbit.model.weights import LlamaWeights, SparseWeights
from lowbit.moe.offload import trace
from lowbit.moe.routing import Ids
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp import bfp12, cast, decode
from lowbit.runtime import BackendLinears
from lowbit_cuda.engine.storage import stride
from lowbit_cuda.model.decoder import Decoder
from lowbit_cuda.model.matrices import ExpertLayout
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.order import RaceError

AMPLE = 1 << 24
MODEL = model()
EXPERT = stride(ExpertLayout.of(MODEL.layers[0].feed_forward.experts[0]).nbytes)  # type: ignore[union-attr]  # the model is sparse


DEVICES: list[SimDevice] = []


@pytest.fixture(autouse=True)
def _every_kernel_was_loaded_ahead() -> Iterator[None]:
    """In every test of this file: no token waits for a kernel to be compiled and brought to the device."""
    DEVICES.clear()
    yield
    assert [made.loaded_late for made in DEVICES if made.loaded_late] == []


def device(budget: int = AMPLE, **choices: Any) -> SimDevice:
    """A device that refuses what is read before it is written."""
    DEVICES.append(SimDevice("a100", budget=budget, on_unwritten="raise", **choices))
    return DEVICES[-1]


def decoder(budget: int = AMPLE, weights: LlamaWeights = MODEL, *, sim: Any = None, **settings: Any) -> Decoder:
    """A model on a device."""
    port = device(budget, **(sim or {}))
    return Decoder(port, weights, DeviceSettings(**{"context": 40} | settings), record=True)


def least_of(weights: LlamaWeights, **settings: Any) -> int:
    """What is said to be needed at least."""
    with pytest.raises(ArgumentError, match="device memory") as caught:
        decoder(1, weights, **settings)
    found = re.search(r"at least (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


LEAST = least_of(MODEL)


def sparse_of(weights: LlamaWeights, layer: int) -> SparseWeights:
    """The router and the experts of a layer."""
    part = weights.layers[layer].feed_forward
    assert isinstance(part, SparseWeights)
    return part


@pytest.fixture(scope="module")
def resident() -> bytes:
    """Logits where every expert is in a slot."""
    with decoder() as whole:
        assert whole.account().slots == CONFIG.routing.experts  # type: ignore[union-attr]  # the model is sparse
        return bits_of(whole)


# Memory.


@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "swap"}, {"keys": "bfp12"}, {"keys": "float32", "context": 64}, {"buffers": 1}, {"context": 12}],
)
def test_the_budget_is_met_to_the_byte(settings: dict[str, Any]) -> None:
    """What is named as the least is just enough, a byte less is refused, and each further slot costs what it must."""
    least = least_of(MODEL, **settings)
    with pytest.raises(ArgumentError, match=f"device memory is {least - 1} bytes"):
        decoder(least - 1, **settings)
    for budget, slots in ((least, 1), (least + 3 * EXPERT - 1, 1), (least + 3 * EXPERT, 2), (least + 6 * EXPERT, 3)):
        with decoder(budget, **settings) as tight:
            generated = list(generate(tight, PROMPT, 2))
            account = tight.account()
        assert len(generated) == 2
        assert account.slots == slots
        assert account.peak == least + 3 * EXPERT * (slots - 1) <= account.budget == budget


def test_everything_is_given_back() -> None:
    """After a decoder is closed nothing is left on the device or pinned, and the device can be used for another."""
    port = device()
    for settings in (DeviceSettings(context=20), DeviceSettings(context=40, mode="swap")):
        with Decoder(port, MODEL, settings) as one:
            next_logits(one, PROMPT)
        one.close()
        assert (port.used, port.pinned, port.leaks()) == (0, 0, ())


# The same answers, wherever experts lie.


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("mode", ["mirror", "swap"])
@pytest.mark.parametrize("buffers", [1, 4])
def test_bits_do_not_depend_on_what_is_cached(resident: bytes, slots: int, mode: str, buffers: int) -> None:
    """Logits are to the bit those of a device with every expert, with few slots and buffers, guesses or none."""
    least = least_of(MODEL, buffers=buffers)
    for prefetch in ("on", "off"):
        budget = least + 3 * EXPERT * (slots - 1)
        with decoder(budget, mode=mode, buffers=buffers, prefetch=prefetch) as offloaded:
            assert bits_of(offloaded) == resident
            account = offloaded.account()
            assert account.slots == slots
            assert account.recall is not None and account.recall.needed > account.recall.resident
            assert (account.recall.staged > 0) == (prefetch == "on")


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
@pytest.mark.parametrize("link", ["pcie3", "nvlink-c2c"])
def test_bits_do_not_depend_on_the_schedule(resident: bytes, schedule: str, link: str) -> None:
    """Copies may come as soon or as late as the order allows; no two of them race."""
    with decoder(LEAST, sim={"schedule": schedule, "seed": 5, "link": link}) as offloaded:
        assert bits_of(offloaded) == resident


def test_the_events_are_those_of_the_specification() -> None:
    """What the engine decided during a generation is the trace of what it was asked for."""
    with decoder(LEAST + 3 * EXPERT, prefetch="on") as offloaded:
        bits_of(offloaded)
        engine = offloaded.engine
        assert engine is not None
        assert tuple(offloaded.events) == trace(engine.arrangement, engine.requests)
        assert {event.kind for event in offloaded.events} == {"hit", "load", "evict", "promote", "stage", "drop"}


def test_requests_are_those_of_the_reference_decoder() -> None:
    """Token by token, each layer asks for the experts that the reference decoder chooses, and guesses by the next
    layer's router on this layer's gate input, as the paper does."""
    asked: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def observe(layer: int, x: F64, chosen: Ids) -> None:
        guesses: tuple[int, ...] = ()
        if layer + 1 < CONFIG.layers:
            router = sparse_of(MODEL, layer + 1).router
            guesses = tuple(int(e) for e in guess(x.astype(np.float32), router, count=2)[0])
        asked.append((layer, tuple(sorted(int(e) for e in chosen[0])), guesses))

    reference = ReferenceDecoder(MODEL, BackendLinears(load("reference")), observe)
    state = reference.new_state()
    for token in PROMPT:
        reference.hidden([token], state)
    with decoder(keys="float32", prefetch="on") as ours:
        own = ours.new_state()
        for token in PROMPT:
            ours.hidden([token], own)
        assert ours.engine is not None
        assert [(r.layer, r.needed, r.guesses) for r in ours.engine.requests] == asked


def test_a_prompt_loads_each_expert_once() -> None:
    """Without guesses and with one slot a layer, a prompt copies each expert that it needs once for each chunk."""
    with decoder(LEAST, prefetch="off") as offloaded:
        offloaded.hidden(PROMPT, offloaded.new_state())
        kinds = [event.kind for event in offloaded.events]
        needed = {(event.layer, event.expert) for event in offloaded.events if event.kind == "load"}
        assert kinds.count("load") == len(needed) > 3 * 2


def test_bits_do_not_depend_on_how_tokens_come(resident: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt token by token, in small chunks, and at once end in the same bits."""
    with decoder() as one:
        at_once = one.hidden(PROMPT, one.new_state())
        state = one.new_state()
        assert np.array_equal(np.concatenate([one.hidden([token], state) for token in PROMPT]), at_once)
    monkeypatch.setattr("lowbit_cuda.model.workspace.CHUNK", 4)
    with decoder(LEAST) as pieces:
        assert np.array_equal(pieces.hidden(PROMPT, pieces.new_state()), at_once)
        assert bits_of(pieces) == resident


# Against the reference decoder.


STEPS = 8


def worst(some: Sequence[Step], others: Sequence[Step]) -> float:
    """The largest difference of two logits."""
    return max(float(np.abs(a.logits - b.logits).max()) for a, b in zip(some, others, strict=True))


def forced(model: AnyDecoder, tokens: Sequence[int]) -> list[Step]:
    """A continuation along given tokens."""
    return list(generate(model, PROMPT, STEPS, forced=tokens))


def compare(weights: LlamaWeights, **settings: Any) -> None:
    """Every step of a continuation of the reference decoder, along the same tokens and freely; keys are float32.

    What is left is rounding: 2e-5 is what the reference decoder itself is allowed from a second model in float64.
    """
    expected = list(generate(ReferenceDecoder(weights, BackendLinears(load("reference"))), PROMPT, STEPS))
    with decoder(weights=weights, keys="float32", **settings) as ours:
        apart = worst(forced(ours, [step.token for step in expected]), expected)
        assert apart <= 2e-5
        difference = first_difference(list(generate(ours, PROMPT, STEPS)), expected)
    assert difference is None or max(difference.gaps) <= 2 * apart  # a near-tie


def test_against_the_reference_decoder() -> None:
    """Token for token, and the logits within rounding."""
    compare(MODEL)


class HalfCache(KeyValueCache):
    """Values, and keys, as float16 has them."""

    def append(self, keys: F64, values: F64) -> None:
        super().append(self.rounded(keys), values.astype(np.float32).astype(np.float16).astype(np.float64))

    def rounded(self, keys: F64) -> F64:
        return keys.astype(np.float32).astype(np.float16).astype(np.float64)


class BfpCache(HalfCache):
    """Keys as BFP12 has them."""

    def rounded(self, keys: F64) -> F64:
        rows = np.ascontiguousarray(keys.reshape(-1, keys.shape[2]), np.float32)
        return decode(cast(rows, bfp12(32))).astype(np.float64).reshape(keys.shape)


@pytest.mark.parametrize(("keys", "cache"), [("float16", HalfCache), ("bfp12", BfpCache)])
def test_keys_are_rounded_as_the_specification_rounds_them(keys: str, cache: type[KeyValueCache]) -> None:
    """Far closer to a reference decoder whose cache rounds the same than to one whose cache does not.

    Not within rounding of float32: a key that lies near the middle of two numbers may be rounded to the other one.
    """
    like = ReferenceDecoder(MODEL, BackendLinears(load("reference")), ops=replace(FORMULAS, cache=cache))
    expected = list(generate(like, PROMPT, STEPS))
    tokens = [step.token for step in expected]
    with decoder(keys=keys) as ours:
        steps = forced(ours, tokens)
    apart = worst(steps, expected)
    assert apart <= 2e-4
    assert worst(steps, forced(ReferenceDecoder(MODEL, BackendLinears(load("reference"))), tokens)) > 10 * apart


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, window=4),
        replace(CONFIG, window=4, full_every=2, local_rope_base=100.0),
        replace(CONFIG, rope_scaling=llama3_scaling(CONFIG.head_dim, CONFIG.rope_base, 8.0, 1.0, 4.0, 64)),
        replace(CONFIG, rope_scaling=proportional_scaling(CONFIG.head_dim, CONFIG.head_dim // 4)),
        replace(CONFIG, unrotated=(0,)),
        replace(CONFIG, embedding_scale=8.0),
        replace(CONFIG, kv_heads=4, head_dim=8, routing=replace(CONFIG.routing, softmax="before", top_k=3)),  # type: ignore[type-var]  # the model is sparse
        replace(CONFIG, routing=replace(CONFIG.routing, experts=1, top_k=1)),  # type: ignore[type-var]  # the model is sparse
        replace(DENSE, window=3),
    ],
    ids=[
        "window",
        "two bases",
        "scaled rotation",
        "proportional rotation",
        "no rotation",
        "embedding scale",
        "softmax before",
        "one expert",
        "dense",
    ],
)
def test_other_models(config: LlamaConfig) -> None:
    """Windows, other rotations or none, a scaled embedding, the other softmax, a single expert, and no experts."""
    compare(model(config, seed=3))


@pytest.mark.parametrize(("attention", "experts"), [(8, 2), (None, None), (2, 4)])
def test_other_weights(attention: int | None, experts: int | None) -> None:
    """Any number of bits, and plain weights, which are kept in float16 where that loses nothing."""
    weights = model(seed=4, attention=attention, experts=experts)
    compare(weights)
    if experts is None:
        layout = ExpertLayout.of(sparse_of(weights, 0).experts[0])
        assert layout.nbytes == 2 * 3 * CONFIG.hidden * CONFIG.feed_forward


def test_the_other_convention() -> None:
    """Zero-points, and scales in float32."""
    compare(MODEL.changed(lambda _, matrix: quantize(to_float(matrix), bits=4, group_size=64, convention="zero_point")))


# Experts on the host.


def test_cold_experts_run_on_the_host() -> None:
    """Where copies are slow, experts are run on the host, for one token and for many; the account says how many."""
    expected = list(generate(ReferenceDecoder(MODEL, BackendLinears(load("reference"))), PROMPT, 6))
    tokens = [step.token for step in expected]
    with decoder(LEAST + 4 * EXPERT * 3, sim={"link": "pcie3"}, keys="float32", cold_experts="numpy") as ours:
        ours.hidden(PROMPT, ours.new_state())
        for_many = ours.account().cold
        steps = list(generate(ours, PROMPT, 6, forced=tokens))
        account = ours.account()
    assert account.cold > for_many > 0
    assert worst(steps, expected) <= 2e-5


# Refusals.


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"activation": "gelu"}, "gelu"),
        ({"hidden": 68, "heads": 2}, "hidden 68"),
        ({"logit_cap": 30.0}, "a soft cap, a factor or sinks"),
        ({"score_scale": 0.5}, "a soft cap, a factor or sinks"),
        ({"logit_divisor": 8.0}, "a soft cap, a factor or sinks"),
        ({"residual_scale": 0.22}, "a factor of what the parts of a block add"),
        ({"rope_scaling": partial_scaling(CONFIG.head_dim, 4)}, "rotations of a part of each head"),
    ],
)
def test_other_shapes_are_refused(changes: dict[str, Any], word: str) -> None:
    """What the kernels do not do is refused in words, before anything is taken."""
    port = device()
    with pytest.raises(NotDeclaredError, match=word):
        Decoder(port, model(replace(CONFIG, **changes), attention=None, experts=None), DeviceSettings())
    assert port.peak == 0


def test_other_layers_are_refused() -> None:
    """A bias and an order of channels are refused, and experts that are stored otherwise than those of the first."""
    biased = replace(MODEL.layers[1], query_bias=np.zeros(CONFIG.heads * CONFIG.head_dim, np.float32))
    order = np.tile(np.arange(CONFIG.head_dim, dtype=np.float32), CONFIG.kv_heads)
    moved = tuple(replace(layer, key_order=order) for layer in MODEL.layers)
    other = replace(MODEL.layers[2], feed_forward=model(experts=4).layers[2].feed_forward)
    for layers, error, word in (
        ((MODEL.layers[0], biased, MODEL.layers[2]), NotDeclaredError, "query_bias"),
        (moved, NotDeclaredError, "key_order"),
        ((*MODEL.layers[:2], other), ArgumentError, "matrix"),
    ):
        port = device()
        with pytest.raises(error, match=word):
            Decoder(port, replace(MODEL, layers=layers), DeviceSettings(context=20))
        assert not port.leaks()


def swapped(program: Program) -> Program:
    """The last sum, the other way round."""
    return (*program[:-1], replace(program[-1], inputs=program[-1].inputs[::-1]))


def late(program: Program) -> Program:
    """The second norm reads the stream of before the first sum."""
    return tuple(replace(line, inputs=("x",)) if line.out == "middle_normed" else line for line in program)


def renamed(program: Program) -> Program:
    """Queries have another name."""
    names = {"query": "q", "query_rotated": "turned"}
    return tuple(
        replace(line, out=names.get(line.out, line.out), inputs=tuple(names.get(name, name) for name in line.inputs))
        for line in program
    )


def divided(program: Program) -> Program:
    """The product with gate stands elsewhere."""
    gate = next(line for line in program if line.out == "gate")
    others = [line for line in program if line is not gate]
    return (*others[:2], replace(gate, inputs=("normed",)), *others[2:])


@pytest.mark.parametrize("change", (swapped, late, renamed, divided))
def test_other_programs_are_refused(change: Callable[[Program], Program]) -> None:
    """Sound ones of the same lines, for which the buffers of the device are not made."""
    weights, port = model(DENSE), device()
    layers = tuple(
        replace(layer, program=change(program))
        for layer, program in zip(weights.layers, step_of(weights).blocks, strict=True)
    )
    with pytest.raises(NotDeclaredError, match="where it stands"):
        Decoder(port, replace(weights, layers=layers), DeviceSettings(context=20))
    assert not port.leaks()


def test_wrong_tokens_and_stale_states_are_refused() -> None:
    """As the chapter's decoder; and a state is only good until the next, since there is one cache."""
    with decoder() as ours:
        first = ours.new_state()
        for wrong in ([], [50], [-1], PROMPT * 4):
            with pytest.raises(ArgumentError):
                ours.hidden(wrong, first)
        ours.hidden([1], first)  # what was refused has changed nothing
        second = ours.new_state()
        with pytest.raises(ArgumentError, match="state"):
            ours.hidden([1], first)
        ours.hidden([1], second)
        with pytest.raises(ArgumentError, match="count"):
            next(generate(ours, PROMPT, 31))
        assert len(list(generate(ours, PROMPT, 30))) == 30


# What goes over the link.


def test_of_a_layer_nothing_small_is_copied() -> None:
    """Scores and probabilities of one token wait for no expert: its stream copies only at its start and its end."""
    for mode in ("mirror", "swap"):
        with decoder(LEAST + 3 * EXPERT, mode=mode) as ours:
            state = ours.new_state()
            ours.hidden(PROMPT, state)
            port = ours._port
            assert isinstance(port, SimDevice)
            before = len(port.log)
            ours.hidden([1], state)
            copied = [one.what for one in port.log[before:] if one.kind == "copy" and one.stream == "model"]
        ends = [("position", "position"), ("x", "x"), ("normed", "normed")]
        assert copied == [f"workspace: {one} → workspace: {other}" for one, other in ends]


# Mistakes that must be seen.


def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading scores without waiting for them is found, under any schedule, whatever was read."""
    for schedule in ("eager", "late"):
        with decoder(sim={"schedule": schedule}) as ours, monkeypatch.context() as patch:
            patch.setattr("lowbit_cuda.model.arena.Arena.wait", lambda arena: None)
            with pytest.raises(RaceError):
                ours.hidden([1], ours.new_state())
