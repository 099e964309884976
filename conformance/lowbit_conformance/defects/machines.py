"""Families of stateful operations: the rules of the offload engine, its events, and the results of the key-value
cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.moe.offload import Event, Offload, Request, Resident, Staged, Trace
from lowbit.quantization.bfp import Format, cast, decode
from lowbit_conformance.defects.defect import Defect, arithmetical
from lowbit_conformance.defects.engines import traced
from lowbit_conformance.defects.narrow import Change
from lowbit_conformance.defects.places import changes

Events = Sequence[Event]

# **Events** that are missing, reordered or changed.


def _edited(edit: Callable[[Events], Events]) -> type[Offload]:
    class Edited(Offload):
        def _answer(self, request: Request) -> Trace:
            return tuple(edit(super()._answer(request)))

    return Edited


def _without(kind: str, cause: str | None = None) -> Callable[[Events], Events]:
    return lambda events: [e for e in events if not (e.kind == kind and cause in (None, e.cause))]


def _saying(field: str, say: Callable[[Event], Any], kinds: tuple[str, ...] = ()) -> Callable[[Events], Events]:
    return lambda events: [replace(e, **{field: say(e)}) if e.kind in kinds or not kinds else e for e in events]


def _always(cause: str) -> Callable[[Event], str]:
    return lambda event: cause


def _exchanged(first: str, second: str) -> Callable[[Events], Events]:
    """Swap neighbouring events of these kinds."""

    def edit(events: Events) -> Events:
        found, at = list(events), 0
        while at + 1 < len(found):
            if (found[at].kind, found[at + 1].kind) == (first, second):
                found[at], found[at + 1] = found[at + 1], found[at]
                at += 1
            at += 1
        return found

    return edit


def _gathered(order: Sequence[str]) -> Callable[[Events], Events]:
    """Events sorted by their kind."""
    return lambda events: sorted(events, key=lambda e: order.index(e.kind))


KINDS = ("hit", "load", "evict", "promote", "stage", "drop")


def _of_events() -> Iterator[tuple[str, str, type[Offload]]]:
    for kind in KINDS:
        yield f"no-{kind}-events", f"Events of kind {kind} are not written.", _edited(_without(kind))
    for cause in ("unused", "abandoned", "buffer"):
        words = f"A guess that is dropped as {cause} is not reported."
        yield f"no-{cause}-drops", words, _edited(_without("drop", cause))
    for first, second in (
        ("load", "evict"),
        ("evict", "promote"),
        ("load", "promote"),
        ("hit", "load"),
        ("stage", "drop"),
    ):
        words = f"Of two neighbouring events, {second} is written before {first}."
        yield f"{second}-before-{first}", words, _edited(_exchanged(first, second))
    yield "events-by-kind", "The events of a step are sorted by their kind.", _edited(_gathered(KINDS))
    yield "steps-from-1", "Steps count from 1.", _edited(_saying("step", lambda e: e.step + 1))
    yield (
        "layer-of-the-guess",
        "An event of a guess names the layer before.",
        _edited(_saying("layer", lambda e: e.layer - 1, ("stage",))),
    )
    for field in ("slot", "buffer", "host"):
        yield f"{field}-not-named", f"No event names its {field}.", _edited(_saying(field, lambda e: None))
        for kind in KINDS:
            words = f"An event of kind {kind} does not name its {field}."
            yield f"{kind}-without-{field}", words, _edited(_saying(field, lambda e: None, (kind,)))
    own = _saying("host", lambda e: None if e.host is None else e.expert)
    yield "host-place-is-the-number", "The host place of an expert is written as its number.", _edited(own)
    read = _saying("host", lambda e: e.expert, ("load", "stage"))
    yield (
        "host-place-read-is-the-number",
        "The host place that is read is written as the expert's number.",
        _edited(read),
    )
    for cause in ("miss", "guess", "request"):
        words = f"The cause of a promotion is always {cause}."
        yield f"cause-always-{cause}", words, _edited(_saying("cause", _always(cause), ("promote",)))
        both = _saying("cause", _always(cause), ("promote", "evict"))
        yield (
            f"both-causes-always-{cause}",
            f"The cause of a promotion and of its eviction is always {cause}.",
            _edited(both),
        )


# **Rules**: which expert is evicted, where a new one goes, and in which order.

VICTIMS: tuple[tuple[str, str, Callable[[Resident], int]], ...] = (
    ("lowest-id", "the lowest id", lambda r: r.expert),
    ("highest-id", "the highest id", lambda r: -r.expert),
    ("lowest-slot", "the lowest slot", lambda r: r.slot),
    ("highest-slot", "the highest slot", lambda r: -r.slot),
)


def _evicting(key: Callable[[Resident], int]) -> type[Offload]:
    class Evicting(Offload):
        def _promote(self, newcomer: Staged) -> None:
            residents = self.slots[newcomer.layer]
            if len(residents) == self.arrangement.slots:
                residents.insert(0, residents.pop(residents.index(min(residents, key=key))))
            super()._promote(newcomer)

    return Evicting


class HighestSlot(Offload):
    def _promote(self, newcomer: Staged) -> None:
        residents = self.slots[newcomer.layer]
        free = set(range(self.arrangement.slots)) - {resident.slot for resident in residents}
        super()._promote(newcomer)
        if free:
            residents[-1].slot = max(free)
            self._events[-1] = replace(self._events[-1], slot=max(free))


class RequestLast(Offload):
    """A hit does not count as a use until all misses are loaded."""

    def _answer(self, request: Request) -> Trace:
        events = super()._answer(request)
        residents = self.slots[request.layer]
        residents.sort(key=lambda resident: resident.expert in request.needed)
        return events


def _ordered(misses: Callable[[list[int]], Sequence[int]]) -> type[Offload]:
    class Ordered(Offload):
        def _bring(self, layer: int, pending: list[int]) -> int:
            return super()._bring(layer, list(misses(pending)))

    return Ordered


def _guessing(order: Callable[[tuple[int, ...]], Sequence[int]]) -> type[Offload]:
    class Guessing(Offload):
        def _stage(self, request: Request) -> None:
            super()._stage(replace(request, guesses=tuple(order(request.guesses))))

    return Guessing


class HitsDescending(Offload):
    def _run_residents(self, request: Request) -> list[int]:
        missing: list[int] = []
        for expert in sorted(request.needed, reverse=True):
            missing += super()._run_residents(replace(request, needed=(expert,)))
        return missing[::-1]


class PromotesOnHit(Offload):
    """A guess for the current layer is promoted before hits run."""

    def _run_residents(self, request: Request) -> list[int]:
        for guess in [s for s in self.staged if s.layer == request.layer and s.expert in request.needed]:
            self._promote(guess)
        return super()._run_residents(request)


class LoadsStaged(Offload):
    """An expert that was guessed is loaded again."""

    def _find_staged(self, layer: int, expert: int) -> Staged | None:
        return None


def _of_rules() -> Iterator[tuple[str, str, type[Offload]]]:
    for name, words, key in VICTIMS:
        yield f"{name}-evicted", f"The expert of {words} is evicted, not the one that ran longest ago.", _evicting(key)
    yield "highest-free-slot", "A new expert takes the highest free slot.", HighestSlot
    yield "needed-count-as-newest", "All needed experts count as used last, in their previous order.", RequestLast
    falling, reverse = _ordered(lambda ids: ids[::-1]), _guessing(lambda ids: ids[::-1])
    yield "misses-descending", "Missing experts are loaded by descending id.", falling
    yield "hits-descending", "Hits are run by descending id.", HitsDescending
    yield "guesses-ascending", "Guesses are staged by ascending id instead of in their order.", _guessing(sorted)
    yield "guesses-descending", "Guesses are staged by descending id.", _guessing(lambda ids: sorted(ids, reverse=True))
    yield "guesses-reversed", "Guesses are staged last one first.", reverse
    yield "guesses-never-staged", "Guesses are never staged.", _guessing(lambda ids: ())
    yield "first-guess-only", "Only the first guess is staged.", _guessing(lambda ids: ids[:1])
    yield "guesses-promoted-first", "Needed guesses are promoted before hits are run.", PromotesOnHit
    yield "guesses-loaded-again", "An expert that is in a buffer is loaded again.", LoadsStaged


# **The key-value cache**: what a step returns, and what is stored.

Answers = tuple[Array, Array]
Answering = Callable[["Kept"], Answers]


class Kept(BfpKeyValueCache):
    """A cache that also keeps the given rows, S × G × d_h."""

    def __init__(self, kv_heads: int, head_dim: int, key_format: Format, value_format: Format) -> None:
        super().__init__(kv_heads, head_dim, key_format, value_format)
        self.formats, self.last = (key_format, value_format), 0
        self.given = [np.zeros((0, kv_heads, head_dim), np.float32) for _ in range(2)]

    answering: Answering

    def step(self, keys: F32, values: F32) -> tuple[F32, F32]:
        super().step(keys, values)
        self.given = [np.concatenate([old, new]) for old, new in zip(self.given, (keys, values), strict=True)]
        self.last = len(keys)
        first, second = type(self).answering(self)
        return np.ascontiguousarray(first, np.float32), np.ascontiguousarray(second, np.float32)


def _answering(answer: Answering) -> type[Kept]:
    return type("Answering", (Kept,), {"answering": staticmethod(answer)})


def _held(cache: Kept) -> Answers:
    return cache.keys.astype(np.float32), cache.values.astype(np.float32)


def _changed(which: tuple[int, ...], change: Change) -> Answering:
    def answer(cache: Kept) -> Answers:
        first, second = (change(part) if at in which else part for at, part in enumerate(_held(cache)))
        return first, second

    return answer


def _stored(shape: Callable[[Array], Array]) -> Answering:
    """The rows that were given, cast in blocks along another axis."""

    def answer(cache: Kept) -> Answers:
        found = []
        for rows, format in zip(cache.given, cache.formats, strict=True):
            order = shape(np.arange(rows.size).reshape(rows.shape))
            flat = np.empty(rows.size, np.float32)
            flat[order.reshape(-1)] = decode(cast(np.ascontiguousarray(rows.reshape(-1)[order]), format)).reshape(-1)
            found.append(flat.reshape(rows.shape).swapaxes(0, 1))
        return found[0], found[1]

    return answer


def _newest_over(place: int) -> Change:
    def change(part: Array) -> Array:
        changed = part.copy()
        changed[:, place] = part[:, -1]
        return changed

    return change


def _wrapping(most: int) -> Change:
    """The last token at each place of a ring buffer."""

    def change(part: Array) -> Array:
        token = np.arange(part.shape[1])
        return np.asarray(part[:, token + (part.shape[1] - 1 - token) // most * most])

    return change


def _of_answers() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    yield (
        "answers-exchanged",
        "A step returns values as keys, and keys as values.",
        _answering(lambda c: _held(c)[::-1]),
    )
    last = _answering(lambda c: (_held(c)[0][:, -c.last :], _held(c)[1][:, -c.last :]))
    yield "last-step-only", "A step returns its own tokens only.", last
    raw = _answering(lambda c: (c.given[0].swapaxes(0, 1), c.given[1].swapaxes(0, 1)))
    yield "rows-not-cast", "Rows are returned as they were given.", raw
    for name, words, shape in (
        ("tokens", "the tokens of a head", lambda at: at.swapaxes(0, 1).reshape(at.shape[1], -1)),
        ("heads", "the heads of a token", lambda at: at.reshape(len(at), -1)),
        ("everything", "all that is kept", lambda at: at.reshape(1, -1)),
    ):
        yield f"blocks-over-{name}", f"Blocks run over {words}.", _answering(_stored(shape))
    for place, words in ((0, "first"), (-2, "one before the newest")):
        over = _answering(_changed((0, 1), _newest_over(place)))
        yield f"newest-over-the-{words}".replace(" ", "-"), f"The newest token is written over the {words}.", over
    for most in (2, 4, 8, 16, 32, 64, 128, 256):
        ring = _answering(_changed((0, 1), _wrapping(most)))
        yield f"tokens-wrap-at-{most}", f"Tokens past {most} are written over the first ones.", ring
    for which, words in (((0, 1), "keys and values"), ((0,), "keys"), ((1,), "values")):
        for name, does, change in changes():
            run = _answering(_changed(which, change))
            yield f"{words.replace(' ', '-')}-{name}", f"The array of {words} {does}", run


def of_machines(operation: str) -> Iterator[Defect]:
    """The families of a stateful operation; none for others."""
    if operation in ("offload.trace", "offload.engine"):
        for name, cause, machine in (*_of_events(), *_of_rules()):
            run = traced(machine) if operation == "offload.trace" else machine
            yield arithmetical(name, cause, "", {operation: run})
    if operation == "kvcache.bfp":
        for name, cause, cache in _of_answers():
            yield arithmetical(name, cause, "", {operation: cache})
