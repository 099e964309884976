"""Defects of stateful operations: the offload engine and the key-value cache."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.moe.offload import Arrangement, Offload, Request, Resident, Staged, Trace
from lowbit.operations import OPERATIONS
from lowbit.quantization.bfp import Format
from lowbit_conformance.defects.defect import COMMON, MOVES, Declaring, Defect, arithmetical, of_operation

DEFECTS: list[Defect] = []
of_engine, of_cache = of_operation(DEFECTS, "offload.engine"), of_operation(DEFECTS, "kvcache.bfp")

# **The offload engine.** Each class changes one step of the state machine, and makes both a trace and an engine.


def traced(machine: type[Offload]) -> Callable[..., Trace]:
    def trace(arrangement: Arrangement, requests: Any) -> Trace:
        OPERATIONS["offload.trace"].check(arrangement, requests)
        engine = machine(arrangement)
        return tuple(event for request in requests for event in engine.step(request))

    return trace


def of_machines(into: list[Defect]) -> Declaring:
    """Declares defects of the state machine, each as a trace and an engine."""

    def make(name: str, cause: str, numbers: str, machine: type[Offload], seen: str = COMMON) -> Defect:
        clauses = " ".join([*(f"offload.trace/{number}" for number in numbers.split()), "offload.engine/C1"])
        return arithmetical(name, cause, clauses, {"offload.trace": traced(machine), "offload.engine": machine}, seen)

    return Declaring(into, make)


of_machine = of_machines(DEFECTS)


@of_machine("C1 C4")
class LruAsFifo(Offload):
    """What was loaded longest ago is evicted, not what ran longest ago."""

    def _mark_used(self, layer: int, resident: Resident) -> None:
        pass


@of_machine("C1 C4 C5", "errata M1, as the paper prints the policy")
class LeastRecentKept(Offload):
    """What ran last is evicted and the least recently used stay."""

    def _promote(self, newcomer: Staged) -> None:
        residents = self.slots[newcomer.layer]
        if len(residents) == self.arrangement.slots:
            residents.insert(0, residents.pop())
        super()._promote(newcomer)


@of_machine("C1 C2", "https://github.com/vllm-project/vllm/pull/50562")
class ExpertInUseEvicted(Offload):
    """An expert that the same request runs is evicted for another."""

    # Misses are loaded before hits are marked as used.

    def _run_residents(self, request: Request) -> list[int]:
        before = list(self.slots[request.layer])
        missing = super()._run_residents(request)
        self.slots[request.layer][:] = before
        return missing


@of_machine("C2 C3")
class StagedIntoWrongLayer(Offload):
    """A staged expert of another layer is promoted into this one."""

    # A guess is looked up by the number of its expert alone.

    def _find_staged(self, layer: int, expert: int) -> Staged | None:
        found = next((s for s in self.staged if s.expert == expert), None)
        if found is not None and found.layer != layer:
            found.layer = layer
            found.host = self._host[layer].get(expert, found.host)
        return found


@of_machine("C1 C2", "https://github.com/Avarok-Cybersecurity/atlas/pull/508")
class StaleEntry(Offload):
    """An evicted expert still counts as a hit once."""

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__(arrangement)
        self._gone: list[dict[int, Resident]] = [{} for _ in range(arrangement.layers)]

    def _run_residents(self, request: Request) -> list[int]:
        missing = super()._run_residents(request)
        stale = [e for e in missing if e in self._gone[request.layer]]
        for expert in stale:
            self._write("hit", request.layer, expert, "request", slot=self._gone[request.layer].pop(expert).slot)
        return [e for e in missing if e not in stale]

    def _promote(self, newcomer: Staged) -> None:
        residents = list(self.slots[newcomer.layer])
        super()._promote(newcomer)
        for resident in residents:
            if resident not in self.slots[newcomer.layer]:
                self._gone[newcomer.layer][resident.expert] = resident


@of_machine("C1 C4")
class MissesAsRequested(Offload):
    """Misses are brought in the order of the request and not by id."""

    def _run_residents(self, request: Request) -> list[int]:
        missing = super()._run_residents(request)
        return [expert for expert in request.needed if expert in missing]


@of_machine("C2 C3")
class HighestFreeBuffer(Offload):
    """A copy goes into the highest free buffer."""

    def _free_buffer(self) -> int | None:
        free = set(range(self.arrangement.buffers)) - {staged.buffer for staged in self.staged}
        return max(free, default=None)


@of_machine("C2")
class ResidentStaged(Offload):
    """A guess that lies in a slot is staged all the same."""

    def _stage(self, request: Request) -> None:
        for expert in request.guesses:
            layer = request.layer + 1
            there = expert in self._host[layer]
            if self._free_buffer() is not None and there and self._find_staged(layer, expert) is None:
                self._copy_in("stage", layer, expert, "guess")


@of_machine("C3")
class NeededGuessDropped(Offload):
    """A load takes the buffer of a guess that its own layer needs."""

    def _bring(self, layer: int, pending: list[int]) -> int:
        if self._find_staged(layer, pending[0]) is None and self._free_buffer() is None:
            self._drop(self.staged[0], "buffer")
        return super()._bring(layer, pending)


@of_machine("C3")
class NewestGuessDropped(Offload):
    """A load takes the buffer of the newest guess and not of the oldest."""

    def _bring(self, layer: int, pending: list[int]) -> int:
        if self._find_staged(layer, pending[0]) is None and self._free_buffer() is None:
            unneeded = [guess for guess in self.staged if guess.expert not in pending]
            if unneeded:
                self._drop(unneeded[-1], "buffer")
        return super()._bring(layer, pending)


@of_machine("C4")
class FirstStay(Offload):
    """Where experts stream through, those that ran first keep their slots."""

    # The others pass through the last slot.

    def _promote(self, newcomer: Staged) -> None:
        residents = self.slots[newcomer.layer]
        ran = [event.expert for event in self._events if event.kind in ("hit", "promote")]
        if len(residents) == self.arrangement.slots and all(r.expert in ran for r in residents):
            residents.insert(0, residents.pop())
        super()._promote(newcomer)


@of_machine("C5")
class HostPlaceByNumber(Offload):
    """Under swap an evicted expert goes to a host place of its own number."""

    def _write(self, kind: Any, layer: int, expert: int, cause: str, **places: Any) -> None:
        if kind == "evict" and places.get("host") is not None:
            places["host"] = expert
        super()._write(kind, layer, expert, cause, **places)


@of_machine("C5")
class SlotsBeginEmpty(Offload):
    """Slots begin empty under swap, too."""

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__(arrangement)
        self.slots = [[] for _ in range(arrangement.layers)]
        for places in self._host:
            places.update({expert: places.get(expert, expert) for expert in range(arrangement.experts)})


@of_machine("C6")
class GuessesSurviveAPass(Offload):
    """Guesses of a pass that ended early stay."""

    def _drop(self, guess: Staged, cause: str) -> None:
        if cause != "abandoned":
            super()._drop(guess, cause)


@of_machine("C2")
class UnusedGuessesKept(Offload):
    """Guesses stay in their buffers when their layer has run."""

    def _drop(self, guess: Staged, cause: str) -> None:
        if cause != "unused":
            super()._drop(guess, cause)


@of_engine("C1")
class StepsIn16Bits(Offload):
    """Steps are counted in 16 bits."""

    def step(self, request: Request) -> Trace:
        if self._step == (1 << 16) - 1:
            self._step = -1
        return super().step(request)


def clocked(bits: int, ticks: Callable[[Request], int]) -> type[Offload]:
    """Records when an expert ran by a clock with few bits, and evicts the one with the least time."""

    class Clocked(Offload):
        def __init__(self, arrangement: Arrangement) -> None:
            super().__init__(arrangement)
            self._clock, self._times = 0, dict[tuple[int, int], int]()

        def step(self, request: Request) -> Trace:
            answer = super().step(request)
            self._clock += ticks(request)
            return answer

        def _mark_used(self, layer: int, resident: Resident) -> None:
            super()._mark_used(layer, resident)
            self._times[layer, resident.expert] = self._clock % (1 << bits)

        def _promote(self, newcomer: Staged) -> None:
            layer = newcomer.layer
            self.slots[layer].sort(key=lambda resident: self._times.get((layer, resident.expert), -1))
            self._times[layer, newcomer.expert] = self._clock % (1 << bits)
            super()._promote(newcomer)

    return Clocked


@of_engine("C1 C4 C5", verdicts=MOVES)
class EnginesShareSlots(Offload):
    """Engines of one arrangement share their slots."""

    _all: dict[Arrangement, Any] = {}  # noqa: RUF012 - shared on purpose: it is the defect

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__(arrangement)
        self.slots = self._all.setdefault(arrangement, self.slots)


for bits in (8, 15, 16):
    of_machine.add(
        f"time-in-{bits}-bits",
        f"The step at which an expert ran is kept in {bits} bits.",
        "C1",
        clocked(bits, lambda request: 1),
    )
    of_engine.add(
        f"uses-in-{bits}-bits",
        f"Uses of experts, by which they are evicted, are counted in {bits} bits.",
        "C1",
        clocked(bits, lambda request: len(request.needed)),
    )


# **The key-value cache.**


@of_cache("C1 C3")
class OneTokenForAll(BfpKeyValueCache):
    """Of tokens that come together the first is stored for each."""

    def step(self, keys: Any, values: Any) -> Any:
        return super().step(np.ascontiguousarray(np.repeat(keys[:1], len(keys), axis=0)), values)


@of_cache("C1")
class NewestTokenFirst(BfpKeyValueCache):
    """The newest token stands first."""

    def step(self, keys: Any, values: Any) -> Any:
        return tuple(np.ascontiguousarray(part[:, ::-1]) for part in super().step(keys, values))


@of_cache("C1", "https://github.com/InternLM/lmdeploy/issues/4917")
class AnswerOneStepLate(BfpKeyValueCache):
    """A step answers with what was there before it."""

    def step(self, keys: Any, values: Any) -> Any:
        before = (self.keys.astype(np.float32), self.values.astype(np.float32)) if len(self) else None
        after = super().step(keys, values)
        return before if before is not None else after


@of_cache("C1")
class ValuesInFormatOfKeys(BfpKeyValueCache):
    """Values are cast in the format of keys."""

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, key_format, key_format)


@of_cache("C1 C2")
class OldTokensWearOff(BfpKeyValueCache):
    """Old tokens are cast again with every step."""

    def step(self, keys: Any, values: Any) -> Any:
        old = len(self)
        given = super().step(keys, values)
        worn = [part.copy() for part in given]
        for part in worn:
            part[:, :old] = part[:, :old].astype(np.float16)
            part[:, : max(0, old - 2)] *= np.float32(1 - 2.0**-6)
        return tuple(worn)


@of_cache("C1 C5", "https://github.com/awslabs/keys_values/issues/45")
class CacheNotReset(BfpKeyValueCache):
    """A new cache begins with the tokens of the last."""

    _last: "CacheNotReset | None" = None

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, key_format, value_format)
        last = CacheNotReset._last
        fits = last is not None and last._keys.shape[::2] == self._keys.shape[::2]
        if fits and last is not None and len(last):
            self.append(last.keys.swapaxes(0, 1).copy(), last.values.swapaxes(0, 1).copy())
        CacheNotReset._last = self


@of_cache("C1 C2", verdicts=("OOB_READ", "WRONG", "NONDETERMINISTIC", "RAISED"))
class TokensBorrowed(BfpKeyValueCache):
    """Tokens are cast when they are returned, from the arrays of the caller."""

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, key_format, value_format)
        self._opening = kv_heads, head_dim, key_format, value_format
        self._borrowed: list[tuple[Any, Any]] = []

    def step(self, keys: Any, values: Any) -> Any:
        self._borrowed.append((keys, values))
        fresh = BfpKeyValueCache(*self._opening)
        return [fresh.step(*tokens) for tokens in self._borrowed][-1]


@of_cache("C1")
class CacheIn16Bits(BfpKeyValueCache):
    """Tokens past 65,536 overwrite the first ones."""

    def step(self, keys: Any, values: Any) -> Any:
        answer = super().step(keys, values)
        for part in answer:
            over = part.shape[1] - (1 << 16)
            if over > 0:
                part[:, :over] = part[:, -over:].copy()
        return answer
