"""Defects of KIVI's cache: which tokens stay in 16 bits, and how the others are grouped."""

from typing import Any

import numpy as np

from lowbit.arrays import F32
from lowbit.attention.kivi_cache import KiviCache, Tokens
from lowbit.tensor_formats.kivi import SUFFIX
from lowbit.tensor_formats.stored import Stored, quantized
from lowbit_conformance.defects.defect import Defect, of_operation

DEFECTS: list[Defect] = []
of_kivi = of_operation(DEFECTS, "kvcache.kivi")


@of_kivi("C1")
class KiviKeysSlide(KiviCache):
    """Keys leave the residual tokens one by one, as values do."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        whole, self.residual = self.residual, 10**9
        super().step(keys, values)
        self.residual = whole
        group = dict(self.keys._store(np.ones_like(self.keys.newest[:1])).options)["tokens"]
        over = max(0, len(self.keys.newest) - whole)
        self.keys.store(over - over % group)
        self.values.store(max(0, len(self.values.newest) - whole))
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


@of_kivi("C1")
class KiviValuesByResidual(KiviCache):
    """Values are stored R at a time, as keys are."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        whole, self.residual = self.residual, 10**9
        super().step(keys, values)
        self.residual = whole
        for kept in (self.keys, self.values):
            kept.store(len(kept.newest) - len(kept.newest) % whole)
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


@of_kivi("C1 C3")
class KiviNoResidual(KiviCache):
    """All tokens are stored at once."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        super().step(keys, values)
        for kept in (self.keys, self.values):
            kept.store(len(kept.newest))
        return self.keys.in_heads(self.kv_heads), self.values.in_heads(self.kv_heads)


@of_kivi("C3")
class KiviPromptStored(KiviNoResidual):
    """All tokens of a prompt are stored."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        if len(keys) > 1 and not len(self.keys.stored) + len(self.keys.newest):
            return super().step(keys, values)
        return KiviCache.step(self, keys, values)


@of_kivi("C2")
class KiviKeysByToken(KiviCache):
    """Keys are grouped along channels, as values are."""

    def __init__(self, *opening: Any) -> None:
        super().__init__(*opening)
        self.keys._store = self.values._store


@of_kivi("C2 C3")
class KiviOneScale(KiviCache):
    """A channel of keys has one scale for all its groups."""

    # It follows the range of all that is stored.

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


@of_kivi("C5")
class KiviNotReset(KiviCache):
    """A new cache begins with the newest tokens of the previous one."""

    _last: "KiviNotReset | None" = None

    def __init__(self, *opening: Any) -> None:
        super().__init__(*opening)
        last = KiviNotReset._last
        if last is not None and last.keys.newest.shape[1:] == self.keys.newest.shape[1:]:
            self.keys.newest, self.values.newest = last.keys.newest, last.values.newest
        KiviNotReset._last = self


@of_kivi("C1")
class KiviNewestCut(KiviCache):
    """The newest tokens lose bits."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        return super().step(*((part.view(np.uint16) & np.uint16(0xFFF8)).view(part.dtype) for part in (keys, values)))


@of_kivi("C1 C2")
class KiviTokensInHalf(KiviCache):
    """Tokens are clamped to the range of float16."""

    def step(self, keys: Tokens, values: Tokens) -> tuple[F32, F32]:
        most = np.float32(65504)
        return super().step(*(part.astype(np.float32).clip(-most, most).astype(part.dtype) for part in (keys, values)))
