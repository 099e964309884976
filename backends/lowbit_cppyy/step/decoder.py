"""A decoder whose step is one call of C++.

It is a `lowbit.model.decoder.AnyDecoder`, made from one that runs the same step one operation at a time on this
backend, and gives the same bits: the matrices, kernels and orders of operations are the same. It saves the time between
operations: Python is not involved, the threads stay awake, and activations are laid out where they are read.

**Unchanged.** Norms, activations, rotations and attention are those of the backend, in float32, and every product is
one of a prepared matrix. A step with anything else, such as a matrix that numpy multiplies by, is not compiled.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lowbit.arrays import F32, F64, I64, U8, U64, Array
from lowbit.attention.rope import Frequencies
from lowbit.backend.prepared import placed
from lowbit.contract.checks import check_integer, check_view
from lowbit.errors import ArgumentError
from lowbit.model.block import check_scores
from lowbit.model.caches import Keys, beyond_float16, stored_bytes
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import PREFILL_TOKENS, Rows, batch_ids, embedded, token_ids
from lowbit.model.generation import Step
from lowbit.model.sampling import MOST_TOKENS, Sampling, check_logits, choose
from lowbit.model.weights import Progress
from lowbit_cppyy.codegen.elementwise import CHUNK
from lowbit_cppyy.layout.memory import ALIGNMENT
from lowbit_cppyy.runtime.calls import FLOATS
from lowbit_cppyy.runtime.compiler import FORKED, INEXACT, NO_MEMORY, raise_failure
from lowbit_cppyy.step.embedding import Description
from lowbit_cppyy.stored.casts import raise_for

PURPOSES = (1, 2, 128)
"""Token counts with kernels of their own: one, a few, many. A step chooses between the last two by the rows that the
kernels compute; from 121 on the choice would not change, because no kernel computes more than 16."""
UNROUTED = 9
"""Status of a step in which the score of an expert is not finite."""
UNKEPT = 10
"""Status of a step with a finite key or value that is infinite in float16."""
UNCHOSEN = 11
"""Status of a step that should choose a token but has a logit that is not finite."""
MOST_LOGITS = 2**22
"""The most bytes of the logits of one call, or those of one token if they are more."""
MOST_CHOICES = 64
"""The most tokens that one call generates for a sequence, for which it reserves memory."""
TURN = 50_000_000
"""Nanoseconds after which a call that generates tokens ends with the next one. An interrupt waits as long, and so does
a reader of the text."""
MOST_FREQUENCIES = 4
"""The largest number of kinds of rotations in one model."""
MOST_POSITIONS = 4096
"""The most positions whose cosines and sines are computed ahead, so that no token waits long."""


@dataclass
class State:
    """The state of a sequence: keys and values of all blocks, uint8, blocks × heads × capacity × bytes of a row.

    Attributes:
        keys: rotated, in the number format of the decoder.
        values: likewise, and not rotated.
        length: the number of tokens in them.
    """

    keys: U8
    values: U8
    length: int = 0

    def __len__(self) -> int:
        return self.length

    def reserve(self, length: int, most: int) -> None:
        """Make room for `length` tokens, of at most `most`."""
        capacity = self.keys.shape[2]
        if length > capacity:
            capacity = max(length, min(2 * capacity, most))
            self.keys, self.values = (_grown(each, self.length, capacity) for each in (self.keys, self.values))


def cache_rows(shape: tuple[int, ...]) -> U8:
    """Uninitialised memory for keys or values. Rows of whole cache lines begin at one, so that no register is read
    from two."""
    return placed(shape, np.uint8, ALIGNMENT, overread=0)


def _grown(array: U8, length: int, capacity: int) -> U8:
    larger = cache_rows((*array.shape[:2], capacity, array.shape[3]))
    larger[:, :, :length] = array[:, :, :length]
    return larger


class AnyParts(Protocol):
    """The arguments of a step; see `lowbit_cppyy.step.parts.StepParts`."""

    keys: Keys
    model: int
    run: Callable[..., int]
    run_on: Callable[..., int]
    run_batch: Callable[..., int]
    score: Callable[..., int]
    choose: Callable[..., int]

    def address(self, array: Array) -> int: ...

    def written(self, arrays: Sequence[Array]) -> AbstractContextManager[U64]: ...

    def table_of(self, purpose: int, *, exact: bool = False) -> int: ...


class CompiledDecoder:
    """A decoder with a compiled step; see the top of the module.

    Attributes:
        config: of the model.
        parts: the arguments of its step.
    """

    def __init__(self, config: LlamaConfig, embedding: Rows, described: Description, parts: AnyParts) -> None:
        """A decoder of parts that are already compiled.

        Args:
            config: of the model.
            embedding: the rows of tokens, indexed as an array: float32, vocabulary × hidden.
            described: the same rows, times the factor of the embedding, for C++.
            parts: of its step.
        """
        self.config, self.parts, self._embedding = config, parts, embedding
        self._described, self._fields = described, described.fields(parts.address)
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._angles = _Angles(config, parts)
        self._row_bytes = stored_bytes(parts.keys, config.head_dim)
        self._scored: tuple[F32, F32] | None = None

    def new_state(self, capacity: int = 64) -> State:
        """The state of an empty sequence, initially with room for `capacity` tokens.

        Raises:
            ArgumentError: a capacity of less than one.
        """
        check_integer("capacity", capacity, least=1)
        config = self.config
        shape = config.layers, config.kv_heads, capacity
        keys, values = (cache_rows((*shape, size)) for size in self._row_bytes)
        return State(keys, values)

    def hidden(self, tokens: Sequence[int], state: State, progress: Progress | None = None) -> F64:
        """As `lowbit.model.decoder.Decoder.hidden`.

        Raises:
            ArgumentError: no tokens, a token outside the vocabulary, or more tokens than the context; a state of
                another decoder; an activation that cannot be cast.
            UnavailableError: no memory, a forked process, a closed backend.
        """
        self._check_state("state", state)
        ids, parts, work = token_ids(tokens, self.config, already=len(state)), [], 0
        for start in range(0, len(ids), PREFILL_TOKENS):
            part = ids[start : start + PREFILL_TOKENS]
            stream = embedded(self._embedding, part, self.config.embedding_scale).astype(np.float32)
            with self._alone():
                parts.append(self._read(stream, state))
            work += len(part) * self.config.layers
            if progress is not None:
                progress(work, len(ids) * self.config.layers)
        return np.concatenate(parts).astype(np.float64)

    def hidden_batch(self, tokens: Sequence[int], states: Sequence[State]) -> F64:
        """As `lowbit.model.decoder.Decoder.hidden_batch`.

        Raises:
            ArgumentError, UnavailableError: as `lowbit.model.decoder.Decoder.hidden_batch` and `hidden`.
        """
        stream = self._batch(tokens, states)
        with self._alone(), self._places(states, 1) as places:
            hidden = self._call(self.parts.run_batch, stream, _longest(states) + 1, places)
            for state in states:
                state.length += 1
        return hidden.astype(np.float64)

    def logits(self, hidden: F64) -> F32:
        """As `lowbit.model.decoder.Decoder.logits`. Those of a single token were computed with it.

        Raises:
            ArgumentError: hidden states of another shape; a logit is not finite.
        """
        rows, scored = np.ascontiguousarray(hidden, np.float32), self._scored
        check_view("hidden", rows, np.float32, (None, self.config.hidden))
        if scored is not None and len(rows) == 1 and np.array_equal(rows[0], scored[0]):
            scores = scored[1][np.newaxis].copy()
        else:
            scores = np.empty((len(rows), self.config.vocabulary), np.float32)
            with self._alone():
                self._tried(rows, lambda tables: self.parts.score(self.parts.model, tables, len(rows), rows, scores))
        check_scores(scores, "a logit")
        return scores

    def choose(self, logits: F32, sampling: Sampling, position: int, sequence: int = 0) -> int:
        """As `lowbit.model.sampling.choose`, with the same token; sampling in C++ takes a fraction of the time.

        Raises:
            ArgumentError: as that.
            UnavailableError: no memory.
        """
        if sampling.temperature == 0:
            return choose(logits, sampling, position, sequence)
        check_logits(logits)
        check_integer("position", position, 0, 2**64 - 1)
        check_integer("sequence", sequence, 0, 2**64 - 1)
        place = np.array([sampling.seed, position, sequence], np.uint64)
        row = np.ascontiguousarray(logits, np.float32)
        token = self.parts.choose(row, len(row), _settings(sampling), min(sampling.top_k, len(row)), place)
        if token < 0:
            raise_failure(NO_MEMORY)
        return token

    def follow(
        self, token: int, state: State, sampling: Sampling, position: int, most: int = 1, stop: Sequence[int] = ()
    ) -> list[Step]:
        """As `lowbit.model.generation.follow`, with the same bits, in one call of C++. It generates tokens for 50 ms
        (`TURN`); a single one if C++ cannot decode the rows of the embedding.

        Raises:
            ArgumentError: as `hidden` and `choose`, of the first token; the state stays as it was.
            UnavailableError: as `hidden`.
        """
        self._check_state("state", state)
        most = min(most, max(1, MOST_LOGITS // (4 * self.config.vocabulary)))
        chosen, logits = self._follow([token], [state], sampling, [(position, 0)], most, stop, keep=True)
        return [Step(int(number), row) for (number,), row in zip(chosen, logits, strict=False)]

    def follow_batch(
        self,
        tokens: Sequence[int],
        states: Sequence[State],
        sampling: Sampling,
        places: Sequence[tuple[int, int]],
        most: int = 1,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        """As `lowbit.model.generation.follow_batch`, with the same tokens, in one call of C++, as `follow`.

        Raises:
            ArgumentError: as `hidden_batch` and `choose`, of the first tokens; the states stay as they were.
            UnavailableError: as `hidden`.
        """
        chosen, _ = self._follow(tokens, states, sampling, places, most, stop, keep=False)
        found: list[list[int]] = chosen.tolist()
        return found

    def _follow(
        self,
        tokens: Sequence[int],
        states: Sequence[State],
        sampling: Sampling,
        places: Sequence[tuple[int, int]],
        most: int,
        stop: Sequence[int],
        *,
        keep: bool,
    ) -> tuple[I64, F32]:
        """The tokens that were chosen, rounds × sequences, and their logits: a row for each, and perhaps unused rows;
        only those of the last round if they are not kept."""
        stream, vocabulary = self._batch(tokens, states), self.config.vocabulary
        check_integer("number of logits", vocabulary, 1, MOST_TOKENS)
        check_integer("most", most, least=1)
        if len(places) != len(states):
            raise ArgumentError("number of places", len(places), f"one for each of {len(states)} states")
        for position, sequence in places:
            check_integer("position", position, 0, 2**64 - 1)
            check_integer("sequence", sequence, 0, 2**64 - 1)
        most = min(most, MOST_CHOICES, self.config.context - _longest(states))
        count = most if self._described.complete else 1
        numbers = [*(position for position, _ in places), *(sequence for _, sequence in places)]
        choice = np.array([min(sampling.top_k, vocabulary), sampling.seed, *numbers], np.uint64)
        logits = np.empty((len(states) * (count if keep else 1), vocabulary), np.float32)
        found = np.zeros(1 + count * len(states), np.int64)
        ends = np.array([*(each for each in stop if 0 <= each < vocabulary), -1], np.int64)  # never empty
        how = _settings(sampling), choice, self._fields, ends, len(ends), count, TURN
        with self._alone(), self._places(states, count) as places_of:
            where = *places_of, logits, vocabulary if keep else 0, *how, found
            self._call(self.parts.run_on, stream, _longest(states) + count, where)
            for state in states:
                state.length += int(found[0])
        return found[1 : 1 + found[0] * len(states)].reshape(-1, len(states)), logits

    def _batch(self, tokens: Sequence[int], states: Sequence[State]) -> F32:
        """The embeddings of the next tokens of several sequences."""
        for number, state in enumerate(states):
            self._check_state(f"states[{number}]", state)
        ids = batch_ids(tokens, states, [len(state) for state in states], self.config)
        return embedded(self._embedding, ids, self.config.embedding_scale).astype(np.float32)

    @contextmanager
    def _places(self, states: Sequence[State], count: int) -> Iterator[tuple[object, ...]]:
        """The arguments of C++ that say where each sequence ends and lies, with room for `count` more tokens."""
        for state in states:
            state.reserve(state.length + count, self.config.context)
        lengths = np.array([state.length for state in states], np.int64)
        capacities = np.array([state.keys.shape[2] for state in states], np.int64)
        caches = [state.keys for state in states] + [state.values for state in states]
        with self.parts.written(caches) as addresses:
            yield lengths, capacities, addresses[: len(states)], addresses[len(states) :]

    def _alone(self) -> threading.Lock:
        """The lock of the decoder. A forked child gets an error: it lacks the threads of the pool, and one of the
        missing threads may hold the lock."""
        if os.getpid() != self._owner:
            raise_failure(FORKED)
        return self._lock

    def _check_state(self, argument: str, state: State) -> None:
        config = self.config
        own = [(config.layers, config.kv_heads, size) for size in self._row_bytes]
        given = [state.keys, state.values] if isinstance(state, State) else []
        if [(*each.shape[:2], each.shape[3]) for each in given] != own:
            raise ArgumentError(argument, "of another decoder", "a state that `new_state` of this decoder has made")

    def _read(self, stream: F32, state: State) -> F32:
        """The hidden states of tokens with these embeddings; adds the tokens to the state."""
        single = len(stream) == 1
        logits = np.empty(self.config.vocabulary, np.float32) if single else FLOATS
        count = len(stream)
        state.reserve(state.length + count, self.config.context)
        where = state.length, state.keys.shape[2], state.keys, state.values, logits, int(single)
        hidden = self._call(self.parts.run, stream, state.length + count, where)
        state.length += count
        if single:
            self._scored = hidden[0].copy(), logits
        return hidden

    def _call(self, run: Callable[..., int], stream: F32, positions: int, where: tuple[object, ...]) -> F32:
        """The hidden states that a function of the bridge writes. Kernels fold powers of two into activations; if an
        activation is too small for that, other kernels run."""
        hidden, angles = np.empty_like(stream), self._angles.up_to(positions)

        def called(tables: U64) -> int:
            x = stream.copy()  # a step overwrites it
            return run(self.parts.model, tables, len(stream), x, angles, hidden, *where)

        self._tried(stream, called)
        return hidden

    def _tried(self, rows: F32, call: Callable[[U64], int]) -> None:
        """Call with the tables for a number of rows, and again without powers of two if an activation is too small."""
        for exact in (False, True):
            status = call(self._tables_of(len(rows), exact=exact))
            if status != INEXACT:
                break
        if status == UNROUTED:
            check_scores(np.full(1, np.nan, np.float32))
        if status == UNCHOSEN:
            check_scores(np.full(1, np.nan, np.float32), "a logit")
        if status == UNKEPT:
            raise beyond_float16("keys or values")
        if status:
            raise_for(status, rows)

    def _tables_of(self, count: int, *, exact: bool) -> U64:
        """The addresses of the products of one token, a few and many, from which a step chooses. A dense model gets a
        single table if there is no choice. A sparse model may send any number of tokens to an expert."""
        one, _, many = PURPOSES
        if count == one:
            purposes: tuple[int, ...] = (one,) * 3
        elif self.config.routing is None and count >= many:
            purposes = (many,) * 3
        else:
            purposes = PURPOSES
        return np.array([self.parts.table_of(each, exact=exact) for each in purposes], np.uint64)


def _settings(sampling: Sampling) -> F64:
    """The settings in the order of the bridge."""
    return np.array([sampling.temperature, sampling.top_p, sampling.min_p])


def _longest(states: Sequence[State]) -> int:
    return max(len(state) for state in states)


class _Angles:
    """Cosines and sines of positions for all frequencies, as ``rotate_head`` reads them."""

    def __init__(self, config: LlamaConfig, parts: AnyParts) -> None:
        self._head_dim, self._frequencies, self._parts = config.head_dim, config.frequencies, parts
        self._context = config.context
        self._made: tuple[int, list[F32], U64] = 0, [], np.zeros(MOST_FREQUENCIES, np.uint64)

    def up_to(self, positions: int) -> U64:
        """The addresses of the tables, extended to at least `positions` rows."""
        before, made, _ = self._made
        if positions > before:
            count = max(min(max(64, 2 * before, positions), before + MOST_POSITIONS, self._context), positions)
            new = [self._table(each, before, count) for each in self._frequencies]
            tables = [np.concatenate(pair) for pair in zip(made, new, strict=True)] if made else new
            addresses = np.zeros(MOST_FREQUENCIES, np.uint64)
            for n, table in enumerate(tables):
                addresses[n] = self._parts.address(table)
            self._made = count, tables, addresses  # in one assignment, so that an interrupt leaves the previous tables
        return self._made[2]

    def _table(self, frequencies: Frequencies, first: int, end: int) -> F32:
        positions = end - first
        turned = frequencies.rotation(self._head_dim, first, positions)
        d = self._head_dim
        padded = -(-d // CHUNK) * CHUNK
        table = np.zeros((positions, padded // CHUNK, 2, CHUNK), np.float32)
        for half, numbers in enumerate((turned.cos, turned.sin)):
            whole = np.zeros((positions, padded), np.float32)
            whole[:, :d] = numbers
            table[:, :, half] = whole.reshape(positions, -1, CHUNK)
        return table
