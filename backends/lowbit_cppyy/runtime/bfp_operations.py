"""Operations of Block Floating Point, of the chapters `lowbit.quantization.bfp` and `lowbit.quantization.bfp_dot`."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import Declaration
from lowbit.quantization.bfp import Blocks, Format
from lowbit.quantization.bfp_dot import BlockSums
from lowbit_cppyy.caching import cached_property
from lowbit_cppyy.codegen.block_products import block_products, fits
from lowbit_cppyy.codegen.isa import InstructionSet
from lowbit_cppyy.runtime import processor
from lowbit_cppyy.runtime.calls import BYTES, FLOATS, INTS, NUMBERS, SHORTS, Calls, KernelSet, done
from lowbit_cppyy.runtime.compiler import Pool, preparing


class BlockKernels(Calls):
    """The functions of ``cpp/blocks.h``."""

    def __init__(self, table: InstructionSet, pool: Pool) -> None:
        super().__init__("blocks.h", table, pool)
        self._products: dict[tuple[int, int], KernelSet] = {}

    @cached_property
    def cast(self) -> Callable[..., int]:
        return self._function("cast", 0, FLOATS, 0, 0, 0, 0, 0, 0, BYTES, SHORTS)

    @cached_property
    def decode(self) -> Callable[..., int]:
        return self._function("decode", 0, BYTES, SHORTS, 0, 0, 0, 0, FLOATS)

    @cached_property
    def dot(self) -> Callable[..., int]:
        return self._function("dot", 0, BYTES, SHORTS, 0, BYTES, SHORTS, 0, 0, 0, NUMBERS, INTS)

    @cached_property
    def dot_bytes(self) -> Callable[..., int]:
        return self._function("dot_bytes", 0, BYTES, SHORTS, 0, BYTES, SHORTS, 0, 0, 0, NUMBERS, INTS)

    @cached_property
    def total(self) -> Callable[..., int]:
        return self._function("total", 0, NUMBERS, INTS, 0, 0, FLOATS)

    def products(self, columns: int, block: int) -> int:
        """The kernel of `dot_bytes` for rows and blocks of these sizes; 0 if there is none."""
        made = self._products.get((columns, block))
        if made is None:
            if not fits(columns, block, self._table.lanes):
                return 0
            with preparing:
                made = KernelSet([block_products(columns, block, self._table)], self._pool)
                made = self._products.setdefault((columns, block), made)
        return made.handle

    @property
    def pool(self) -> int:
        """The handle of the pool of threads."""
        return self._pool.handle


class BlockOperations:
    """The operations, for all shapes: shapes without a kernel are slower but equally exact."""

    declared: ClassVar[dict[str, Declaration]] = dict.fromkeys(
        ("bfp.cast", "bfp.decode", "bfp.dot", "bfp.total"), Declaration()
    )
    _isa: str | None
    _require_pool: Callable[[], Pool]

    @cached_property
    def _table(self) -> InstructionSet:
        return processor.choose_table(self._isa)

    @cached_property
    def _blocks(self) -> BlockKernels:
        return BlockKernels(self._table, self._require_pool())

    def _bfp_cast(self, x: F32, format: Format) -> Blocks:
        mantissas = np.empty(x.shape, format.dtype)
        exponents = np.empty((len(x), format.blocks(x.shape[1])), np.int16)
        sizes = *x.shape, format.block, format.mantissa, format.reach, mantissas.itemsize
        done(self._blocks.cast(self._blocks.pool, x, *sizes, mantissas, exponents), None)
        return Blocks(mantissas, exponents, format)

    def _bfp_decode(self, blocks: Blocks) -> F32:
        out, mantissas = np.empty(blocks.mantissas.shape, np.float32), blocks.mantissas
        sizes = *out.shape, blocks.format.block, mantissas.itemsize
        return done(self._blocks.decode(self._blocks.pool, mantissas, blocks.exponents, *sizes, out), out)

    def _bfp_dot(self, a: Blocks, b: Blocks) -> BlockSums:
        columns, block = a.columns, min(a.format.block, a.columns)
        shape = (a.rows, b.rows, a.exponents.shape[1])
        sums, exponents = np.empty(shape, np.int64), np.empty(shape, np.int32)
        narrow = a.mantissas.itemsize == 1 and b.mantissas.itemsize == 1
        if narrow and (kernel := self._blocks.products(columns, block)):
            both = (a.mantissas, a.exponents, a.rows, b.mantissas, b.exponents, b.rows)
            done(self._blocks.dot_bytes(kernel, *both, columns, shape[2], sums, exponents), None)
            return BlockSums(sums, exponents)
        wide = [x.mantissas.astype(np.int32, copy=False) for x in (a, b)]
        both = (wide[0], a.exponents, a.rows, wide[1], b.exponents, b.rows)
        done(self._blocks.dot(self._blocks.pool, *both, columns, block, sums, exponents), None)
        return BlockSums(sums, exponents)

    def _bfp_total(self, blocks: BlockSums) -> F32:
        out = np.empty(blocks.sums.shape[:2], np.float32)
        count, parts = out.size, blocks.sums.shape[2]
        return done(self._blocks.total(self._blocks.pool, blocks.sums, blocks.exponents, count, parts, out), out)
