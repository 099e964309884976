"""The theorems of instructions: tables hold, wrong bodies are refuted, and the processor refutes wrong meanings."""

import doctest
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lowbit.kernels.vector import VOCABULARY
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.runtime import processor
from lowbit_prove import cplusplus, instructions, intrinsics, operators, probes, processors, registers, sums
from lowbit_prove.bodies import NO_VALUE, executed, intrinsic, uses
from lowbit_prove.instructions import decide, ran
from lowbit_prove.intrinsics import MEANINGS
from lowbit_prove.intrinsics_neon import NEON_MEANINGS
from lowbit_prove.processors import Probe
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Proof, Refutation, Undecided

RUNS = [each for each in processors.probes() if each.possible]


@pytest.mark.parametrize("name", ("avx2", "neon", "plain"))
@pytest.mark.parametrize("word", [each for each in TABLES["avx2"].words if each not in NO_VALUE])
def test_words_are_those_of_the_vocabulary(name: str, word: str) -> None:
    assert isinstance(decide(TABLES[name], word), Proof)


OF_THEIR_OWN = (
    "and_or",
    "select",
    "load_half",
    "permute",
    "permute_pair",
    "add_neighbours",
    "lookup_bytes",
    "cvt_int_float",
)
"""Words of which a table of other registers or instructions has a body of its own."""


@pytest.mark.parametrize("name", ("avx512", "avx512vnni", "avxvnni", "neondot"))
@pytest.mark.parametrize("word", OF_THEIR_OWN)
def test_words_of_other_tables_are_those_of_the_vocabulary(name: str, word: str) -> None:
    assert isinstance(decide(TABLES[name], word), Proof)


@pytest.mark.parametrize("name", ("avxvnni", "avx512vnni", "neondot"))
def test_dots_in_one_instruction_are_those_of_the_vocabulary(name: str) -> None:
    assert isinstance(decide(TABLES[name], "dot4"), Proof)


@pytest.mark.parametrize("name", TABLES)
def test_bodies_on_random_numbers_are_the_words(name: str) -> None:
    """Also those that take the solver long; a body and a word are executed on numbers."""
    random = np.random.default_rng(1)
    for word in (each for each in TABLES[name].words if each not in NO_VALUE):
        for _ in range(8):
            numbers = {f"{letter}_{lane}": int(random.integers(2**31)) for letter in "abc" for lane in range(16)}
            assert ran(TABLES[name], word, numbers | {"i": int(random.integers(32))}) is None, word


def test_every_word_has_a_theorem() -> None:
    names = {each.name for each in instructions.theorems()}
    for name in TABLES:
        assert {f"{word}_{name}" for word in TABLES[name].words if word not in NO_VALUE} <= names
    assert set(NO_VALUE) == {name for name, word in VOCABULARY.items() if word.function is None}


# Mistakes in tables.

BODIES = (
    ("srai", "return _mm256_srli_epi32(a, i);"),
    ("srli", "return _mm256_srai_epi32(a, i);"),
    ("slli", "return _mm256_srli_epi32(a, i);"),
    ("and_or", "return _mm256_and_si256(_mm256_or_si256(a, b), c);"),
    ("subtract_int", "return _mm256_sub_epi32(b, a);"),
    ("add_pairs", "return _mm256_add_epi32(a, b);"),
    ("maximum", "return _mm256_max_ps(b, a);"),
    ("add", "return _mm256_mul_ps(a, b);"),
    ("fmadd", "return _mm256_add_ps(_mm256_mul_ps(a, b), c);"),
    ("dot4", "return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(b, c)));"),
    ("dot4_pairs", "return _mm256_maddubs_epi16(b, a);"),
    ("dot2", "return _mm256_add_epi32(a, _mm256_madd_epi16(b, b));"),
    ("permute", "return _mm256_permutevar8x32_ps(a, _mm256_add_epi32(b, b));"),
    (
        "permute_pair",  # by the wrong bit of the index
        "return _mm256_blendv_ps(_mm256_permutevar8x32_ps(a, b), _mm256_permutevar8x32_ps(c, b), "
        "_mm256_castsi256_ps(_mm256_slli_epi32(b, 29)));",
    ),
    ("select", "return _mm256_or_si256(_mm256_and_si256(a, c), _mm256_andnot_si256(a, b));"),
    ("select", "return _mm256_or_si256(_mm256_and_si256(a, b), c);"),
    ("add_neighbours", "return _mm256_hadd_ps(a, b);"),
    ("add_neighbours_int", "return _mm256_permute4x64_epi64(_mm256_hadd_epi32(b, a), 0xD8);"),
    ("add_neighbours_int", "return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xE4);"),
    ("lookup_bytes", "return _mm256_shuffle_epi8(b, a);"),
    ("cvt_signed_float", "return _mm256_castsi256_ps(a);"),
    ("load_byte", "return _mm256_cvtepu8_epi32(_mm_loadl_epi64(_mm256_add_epi16(a, a)));"),
    ("store", "_mm256_storeu_ps(a, _mm256_add_ps(b, b));"),
)


@pytest.mark.parametrize(("word", "body"), BODIES)
def test_a_body_with_a_mistake_is_refuted_with_numbers(word: str, body: str) -> None:
    table = replace(TABLES["avx2"], words={**TABLES["avx2"].words, word: body})
    outcome = decide(table, word)
    assert isinstance(outcome, Refutation), outcome
    assert ran(table, word, outcome.numbers) is not None and ran(TABLES["avx2"], word, outcome.numbers) is None


def test_the_sign_of_a_converted_integer_matters_only_where_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2^31 on the instruction gives negative numbers, and the word positive ones."""
    monkeypatch.setattr(instructions, "DEFINED_BELOW", {})
    found = decide(TABLES["avx2"], "cvt_int_float")
    assert isinstance(found, Refutation) and int(found.numbers["a_0"]) >= 2**31


@pytest.mark.parametrize("body", ("return a + b;", "for (;;) { }", "return _mm256_unknown_ps(a);", "return f(a);"))
def test_what_is_not_read_is_not_decided(body: str) -> None:
    table = replace(TABLES["avx2"], words={**TABLES["avx2"].words, "add": body})
    assert isinstance(decide(table, "add"), Undecided)


def test_a_wrong_number_of_operands_is_not_decided() -> None:
    table = replace(TABLES["avx2"], words={"add": "return _mm256_add_ps(a);"})
    with pytest.raises(UndecidedError, match="has 1 operands"):
        executed(table, "add", {"a": np.zeros(8, np.float32)})


# Meanings and the processor.


@pytest.mark.parametrize("probe", RUNS, ids=lambda each: each.name)
def test_this_processor_does_what_an_intrinsic_means(probe: Probe) -> None:
    assert isinstance(probes.decide(probe), Proof)


Meaning = Callable[..., Any]


def next_lane(meaning: Meaning) -> Meaning:
    """Lanes are those of their neighbours."""
    return lambda *given: np.roll(meaning(*given), 1, axis=-1)


def one_bit(meaning: Meaning) -> Meaning:
    """The highest lane has another lowest bit where it has its highest one."""

    def wrong(*given: Any) -> Any:
        found = np.array(meaning(*given))
        bits = found.view(np.uint32)
        bits[..., -1] ^= (bits[..., -1] >> np.uint32(31)) | (bits[..., -1] == 0x00FF00FF) | (bits[..., -1] < 64)
        return found

    return wrong


CONSTANT = ("set1_epi16", "set1_epi32", "set1_ps")
"""Whose lanes are all the same."""


@pytest.mark.parametrize("change", (next_lane, one_bit), ids=lambda change: change.__name__)
@pytest.mark.parametrize("probe", RUNS, ids=lambda each: each.name)
def test_another_meaning_is_noticed(probe: Probe, change: Callable[[Meaning], Meaning]) -> None:
    name = probe.use[0]
    if change is not next_lane or not (name.startswith("vdupq_n") or name.endswith(CONSTANT)):
        assert isinstance(probes.decide(probe, change(intrinsic(name)[0].meaning)), Refutation)


def _saturating(L: int, total: Any, a: Any, b: Any) -> Any:
    found = MEANINGS["dpbusd_epi32"].meaning(L, 0 * total, a, b).view(np.int32).astype(np.int64)
    return np.clip(total.view(np.int32) + found, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32)


def _wrapping(L: int, a: Any, b: Any) -> Any:
    products = a.view(np.uint8).astype(np.int32) * b.view(np.int8).astype(np.int32)
    return (products[..., ::2] + products[..., 1::2]).astype(np.int16).view(np.uint32)


def _both_signed(L: int, a: Any, b: Any) -> Any:
    products = a.view(np.int8).astype(np.int32) * b.view(np.int8).astype(np.int32)
    return np.clip(products[..., ::2] + products[..., 1::2], -(2**15), 2**15 - 1).astype(np.int16).view(np.uint32)


def _anywhere(L: int, a: Any, index: Any) -> Any:
    """Bytes are looked up in the whole register."""
    table, places = a.view(np.uint8), index.view(np.uint8)
    found = np.take_along_axis(table, (places & np.uint8(4 * L - 1)).astype(np.int64), axis=-1)
    return np.where(places > 127, np.uint8(0), found).view(np.uint32)


def _saturated_pairs(L: int, a: Any, b: Any) -> Any:
    sums = a.view(np.int16).astype(np.int32) + b.view(np.int16)
    return np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16).view(np.uint32)


def _saturated_sums(L: int, a: Any, b: Any) -> Any:
    products = a.view(np.int16).astype(np.int64) * b.view(np.int16)
    return np.minimum(products[..., ::2] + products[..., 1::2], 2**31 - 1).astype(np.int32).view(np.uint32)


OTHERS: dict[str, Meaning] = {
    "_mm512_dpbusd_epi32": _saturating,
    "_mm256_dpbusd_avx_epi32": _saturating,
    "_mm256_maddubs_epi16": _wrapping,
    "_mm512_maddubs_epi16": _both_signed,
    "_mm256_shuffle_epi8": _anywhere,
    "_mm512_shuffle_epi8": lambda L, a, index: MEANINGS["shuffle_epi8"].meaning(L, a, index & np.uint32(0x0F0F0F0F)),
    "_mm256_add_epi16": _saturated_pairs,
    "_mm256_madd_epi16": _saturated_sums,
    "_mm256_max_ps": lambda L, a, b: np.where(b > a, b, a),
    "_mm256_fmadd_ps": lambda L, a, b, c: a * b + c,
    "_mm256_cvtepi32_ps": lambda L, a: a.astype(np.float32),
    "_mm256_hadd_epi32": lambda L, a, b: np.concatenate([a, b], -1)[..., ::2] + np.concatenate([a, b], -1)[..., 1::2],
    "_mm256_srai_epi16-0x8": lambda L, a, i: a >> np.uint32(i),
    "_mm512_ternarylogic_epi32-0xea": lambda L, a, b, c, table: (a | b) & c,
    "_mm256_cvtph_ps": lambda L, a: np.where(np.abs(x := a.view(np.float16).astype(np.float32)) < 2**-14, 0 * x, x),
    "_mm512_permutexvar_ps": lambda L, index, a: np.take_along_axis(a, index & np.uint32(7), axis=-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_usual_mistake_about_an_instruction_is_noticed(name: str) -> None:
    (probe,) = (each for each in processors.probes() if each.name == name)
    if not probe.possible:
        pytest.skip("this processor lacks the instruction")
    found = probes.decide(probe, OTHERS[name])
    assert isinstance(found, Refutation) and "a_0" in found.numbers


# What cannot be compared.


def test_what_the_processor_lacks_is_not_compared_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(feature: str) -> bool:
        return feature in ("avx2", "fma", "f16c")

    monkeypatch.setattr(processor, "has", has)
    missing = processors.unchecked()
    assert "_mm512_dpbusd_epi32" in missing and "_mm256_add_ps" not in missing
    names = {each.name for each in instructions.theorems()}
    assert "_mm256_add_ps" in names and "_mm512_add_ps" not in names and "dot4_avx512vnni" in names
    (probe,) = (each for each in processors.probes() if each.name == "_mm512_dpbusd_epi32")
    assert isinstance(probes.decide(probe), Undecided)


def test_without_archspec_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what a processor has."""
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    assert "_mm256_add_ps" in processors.unchecked()
    assert {each.name for each in instructions.theorems() if each.name.startswith("_mm")} == set()


def test_without_a_compiler_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "compiler", lambda: None)
    processors.library.cache_clear()
    for probe in (each for each in RUNS[:1] if each.native):
        found = probes.decide(probe)
        assert isinstance(found, Undecided) and "compiler" in found.reason


def test_all_intrinsics_of_all_tables_have_meanings() -> None:
    used = {name for table in TABLES.values() for name, _ in uses(table)}
    arm = {name for name in used if not name.startswith("_mm")}
    assert {intrinsics.split(name)[0] for name in used - arm} == MEANINGS.keys() and arm == NEON_MEANINGS.keys()


MODULES = (cplusplus, intrinsics, operators, registers, sums)


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_examples_of_docstrings(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0 and tried > 0
