"""The diagnosis of kernels that work in parts: parts of K, places in a word, pieces of a run, lanes, and casts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.arrays import F64
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.stored import quantize as cast_to
from lowbit_conformance.defects.stored_codes import codes_of
from lowbit_conformance.suite.explaining import Asked, Explainer
from lowbit_conformance.suite.format_inputs import FormatCase, drawn

RNG = np.random.default_rng(11)


def names(operation: str, calls: list[tuple[tuple[Any, ...], Any]]) -> set[str]:
    """The names that the diagnosis has for wrong results of these calls."""
    explainer = Explainer()
    for number, (arguments, given) in enumerate(calls):
        asked = Asked(operation, arguments, {}, given)
        explainer.note(f"{operation}/C2/random/{number}-s0", [asked], verdict="WRONG")
    return {name for _, each in explainer.explanations() for name in each.defects}


def stored(format: str, rows: int, *options: tuple[str, int]) -> Stored:
    return drawn(FormatCase("linear.gemm/C2", "random", "", format, rows, 16, 4, options=options), powers=False)


def named(wrong: Callable[[F64, Stored], F64], matrices: list[Stored]) -> set[str]:
    """The names for products with matrices; `wrong` takes x."""
    calls = []
    for weights in matrices:
        x = RNG.normal(size=(4, weights.rows)).astype(np.float32)
        calls.append(((x, weights), wrong(x.astype(np.float64), weights).astype(np.float32)))
    return names("linear.gemm", calls)


def in_groups(weights: Stored) -> tuple[F64, F64, F64]:
    """Codes, the step of each, and the offset of each, all K × N."""
    view = codes_of(weights)
    assert view is not None
    return view.codes, view.step, view.base


AWQ = [stored("awq-gemm", rows, ("group_size", 32)) for rows in (192, 288)]


@pytest.mark.whole
def test_parts_of_k_that_begin_at_the_first_group_are_named() -> None:
    def wrong(x: F64, weights: Stored) -> F64:
        codes, step, base = in_groups(weights)
        rows = np.arange(weights.rows) % (-(-weights.rows // 32 // 3) * 32)
        return np.asarray(x @ (codes * step[rows] + base[rows]))

    assert named(wrong, AWQ) == {"stored-scale-and-zero-counted-from-a-part"}


def test_the_last_code_of_each_word_with_a_sign_is_named() -> None:
    def wrong(x: F64, weights: Stored) -> F64:
        codes, step, base = in_groups(weights)
        last = (np.arange(weights.rows) % 8 == 7)[:, np.newaxis]
        return np.asarray(x @ (np.where(last & (codes > 7), codes - 16, codes) * step + base))

    matrices = [stored("gptq-v2", rows, ("bits", 4), ("group_size", 32)) for rows in (64, 128)]
    assert named(wrong, matrices) == {"stored-codes-in-twos-complement-in-part"}


@pytest.mark.whole
def test_pieces_of_codes_that_are_counted_crosswise_are_named() -> None:
    """In blocks of Q4_K: four pairs of runs, of four pieces of eight bytes each."""

    def wrong(x: F64, weights: Stored) -> F64:
        codes, step, base = in_groups(weights)
        pieces = codes.reshape(-1, 4, 2, 4, 8, codes.shape[1]).swapaxes(1, 3)
        return np.asarray(x @ (pieces.reshape(codes.shape) * step + base))

    assert named(wrong, [stored("q4_k", rows) for rows in (256, 512)]) == {"stored-codes-in-pieces"}


@pytest.mark.whole
def test_integer_lanes_for_weights_that_are_floats_are_named() -> None:
    """Eight lanes lose the fraction of each sum of FP8 and codes of 8 bits."""
    calls = []
    for rows in (32, 64):
        weights = stored("fp8-channel", rows)
        case = FormatCase("linear.gemm/C2", "random", "", "int8-token", rows, 4, 4)
        x = drawn(case, powers=False)
        units, scale = (weights.by_name[name].astype(np.float64) for name in ("weight", "weight_scale"))
        codes, of_x = (x.by_name[name].astype(np.float64) for name in ("codes", "scale"))
        sums = np.zeros((8, 4, 16))
        for k in range(rows):
            sums[k % 8] = np.trunc(sums[k % 8] + codes[:, [k]] * units[:, k])
        given = sums.sum(axis=0) * scale.reshape(-1) * of_x.reshape(-1, 1)
        calls.append(((x, weights), given.astype(np.float32)))
    assert names("linear.gemm_cast", calls) == {"stored-sums-of-lanes-truncated"}


def test_codes_by_the_stored_scale_are_named() -> None:
    """The scale of Q8_0 is right, and codes are divided by what is left of it in float16."""
    calls = []
    for _ in range(3):
        x = RNG.normal(size=(8, 256)).astype(np.float32)
        right = cast_to(x, "q8_0")
        fields = right.table.fields_of(right.by_name)
        d = fields["d"].astype(np.float32)[..., np.newaxis]
        codes = np.rint(x.reshape(8, 8, 32) / d).clip(-127, 127).astype(np.int8)
        assert (codes != fields["qs"]).any()
        tensors = right.table.tensors_of(fields | {"qs": codes}, right.sizes)
        calls.append(((x, "q8_0"), Stored("q8_0", right.rows, right.columns, tensors, right.options)))
    assert names("formats.quantize", calls) == {"cast-inverse-of-rounded-scale"}


def test_rows_past_the_last_part_of_k_are_named() -> None:
    def wrong(x: F64, weights: Stored) -> F64:
        end = weights.rows // 32 // 5 * 32 * 5
        return np.asarray(x[:, :end] @ weights.values[:end])

    assert named(wrong, AWQ) == {"stored-rows-past-the-last-part-left-out"}


@pytest.mark.whole
def test_scales_that_the_wrong_digit_of_a_row_chooses_are_named() -> None:
    def wrong(x: F64, weights: Stored) -> F64:
        codes, step, base = in_groups(weights)
        rows = np.arange(weights.rows)
        taken = rows & ~32 | (rows >> 2 & 1) << 5
        return np.asarray(x @ (codes * step[taken] + base))

    assert named(wrong, [stored("q4_k", rows) for rows in (256, 512)]) == {"stored-scale-of-another-run"}
