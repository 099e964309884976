"""Where the time of a token goes: a compiled step that adds up the seconds of its parts.

The text of such a step differs from that of others only in lines that read a clock, so it gives the same bits. A part
is a phase of a kind of block (`lowbit_cppyy.step.phases`), or the norm or the scores at the end. A thread that is done
with a part waits for the others; that time is counted separately. Reading the clock takes some 30 ns.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F64
from lowbit.model.caches import stored_bytes
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder
from lowbit.model.program import Line
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime.compiler import runtime
from lowbit_cppyy.step.decoder import CompiledDecoder
from lowbit_cppyy.step.embedding import described
from lowbit_cppyy.step.parts import StepParts, product_of
from lowbit_cppyy.step.phases import Attend, Experts, Multiply, lines_of
from lowbit_cppyy.step.source import Part, StepSource, padded


@dataclass(frozen=True)
class _Seconds:
    """The function of a timed step that returns the address of its seconds; the step's own text defines it."""

    step: StepSource
    source = ""

    @property
    def name(self) -> str:
        return f"{self.step.name}_seconds"

    @property
    def table(self) -> InstructionSet:
        return self.step.table


class TimedStep:
    """A decoder with a timed step. The seconds belong to the shape of the model, so time one decoder of it at once.

    Attributes:
        decoder: gives the bits of a decoder that is not timed.
        parts: of its step, in order.
    """

    def __init__(self, decoder: Decoder, parts: StepParts) -> None:
        """`parts` are those of this decoder, and timed."""
        rows = described(decoder.embedding, decoder.config)
        self.decoder = CompiledDecoder(decoder.config, decoder.embedding, rows, parts)
        source = parts.source
        self.parts, self._made, threads = source.parts, decoder, source.timed
        found = ctypes.CFUNCTYPE(ctypes.c_void_p)(runtime().kernel(_Seconds(source)))()
        size = padded(2 * len(self.parts))
        assert found is not None
        numbers = (ctypes.c_double * (threads * size)).from_address(found)
        self._seconds: F64 = np.ctypeslib.as_array(numbers).reshape(threads, size)

    def begin(self) -> None:
        """Forget the seconds so far."""
        self._seconds[:] = 0

    @property
    def seconds(self) -> F64:
        """The seconds since `begin` in each part and in waiting after it: float64, parts × threads × 2."""
        seconds = self._seconds[:, : 2 * len(self.parts)]
        return seconds.reshape(len(seconds), len(self.parts), 2).swapaxes(0, 1).copy()

    def bytes_of(self, part: Part, positions: int) -> int:
        """The bytes of matrices, keys and values that a part reads for one token after `positions` others."""
        config, step = self._made.config, self._made.step
        if isinstance(part.phase, Attend):
            seen = min(positions, part.phase.line.setting("window") or positions)
            return part.blocks * seen * _row_bytes(config, self.decoder)
        lines = [line for line in lines_of(part.phase) if line.kind in ("product", "experts")]
        if not isinstance(part.phase, Multiply | Experts) or not lines:
            return 0
        if lines[0] in step.last:
            return _nbytes([self._made.scores.linears["head"]])
        blocks = [block for program, block in zip(step.blocks, self._made.blocks, strict=True) if lines[0] in program]
        return sum(_bytes_of_line(line, block, config) for block in blocks for line in lines)


def _row_bytes(config: LlamaConfig, decoder: CompiledDecoder) -> int:
    """The bytes of the keys and values of one token in one block."""
    return config.kv_heads * sum(stored_bytes(decoder.parts.keys, config.head_dim))


def _bytes_of_line(line: Line, block: Any, config: LlamaConfig) -> int:
    """The bytes of a product; of experts, those of as many average ones as a token needs."""
    if line.kind == "product":
        return _nbytes([block.linears[str(line.parameter)]])
    assert config.routing is not None
    count = config.routing.experts
    every = [block.linears[f"{line.parameter}[{n}].{each}"] for n in range(count) for each in ("gate", "up", "down")]
    return _nbytes(every) * config.routing.top_k // count


def _nbytes(linears: Sequence[Any]) -> int:
    return sum(product_of(linear, 1, exact=False).nbytes for linear in linears)
