"""QIGen's own kernels: the generator of its authors makes them, each for one shape, group size and number of threads.

QIGen has no package, so ``LOWBIT_QIGEN`` names a clone of its repository. Its ``setup.py`` searches for the fastest
tile at one size; here 18 tiles are tried at the size of the problem, and the fastest takes part. Kernels are for one
row of activations.

A product is what ``qLinear.forward`` does for one row: the sums of the activations in each group, and the kernel, which
adds to a vector of zeros. Scales and offsets are float32, w = s (q + z), and codes lie in the order of ``pack_qw``.

Source: the functions that generate.py writes; QIGen (arXiv 2307.03738) §3 and §4.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.arrays import F32, I32, Array
from lowbit.backend.prepared import placed
from lowbit.quantization.affine import QuantizedMatrix, dequantize
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

CLONE = "LOWBIT_QIGEN"
FLAGS = ["-O3", "-mavx2", "-mfma", "-march=native", "-ffast-math", "-ftree-vectorize", "-std=c++17", "-fopenmp"]
"""Those of its setup.py that matter for speed."""
LINE = 64  # bytes of a line of the cache
FEW = 8  # copies of the weights with which each tile is tried

Held = tuple[I32, F32, F32]
"""Codes in its order, scales, and offsets."""

GENERATE = """
import sys
from types import ModuleType
for name in ("gekko", "pandas"):  # of its search, which is not used
    sys.modules[name] = ModuleType(name)
sys.modules["gekko"].GEKKO = None
sys.path.insert(0, sys.argv[1])
import generate
generate.subprocess.call = lambda *words: 0  # it would compile and run a program
*sizes, unroll, bits, group_size = map(int, sys.argv[2:])
generate.gen_and_compile(*sizes, unroll=unroll, bits=bits, gs=group_size)
"""

CALLS = """
#include <cstdint>
#include <iostream>
#include "forward.h"
extern "C" void pack(int* codes, int* packed) { pack_qw(codes, packed); }
extern "C" void multiply(const float* x, const int* w, const float* s, const float* z, const float* bias, float* sums,
                         float* y, int m, int t, int group) {
  for (int g = 0; g < m / group; ++g) {
    float sum = 0;
    for (int k = g * group; k < (g + 1) * group; ++k) sum += x[k];
    sums[g] = sum;
  }
  for (int n = 0; n < t; ++n) y[n] = 0;
  qforward(x, w, s, z, bias, sums, y, 1, m, t);
}
"""


def clone() -> Path:
    """The clone of the repository.

    Raises:
        AbsentError: no clone is named.
    """
    if not (found := os.environ.get(CLONE)):
        raise AbsentError(f"{CLONE} names no clone of its repository")
    return Path(found)


def tiles(weights: Weights, bits: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows and columns of a block, rows and columns of a tile, and how often its loop is unrolled. Blocks divide the
    matrix."""
    inner = [(32, 16, 5), (32, 32, 5), (32, 64, 5)] if bits == 3 else [(16, 16, 2), (16, 32, 2), (16, 32, 4)]
    for rows, columns, (mu, tu, unroll) in product((512, 1024, 2048), (64, 128), inner):
        if weights.rows % rows == 0 and weights.columns % columns == 0:
            yield rows, columns, mu, tu, unroll


def aligned(array: Array) -> Array:
    """A copy at the beginning of a line of the cache, as PyTorch places the arrays of its users."""
    found = placed(array.shape, array.dtype, LINE, overread=0)
    found[...] = array
    return found


class Library:
    """The kernel for a tile."""

    def __init__(self, weights: Weights, threads: int, bits: int, tile: tuple[int, int, int, int, int]) -> None:
        rows, columns, mu, tu, unroll = tile
        size = -1 if weights.group_size >= weights.rows else weights.group_size
        numbers = (1, weights.rows, weights.columns, 1, rows, columns, 1, mu, tu, threads, unroll, bits, size)
        with tempfile.TemporaryDirectory() as folder:
            arguments = [sys.executable, "-P", "-c", GENERATE, str(clone()), *map(str, numbers)]
            self._run(arguments, folder)
            (Path(folder) / "calls.cpp").write_text(CALLS)
            self._run(["g++", *FLAGS, "-shared", "-fPIC", "-w", "-o", "tile.so", "calls.cpp"], folder)
            self._calls = ctypes.CDLL(str(Path(folder) / "tile.so"))

    @staticmethod
    def _run(words: list[str], folder: str) -> None:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AbsentError((done.stderr.strip().splitlines() or ["it failed"])[-1])

    def packed(self, codes: I32) -> I32:
        """Codes as the kernel reads them."""
        found = np.empty_like(codes)
        self._calls.pack(ctypes.c_void_p(codes.ctypes.data), ctypes.c_void_p(found.ctypes.data))
        return found

    def multiply(self, x: F32, w: Held, spare: tuple[F32, F32], y: F32) -> None:
        sums, bias = spare
        arrays = (x, *w, bias, sums, y)
        group = len(x) // len(sums)
        self._calls.multiply(*(ctypes.c_void_p(each.ctypes.data) for each in arrays), len(x), len(y), group)


class QigenContestant(Contestant):
    """Products by the fastest of its tiles."""

    def __init__(self, weights: Weights, plan: Plan, bits: int, group_size: int) -> None:
        weights = Weights(weights.rows, weights.columns, group_size)
        self._tile = weights.quantized(bits)
        codes, scales, offsets = _arrays(weights.whole(self._tile))
        self.nbytes = codes.nbytes + scales.nbytes + offsets.nbytes
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        self._x, self._y = weights.activations(1)[0], aligned(np.zeros(weights.columns, np.float32))
        self._spare = np.zeros(len(scales), np.float32), aligned(np.zeros(weights.columns, np.float32))

        def copies(library: Library, count: int) -> Rotation[Held]:
            packed = library.packed(codes)
            return Rotation([(aligned(packed), aligned(scales), aligned(offsets)) for _ in range(count)])

        tried = list[tuple[float, Library]]()
        for tile in tiles(weights, bits):
            self._library = Library(weights, plan.threads, bits, tile)
            self._rotation = copies(self._library, FEW)
            tried.append((min(self._seconds() for _ in range(2 * FEW)), self._library))
        if not tried:
            raise AbsentError("none of its blocks divides the matrix")
        _, self._library = min(tried, key=itemgetter(0))
        self._rotation = copies(self._library, self.products * self.bursts)

    def _seconds(self) -> float:
        start = time.perf_counter()
        self._multiply()
        return time.perf_counter() - start

    def _multiply(self) -> None:
        self._library.multiply(self._x, self._rotation.next(), self._spare, self._y)

    def prepare(self, x: F32) -> None:
        if len(x) > 1:
            raise AbsentError("its kernels are for one row of activations")
        self._x = x[0].copy()

    def run(self) -> None:
        for _ in range(self.products):
            self._multiply()

    def result(self) -> F32:
        return self._y.copy()[None]

    def held(self) -> F32:
        return dequantize(self._tile)


def _arrays(matrix: QuantizedMatrix) -> Held:
    """Words, scales and offsets: w = s (q + z)."""
    scales = np.ascontiguousarray(matrix.scales, np.float32)
    return matrix.words.view(np.int32).copy(), scales, -matrix.zeros.astype(np.float32)


def details() -> dict[str, Any]:
    """The commit of the clone, for the report."""
    words = ["git", "-C", str(clone()), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return {"commit": done.stdout.strip()}
