"""The diagnosis of failures: on mistakes that were written without the bank, and on results that change.

The whole list is measured by running this file: it prints a line for each mistake that is not named rightly.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hosting import hosted
from mistaken import MISTAKES, judged, verdict
from mistakes_products import Mistake
from paths import SUPPORT

from lowbit.attention.attention import attend_to
from lowbit.attention.rope import half_split, rotate_heads, rotation
from lowbit.linear.linear import qgemv
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import quantize
from lowbit.quantization.bfp import Blocks, Format, bfp12, cast
from lowbit.quantization.bfp_dot import dot
from lowbit.quantization.bfp_storage import load, store
from lowbit.quantization.gptq import factor
from lowbit.tensor_formats.stored import Stored
from lowbit.tensor_formats.stored import quantize as stored_cast
from lowbit_conformance.defects import places
from lowbit_conformance.defects.bank import BANK
from lowbit_conformance.defects.families import relatives
from lowbit_conformance.defects.stored_nested import of_nested_size
from lowbit_conformance.isolation.verdicts import BrokenPromiseError
from lowbit_conformance.suite.explaining import Asked, Explainer, asked_of
from lowbit_conformance.suite.format_inputs import FormatCase, drawn

SAMPLE = MISTAKES[::16]
PARTS = 3
LEAST_RIGHT, MOST_WRONG = 0.8, 0.02

RNG = np.random.default_rng(5)
FIRST, SECOND = (quantize(RNG.normal(size=(16, 5)).astype(np.float32), bits=4, group_size=8) for _ in range(2))
X = np.arange(1, 17, dtype=np.float32)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an unregistered backend is looked for."""
    monkeypatch.chdir(SUPPORT)


def test_the_list_is_long_and_its_names_exist() -> None:
    """At least a hundred mistakes, each of another name; the right names are those of the bank and its families."""
    assert len(MISTAKES) >= 100
    assert len({each.name for each in MISTAKES}) == len(MISTAKES)
    families = {defect.name for operation in OPERATIONS for defect in relatives(operation)}
    families |= {each.name for operation in OPERATIONS for each in places.of_results(operation)}
    unknown = {name for each in MISTAKES for name in each.right} - BANK.keys() - families
    assert not unknown, unknown


@pytest.mark.whole
@pytest.mark.parametrize("part", range(PARTS))
def test_mistakes_are_named_rightly(part: int) -> None:
    """Of every sixteenth mistake: all are found, enough are named rightly, and none is given a wrong name."""
    said = [verdict(mistake, judged(mistake)) for mistake in SAMPLE[part::PARTS]]
    assert "survived" not in said
    assert said.count("right") >= LEAST_RIGHT * len(said), said
    assert said.count("wrong") <= MOST_WRONG * len(said), said


@pytest.mark.parametrize(
    "name", ["one-element:linear.qgemv", "lanes-unpacked:linear.qgemv", "a-lot-of-noise:linear.qgemv"]
)
def test_what_has_no_name_is_described(name: str) -> None:
    """A mistake that the bank does not have is given no name."""
    mistake = next(each for each in MISTAKES if each.name == name)
    outcome = judged(mistake)
    assert outcome.failed and not outcome.names
    assert outcome.text.startswith("no known mistake explains this result; ")


def test_one_wrong_element_has_no_name() -> None:
    """Too many mistakes would give it."""
    explainer = Explainer()
    words = np.array([[0x21]], np.uint32)
    given = np.array([[2], *[[0]] * 7], np.uint8)
    asked = Asked("packing.unpack", (words[:1], 4), {}, np.where(given == 0, given, np.uint8(1)))
    explainer.note("packing.unpack/C1/lattice/x-s0", [asked], verdict="WRONG")
    for _, told in explainer.explanations():
        assert not told.defects


def test_failures_that_no_one_mistake_explains_have_no_name() -> None:
    """Two mistakes of one operation: each case has its own, and a name would be wrong for the other."""
    explainer = Explainer()
    from lowbit.quantization.packing import unpack

    words = RNG.integers(0, 2**32, (2, 6), np.uint32)
    swapped, signed = (BANK[name].wrong["packing.unpack"] for name in ("nibbles-swapped", "most-significant-first"))
    for number, wrong in enumerate((swapped, signed)):
        assert not np.array_equal(wrong(words, 4), unpack(words, 4))
        asked = Asked("packing.unpack", (words, 4), {}, wrong(words, 4))
        explainer.note(f"packing.unpack/C1/lattice/{number}-s0", [asked], verdict="WRONG")
    told = dict(explainer.explanations())
    assert len(told) == 2
    assert all(not each.defects and "no known mistake" in each.diagnosis for each in told.values())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ByTime", "NONDETERMINISTIC: the same call again gives other bits"),
        ("EveryFifth", "NONDETERMINISTIC: the same call again gives other bits"),
        ("ByAddress", "NONDETERMINISTIC: the result changes with the addresses"),
    ],
)
def test_time_is_told_from_addresses(kind: str, words: str) -> None:
    """Both placements are repeated in turn: only what depends on them gives the same two results each time."""
    with hosted(f"moody:{kind}") as remote:
        prepared = remote.prepare(FIRST)
        with pytest.raises(BrokenPromiseError) as caught:
            for _ in range(3):
                prepared.qgemv(X)
        assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("KeepsByShape", "the result is that of a matrix that was prepared before"),
        ("KeepsX", "the result is that of the activations of a call before"),
    ],
)
def test_stale_results_are_named(kind: str, words: str) -> None:
    """Numbers that belong to the matrix or the activations before are said to be theirs."""
    explainer = Explainer()
    with hosted(f"moody:{kind}") as remote:
        for number, (matrix, x) in enumerate(((FIRST, X), (SECOND, 2 * X + 1))):
            with remote.recording() as calls:
                remote.prepare(matrix).qgemv(x)
            explainer.note(
                f"linear.qgemv/C1/lattice/{number}-s0", asked_of(calls), verdict="WRONG" if number > 0 else ""
            )
    told = dict(explainer.explanations())
    assert [each.diagnosis for each in told.values()] == [words]


# **Families**: mistakes with a number or a place that the bank does not hold.


def explained(operation: str, calls: list[tuple[tuple[Any, ...], Any]], right: int = 0) -> tuple[str, ...]:
    """The names that are given to calls with wrong results, the last of which may be right."""
    explainer = Explainer()
    for number, (arguments, given) in enumerate(calls):
        asked = Asked(operation, arguments, {}, given)
        explainer.note(
            f"{operation}/C2/random/{number}-s0", [asked], verdict="WRONG" if number < len(calls) - right else ""
        )
    return next((each.defects for _, each in explainer.explanations() if each.defects), ())


def moving(grows: bool) -> set[str]:
    """The names that are given to calls whose results are other ones when they are made again."""
    explainer = Explainer()
    for number, kept in enumerate(np.array([0, 40, -7], np.float32)):
        right = qgemv(X, FIRST).astype(np.float32)
        again = kept + right + right if grows else kept - right
        asked = Asked("linear.qgemv", (X, FIRST), {}, kept + right, again=again)
        explainer.note(f"linear.qgemv/C1/lattice/{number}-s0", [asked], verdict="NONDETERMINISTIC")
    return {name for _, each in explainer.explanations() for name in each.defects}


def test_sums_that_are_kept_from_call_to_call_are_named() -> None:
    """Each result is the one before plus what is right; others that change say nothing of that."""
    assert moving(grows=True) == {"result-added-to-the-call-before"}
    assert "result-added-to-the-call-before" not in moving(grows=False)


def in_tf32(numbers: Any) -> Any:
    """Ties away, as a tensor core is fed by a conversion in software."""
    return ((numbers.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(2**32 - (1 << 13))).view(np.float32)


def test_a_narrow_input_is_named_by_its_format_and_its_place() -> None:
    queries, keys, values = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 2, 8), (1, 3, 8), (1, 3, 8)))
    given = attend_to(queries, keys, in_tf32(values)).astype(np.float32)
    names = explained("attention.attend", [((queries, keys, values), given)])
    assert "values-in-tf32" in names


def test_the_neighbour_of_a_column_is_named() -> None:
    calls = []
    for matrix in (FIRST, SECOND):
        rolled = replace(matrix, zeros=np.roll(matrix.zeros, 1, axis=1))
        calls.append(((X, matrix), qgemv(X, rolled).astype(np.float32)))
    assert explained("linear.qgemv", calls) == ("zeros-of-previous-column",)


def test_integers_that_are_too_narrow_are_named() -> None:
    a, b = (cast(RNG.normal(size=(2, 64)).astype(np.float32), Format(32, 12)) for _ in range(2))
    narrow = Blocks(b.mantissas.astype(np.int8).astype(np.int16), b.exponents, b.format)
    assert explained("bfp.dot", [((a, b), dot(a, narrow))]) == ("mantissas-of-b-wrap-at-8-bits",)


def test_exponents_without_their_bias_are_named() -> None:
    stored = store(cast(RNG.normal(size=(3, 40)).astype(np.float32), bfp12(32)))
    right = load(stored)
    wrong = Blocks(right.mantissas, stored.exponents.view(np.int8).astype(np.int16), right.format)
    assert explained("bfp.load", [((stored,), wrong)]) == ("exponents-without-bias",)


def expert_inputs() -> tuple[Any, ...]:
    shapes = (4, 16), (16, 12), (16, 12), (12, 16)
    return tuple(RNG.normal(size=shape).astype(np.float32) for shape in shapes)


def in_bfloat16(numbers: Any) -> Any:
    return (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_what_lies_between_two_steps_in_a_narrow_format_is_named() -> None:
    x, gate, up, down = expert_inputs()
    a = in_bfloat16(x @ gate)
    given = (a / (1 + np.exp(-a)) * (x @ up)) @ down
    assert explained("routing.expert", [((x, gate, up, down), given)]) == ("gate-product-in-bfloat16",)


def test_a_case_that_passed_with_the_same_mistake_does_not_hide_its_name() -> None:
    """A case that judges bits of two calls passes with wrong numbers; they speak for the mistake and not against it."""
    calls = []
    for _ in range(2):
        x, gate, up, down = expert_inputs()
        a = x @ gate
        calls.append(((x, gate, up, down), (a / (1 + np.exp(np.float32(-1.702) * a)) * (x @ up)) @ down))
    assert explained("routing.expert", calls, right=1) == ("gelu-for-silu",)


def test_a_count_that_ends_too_early_is_named_with_its_number() -> None:
    x = RNG.normal(size=(2, 3, 24)).astype(np.float32)
    turn = rotation(half_split(24), 10000.0, 5, 2)
    given = rotate_heads(x, turn).astype(np.float32)
    given[..., 16:] = x[..., 16:]
    assert explained("rope.rotate", [((x, turn), given)]) == ("channels-past-16-not-turned",)


def test_a_result_that_stands_otherwise_is_named() -> None:
    x = RNG.normal(size=(20, 6))
    hessian = x.T @ x
    given = np.ascontiguousarray(factor(hessian).T).astype(np.float32)
    assert explained("gptq.factor", [((hessian,), given)]) == ("result-transposed",)


def test_masks_of_several_finite_numbers_are_one_mistake() -> None:
    """Hidden scores far below all others: no number can be told from another, and the kind is named."""
    queries, keys, values = (RNG.normal(size=shape).astype(np.float32) for shape in ((3, 1, 8), (1, 3, 8), (1, 3, 8)))
    keys[...], keys[0, 1:, 0], queries[..., 0] = 0, 1e18, -1e18
    keys[0, 0, 0] = 9e17
    scores = queries[:, 0].astype(np.float64) @ keys[0].astype(np.float64).T / np.sqrt(8)
    scores = np.where(np.tri(3, dtype=bool), scores, -1e9)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    given = ((shares / shares.sum(axis=1, keepdims=True)) @ values[0])[:, None].astype(np.float32)
    assert explained("attention.attend", [((queries, keys, values), given)]) == ("hidden-scores-finite",)


def test_a_family_that_spoils_what_was_right_is_not_named() -> None:
    """Results cut to bfloat16 on one matrix; on the other, where that would show as well, there is nothing wrong."""
    first, second = qgemv(X, FIRST).astype(np.float32), qgemv(X, SECOND).astype(np.float32)
    short = (first.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert explained("linear.qgemv", [((X, FIRST), short)]) == ("result-in-bfloat16-cut",)
    assert not explained("linear.qgemv", [((X, FIRST), short), ((X, SECOND), second)], right=1)


def test_few_results_are_not_named_by_what_spoils_others() -> None:
    """One result without its last row, where another is right: no name, since that mistake would have spoilt both."""
    short = qgemv(X * np.float32(np.arange(16) < 15), FIRST).astype(np.float32)
    assert explained("linear.qgemv", [((X, FIRST), short)]) == ("last-row-dropped",)
    right = qgemv(X, SECOND).astype(np.float32)
    assert not explained("linear.qgemv", [((X, FIRST), short), ((X, SECOND), right)], right=1)


def test_what_was_not_computed_is_named_by_its_place() -> None:
    """The last element of each result holds any number, which no defect gives."""
    calls = []
    for number, matrix in enumerate((FIRST, SECOND, FIRST)):
        x = X + np.float32(number)
        given = qgemv(x, matrix).astype(np.float32)
        given[-1] = 17.25 + number
        calls.append(((x, matrix), given))
    assert explained("linear.qgemv", calls) == ("result-last-not-written-along-axis-0",)


@pytest.mark.whole
def test_elements_at_the_end_of_memory_that_were_not_computed_are_named() -> None:
    """The last two of a result of several vectors hold any numbers."""
    calls = []
    for size in (32, 64):
        weights = stored("gptq-v1", 128, 16, ("bits", 4), ("group_size", size))
        x = RNG.normal(size=(4, weights.rows)).astype(np.float32)
        given = (x.astype(np.float64) @ weights.values).astype(np.float32)
        given[-1, -2:] = 77.5 + size
        calls.append(((x, weights), given))
    assert explained("linear.gemm", calls) == ("result-last-2-elements-not-written",)


# **Casts.**


def explained_cast(format: str, change: Callable[[Stored], Stored]) -> tuple[tuple[str, ...], str]:
    """The names and the sentence that are given to casts of some numbers that were changed."""
    explainer = Explainer()
    for number in range(3):
        x = RNG.normal(size=(2 + number, 256)).astype(np.float32)
        asked = Asked("formats.quantize", (x, format, ()), {}, change(stored_cast(x, format)))
        explainer.note(f"formats.quantize/C1/random/{number}-s0", [asked], verdict="WRONG")
    return next(((each.defects, each.diagnosis) for _, each in explainer.explanations()), ((), ""))


def with_fields(found: Stored, **changed: Any) -> Stored:
    """A cast with other fields."""
    tensors = found.table.tensors_of(found.table.fields_of(found.by_name) | changed, found.sizes)
    return replace(found, tensors=tensors)


def test_a_field_that_a_cast_writes_otherwise_is_named() -> None:
    names, said = explained_cast(
        "q4_0", lambda right: with_fields(right, d=right.table.fields_of(right.by_name)["d"] * 2)
    )
    assert "cast-scale-doubled" in names, said


def test_a_cast_with_the_other_sign_is_named() -> None:
    def negated(right: Stored) -> Stored:
        fields = right.table.fields_of(right.by_name)
        return with_fields(right, **{name: -each for name, each in fields.items()})

    assert explained_cast("q8_k", negated)[0] == ("cast-scale-and-codes-negated",)


def test_the_wrong_fields_of_a_cast_are_located() -> None:
    """No list has such a factor."""
    names, said = explained_cast(
        "int8-token", lambda right: with_fields(right, scale=right.by_name["scale"] * np.float32(1.25))
    )
    assert names == ("cast-fields-wrong",)
    assert said.endswith("Of the fields of a cast, all of scale are 1.25 times what is right; codes is right.")


# **Stored matrices** with an index, and scales of a second level.


def explained_product(wrong: Callable[[Stored], Any], matrices: list[Stored]) -> tuple[str, ...]:
    calls = []
    for weights in matrices:
        x = RNG.normal(size=(4, weights.rows)).astype(np.float32)
        calls.append(((x, weights), (x.astype(np.float64) @ wrong(weights)).astype(np.float32)))
    return explained("linear.gemm", calls)


def stored(format: str, rows: int, columns: int, *options: tuple[str, int]) -> Stored:
    return drawn(FormatCase("linear.gemm/C2", "random", "", format, rows, columns, 4, options=options), powers=False)


@pytest.mark.whole
def test_x_in_the_inverse_order_of_groups_is_named() -> None:
    """Rows are sorted by group, and x by the inverse permutation."""

    def wrong(weights: Stored) -> Any:
        order = np.argsort(weights.by_name["g_idx"], kind="stable")
        found = np.zeros_like(weights.values)
        np.add.at(found, np.argsort(order), weights.values[order])
        return found

    matrices = [stored("gptq-v1", 128, 16, ("bits", 4), ("group_size", size)) for size in (32, 64)]
    assert explained_product(wrong, matrices) == ("stored-rows-permuted",)


@pytest.mark.whole
def test_scales_of_the_second_level_of_another_size_are_named() -> None:
    def wrong(weights: Stored) -> Any:
        return of_nested_size(128, False, weights).values

    matrices = [stored("nf4-double", 256, columns, ("blocksize", 64)) for columns in (136, 144)]
    assert explained_product(wrong, matrices) == ("stored-scale-of-128-nested-blocks",)


def test_zeros_are_not_those_of_a_call_before() -> None:
    """A result of zeros may come from anywhere, whatever a call before gave."""
    explainer, nothing = Explainer(), np.zeros(16, np.float32)
    for number, x in enumerate((nothing, X)):
        asked = Asked("linear.qgemv", (x, FIRST), {}, np.zeros(5, np.float32))
        explainer.note(f"linear.qgemv/C1/lattice/{number}-s0", [asked], verdict="WRONG" if number > 0 else "")
    assert not any("call before" in each.diagnosis for _, each in explainer.explanations())


def main(mistakes: list[Mistake]) -> None:
    """Print what is not named rightly, and the rates."""
    counts: dict[str, int] = {}
    for mistake in mistakes:
        outcome = judged(mistake)
        said = verdict(mistake, outcome)
        counts[said] = counts.get(said, 0) + 1
        if said != "right":
            sys.stdout.write(f"{said} {mistake.name}: {', '.join(outcome.names)}; fits: {', '.join(mistake.right)}\n")
    sys.stdout.write(f"{counts} of {len(mistakes)}\n")


if __name__ == "__main__":
    main(MISTAKES)
