"""Defects of KIVI's cache: which tokens stay in 16 bits, and how the others are grouped."""

from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.kivi_cache import KiviCache, Tokens
from lowbit.tensor_formats.kivi import SUFFIX
from lowbit.tensor_formats.stored import Stored, quantized
from lowbit_conformance.defects.defect import of


class Sliding(KiviCache):
    """The newest R keys are kept, as the newest values are, and older groups are stored."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        whole, self.residual = self.residual, 10**9
        super().step(keys, values)
        self.residual = whole
        group = dict(self.keys._store(np.ones_like(self.keys.newest[:1])).options)["tokens"]
        over = max(0, len(self.keys.newest) - whole)
        self.keys.store(over - over % group)
        self.values.store(max(0, len(self.values.newest) - whole))
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


class Together(KiviCache):
    """Values are stored R at a time, when keys are."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        whole, self.residual = self.residual, 10**9
        super().step(keys, values)
        self.residual = whole
        for kept in (self.keys, self.values):
            kept.store(len(kept.newest) - len(kept.newest) % whole)
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


class NoneKept(KiviCache):
    """All tokens of a step are stored at once."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        super().step(keys, values)
        for kept in (self.keys, self.values):
            kept.store(len(kept.newest))
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


class PromptStored(NoneKept):
    """A prompt, the first step of several tokens, is stored whole."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        if len(keys) > 1 and not len(self.keys.stored) + len(self.keys.newest):
            return super().step(keys, values)
        return KiviCache.step(self, keys, values)


class ByToken(KiviCache):
    """Keys are grouped along the channels of a token, as values are."""

    def __init__(self, *opening: Any) -> None:
        super().__init__(*opening)
        self.keys._store = self.values._store


class OneScale(KiviCache):
    """A channel of keys has one scale for all its groups, which follows the range of all that is stored."""

    def __init__(self, *opening: Any) -> None:
        super().__init__(*opening)
        self._bits, self._all = int(opening[2]), self.keys.newest
        self.keys._store = self._gathered

    @property
    def _format(self) -> str:
        return f"kivi-keys{SUFFIX[self.dtype]}"

    def _gathered(self, part: Tokens) -> Stored:
        self._all = np.concatenate([self._all, part])
        found = quantized(self._all, self._format, (("bits", self._bits), ("tokens", len(self._all))))
        old = len(self.keys.stored)
        self.keys.stored = found.values.T[:old].astype(np.float32)
        return quantized(part, self._format, (("bits", self._bits), ("tokens", len(part))))


class NotReset(KiviCache):
    """A cache that is opened begins with the tokens of the one before."""

    _last: "NotReset | None" = None

    def __init__(self, *opening: Any) -> None:
        super().__init__(*opening)
        last = NotReset._last
        if last is not None and last.keys.newest.shape[1:] == self.keys.newest.shape[1:]:
            self.keys.newest, self.values.newest = last.keys.newest, last.values.newest
        NotReset._last = self


class NewestInBfloat(KiviCache):
    """The newest tokens lose the last three bits of their 16."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        return super().step(*((part.view(np.uint16) & np.uint16(0xFFF8)).view(part.dtype) for part in (keys, values)))


class NewestInHalf(KiviCache):
    """Tokens go through float16, which ends at 65504."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        most = np.float32(65504)
        return super().step(*(part.astype(np.float32).clip(-most, most).astype(part.dtype) for part in (keys, values)))


DEFECTS = (
    of("kvcache.kivi", "kivi-keys-slide", "Keys slide out of the residual tokens as values do.", "C1", Sliding),
    of("kvcache.kivi", "kivi-values-by-residual", "Values are stored R at a time, as keys are.", "C1", Together),
    of("kvcache.kivi", "kivi-no-residual", "All tokens are stored at once.", "C1 C3", NoneKept),
    of("kvcache.kivi", "kivi-prompt-stored", "All tokens of a prompt are stored.", "C3", PromptStored),
    of("kvcache.kivi", "kivi-keys-by-token", "Keys are grouped along channels, as values are.", "C2", ByToken),
    of("kvcache.kivi", "kivi-one-scale", "A channel of keys has one scale for all its groups.", "C2 C3", OneScale),
    of("kvcache.kivi", "kivi-not-reset", "A new cache begins with the newest tokens of the last.", "C5", NotReset),
    of("kvcache.kivi", "kivi-newest-cut", "The newest tokens lose bits.", "C1", NewestInBfloat),
    of("kvcache.kivi", "kivi-tokens-in-half", "Tokens end where float16 does.", "C1 C2", NewestInHalf),
)
