"""The decoder when a call fails: a clear error, nothing left behind, and the same answers from it afterwards."""

import itertools
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cuda_models import CONFIG, bits_of, model

from lowbit.backend.whole_model import DeviceSettings
from lowbit.errors import ArgumentError
from lowbit.model.generation import generate
from lowbit_cuda.model.decoder import Decoder
from lowbit_cuda.port import DeviceError, DeviceLostError
from lowbit_gpusim.sim.device import SimDevice
from lowbit_gpusim.sim.faults import Failure

SMALL = model(replace(CONFIG, layers=2), seed=6)
SHORT = [5, 49, 7]
MODES = ("mirror", "swap")
SAMPLES = 10
"""Calls that fail, of all that there are, drawn with a seed."""


def settings(mode: str) -> DeviceSettings:
    """Of a decoder with little room."""
    return DeviceSettings(context=20, mode="swap" if mode == "swap" else "mirror", prefetch="on")


@cache
def least(mode: str) -> int:
    """The least budget."""
    with pytest.raises(ArgumentError) as caught:
        Decoder(SimDevice(budget=1), SMALL, settings(mode))
    return int(str(caught.value).split("at least ")[1].split()[0])


@pytest.fixture(scope="module")
def answer() -> bytes:
    """Of a device on which nothing fails."""
    with Decoder(SimDevice(), SMALL, settings("mirror")) as whole:
        return bits_of(whole, 3, SHORT)


@cache
def calls(mode: str) -> tuple[int, int]:
    """How many calls loading makes, and how many loading and a continuation."""
    device = SimDevice(budget=least(mode))
    with Decoder(device, SMALL, settings(mode)) as whole:
        loading = device.calls
        bits_of(whole, 3, SHORT)
        return loading, device.calls


def drawn(first: int, last: int, *seed: str) -> list[int]:
    """Numbers of calls."""
    rng = np.random.default_rng([zlib.crc32(word.encode()) for word in seed])
    return [int(number) for number in rng.choice(np.arange(first, last + 1), SAMPLES, replace=False)]


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_device(mode: str) -> None:
    """Where it is lost while tokens are read, the error says so, and so does every later call, which asks the device
    once, whether it still is. Closing is quiet, and everything is counted off."""
    first, last = calls(mode)
    for at in drawn(first + 1, last, mode, "lost"):
        device = SimDevice(budget=least(mode), fail=Failure(at, "lost", later=(1, 2, 400)[at % 3]))
        with Decoder(device, SMALL, settings(mode)) as decoder:
            try:
                bits_of(decoder, 3, SHORT)
            except DeviceLostError as error:
                assert "the device is lost to this process" in str(error)
            else:
                assert not device.failed
                continue
            for _ in range(2):
                before = device.calls
                with pytest.raises(DeviceLostError, match="lost since an earlier error"):
                    decoder.hidden(SHORT, decoder.new_state())
                assert device.calls == before + 1
        assert (device.used, device.pinned, device.leaks()) == (0, 0, ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
def test_a_failure_while_loading_leaves_nothing(mode: str, kind: str) -> None:
    """Whatever fails, the error comes out and all memory is given back."""
    loading, _ = calls(mode)
    for at in drawn(1, loading, mode, kind):
        device = SimDevice(budget=least(mode), fail=Failure(at, kind))
        try:
            decoder = Decoder(device, SMALL, settings(mode))
        except (DeviceError, KeyboardInterrupt):
            assert device.failed
        else:  # it failed late, at the very end
            decoder.close()
        assert (device.used, device.pinned, device.leaks()) == (0, 0, ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["error", "interrupt", "late"])
def test_a_failure_while_running_is_over_with_the_next_state(answer: bytes, mode: str, kind: str) -> None:
    """The error comes out; the state it hit is refused; a new one on the same decoder gives the right bits. A late
    failure may be told at once, soon, or when something waits for it."""
    loading, last = calls(mode)
    failures = 0
    for at in drawn(loading + 1, last, mode, kind):
        device = SimDevice(budget=least(mode), fail=Failure(at, kind, later=(1, 2, 400)[at % 3]), schedule="late")
        with Decoder(device, SMALL, settings(mode)) as decoder:
            state = decoder.new_state()
            try:
                decoder.hidden(SHORT, state)
                for token in (1, 2):
                    decoder.hidden([token], state)
            except (DeviceError, KeyboardInterrupt):
                failures += 1
                with pytest.raises(ArgumentError, match="state"):
                    decoder.hidden([1], state)
            assert bits_after(decoder) == answer
        assert (device.used, device.pinned, device.leaks()) == (0, 0, ())
    assert failures > SAMPLES // 3


@pytest.mark.parametrize("later", [1, 2])
def test_every_copy_that_is_lost_without_a_word(answer: bytes, later: int) -> None:
    """The device tells of it only a call or two later, when a graph may have kept it, or the engine may be waiting for
    something of its own. Each copy of a prompt and of the first token alone."""
    counted = SimDevice(budget=least("mirror"))
    with Decoder(counted, SMALL, settings("mirror")) as decoder:
        before = counted.calls_by_kind["copy"]
        state = decoder.new_state()
        decoder.hidden(SHORT, state)
        decoder.hidden([1], state)
        after = counted.calls_by_kind["copy"]
    assert after - before > 20
    for at in range(before + 1, after + 1):
        fail = Failure(at, "late", of="copy", later=later)
        device = SimDevice(budget=least("mirror"), fail=fail, schedule="late")
        with Decoder(device, SMALL, settings("mirror")) as decoder:
            state = decoder.new_state()
            with pytest.raises(DeviceError, match="has failed"):
                decoder.hidden(SHORT, state)
                decoder.hidden([1], state)
            assert bits_of(decoder, 2, SHORT) == answer[: len(answer) // 3 * 2]


def bits_after(decoder: Decoder) -> bytes:
    """A continuation, begun again if a failure of before, or a failure to come, is in it: there is only one."""
    try:
        return bits_of(decoder, 3, SHORT)
    except (DeviceError, KeyboardInterrupt):
        return bits_of(decoder, 3, SHORT)


def test_a_cancelled_generation_leaves_the_decoder_usable(answer: bytes) -> None:
    """A generator that is closed in the middle, and one that is only dropped, are no harm to the next."""
    device = SimDevice(budget=least("swap"))
    with Decoder(device, SMALL, settings("swap")) as decoder:
        used = device.used
        steps = generate(decoder, SHORT, 5)
        list(itertools.islice(steps, 2))
        steps.close()  # type: ignore[attr-defined]  # a generator
        next(generate(decoder, SHORT, 5))
        assert bits_of(decoder, 3, SHORT) == answer
        assert device.used == used
    assert device.leaks() == ()


def test_an_error_of_the_caller_in_the_middle(answer: bytes) -> None:
    """Progress is the caller's, and may raise: then too the next state is as good as new."""

    def stop(done: int, total: int) -> None:
        if done > len(SHORT):
            raise RuntimeError("stopped")

    with Decoder(SimDevice(schedule="late"), SMALL, settings("mirror")) as decoder:
        with pytest.raises(RuntimeError, match="stopped"):
            decoder.hidden(SHORT, decoder.new_state(), stop)
        assert bits_of(decoder, 3, SHORT) == answer


def test_memory_that_the_host_does_not_have() -> None:
    """Pinned memory that is refused is an error in words, and nothing is left."""
    device = SimDevice(host_memory=100_000)
    with pytest.raises(DeviceError, match=r"memory for experts of layer \d: \d+ bytes asked"):
        Decoder(device, SMALL, settings("mirror"))
    assert device.leaks() == ()
