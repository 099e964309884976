"""Rulings on HQQ, and on what MoE offloading says of sizes.

The paper names HQQ and its settings and gives no formula, so the rulings with H define the method. M6 and M7 are the
two rulings on the sizes that follow from it.

Source: MoE offloading §3.3, §4.2 and Table 1, as printed in the copy at hand.
"""

import numpy as np

from lowbit.errata import check_refused, ruling
from lowbit.quantization.hqq import as_minimum, dequantize, quantize, to_blocks
from lowbit.quantization.hqq_numbers import decode, range_grid
from lowbit.quantization.hqq_published import VERSIONS, inverse_grid, last_zeros
from lowbit.quantization.hqq_solver import Solver, codes, residual, shrink, solve, step
from lowbit.quantization.hqq_table1 import GIB, PRINTED, Scheme, mixtral, table_1
from lowbit.quantization.packing import unpack

SPREAD = (np.arange(64).reshape(16, 4) * 37 % 64 - 31.5) / 32
WEIGHTS = (SPREAD**3).astype(np.float32)  # a few large, many small


@ruling(
    "H",
    printed="HQQ is named with its bits and group sizes; scale, zero, solver, stopping and axis are not stated",
    ruled="scale multiplies codes; real zero, rounded at first at 4 bits only; p 0.7, β 10, κ 1.01, 20 steps, the best "
    "zero kept; both axes. These are departures from the authors' code, whose way is the option recipe: it returns the "
    "last zero, today without κ, bounds 1/scale at 20000, and finds codes before scale and zero are stored",
)
def hqq() -> None:
    """Each silence leaves two readings that differ, and the chapters follow the ruled one."""
    blocks = to_blocks(WEIGHTS, 16, axis=1)
    scales, zeros = range_grid(blocks, 2, np.dtype(np.float32))
    q = codes(blocks, scales, zeros, 2)

    # The scale multiplies codes; the reciprocal, which is also called a scale, gives other weights altogether.
    assert np.abs(residual(blocks, q, scales, zeros)).max() <= 0.51 * scales.max()
    assert np.abs(residual(blocks, q, np.reciprocal(scales), zeros)).max() > 2 * scales.max()

    # The zero is real; rounded, it is worse, and at 4 bits it is rounded before the first step and not after.
    found = solve(blocks, scales, zeros, 2)
    assert (found.zeros != np.rint(found.zeros)).any()
    first, moved = (decode(quantize(WEIGHTS, bits=4, group_size=16, solver=Solver(steps=n)).zeros) for n in (0, 20))
    assert (first == np.rint(first)).all()
    assert (moved != np.rint(moved)).any()

    # The shrinking is that of |d|^p, not the soft threshold of p = 1; a step is the mean of the ruling.
    d = np.array([0.05, 0.3, -2.0])
    by_hand = np.sign(d) * np.maximum(0, np.abs(d) - np.abs(d) ** (0.7 - 1) / 10)
    np.testing.assert_allclose(shrink(d, 0.7, 10.0), by_hand, rtol=1e-15)
    assert np.abs(shrink(d, 1.0, 10.0) - by_hand).max() > 0.01
    errors = residual(blocks, q, scales, zeros)
    means = np.mean(q - (blocks - shrink(errors, 0.7, 10.0)) / scales, axis=0)
    np.testing.assert_allclose(step(blocks, q, scales, zeros, 0.7, 10.0), means, rtol=1e-14)

    # The best zeros are kept, not the last: here the third step makes the error larger and ends the run.
    scales, zeros = range_grid(blocks, 4, np.dtype(np.float32))
    found = solve(blocks, scales, zeros, 4)
    assert len(found.errors) == 4
    assert found.errors[3] > found.errors[2] == min(found.errors) < found.errors[0]
    kept = np.abs(residual(blocks, codes(blocks, scales, found.zeros, 4), scales, found.zeros)).mean()
    assert abs(kept - found.errors[2]) < 1e-9 * kept

    # The axes group different weights; only axis 1 is equation 2's.
    assert not np.array_equal(to_blocks(WEIGHTS, 16, axis=0), blocks)
    along_0 = quantize(WEIGHTS, bits=2, group_size=16, axis=0)
    along_1 = quantize(WEIGHTS, bits=2, group_size=16, axis=1)
    assert np.abs(dequantize(along_1) - dequantize(along_0)).max() > 0.01
    assert as_minimum(along_1).groups == 1
    check_refused(lambda: as_minimum(along_0))

    # The authors' code: the zero after the last step, and a scale that is at least 1/20000.
    published = VERSIONS["hqq-0.1.1"]
    inverse, first_zeros = inverse_grid(blocks, 4, published)
    last = last_zeros(blocks, inverse, first_zeros, 4, Solver(), published)
    assert np.abs(last - found.zeros).max() > 1e-3
    tiny = WEIGHTS / np.float32(2**20)
    ruled, authors = (quantize(tiny, bits=4, group_size=16, recipe=recipe) for recipe in ("ruled", "hqq-0.1.1"))
    assert decode(ruled.scales).max() < 1 / 20000 * 0.01
    assert (decode(authors.scales) == 1 / np.float32(20000)).all()

    # Codes that are found before the scale is rounded to float16 are not all those of the scale as stored.
    spread = np.resize(WEIGHTS.reshape(-1, 1), (256, 1)) * np.linspace(0.9, 1.1, 256, dtype=np.float32).reshape(-1, 1)
    half = quantize(spread, bits=8, group_size=256, scale_dtype="float16", recipe="hqq-0.2.8")
    wide = quantize(spread, bits=8, group_size=256, recipe="hqq-0.2.8")
    assert (half.words == wide.words).all()
    nearest = codes(spread, decode(half.scales), decode(half.zeros), 8)
    assert (unpack(half.words, 8) != nearest).any()


@ruling(
    "M6",
    printed="2-bit codes in groups of 16 use 2.6 bits per parameter",
    ruled="2 + 8/16 + 8/16 + 32/(16·128) = 3.016",
)
def bits_of_the_two_bit_scheme() -> None:
    """Scale and zero of 8 bits each for every 16 codes are a whole bit already, and real bytes count so."""
    scheme = Scheme(2, 16, 128)
    assert round(scheme.bits_per_weight(), 3) == 3.016
    assert scheme.bits_per_weight() > 3 > 2.6
    weights = np.tile(WEIGHTS, (8, 16))
    matrix = quantize(weights, bits=2, group_size=16, meta_group=128, scale_dtype="float16")
    one_pair_for_all_zeros = 32
    assert 8 * matrix.nbytes == scheme.bits_per_weight() * weights.size + one_pair_for_all_zeros


@ruling(
    "M7",
    printed="Table 1 gives sizes in GB",
    ruled="they are GiB; every row is computed, residuals are listed, nothing is fitted",
)
def sizes_are_gib() -> None:
    """In GB the first row misses by 6.4, in GiB by nothing; 3-bit codes ten to a word explain the rows at 3 bits."""
    unquantised = 2 * mixtral().total
    printed = PRINTED["FP16", "FP16"]
    assert abs(unquantised / 1e9 - printed) > 6
    assert abs(unquantised / GIB - printed) < 0.005
    assert Scheme(3, 64, 128).code_bits == 3.5
    rows = {(row.attention, row.experts): row for row in table_1()}
    assert len(rows) == 16
    for row in rows.values():  # as stored, what is left is the same for experts of 4, 3 and 2 bits, and unexplained
        least, most = (-0.01, 0.01) if row.experts == "FP16" else (0.50, 0.56)
        assert least < row.stored_residual < most
        if row.experts == "3-bit":
            assert row.residual > 3
