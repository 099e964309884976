"""Mistakes between two steps: stages are those of the reference, and a mistake with one of them has its name."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kills.trial import cases_of, run
from mistaken import Mistaken
from mistakes_products import Mistake

from lowbit.attention.kvcache import BfpKeyValueCache
from lowbit.linear.linear import group_offsets, qgemv
from lowbit.moe.offload import Arrangement, Offload, Request, Staged
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import dequantize, quantize
from lowbit.quantization.bfp import bfp12, bfp16
from lowbit.quantization.gptq import hessian
from lowbit_conformance.defects.diagnosis import common_defects
from lowbit_conformance.defects.likeness import nearly
from lowbit_conformance.defects.seen import Seen
from lowbit_conformance.defects.stage_table import STAGES, of_stages
from lowbit_conformance.defects.stages import At
from lowbit_conformance.suite.cases import HABIT
from lowbit_conformance.suite.explaining import Asked

RNG = np.random.default_rng(23)
CASES = 6  # of an operation


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def calls_of(operation: str) -> list[Asked]:
    """Calls that the suite makes, from all over its cases, with what the reference answers."""
    owner: Any = Mistaken(Mistake("right", operation, OPERATIONS[operation].reference, ()))
    cases = [pair for pair in cases_of((), (operation,), 1) if pair[1].tier not in (HABIT, "exhaustive", "model")]
    for mark, case in cases[:: max(1, len(cases) // CASES)]:
        run(mark, case, owner)
    found = [call for call in owner.calls if call.operation == operation]
    return [call for call in found if sum(np.size(part) for part in call.arguments) < 2**14][: 4 * CASES]


@pytest.mark.parametrize("operation", STAGES)
def test_stages_are_those_of_the_reference(operation: str) -> None:
    """With all stages as they are the result is right, and every stage that is listed is passed in some call."""
    passed = set[str]()
    for call in calls_of(operation):
        at, seen = At(), Seen.of(operation, call)
        with np.errstate(all="ignore"):
            given = STAGES[operation].run(at, *call.arguments, **call.choices)
        if seen.finite:
            assert nearly(given, seen.right, seen.limits)
        passed |= at.values.keys()
        assert {stage for stage, _ in at.others} <= STAGES[operation].others.keys()
        for stage, other in at.others:
            assert other in STAGES[operation].others[stage], (stage, other)
    assert passed == set(STAGES[operation].names)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_mistake_says_its_cause(operation: str) -> None:
    """A name may stand for several roundings of one format; each says its cause in a sentence."""
    found = of_stages(operation)
    causes = Counter((each.name, each.cause) for each in found)
    assert len(causes) == len({name for name, _ in causes})
    assert all(each.cause[0].isupper() and each.cause.endswith(".") for each in found)


# **Names.** Each mistake is written out here as a kernel makes it.

PRODUCTS = [
    (drawn(k), quantize(drawn(k, n), bits=4, group_size=g, convention="zero_point"))
    for k, n, g in ((16, 5, 8), (24, 11, 8), (40, 7, 16))
]
HEADS = [(drawn(t, h, 4), drawn(2, s, 4), drawn(2, s, 4)) for t, h, s in ((2, 4, 6), (3, 2, 7), (4, 6, 9))]
NORMS = [(*pair, 0.3) for pair in ((drawn(2, 8), drawn(8)), (drawn(3, 5), drawn(5)), (drawn(4, 12), drawn(12)))]
INPUTS = [(drawn(t, k),) for t, k in ((3, 4), (9, 5), (20, 3))]


def offsets_of_the_next_column(x: Any, matrix: Any) -> Any:
    offsets = group_offsets(matrix)
    group = np.arange(matrix.rows) // matrix.group_size
    return qgemv(x, matrix) + x.astype(np.float64) @ (np.roll(offsets, -1, axis=1) - offsets)[group]


def last_of_groups_not_in_the_sum(x: Any, matrix: Any) -> Any:
    row = np.arange(matrix.rows)
    last = ((row + 1) % matrix.group_size == 0) | (row == matrix.rows - 1)
    return qgemv(x, matrix) - (x * last).astype(np.float64) @ group_offsets(matrix)[row // matrix.group_size]


def running_maximum(queries: Any, keys: Any, values: Any) -> Any:
    """As a kernel in one pass that forgets to rescale its sums."""
    answer = np.zeros(queries.shape)
    members, first = queries.shape[1] // keys.shape[0], keys.shape[1] - queries.shape[0]
    for token, head in np.ndindex(*queries.shape[:2]):
        scores = keys[head // members, : first + token + 1].astype(np.float64) @ queries[token, head] / 2
        powers = np.exp(scores - np.maximum.accumulate(scores))
        answer[token, head] = powers @ values[head // members, : len(scores)] / powers.sum()
    return answer


def first_token_always_seen(queries: Any, keys: Any, values: Any) -> Any:
    """A window of 3 that keeps the first token."""
    answer = np.zeros(queries.shape)
    members, first = queries.shape[1] // keys.shape[0], keys.shape[1] - queries.shape[0]
    for token, head in np.ndindex(*queries.shape[:2]):
        seen = sorted({0, *range(max(0, first + token - 2), first + token + 1)})
        scores = keys[head // members, seen].astype(np.float64) @ queries[token, head] / 2
        powers = np.exp(scores - scores.max())
        answer[token, head] = powers @ values[head // members, seen] / powers.sum()
    return answer


def mean_of_padded_rows(x: Any, gain: Any, epsilon: float) -> Any:
    sums = np.square(x.astype(np.float64)).sum(axis=1, keepdims=True) / (-(-x.shape[1] // 8) * 8)
    return gain * (x / np.sqrt(sums + epsilon))


def in_float32(x: Any) -> Any:
    total = np.zeros((x.shape[1], x.shape[1]), np.float32)
    for row in x:
        total += np.outer(row, row)
    return total.astype(np.float64)


NAMED: dict[str, tuple[str, list[Any], dict[str, Any], Callable[..., Any]]] = {
    "offsets-one-earlier-along-axis-1": ("linear.qgemv", PRODUCTS, {}, offsets_of_the_next_column),
    "x-of-the-offsets-without-last-of-groups": ("linear.qgemv", PRODUCTS, {}, last_of_groups_not_in_the_sum),
    "greatest-scores-running": ("attention.attend", HEADS, {}, running_maximum),
    "mask-first-always-seen": ("attention.attend", HEADS, {"window": 3}, first_token_always_seen),
    "count-whole-8": ("blocks.rms_norm", NORMS[1:], {}, mean_of_padded_rows),
    "computed-in-float32": ("gptq.hessian", INPUTS, {}, in_float32),
    "inputs-centred": ("gptq.hessian", INPUTS, {}, lambda x: hessian(x - x.mean(axis=0))),
}


@pytest.mark.parametrize("name", NAMED)
def test_it_has_its_name(name: str) -> None:
    """A mistake in all calls has its name, alone or beside another that gives the same."""
    operation, calls, choices, function = NAMED[name]
    seen = []
    for call in calls:
        given = function(*call)
        given = given if operation == "gptq.hessian" else given.astype(np.float32)
        seen.append(Seen.of(operation, Asked(operation, call, choices, given)))
    assert name in {defect.name for defect in common_defects(operation, seen, [])}


def test_bits_of_what_was_right_are_not_narrow() -> None:
    """Whole numbers lie in every format, and say nothing of it."""
    matrix = quantize(np.rint(4 * drawn(16, 5)), bits=4, group_size=8)
    wrong = np.rint(4 * drawn(5)).astype(np.float32)
    assert np.isfinite(dequantize(matrix)).all()
    seen = [Seen.of("linear.qgemv", Asked("linear.qgemv", (drawn(16), matrix), {}, wrong)) for _ in range(3)]
    assert not common_defects("linear.qgemv", seen, [])


# **What remembers.**


class LowestIdOut(Offload):
    def _promote(self, newcomer: Staged) -> None:
        residents = self.slots[newcomer.layer]
        residents.sort(key=lambda resident: resident.expert) if len(residents) == self.arrangement.slots else None
        super()._promote(newcomer)


def test_a_rule_of_the_engine_has_its_name() -> None:
    """The lowest id is evicted in three walks."""
    arrangement, seen = Arrangement(layers=1, experts=8, slots=3), []
    for _ in range(3):
        requests = [Request(0, tuple(int(e) for e in RNG.permutation(8)[:2])) for _ in range(12)]
        machine = LowestIdOut(arrangement)
        given = tuple(event for request in requests for event in machine.step(request))
        seen.append(Seen.of("offload.trace", Asked("offload.trace", (arrangement, tuple(requests)), {}, given)))
    assert [each.name for each in common_defects("offload.trace", seen, [])] == ["lowest-id-evicted"]


def test_what_a_cache_answers_has_its_name() -> None:
    """Each step answers with its own tokens only."""
    seen = []
    for count in (2, 3, 4):
        opening, steps = (2, 8, bfp12(8), bfp16(8)), [(drawn(n, 2, 8), drawn(n, 2, 8)) for n in (1, count)]
        cache = BfpKeyValueCache(*opening)
        given = []
        for keys, values in steps:
            answers = cache.step(keys, values)
            given.append(tuple(np.ascontiguousarray(each[:, -len(keys) :]) for each in answers))
        asked = Asked("kvcache.bfp", opening, {}, tuple(given), tuple(steps))
        seen.append(Seen.of("kvcache.bfp", asked))
    assert [each.name for each in common_defects("kvcache.bfp", seen, [])] == ["last-step-only"]
