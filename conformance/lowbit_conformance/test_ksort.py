"""Checks of `ksort.permutation` and `ksort.relabel`, both exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lowbit import ksort
from lowbit.backend import Backend
from lowbit.errors import ArgumentError
from lowbit.ksort import Order, Reals
from lowbit.rope import Layout, half_split, interleaved
from lowbit_conformance.calls import frozen
from lowbit_conformance.cases import Case
from lowbit_conformance.compare import assert_exact
from lowbit_conformance.marking import Settings, checks

LAYOUTS: dict[str, Callable[[int], Layout]] = {"half-split": half_split, "interleaved": interleaved}


@dataclass(frozen=True)
class HeadCase(Case):
    """A case with one head of `head_dim` channels."""

    head_dim: int


def heads(*variants: str) -> Callable[[str, Settings], Iterator[HeadCase]]:
    """Each variant at every width, and then at widths from the seeds."""

    def generator(clause: str, settings: Settings) -> Iterator[HeadCase]:
        for variant in variants:
            for head_dim in (2, 4, 6, 10, 64, 128, 256):
                yield HeadCase(clause, "lattice", variant, head_dim)
            for seed in settings.seeds:
                yield HeadCase(clause, "random", variant, 2 + 2 * ((31 * seed) % 70), seed=seed)

    return generator


def ordered(backend: Backend, sizes: Reals) -> Order:
    """The order that the backend gives."""
    frozen(sizes)
    order: Order = backend.run("ksort.permutation", sizes)
    return order


@checks("ksort.permutation/C1", heads("distinct"))
def test_sizes_ascend(backend: Backend, case: HeadCase) -> None:
    """Distinct sizes, zero and subnormal ones, ascend in the order given."""
    sizes = np.ldexp(case.generator().permutation(case.head_dim).astype(np.float64), -1060)  # subnormal
    order = ordered(backend, sizes)
    assert (np.diff(sizes[order]) > 0).all(), "WRONG: the sizes do not ascend"


@checks("ksort.permutation/C2", heads("equal", "few-values"))
def test_equal_sizes_keep_their_order(backend: Backend, case: HeadCase) -> None:
    """With all sizes equal, or few different ones, channels of one size stand as they stood."""
    kinds = 1 if case.variant == "equal" else 3
    sizes = case.generator().integers(0, kinds, case.head_dim).astype(np.float64)
    expected = sorted(range(case.head_dim), key=lambda channel: sizes[channel])  # Python's sort is stable
    assert_exact("order", ordered(backend, sizes), np.array(expected, np.int64))


@checks("ksort.permutation/C3", heads("normal"))
def test_every_channel_once(backend: Backend, case: HeadCase) -> None:
    """Random sizes: each channel stands in the order once, and the reference agrees."""
    sizes = np.abs(case.generator().normal(size=case.head_dim))
    order = ordered(backend, sizes)
    assert_exact("sorted order", np.sort(order), np.arange(case.head_dim))
    assert_exact("order", order, ksort.permutation(sizes))


MISTAKES: dict[str, Callable[[Reals], Any]] = {
    "nan": lambda sizes: np.where(np.arange(sizes.size) == 1, np.nan, sizes),
    "float32": lambda sizes: sizes.astype(np.float32),
    "empty": lambda sizes: sizes[:0],
    "two-dimensions": lambda sizes: sizes[None],
}


@checks("ksort.permutation/C4", heads(*MISTAKES))
def test_permutation_refuses(backend: Backend, case: HeadCase) -> None:
    """Each mistake raises ArgumentError."""
    with pytest.raises(ArgumentError):
        backend.run("ksort.permutation", MISTAKES[case.variant](np.ones(case.head_dim)))


def relabelled(backend: Backend, case: HeadCase) -> tuple[Layout, Order, Layout]:
    """A layout, an order, and what the backend makes of both."""
    layout, order = LAYOUTS[case.variant](case.head_dim), case.generator().permutation(case.head_dim)
    frozen(layout.partner, layout.sign, layout.pair, order)
    return layout, order, backend.run("ksort.relabel", layout, order)


@checks("ksort.relabel/C1", heads(*LAYOUTS))
def test_pairs_stay_pairs(backend: Backend, case: HeadCase) -> None:
    """By its old name the partner of each channel is the one that it had."""
    layout, order, moved = relabelled(backend, case)
    assert_exact("old names of the partners", order[moved.partner], layout.partner[order])
    assert_exact("partners of partners", moved.partner[moved.partner], np.arange(case.head_dim))
    assert_exact("frequencies of partners", moved.pair[moved.partner], moved.pair)
    assert_exact("signs of partners", moved.sign[moved.partner], -moved.sign)


@checks("ksort.relabel/C2", heads(*LAYOUTS))
def test_frequencies_and_signs_move(backend: Backend, case: HeadCase) -> None:
    """Channel c has the frequency and the sign that channel order[c] had."""
    layout, order, moved = relabelled(backend, case)
    assert_exact("pair", moved.pair, layout.pair[order])
    assert_exact("sign", moved.sign, layout.sign[order])


ORDER_MISTAKES: dict[str, Callable[[Order], Any]] = {
    "twice": lambda order: np.where(order == 0, 1, order),
    "beyond": lambda order: order + 1,
    "short": lambda order: order[:-1].copy(),
    "float": lambda order: order.astype(np.float64),
}


@checks("ksort.relabel/C3", heads(*ORDER_MISTAKES))
def test_relabel_refuses(backend: Backend, case: HeadCase) -> None:
    """What is no permutation of the channels raises ArgumentError."""
    with pytest.raises(ArgumentError):
        backend.run("ksort.relabel", half_split(case.head_dim), ORDER_MISTAKES[case.variant](np.arange(case.head_dim)))
