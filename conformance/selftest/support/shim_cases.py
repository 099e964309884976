"""Kernels that the tests of the shim share: right ones with what they compute, wrong ones with what is found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sanitized import Sanitized

from lowbit.arrays import F32
from lowbit_cuda.port import Kernel, Parameter
from lowbit_gpusim.shim.launching import KernelError, Launch, Options

FOLDER = Path(__file__).parent / "shim_kernels"
RIGHT, WRONG = FOLDER / "right.cuh", FOLDER / "wrong.cuh"
BLOCK = 64


def kernel(name: str, *spans: Parameter, blocks: int = 1, shared: int = 0) -> Kernel:
    """A kernel of `FOLDER`, with an int32 called n after its spans."""
    parameters = (*spans, Parameter("n", "int32"))

    def grid(_: Any) -> tuple[int, int, int]:
        return (blocks, 1, 1)

    return Kernel(name, "", parameters, grid, BLOCK, shared=lambda _: shared)


def reads(count: int, alignment: int = 1) -> Parameter:
    """The input x, of so many numbers."""
    return Parameter("x", "float32", "read", lambda _: count, alignment=alignment)


def writes(count: int) -> Parameter:
    """The output out, of so many numbers."""
    return Parameter("out", "float32", "write", lambda _: count)


def numbers(count: int) -> F32:
    """Small integers of both signs, whose sums are exact."""
    return ((np.arange(count) * 7) % 11 - 4).astype(np.float32)


def right(name: str, options: Options) -> tuple[Launch, F32]:
    """A launch of a right kernel, and what must be in its last array then."""
    x, out = numbers(BLOCK), np.zeros(BLOCK, np.float32)
    if name == "block_sum":
        x, out = numbers(300), np.zeros(3, np.float32)
        described = kernel(name, reads(300), writes(3), blocks=3, shared=8)
        return Launch(described, {"x": x, "out": out}, {"n": 100}, options), _sums(x.reshape(3, 100))
    if name == "in_place":
        described = kernel(name, Parameter("x", "float32", "update", lambda _: BLOCK))
        return Launch(described, {"x": x}, {"n": BLOCK}, options), np.full(BLOCK, x.sum(), np.float32)
    given = {"x": x, "out": out}
    if name == "reverse":
        turned = x[::-1].copy()
        return Launch(kernel(name, reads(BLOCK), writes(BLOCK)), given, {"n": BLOCK}, options), turned + turned[FLIPPED]
    if name == "prefix":
        sums = x.reshape(8, 8).cumsum(1).reshape(4, 16)
        described = kernel(name, reads(BLOCK, alignment=16), writes(BLOCK), shared=4 * BLOCK)
        return Launch(described, given, {"n": BLOCK}, options), (sums + sums[:, :1]).reshape(-1)
    if name == "broadcast":
        described = kernel(name, reads(BLOCK), writes(BLOCK), shared=4)
        return Launch(described, given, {"n": 5}, options), np.full(BLOCK, x[:5].sum(), np.float32)
    assert name == "votes"
    given["out"] = np.zeros(12 * BLOCK, np.float32)
    described = Kernel(
        name,
        "",
        (reads(BLOCK), writes(12 * BLOCK), Parameter("n", "int32")),
        lambda _: (2, 3, 2),
        BLOCK,
    )
    ballots = (x > 0).reshape(2, 32).sum(1) + 32  # some are positive and some are not
    return Launch(described, given, {"n": 1}, options), np.tile(np.repeat(ballots, 32), 12).astype(np.float32)


RIGHT_NAMES = ("block_sum", "reverse", "prefix", "votes", "in_place", "broadcast")
FLIPPED = np.arange(BLOCK) ^ 31


def _sums(parts: F32) -> F32:
    return np.asarray(parts.sum(1), np.float32)


def wrong(name: str, options: Options) -> Launch:
    """A launch of a wrong kernel."""
    blocks = 2 if name in ("last_block_wrote", "blocks_write") else 1
    shared = 0 if name == "nobody_wrote_variable" else 4 * BLOCK
    alignment = 16 if name == "not_aligned" else 1
    size = BLOCK * blocks
    described = kernel(name, reads(BLOCK, alignment), writes(size), blocks=blocks, shared=shared)
    arrays = {"x": numbers(BLOCK), "out": np.full(size, 5, np.float32)}
    return Launch(described, arrays, {"n": BLOCK}, options)


def checked(threads: Sanitized) -> Sanitized:
    """The same program with `RIGHT`, if ThreadSanitizer can run here; the test is skipped where it cannot."""
    try:
        threads.run(right("votes", Options())[0])
    except KernelError as error:
        if "unexpected memory mapping" in str(error):
            pytest.skip("this kernel's address space layout is not one that ThreadSanitizer can use")
        raise
    return threads
