r"""A model on a device: how much memory it may take, and what it reports afterwards.

The decoder of the chapter `decoder` gives a backend one matrix after another and gets every product back. That does not
suit a device with its own memory: a token should stay there from one layer to the next, and weights that do not fit
must be copied in time, which only a decoder that runs the whole model can do. So a backend may have a decoder of its
own (`lowbit.backend.base.Backend.decoder`). It computes what the chapter's decoder computes, and generation and
perplexity use both in the same way.

**Its budget** is a number of bytes, and everything that the model needs on the device must fit in it: weights that
stay, keys and values of the context, activations, staging buffers. The rest becomes slots for experts
(`lowbit.moe.offload`). More memory makes it faster and changes no bit of an answer.

>>> bytes_of("12GiB"), bytes_of("500MB")
(12884901888, 500000000)
>>> spoken_bytes(12884901888)
'12.0 GiB'
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, get_args

from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.model.caches import KEYS, Keys
from lowbit.model.decoder import AnyDecoder
from lowbit.model.replay import Recall
from lowbit.moe.offload import MEMORIES, Memory

Prefetch = Literal["auto", "on", "off"]
PREFETCHES: tuple[Prefetch, ...] = get_args(Prefetch)


# **Sizes** are written with a unit. Units with an i are powers of 1024, the others powers of 1000.

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("iB", 1024))
}
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)


def bytes_of(text: str, argument: str = "size") -> int:
    """The number of bytes of a size that is written with a unit; a fraction of a byte is dropped.

    >>> bytes_of("1.5KiB"), bytes_of("4096")
    (1536, 4096)
    >>> bytes_of("12 gigs", "--device-memory")
    Traceback (most recent call last):
    lowbit.errors.ArgumentError: --device-memory is '12 gigs'; allowed: a size in bytes such as 12GiB, 8GB or 500MB

    Raises:
        ArgumentError: it is not a number with one of the units of `UNITS`, or it is less than one byte.
    """
    found = SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[2] not in UNITS:
        raise ArgumentError(argument, repr(text), "a size in bytes such as 12GiB, 8GB or 500MB")
    whole, _, fraction = found[1].partition(".")  # in integers, since a float cannot hold all digits of a large size
    size = int(whole + fraction) * UNITS[found[2]] // int(10 ** len(fraction))
    if size < 1:
        raise ArgumentError(argument, repr(text), "at least one byte")
    return size


def spoken_bytes(size: int) -> str:
    """A size for people, in powers of 1024.

    >>> spoken_bytes(1000), spoken_bytes(1536 * 1024)
    ('1000 bytes', '1.5 MiB')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size} bytes"


# **Settings.**


@dataclass(frozen=True)
class DeviceSettings:
    """How a model is run on a device.

    Attributes:
        memory: bytes of the device's memory that may be used; None for the free memory, less what the driver needs.
        context: the most tokens of a sequence; memory for their keys and values is allocated at the start. None for the
            model's own context, which may be long.
        buffers: b, the number of staging buffers for experts.
        mode: whether the host keeps a copy of every expert, ``mirror``, or ``swap`` (`lowbit.moe.offload`).
        prefetch: whether the next layer's experts are guessed and copied ahead: ``on``, ``off``, or ``auto``, which
            stops when measurements show that it saves no time.
        keys: the number format of keys and values: ``float16``, ``bfp12`` for keys in Block Floating Point and values
            in float16, or ``float32``, for comparison.
        cold_experts: the name of a backend that runs experts on the host if that is faster than copying them; None for
            none. It rounds differently, so a result then depends on what was cached.

    Raises:
        ArgumentError: a number below 1, or an unknown choice.
    """

    memory: int | None = None
    context: int | None = None
    buffers: int = 4
    mode: Memory = "mirror"
    prefetch: Prefetch = "auto"
    keys: Keys = "float16"
    cold_experts: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "context"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        check_integer("buffers", self.buffers, least=1)
        check_choice("mode", self.mode, MEMORIES)
        check_choice("prefetch", self.prefetch, PREFETCHES)
        check_choice("keys", self.keys, KEYS)


# **The account** of a run.


@dataclass(frozen=True)
class DeviceAccount:
    """Statistics of a decoder on a device so far.

    Attributes:
        device: its name.
        budget: bytes that it may use.
        peak: the most bytes that it used at once.
        layers: sparse layers; for a dense model, this is 0 and the following attributes are 0 or None.
        experts: E, experts of a layer.
        slots: k, experts of a layer that the device keeps.
        recall: where needed experts were found; None before the first one.
        copied: bytes of experts that were copied to the device.
        prefetch: ``on`` or ``off``.
        prefetch_why: the reason, in words; empty if the user chose it.
        cold: experts that were run on the host.
    """

    device: str
    budget: int
    peak: int
    layers: int = 0
    experts: int = 0
    slots: int = 0
    recall: Recall | None = None
    copied: int = 0
    prefetch: str = "off"
    prefetch_why: str = ""
    cold: int = 0

    def describe(self) -> dict[str, Any]:
        """For a JSON answer."""
        recall = None if self.recall is None else vars(self.recall) | {"value": self.recall.value}
        return vars(self) | {"recall": recall}

    def sentence(self) -> str:
        """For people.

        >>> DeviceAccount("a device", 2**30, 2**29).sentence()
        'peak device memory 512.0 MiB of 1.0 GiB on a device'
        """
        parts = [f"peak device memory {spoken_bytes(self.peak)} of {spoken_bytes(self.budget)} on {self.device}"]
        if self.layers:
            parts += [f"{self.slots} of {self.experts} experts of each of {self.layers} layers in slots"]
            if self.recall is not None:
                staged = f", {self.recall.staged} more were guessed" if self.recall.staged else ""
                found = f"{self.recall.resident} of {self.recall.needed} needed experts were in slots{staged}"
                parts += [f"{found}, recall {self.recall.value:.3f}"]
            parts += [f"{spoken_bytes(self.copied)} of experts copied"]
            parts += [f"prefetch {self.prefetch}" + (f": {self.prefetch_why}" if self.prefetch_why else "")]
            parts += [f"{self.cold} experts run on the host"] if self.cold else []
        return "; ".join(parts)


class DeviceDecoder(AnyDecoder, Protocol):
    """A decoder on a device; as a context manager it frees the device's memory on exit.

    The context of its `config` is at most that of the settings. It keeps one sequence at a time: `new_state` begins
    another and invalidates the earlier state.
    """

    def account(self) -> DeviceAccount:
        """What it has done so far."""

    def close(self) -> None:
        """Free everything on the device; the decoder cannot be used afterwards. Closing twice is harmless."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
