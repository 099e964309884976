"""Checks of `ksort.permutation` and `ksort.relabel`, both exact."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F64
from lowbit.attention import ksort
from lowbit.attention.ksort import Order
from lowbit.attention.rope import Layout, half_split, interleaved
from lowbit_conformance.isolation.remote import Remote
from lowbit_conformance.suite.cases import Case
from lowbit_conformance.suite.compare import assert_array, assert_exact, assert_kind, refuses
from lowbit_conformance.suite.marking import Settings, checks

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


def assert_channels(name: str, given: object, head_dim: int) -> Order:
    """Check an order of `head_dim` channels, or their partners: int64, from 0 to `head_dim` - 1."""
    __tracebackhide__ = True
    channels = assert_array(name, given, np.int64, (head_dim,))
    strange = channels[(channels < 0) | (channels >= head_dim)]
    assert not len(strange), f"WRONG: {name} names channel {strange[0]}, allowed are 0 to {head_dim - 1}"
    return channels


def ordered(backend: Remote, sizes: F64) -> Order:
    """The order from the backend."""
    __tracebackhide__ = True
    return assert_channels("order", backend.run("ksort.permutation", sizes), sizes.size)


@checks("ksort.permutation/C1", heads("distinct", "signed"))
def test_sizes_ascend(backend: Remote, case: HeadCase) -> None:
    """Distinct sizes, zero, subnormal sizes and sizes of both signs ascend in the returned order."""
    sizes = np.ldexp(case.generator().permutation(case.head_dim).astype(np.float64), -1060)  # subnormal
    if case.variant == "signed":
        sizes = case.generator().permutation(case.head_dim) - case.head_dim / 2
    order = ordered(backend, sizes)
    assert (np.diff(sizes[order]) > 0).all(), "WRONG: the sizes do not ascend"


@checks("ksort.permutation/C2", heads("equal", "few-values", "zeros"))
def test_equal_sizes_keep_their_order(backend: Remote, case: HeadCase) -> None:
    """With all sizes equal, few distinct sizes, or zeros of both signs, channels of equal size keep their order."""
    values = {"equal": [0.0], "few-values": [0.0, 1.0, 2.0], "zeros": [0.0, -0.0]}[case.variant]
    sizes = case.generator().choice(values, case.head_dim)
    order = ordered(backend, sizes)
    expected = sorted(range(case.head_dim), key=lambda channel: sizes[channel])  # Python's sort is stable
    assert_exact("order", order, np.array(expected, np.int64))


@checks("ksort.permutation/C3", heads("normal"))
def test_every_channel_once(backend: Remote, case: HeadCase) -> None:
    """With random sizes each channel occurs in the order once, and the order is the reference's."""
    sizes = np.abs(case.generator().normal(size=case.head_dim))
    order = ordered(backend, sizes)
    assert_exact("sorted order", np.sort(order), np.arange(case.head_dim))
    assert_exact("order", order, ksort.permutation(sizes))


def relabelled(backend: Remote, case: HeadCase) -> tuple[Layout, Order, Layout]:
    """A layout, an order, and the layout that the backend makes from both."""
    __tracebackhide__ = True
    layout, order = LAYOUTS[case.variant](case.head_dim), case.generator().permutation(case.head_dim)
    moved = assert_kind("the result", backend.run("ksort.relabel", layout, order), Layout)
    assert_channels("partner", moved.partner, case.head_dim)
    assert_array("sign", moved.sign, np.float64, (case.head_dim,))
    assert_array("pair", moved.pair, np.int64, (case.head_dim,))
    return layout, order, moved


@checks("ksort.relabel/C1", heads(*LAYOUTS))
def test_pairs_stay_pairs(backend: Remote, case: HeadCase) -> None:
    """In the old numbering each channel keeps its partner."""
    layout, order, moved = relabelled(backend, case)
    assert_exact("old names of the partners", order[moved.partner], layout.partner[order])
    assert_exact("partners of partners", moved.partner[moved.partner], np.arange(case.head_dim))
    assert_exact("frequencies of partners", moved.pair[moved.partner], moved.pair)
    assert_exact("signs of partners", moved.sign[moved.partner], -moved.sign)


@checks("ksort.relabel/C2", heads(*LAYOUTS))
def test_frequencies_and_signs_move(backend: Remote, case: HeadCase) -> None:
    """Channel c has the frequency and the sign that channel order[c] had."""
    layout, order, moved = relabelled(backend, case)
    assert_exact("pair", moved.pair, layout.pair[order])
    assert_exact("sign", moved.sign, layout.sign[order])


ORDER_MISTAKES: dict[str, Callable[[Order], Any]] = {
    "twice": lambda order: np.where(order == 0, 1, order),
    "beyond": lambda order: order + 1,
}


@checks("ksort.relabel/H8", heads(*ORDER_MISTAKES))
def test_relabel_refuses(backend: Remote, case: HeadCase) -> None:
    """An order that is not a permutation of the channels raises ArgumentError."""
    with refuses():
        backend.run("ksort.relabel", half_split(case.head_dim), ORDER_MISTAKES[case.variant](np.arange(case.head_dim)))
